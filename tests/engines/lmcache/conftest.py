"""Tests against the real LMCache, in its own environment (make test-lmcache); elsewhere they are not even collected."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
RAW = [{"algorithm": "quantization_for_cold_page", "quant": "none"}]

os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
os.environ.setdefault("OMP_NUM_THREADS", "2")

if importlib.util.find_spec("lmcache") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # the engine's own warnings are not ours to fail on


@pytest.fixture
def drive() -> Iterator[Any]:
    from kvtier.connectors.lmcache import KvtierL2Adapter, KvtierL2AdapterConfig

    from .driver import Driver

    running: list[Any] = []

    def build(**params: Any) -> Driver:
        """An adapter and its driver."""
        params = {"attention": "vllm", "kv_cache_compression_config": RAW, **params}
        running.append(KvtierL2Adapter(KvtierL2AdapterConfig.from_dict(params)))
        return Driver(running[-1])

    yield build
    for adapter in running:
        adapter.close()
        adapter.close()


@pytest.fixture
def start() -> Iterator[Any]:
    from .storage import Storage

    running: list[Storage] = []

    def build(*specs: dict[str, Any], **options: Any) -> Storage:
        running.append(Storage(*specs, **options))
        return running[-1]

    yield build
    for storage in running:
        storage.close()
