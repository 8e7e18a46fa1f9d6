"""Tests against the real vLLM and LMCache, in their own environment (make test-vllm); elsewhere they are not even
collected."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent

os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("lmcache") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # the engine's own warnings are not ours to fail on
