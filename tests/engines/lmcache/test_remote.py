"""The older in-process door, driven as LMCache's remote backend drives it: real configuration, allocator and loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHUNK = 64


def config(folder: Path | None, **options: Any) -> Any:
    from lmcache.v1.config import LMCacheEngineConfig

    tiers: list[dict[str, Any]] = [{"type": "host", "capacity": "64MiB"}]
    if folder is not None:
        tiers.append({"type": "nvme", "path": str(folder), "capacity": "256MiB"})
    params = {
        "tiers": tiers,
        "kv_cache_compression_config": [{"algorithm": "quantization_for_cold_page", "quant": "none"}],
        "promote_deadline": "60s",
        **options,
    }
    extra = {
        "remote_storage_plugin.kvtier.module_path": "kvtier.connectors.lmcache.remote",
        "remote_storage_plugin.kvtier.class_name": "KvtierConnectorAdapter",
        **{f"remote_storage_plugin.kvtier.{name}": value for name, value in params.items()},
    }
    return LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK, remote_storage_plugins=["kvtier"], extra_config=extra, max_local_cpu_size=0.1
    )


class Engine:
    """One worker's connector, its event loop, and its memory."""

    def __init__(self, settings: Any, url: str = "plugin://kvtier") -> None:
        import torch
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.connector import CreateConnector
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        self.metadata = LMCacheMetadata(
            model_name="m",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(3, 2, CHUNK, 2, 64),
            chunk_size=CHUNK,
        )
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.memory = LocalCPUBackend(settings, self.metadata)
        self.connector = CreateConnector(url, self.loop, self.memory, settings, self.metadata, plugin_name="kvtier")

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(120.0)

    def key(self, n: int) -> Any:
        import torch
        from lmcache.utils import CacheEngineKey

        return CacheEngineKey("m", 1, 0, n, torch.bfloat16)

    def chunk(self, n: int, tokens: int = CHUNK) -> Any:
        import torch

        item = self.memory.allocate(
            self.metadata.get_shapes(tokens), self.metadata.get_dtypes(), self.connector.getWrappedConnector().meta_fmt
        )
        draw = torch.Generator().manual_seed(n)
        item.get_tensor(0).copy_(torch.randn(self.metadata.get_shapes(tokens)[0], generator=draw))
        return item

    def values(self, item: Any) -> Any:
        return item.get_tensor(0).clone()

    def close(self, *, connector: bool = True) -> None:
        """connector: whether that is closed too. LMCache's own Redis connector waits for itself there."""
        if self.loop.is_closed():
            return
        if connector:
            store = self.connector.getWrappedConnector()._chunks.store
            assert store.flush(60.0), "a lower tier did not take its pages"
            self.run(self.connector.close())
        self.run(self._end_tasks())
        self.memory.close()
        self.run(self.loop.shutdown_default_executor())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(60.0)
        self.loop.close()

    async def _end_tasks(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Any]:
    made: list[Engine] = []

    def build(**options: Any) -> Engine:
        made.append(Engine(config(tmp_path, **options)))
        return made[-1]

    yield build
    for one in made:
        one.close()


def test_chunks_come_back_partial_ones_too(engine: Any) -> None:
    import torch

    worker = engine()
    written = {}
    for n, tokens in ((1, CHUNK), (2, CHUNK), (3, 17), (4, 1), (5, 33)):
        item = worker.chunk(n, tokens)
        written[n] = worker.values(item)
        worker.run(worker.connector.put(worker.key(n), item))
    assert worker.run(worker.connector.exists(worker.key(3))) and not worker.connector.exists_sync(worker.key(9))
    neighbours = [worker.chunk(100 + n) for n in range(4)]  # whoever wrote past a partial chunk would change these
    before = [worker.values(item) for item in neighbours]
    for n in (1, 2, 3, 4, 5):
        item = worker.run(worker.connector.get(worker.key(n)))
        assert torch.equal(worker.values(item), written[n])
        item.ref_count_down()
    assert worker.run(worker.connector.get(worker.key(9))) is None
    assert all(torch.equal(worker.values(item), old) for item, old in zip(neighbours, before, strict=True))
    for item in neighbours:
        item.ref_count_down()
    inner = worker.connector.getWrappedConnector()
    assert sorted(worker.run(inner.list())) == sorted(worker.key(n).to_string() for n in (1, 2, 3, 4, 5))
    assert inner.remove_sync(worker.key(2)) and not inner.remove_sync(worker.key(9))
    assert inner.batched_contains([worker.key(1), worker.key(2), worker.key(3)]) == 1


def test_batches_and_a_restart_from_disk(engine: Any) -> None:
    import torch

    worker = engine()
    items = [worker.chunk(n) for n in range(6)]
    written = [worker.values(item) for item in items]
    inner = worker.connector.getWrappedConnector()
    worker.run(inner.batched_put([worker.key(n) for n in range(6)], items))
    assert all(item.get_ref_count() == 1 for item in items)
    for item in items:
        item.ref_count_down()
    worker.close()
    second = engine()
    inner = second.connector.getWrappedConnector()
    assert inner.batched_contains([second.key(n) for n in range(8)]) == 6
    got = second.run(inner.batched_get([second.key(n) for n in range(8)]))
    assert [item is not None for item in got] == [True] * 6 + [False] * 2
    assert all(torch.equal(second.values(item), want) for item, want in zip(got[:6], written, strict=True))
    assert inner._chunks.ledger.snapshot().hits == {"host": 0, "nvme": 6}
    for item in got[:6]:
        item.ref_count_down()


def test_quantized_by_default_with_the_shape_that_lmcache_tells(engine: Any) -> None:
    worker = engine(kv_cache_compression_config=[{"algorithm": "quantization_for_cold_page", "quant": "nvfp4"}])
    item = worker.chunk(1)
    want = worker.values(item)
    worker.run(worker.connector.put(worker.key(1), item))
    got = worker.run(worker.connector.get(worker.key(1)))
    error = (worker.values(got).float() - want.float()).norm() / want.float().norm()
    assert 0.02 < error < 0.12
    got.ref_count_down()


def test_a_block_with_dots_is_refused() -> None:
    from kvtier.connectors.lmcache.remote import options_of

    given = {"remote_storage_plugin.kvtier.http.port": 1, "remote_storage_plugin.other.class_name": "X"}
    with pytest.raises(ValueError, match="as a mapping"):
        options_of(given, "kvtier")
    given = {"remote_storage_plugin.kvtier.class_name": "X", "remote_storage_plugin.kvtier.instance": "a"}
    assert options_of(given, "kvtier") == {"instance": "a"}
