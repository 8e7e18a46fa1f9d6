"""What is under deploy/, checked without a cluster and without a container engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from .chart import Helm


@pytest.fixture(scope="session")
def helm() -> Iterator[Helm]:
    if importlib.util.find_spec("helm_python") is None:
        pytest.skip("helm-python-sdk is not made for this platform")
    running = Helm()
    try:
        yield running
    finally:
        running.close()
