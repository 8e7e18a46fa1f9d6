"""Tests against real engines, each in an environment of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # the engine's own warnings are not ours to fail on
