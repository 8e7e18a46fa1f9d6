"""Requests, flushes and updates that meet at awkward moments: nothing wrong is restored, and nothing is left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("engine_hooks")

TOKENS = list(range(5, 133))


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


def when_drained(monkeypatch: pytest.MonkeyPatch, engine: Any, then: Callable[[], None]) -> None:
    """Call `then` when the engine begins to wait for copies."""
    real = engine.linker._movers.drain

    def drain(*limit_s: float) -> Any:
        then()
        return real(*limit_s)

    monkeypatch.setattr(engine.linker._movers, "drain", drain)


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
    from .harness import PATIENCE_S, Gate, config

    engine = start(tiny, config(tmp_path))
    engine.compute(TOKENS)
    assert engine.linker._store.flush(PATIENCE_S)
    engine.flush()
    mover = engine.linker._mover
    hangs = {"_encode": Gate(), "decode": Gate()}
    for method, hang in hangs.items():  # which never does anything: the memory is gone by then
        owner = mover if method == "_encode" else mover._reader
        monkeypatch.setattr(owner, method, lambda *_, hang=hang: hang.come())
    queue_load(engine, engine.request("loads", TOKENS))
    engine.cache.ready_to_load_host_cache()
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams

    from .harness import key_of

    slots = engine.allocator.alloc(64)
    engine.cache.insert(InsertParams(key=key_of(range(300, 364)), value=slots))
    for hang in hangs.values():
        hang.reached()
    begin = time.monotonic()
    engine.end()
    took = time.monotonic() - begin
    for hang in hangs.values():
        hang.open()
    assert took < PATIENCE_S / 2  # two seconds, but for a busy machine


def test_a_flush_while_pages_are_on_their_way_up(start: Any, tiny: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from .harness import Gate, config, same

    first = start(tiny, config(tmp_path))
    computed = first.compute(TOKENS)
    first.close()
    engine = start(tiny, config(tmp_path))
    slow = Gate.of(monkeypatch, engine.linker._store.lower[0], "get_many_into")
    engine.request("held", TOKENS)
    assert engine.linker.waits("held")
    slow.reached()
    engine.flush()  # returns: the disk is not waited for, which writes to host memory and not to the device
    assert not engine.linker.waits("held")
    engine.assert_nothing_held()
    slow.open()
    restored = engine.admit(engine.request("again", TOKENS))
    assert restored.loaded == len(TOKENS) and same(restored.forward(), computed, len(TOKENS)) and restored.finish()
    engine.assert_nothing_held()


def test_an_abort_between_a_queued_load_and_its_start(start: Any, tiny: Path) -> None:
    from .harness import config

    engine = start(tiny, config())
    engine.compute(TOKENS)
    engine.flush()
    req = engine.request("gone", TOKENS)
    slots = queue_load(engine, req)
    engine.abort(req)
    engine.allocator.free(slots)
    assert engine.cache.ready_to_load_host_cache() == -1
    assert engine.cache.finish_external_linker_loads([req]) == []
    engine.assert_nothing_held()
    assert engine.allocator.available_size() == engine.free_at_start


def test_a_prefix_that_shrinks_on_the_device_before_the_load(start: Any, tiny: Path) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    from .harness import config, same

    engine = start(tiny, config())
    computed = engine.compute(TOKENS)
    req = engine.request("waits", [*TOKENS, *range(300, 332)])
    assert req.prefix_len == len(TOKENS)
    engine.cache.evict(EvictParams(num_tokens=len(TOKENS)))
    restored = engine.admit(req)
    assert (restored.device, restored.loaded) == (0, len(TOKENS))
    assert same(restored.forward(), computed, len(TOKENS)) and restored.finish()
    engine.assert_nothing_held()


def test_a_retracted_request_is_restored_with_what_it_had_generated(start: Any, tiny: Path) -> None:
    from .harness import config, same

    engine = start(tiny, config())
    generated = [*TOKENS, *range(400, 448)]
    computed = engine.compute(generated)
    engine.flush()
    first = engine.admit(engine.request("r", TOKENS))
    first.forward()
    assert first.finish() and first.loaded == len(TOKENS)
    again = engine.admit(engine.request("r", generated))  # queued again under its name, with a longer prompt
    assert again.loaded == len(generated)
    assert same(again.forward(), computed, len(generated)) and again.finish()
    engine.assert_nothing_held()


def test_results_of_offloads_keep_their_order_across_a_flush(start: Any, tiny: Path, monkeypatch: Any) -> None:
    """A result that outlived its flush would be taken for the next node's, which is then freed while it is copied."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams

    from .harness import Gate, config, key_of

    engine = start(tiny, config(workers=1))
    engine.compute(TOKENS)
    engine.flush()
    copying = Gate.of(monkeypatch, engine.linker._mover, "_encode")
    engine.cache.insert(InsertParams(key=key_of(range(200, 248)), value=engine.allocator.alloc(48)))
    assert engine.linker.num_completed_offloads() == 0
    engine.cache.check_hicache_events()
    assert len(engine.cache.linker.pending_offloads) == 1
    when_drained(monkeypatch, engine, copying.open)
    engine.flush()
    assert engine.linker.num_completed_offloads() == 0 and engine.cache.linker.pending_offloads == []
    copying = Gate.of(monkeypatch, engine.linker._mover, "_encode")
    engine.cache.insert(InsertParams(key=key_of(range(300, 348)), value=engine.allocator.alloc(48)))
    engine.cache.check_hicache_events()
    assert len(engine.cache.linker.pending_offloads) == 1
    copying.open()
    engine.offloaded()
    engine.assert_nothing_held()


def test_page_size_one_with_prefixes_that_share_their_beginning(start: Any, tiny: Path) -> None:
    from .harness import config, same

    engine = start(tiny, config(), page=1, pages=512)
    a, b = [*TOKENS[:50], *range(200, 230)], [*TOKENS[:50], *range(300, 330)]
    rows_a = engine.compute(a, seed=1)
    engine.flush()
    engine.compute(b, seed=2)
    engine.flush()
    first, second = engine.request("a", a), engine.request("b", b)
    restored = engine.admit(first)
    assert restored.loaded == len(a) and same(restored.forward(), rows_a, len(a)) and restored.finish()
    restored = engine.admit(second)
    assert restored.loaded == len(b) and restored.forward() and restored.finish()
    engine.assert_nothing_held()


def test_the_forward_goes_on_layer_by_layer_while_later_layers_are_decoded(
    start: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtier.connectors.sglang.loads import BatchLoad

    from .harness import PATIENCE_S, Gate, config, same

    engine = start(tiny, config())
    computed = engine.compute(TOKENS)
    engine.flush()
    second = Gate.of(monkeypatch, BatchLoad, "layer_done", only=lambda _, layer: layer == 1)
    restored = engine.admit(engine.request("again", TOKENS))
    engine.cache.linker.layer_done_counter.set_consumer(restored.index)
    first = engine.pool.get_key_buffer(0)[restored.slots]  # returns although layer 1 is not there
    waiting = threading.Thread(target=engine.pool.get_key_buffer, args=(1,))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive() and first.equal(computed[0][0])
    second.open()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    assert same(restored.forward(), computed, len(TOKENS)) and restored.finish()


def test_pages_are_not_read_before_the_events_that_say_they_are_written(start: Any, tiny: Path) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams

    from .harness import Gate, config, key_of

    engine = start(tiny, config())
    forward = Gate()
    engine.linker.record_offload_ready = lambda: [SimpleNamespace(synchronize=forward.come)]
    slots = engine.allocator.alloc(48)
    engine.cache.insert(InsertParams(key=key_of(TOKENS[:48]), value=slots))
    forward.reached()
    assert engine.linker.num_completed_offloads() == 0
    for buffer in (*engine.pool.k_buffer, *engine.pool.v_buffer):  # the forward that was under way
        buffer[slots] = 3.0
    forward.open()
    engine.offloaded()
    engine.flush()
    restored = engine.admit(engine.request("again", TOKENS[:48]))
    assert all((t == 3.0).all() for pair in restored.forward() for t in pair)
    assert restored.finish() and restored.loaded == 48


def test_memory_is_given_back_after_copies_have_ended(start: Any, tiny: Path, monkeypatch: Any) -> None:
    """The engine, idle, releases the memory of its pages; one of them is still being copied out."""
    from sglang.srt.managers.io_struct import (
        CheckWeightsReqInput,
        ReleaseMemoryOccupationReqInput,
        ResumeMemoryOccupationReqInput,
    )
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams

    from kvtier.connectors.sglang import hold

    from .harness import Gate, config, key_of

    engine = start(tiny, config(workers=1))
    updater = SimpleNamespace(scheduler=SimpleNamespace(tree_cache=engine.cache))
    copying = Gate.of(monkeypatch, engine.linker._mover, "_encode")
    slots = engine.allocator.alloc(64)
    for buffer in (*engine.pool.k_buffer, *engine.pool.v_buffer):
        buffer[slots] = 4.0
    engine.cache.insert(InsertParams(key=key_of(TOKENS[:64]), value=slots))
    copying.reached()
    when_drained(monkeypatch, engine, copying.open)
    hold.memory_released(updater, ReleaseMemoryOccupationReqInput())
    assert copying.is_open and engine.linker.num_completed_offloads() == 1
    engine.flush()  # the memory is overwritten
    restored = engine.admit(engine.request("after", TOKENS[:64]))
    assert restored.loaded == 64 and all((t == 4.0).all() for pair in restored.forward() for t in pair)
    assert restored.finish()

    # What comes back may be anything, where it held weights.
    before = engine.linker._namespace
    for request, changes in (
        (ResumeMemoryOccupationReqInput(tags=["kv_cache"]), False),
        (CheckWeightsReqInput(action="checksum"), False),
        (ResumeMemoryOccupationReqInput(), True),
        (CheckWeightsReqInput(action="reset_tensors"), True),
    ):
        hold.weights_change(updater, request)
        assert (engine.linker._namespace != before) == changes, request
        before = engine.linker._namespace
    engine.flush()
    assert engine.admit(engine.request("later", TOKENS[:64])).loaded == 0
