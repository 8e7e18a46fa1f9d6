"""KV events beside SGLang's own: its structs decode them, and both name the same pages by the same hashes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("engine_hooks")

PATIENCE_S = 60.0
PAGE = 16


class Router:
    """Subscribes as a router does, and decodes with the engine's own structs."""

    def __init__(self, publisher: Any) -> None:
        import msgspec
        import zmq
        from sglang.srt.disaggregation.kv_events import KVEventBatch

        from kvtier.kv_events import BlockRemoved

        self._decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.linger = 0
        self._socket.subscribe(b"")
        self._socket.connect(publisher.endpoint)
        for _ in range(int(PATIENCE_S / 0.05)):
            publisher.publish(BlockRemoved([0], "hello"))
            if self._socket.poll(50):
                return
        raise AssertionError(f"nothing arrived in {PATIENCE_S} s")

    def events(self) -> Iterator[Any]:
        while True:
            assert self._socket.poll(int(PATIENCE_S * 1000)), f"no event in {PATIENCE_S} s"
            _, _, payload = self._socket.recv_multipart()
            yield from (event for event in self._decode(payload).events if event.medium != "hello")

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def test_the_engine_and_kvtier_name_pages_alike(start: Any, tiny: Path, tmp_path: Path) -> None:
    from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored, StorageMedium

    from .harness import config

    block = config(tmp_path / "nvme", kv_events={"endpoint": "tcp://127.0.0.1:*"})
    engine = start(tiny, block, page=PAGE, groups={"enable_kv_cache_events": True})
    store = engine.linker._store
    router = Router(store.observer._events.publisher)
    try:
        engine.compute(list(range(5, 5 + 4 * PAGE)))
        told = [event for event in engine.cache.take_events() if isinstance(event, BlockStored)]
        hashes = {h for event in told for h in event.block_hashes}
        assert len(hashes) == 4
        seen: dict[str, set[int]] = {}
        events = router.events()
        while seen != {StorageMedium.CPU.value: hashes, StorageMedium.DISK.value: hashes}:
            event = next(events)
            assert isinstance(event, BlockStored) and event.block_size == PAGE
            seen.setdefault(str(event.medium), set()).update(event.block_hashes)
        store.inventory.purge("all")
        while any(seen.values()):
            event = next(events)
            assert isinstance(event, BlockRemoved)
            seen[str(event.medium)] -= set(event.block_hashes)
    finally:
        router.close()
