"""Requests, flushes and updates that meet at awkward moments: nothing wrong is restored, and nothing is left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("engine_hooks")

TOKENS = list(range(5, 133))


@pytest.fixture
def start() -> Iterator[Any]:
    from .harness import Engine

    engines: list[Engine] = []

    def build(*args: Any, **options: Any) -> Engine:
        engines.append(Engine(*args, **options))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


def queue_load(engine: Any, req: Any) -> Any:
    """Match and queue the load of a request, as the engine does for each request of a batch; returns its slots."""
    from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

    req.init_next_round_input(engine.cache)
    if not req.needs_host_load_back():
        return None
    loaded, req.last_node = engine.cache.init_load_back(
        InitLoadBackParams(best_match_node=req.best_match_node, host_hit_length=req.host_hit_length, req=req)
    )
    return engine.cache.linker.private_load_indices[req.rid] if loaded else None


def test_two_requests_load_the_same_prefix_at_once(start: Any, tiny: Path) -> None:
    from .harness import config, same

    engine = start(tiny, config())
    computed = engine.compute(TOKENS)
    engine.flush()
    requests = [engine.request(rid, TOKENS) for rid in ("a", "b")]
    slots = [queue_load(engine, req) for req in requests]
    assert not set(slots[0].tolist()) & set(slots[1].tolist())
    counter = engine.cache.linker.layer_done_counter
    counter.set_consumer(engine.cache.ready_to_load_host_cache())
    for where in slots:
        assert same(engine.read(where, waiting=True), computed, len(TOKENS))
    assert engine.cache.finish_external_linker_loads(requests) == []
    engine.assert_nothing_held()
    assert engine.counts.hits == {"host": 16}


def test_two_requests_of_one_name_do_not_mix_their_pages(start: Any, tiny: Path) -> None:
    """Several tokenizers do not know of each other's requests, so a client's ids may come twice."""
    from .harness import config, same

    engine = start(tiny, config())
    head = TOKENS[:16]
    prompts = [head + [200 + n * 100 + i for i in range(48)] for n in range(2)]
    computed = []
    for n, prompt in enumerate(prompts):
        computed.append(engine.compute(prompt, seed=n))
        engine.flush()
    first, second = (engine.request("twin", prompt) for prompt in prompts)
    slots = queue_load(engine, first)
    assert slots is not None
    assert queue_load(engine, second) is None  # recomputed
    counter = engine.cache.linker.layer_done_counter
    counter.set_consumer(engine.cache.ready_to_load_host_cache())
    got = engine.read(slots, waiting=True)
    assert engine.cache.finish_external_linker_loads([first]) == []
    assert same([(k[16:], v[16:]) for k, v in got], [(k[16:], v[16:]) for k, v in computed[0]], 48)
    engine.assert_nothing_held()


def test_pins_that_expire_between_lookup_and_load_mean_recompute(
    start: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from .harness import config

    engine = start(tiny, config(lease="1ms"))
    engine.compute(TOKENS)
    engine.flush()
    store = engine.linker._store
    real = type(store).hold

    def late(self: Any, *args: Any) -> Any:
        time.sleep(0.005)
        self._drop_expired()  # a writer in another thread needs room at this very moment
        return real(self, *args)

    monkeypatch.setattr(type(store), "hold", late)
    restored = engine.admit(engine.request("late", TOKENS))
    assert restored.loaded == 0
    restored.forward()
    assert restored.finish()
    engine.assert_nothing_held()


def test_pages_computed_between_an_update_of_the_weights_and_the_flush_are_not_found(start: Any, tiny: Path) -> None:
    """SGLang refuses to flush while requests run, and computes on with what the old weights left on the device."""
    from .harness import config

    engine = start(tiny, config())
    engine.linker.weights_changed()
    engine.compute(TOKENS)
    engine.flush()
    assert engine.admit(engine.request("after", TOKENS)).loaded == 0
    engine.compute(TOKENS, seed=1)
    engine.flush()
    assert engine.admit(engine.request("later", TOKENS)).loaded == len(TOKENS)


def test_close_does_not_wait_for_what_hangs(start: Any, tiny: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from .harness import config

    engine = start(tiny, config(tmp_path))
    engine.compute(TOKENS)
    engine.linker._store.flush(5.0)
    engine.flush()
    hangs = threading.Event()
    monkeypatch.setattr(engine.linker._mover, "_encode", lambda *_: hangs.wait(20))
    monkeypatch.setattr(engine.linker._mover, "_decode", lambda *_: hangs.wait(20))
    monkeypatch.setattr(engine.linker._store.lower[0], "put_many", lambda *_: hangs.wait(20))
    queue_load(engine, engine.request("loads", TOKENS))
    engine.cache.ready_to_load_host_cache()
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams

    from .harness import key_of

    slots = engine.allocator.alloc(64)
    engine.cache.insert(InsertParams(key=key_of(range(300, 364)), value=slots))
    begin = time.monotonic()
    engine.close()
    took = time.monotonic() - begin
    hangs.set()
    assert took < 2.0 + 0.5  # a busy machine
