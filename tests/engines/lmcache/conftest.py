"""Tests against the real LMCache, in its own environment (make test-lmcache); elsewhere they are not even collected."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest

RAW = [{"algorithm": "quantization_for_cold_page", "quant": "none"}]

os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
os.environ.setdefault("OMP_NUM_THREADS", "2")

if importlib.util.find_spec("lmcache") is None:
    collect_ignore_glob = ["test_*.py"]


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
