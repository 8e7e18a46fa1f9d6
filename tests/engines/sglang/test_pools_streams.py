"""The order of events on an accelerator, with events and streams that the test moves: nothing is read before it is
written, nothing is written before it was read, and layers are complete in their order.

The code is the one that runs for pools on a GPU; only the event and stream objects, and the codec's copy, differ there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from .test_pools import tokens_of

pytestmark = pytest.mark.usefixtures("engine_hooks")

LIMIT_S = 60.0


class FakeEvent:
    """Reached when the test says so. `log`: what happened, in order, of all events and the test's hooks."""

    log: list[str] = []  # noqa: RUF012 - emptied by the fixture
    made: list[FakeEvent] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.stream: Any = None
        FakeEvent.made.append(self)

    def record(self, stream: Any = None) -> None:
        self.stream = stream
        FakeEvent.log.append(f"record {stream or 'current'}")

    def synchronize(self) -> None:
        assert self.reached.wait(LIMIT_S), "the test never let the stream get there"
        FakeEvent.log.append(f"reached {self.stream or 'current'}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeEvent]]:
    from sglang.srt.mem_cache.unified_cache import unified_cache_linker

    FakeEvent.log.clear()
    FakeEvent.made.clear()
    monkeypatch.setattr(unified_cache_linker, "device_module", SimpleNamespace(Event=FakeEvent))
    yield FakeEvent
    for event in FakeEvent.made:
        event.reached.set()


def noted(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Log calls of the mover's `_encode` or its reader's `decode`."""
    from kvtier.mover import PageMover
    from kvtier.reader import PageReader

    owner = PageReader if name == "decode" else PageMover
    real = getattr(owner, name)

    def logged(*args: Any) -> Any:
        FakeEvent.log.append(name)
        return real(*args)

    monkeypatch.setattr(owner, name, logged)


@pytest.mark.parametrize(("kind", "page"), [("mla", 16), ("mamba", 1), ("swa", 16)])
def test_pages_are_read_after_the_forward_that_writes_them(
    start_pools: Any, tiny: Path, streams: Any, monkeypatch: pytest.MonkeyPatch, kind: str, page: int
) -> None:
    """The forward is still under way when its pages are offloaded: it changes them until its event."""
    from .harness import config, until
    from .pool_engines import equal

    engine = start_pools(tiny, config(), kind, page=page)
    engine.linker.forward_stream = "forward"
    noted(monkeypatch, "_encode")
    offloaded = engine.offloaded
    monkeypatch.setattr(engine, "offloaded", lambda: None)
    tokens = tokens_of(page)
    engine.fill_prefix(tokens, seed=1)
    events = list(streams.made)
    nodes = len(engine.cache.linker.pending_offloads)
    assert [e.stream for e in events] == [None, "forward"] * nodes
    assert "_encode" not in streams.log and engine.linker.num_completed_offloads() == 0
    places = engine.places(*engine.matched(tokens))
    engine.fill(places, seed=2)  # the rest of the forward
    computed = engine.contents(places)
    for event in events:
        event.reached.set()
    until(lambda: "_encode" in streams.log, LIMIT_S)
    offloaded()
    first = streams.log.index("_encode")
    assert {"record current", "record forward", "reached current", "reached forward"} <= set(streams.log[:first])
    engine.flush()
    restored = engine.admit(engine.request("again", tokens))
    for event in streams.made:
        event.reached.set()
    assert equal(engine.forward(restored), computed) and engine.finish(restored)


@pytest.mark.parametrize(("kind", "page"), [("mla", 16), ("mamba", 1), ("swa", 16)])
def test_pages_are_written_after_the_forward_that_may_still_use_them(
    start_pools: Any, tiny: Path, streams: Any, monkeypatch: pytest.MonkeyPatch, kind: str, page: int
) -> None:
    """The slots of a load were free a moment ago; the last forward of their owner may still write them."""
    from .harness import config
    from .pool_engines import equal

    engine = start_pools(tiny, config(), kind, page=page)
    noted(monkeypatch, "decode")
    tokens = tokens_of(page)
    letting = threading.Thread(target=let_all, args=(streams,), daemon=True)
    letting.start()
    computed = engine.fill_prefix(tokens)
    engine.flush()
    stop_letting(letting)
    streams.log.clear()
    engine.linker.forward_stream = "forward"
    restored = engine.admit(engine.request("again", tokens))
    pending = [e for e in streams.made if not e.reached.is_set()]
    assert [e.stream for e in pending] == [None, "forward"]
    places = engine.places_of(restored)
    assert "decode" not in streams.log
    engine.fill(places, seed=9)  # what the old forward still writes
    for event in pending:
        event.reached.set()
    assert equal(engine.forward(restored), computed) and engine.finish(restored)
    before = streams.log[: streams.log.index("decode")]
    assert before[:2] == ["record current", "record forward"]
    assert {"reached current", "reached forward"} <= set(before)


@pytest.mark.parametrize(
    ("kind", "page", "layers"), [("mla", 16, 4), ("dsa", 64, 4), ("swa", 16, 4), ("mamba_swa", 1, 5)]
)
def test_a_layer_is_complete_once_all_of_its_pools_are(
    start_pools: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch, kind: str, page: int, layers: int
) -> None:
    """Each layer once, those of one pool in their order, and none before its bytes are there."""
    from kvtier.codecs import native

    from .harness import config

    engine = start_pools(tiny, config(), kind, page=page)
    tokens = tokens_of(page)
    engine.fill_prefix(tokens)
    engine.flush()
    done: list[int] = []
    written: list[tuple[int, range]] = []
    complete, decode = engine.linker.layer_done_counter.complete, native.decode

    def completed(index: int, layer: int) -> None:
        done.append(layer)
        complete(index, layer)

    def decoded(layout: Any, pool: Any, pages: Any, buffers: Any) -> None:
        decode(layout, pool, pages, buffers)
        written.append((id(layout.spec), buffers))

    monkeypatch.setattr(engine.linker.layer_done_counter, "complete", completed)
    monkeypatch.setattr(native, "decode", decoded)
    restored = engine.admit(engine.request("again", tokens))
    engine.forward(restored)
    assert engine.finish(restored)
    assert sorted(done) == list(range(layers)) == list(range(engine.linker.layer_done_counter.num_layers))
    for stored in engine.linker._stored:
        mine = [layer for layer in done if layer in stored.pool.counted_as]
        assert mine == sorted(stored.pool.counted_as)
        starts = [buffers.start for spec, buffers in written if spec == id(stored.pool.spec)]
        assert starts == sorted(starts) and len(starts) == stored.pool.layers


def let_all(streams: type[FakeEvent]) -> None:
    """Let every event be reached, until told to stop."""
    thread = threading.current_thread()
    while not getattr(thread, "stop", False):
        for event in list(streams.made):
            event.reached.set()
        threading.Event().wait(0.002)


def stop_letting(thread: Any) -> None:
    thread.stop = True
    thread.join(LIMIT_S)
    assert not thread.is_alive()
