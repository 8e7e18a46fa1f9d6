"""What the connector does when something is wrong: the engine keeps serving, and no wrong byte is used."""

from __future__ import annotations

import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("engine_hooks")

TOKENS = list(range(5, 133))


def stored_pages(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size >= 1 << 20)


def test_a_page_that_is_bad_on_disk_is_recomputed_and_counted(start: Any, tiny: Path, tmp_path: Path) -> None:
    from .harness import config, same

    first = start(tiny, config(tmp_path))
    computed = first.compute(TOKENS)
    keys = first.linker._namespace.page_keys(_hashes(first, TOKENS))
    first.close()
    _flip_on_disk(tmp_path, first, computed, page=2)

    second = start(tiny, config(tmp_path))
    restored = second.admit(second.request("again", TOKENS))
    assert restored.loaded == 2 * 16
    assert same(restored.forward(), computed, 32)
    assert restored.finish()
    counts = second.counts
    assert counts.hits == {"host": 0, "nvme": 2}
    assert counts.misses["corrupt"] == 1 and counts.misses["after_gap"] == 5
    assert second.linker._store.lower[0].length_many([keys[2]]) == [-1]
    second.assert_nothing_held()


def test_a_page_that_turns_bad_after_the_load_started_fails_the_batch_only(start: Any, tiny: Path) -> None:
    from .harness import config, same

    engine = start(tiny, config())
    computed = engine.compute(TOKENS)
    engine.flush()
    req = engine.request("bad", TOKENS)
    arena = engine.linker._store.host.arena
    slot, _ = engine.linker._asked["bad"].lookup.ready_slots(4)[3]
    arena[slot.offset + 100] ^= 1

    restored = engine.admit(req)
    assert restored.loaded == len(TOKENS)
    restored.forward()  # returns: nobody waits for a layer that will never come
    assert not restored.finish()
    assert engine.counts.load_failures == 1 and engine.counts.misses["corrupt"] == 1
    assert engine.cache.match_prefix(_match(engine, TOKENS)).device_prefix_len == 0

    again = engine.admit(engine.request("next", TOKENS))
    assert again.loaded == 3 * 16
    assert same(again.forward(), computed, 48) and again.finish()
    engine.assert_nothing_held()


def test_a_worker_that_fails_mid_load_fails_the_batch_only(
    start: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtier.connectors.sglang.loads import BatchLoad

    from .harness import config, same

    engine = start(tiny, config())
    computed = engine.compute(TOKENS)
    engine.flush()
    real = BatchLoad.layer_done

    def broken(self: BatchLoad, layer: int) -> None:
        if layer == 1:
            raise OSError("injected")
        real(self, layer)

    monkeypatch.setattr(BatchLoad, "layer_done", broken)
    restored = engine.admit(engine.request("bad", TOKENS))
    restored.forward()
    assert not restored.finish()
    monkeypatch.undo()
    again = engine.admit(engine.request("next", TOKENS))
    assert same(again.forward(), computed, len(TOKENS)) and again.finish()
    engine.assert_nothing_held()


@pytest.mark.parametrize(
    ("method", "arguments", "answer"),
    [
        ("lookup", ("r", None), []),
        ("load", ("r", None), False),
        ("finish_layer_wise_loading", (99,), False),
    ],
)
def test_an_exception_never_reaches_the_scheduler(
    start: Any, tiny: Path, method: str, arguments: tuple[Any, ...], answer: Any
) -> None:
    from .harness import config

    engine = start(tiny, config())
    engine.linker._asked["r"] = object()  # nothing that it could be
    got = getattr(engine.linker, method)(*arguments)
    assert got == answer and type(got) is type(answer)
    if None in arguments:
        assert engine.counts.errors["engine"] == 1


def test_a_store_that_stops_working_means_recompute(start: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from .harness import config

    engine = start(tiny, config())
    engine.compute(TOKENS)
    engine.flush()

    def broken(*_: Any, **__: Any) -> Any:
        raise OSError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(type(engine.linker._store), "lookup", broken)
        assert engine.admit(engine.request("1", TOKENS)).loaded == 0
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.linker._mover), "onboard", broken)
        restored = engine.admit(engine.request("2", TOKENS))
        restored.forward()
        assert not restored.finish()  # its pages were promised: 503, not garbage
    again = engine.admit(engine.request("3", TOKENS))
    again.forward()
    assert again.finish() and again.loaded == len(TOKENS)
    engine.assert_nothing_held()


def test_flush_keeps_stored_pages_and_drops_everything_else(start: Any, tiny: Path) -> None:
    from .harness import config

    engine = start(tiny, config())
    engine.compute(TOKENS)
    stored = engine.linker._store.host.usage().resident_pages
    engine.flush()
    engine.request("open", TOKENS)
    engine.flush()
    engine.assert_nothing_held()
    assert engine.linker._store.host.usage().resident_pages == stored == 8
    assert engine.admit(engine.request("again", TOKENS)).loaded == len(TOKENS)


def test_flush_while_pages_are_being_copied(start: Any, tiny: Path) -> None:
    from .harness import config

    engine = start(tiny, config())
    prompts = [[i * 50 + j for j in range(48)] for i in range(8)]
    for i, tokens in enumerate(prompts):
        slots = engine.allocator.alloc(48)
        for buffer in (*engine.pool.k_buffer, *engine.pool.v_buffer):
            buffer[slots] = float(i + 1)
        engine.cache.insert(_insert(tokens, slots))
    engine.flush()  # overwrites device memory at once
    assert engine.cache.linker.pending_offloads == []
    for i, tokens in enumerate(prompts):
        restored = engine.admit(engine.request(f"r{i}", tokens))
        assert restored.loaded == 48
        assert all((t == float(i + 1)).all() for pair in restored.forward() for t in pair)
        assert restored.finish()
    engine.assert_nothing_held()


def test_a_flush_does_not_wait_for_ever_and_stores_nothing_wrong(
    start: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight nodes, two are copied at once; the third is being copied when the flush loses its patience."""
    from kvtier.connectors.sglang import linker

    from .harness import Gate, config

    engine = start(tiny, config(workers=1))
    prompts = [[i * 50 + j for j in range(48)] for i in range(8)]
    monkeypatch.setattr(linker, "_DRAIN_S", 0.2)
    copying = Gate.of(monkeypatch, engine.linker._mover, "_encode", first=2)
    drain, waits = engine.linker._movers.drain, []

    def drained(*limit_s: float) -> Any:
        waits.append(limit_s)
        if not limit_s:  # it waits for what has begun only
            copying.open()
        return drain(*limit_s)

    monkeypatch.setattr(engine.linker._movers, "drain", drained)
    for i, tokens in enumerate(prompts):
        slots = engine.allocator.alloc(48)
        for buffer in (*engine.pool.k_buffer, *engine.pool.v_buffer):
            buffer[slots] = float(i + 1)
        engine.cache.insert(_insert(tokens, slots))
    copying.reached()
    engine.flush()
    assert waits == [(0.2,), ()]
    outcomes = {outcome: n for outcome, n in engine.counts.offloads.items() if n}
    assert outcomes == {"stored": 3 * 3, "failed": 5 * 3}
    for i, tokens in enumerate(prompts):
        restored = engine.admit(engine.request(f"r{i}", tokens))
        assert restored.loaded == (48 if i < 3 else 0)
        assert all((t == float(i + 1)).all() for pair in restored.forward() for t in pair)
        assert restored.finish()
    engine.assert_nothing_held()


def test_a_request_waits_for_its_pages_but_not_past_the_deadline(
    start: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from .harness import Gate, config, until

    first = start(tiny, config(tmp_path))
    first.compute(TOKENS)
    first.close()

    second = start(tiny, config(tmp_path, promote_deadline="300ms"))
    disk = second.linker._store.lower[0]
    real = disk.get_many_into
    monkeypatch.setattr(disk, "get_many_into", lambda keys, outs, deadline_s: real(keys, outs))
    slow = Gate.of(monkeypatch, disk, "get_many_into")
    req = second.request("again", TOKENS)
    lookup = second.linker._asked["again"].lookup
    assert lookup.deadline - lookup.began == pytest.approx(0.3)
    slow.reached()
    restored = second.admit(req)  # which returns while the disk is still being waited for
    assert lookup.deadline <= time.monotonic()
    assert restored.loaded == 0
    assert second.counts.misses["deadline"] == 8
    slow.open()
    until(lambda: second.linker._store.host.usage().resident_pages == 8)  # behind the request's back
    later = second.admit(second.request("later", TOKENS))
    assert later.loaded == len(TOKENS)
    later.forward()
    assert later.finish()
    assert second.counts.misses["deadline"] == 8 and second.counts.hits == {"host": 8, "nvme": 0}
    second.assert_nothing_held()


def test_a_device_prefix_that_is_lost_while_a_request_queues_is_waited_for(
    start: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages were on the device at the first lookup, and are only on disk at the last one before admission."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    from kvtier.connectors.sglang import hold

    from .harness import Gate, config, same, until

    first = start(tiny, config(tmp_path))
    computed = first.compute(TOKENS)
    first.close()

    second = start(tiny, config(tmp_path))
    half = TOKENS[: len(TOKENS) // 2]
    second.compute(half)
    req = second.request("queued", TOKENS)
    until(lambda: not second.linker.waits("queued"))
    assert req.prefix_len == len(half)
    second.cache.evict(EvictParams(num_tokens=len(half)))
    second.linker._store.host.delete_many(second.linker._namespace.page_keys(_hashes(second, half)))

    slow = Gate.of(monkeypatch, second.linker._store.lower[0], "get_many_into")
    req.init_next_round_input(second.cache)
    assert req.prefix_len == 0 and second.linker.waits("queued")
    adder = SimpleNamespace(tree_cache=second.cache, budget_state=lambda: "next")
    assert hold.admit(lambda *_: "added", adder, req, False, None) == "next"
    slow.open()
    restored = second.admit(req)
    assert restored.loaded == len(TOKENS)
    assert same(restored.forward(), computed, len(TOKENS)) and restored.finish()
    assert second.counts.hits == {"host": 0, "nvme": 8}
    second.assert_nothing_held()


def test_what_arrives_while_a_part_is_being_loaded_is_not_called_a_hit(
    start: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from .harness import Gate, config, expire, same, until

    tokens = list(range(5, 5 + 24 * 16))
    first = start(tiny, config(tmp_path))
    computed = first.compute(tokens)
    keys = first.linker._namespace.page_keys(_hashes(first, tokens))
    first.close()

    second = start(tiny, config(tmp_path))
    disk = second.linker._store.lower[0]
    slow = Gate.of(monkeypatch, disk, "get_many_into", only=lambda asked, *_: keys[20] in asked)
    req = second.request("again", tokens)
    until(lambda: second.linker._asked["again"].lookup.ready_pages == 16)
    slow.reached()
    expire(second, "again")
    restored = second.admit(req)
    assert restored.loaded == 16 * 16
    slow.open()
    until(lambda: second.linker._store.host.usage().resident_pages == 24)
    assert same(restored.forward(), computed, restored.loaded) and restored.finish()
    assert second.counts.hits == {"host": 0, "nvme": 16} and second.counts.misses["deadline"] == 8
    second.assert_nothing_held()


def test_a_request_that_waited_longer_than_its_lease_is_looked_up_anew(start: Any, tiny: Path) -> None:
    from .harness import config, same

    engine = start(tiny, config(lease="20ms"))
    computed = engine.compute(TOKENS)
    engine.flush()
    req = engine.request("patient", TOKENS)
    time.sleep(0.05)  # longer than the lease
    engine.linker._store._drop_expired()  # as a writer does that needs room
    assert engine.linker._store.open_requests() == []
    restored = engine.admit(req)
    assert restored.loaded == len(TOKENS)
    assert same(restored.forward(), computed, len(TOKENS)) and restored.finish()
    engine.assert_nothing_held()


def test_aborts_at_every_stage_leave_nothing_behind(start: Any, tiny: Path, tmp_path: Path) -> None:
    from .harness import PATIENCE_S, config

    first = start(tiny, config(tmp_path))
    prompts = [[i * 300 + j for j in range(64)] for i in range(6)]
    for n, prompt in enumerate(prompts):
        first.compute(prompt, seed=n)
    first.close()

    engine = start(tiny, config(tmp_path))
    draw = random.Random(4)
    for n in range(100):
        req = engine.request(f"r{n}", draw.choice(prompts))
        stage = draw.randrange(4)
        if stage == 0:  # while held, or just looked up
            engine.abort(req)
            continue
        restored = engine.admit(req, wait=stage != 1)
        restored.forward()
        if stage == 2:  # while its load runs: the engine ends the load with the batch
            engine.abort(req)
        assert restored.finish()
    engine.assert_nothing_held()
    assert engine.linker._store._promotions.drain(PATIENCE_S)  # of requests that went away
    usage = engine.linker._store.host.usage()
    assert (
        usage.recovered_pages + usage.stored_pages - usage.evicted_pages - usage.deleted_pages == usage.resident_pages
    )
    assert engine.allocator.available_size() == engine.free_at_start
    _every_page_can_be_evicted(engine)


def _every_page_can_be_evicted(engine: Any) -> None:
    """Pins are gone if a page of the arena's whole size can be had, piece by piece."""
    from kvtier.abc.tier import Slot

    host = engine.linker._store.host
    nbytes = engine.linker._mover.layout(engine.linker._stored[0].codec).cold_page_bytes
    count = host.usage().capacity_bytes // (-(-nbytes // 4096) * 4096) - 64
    keys = [n.to_bytes(32, "little") for n in range(count)]
    slots = host.reserve_many(keys, [nbytes] * count)
    assert all(isinstance(slot, Slot) for slot in slots)
    host.abort_many(keys, [slot for slot in slots if isinstance(slot, Slot)])
    resident = host.usage().resident_pages
    assert resident <= 64


def _insert(tokens: list[int], slots: Any) -> Any:
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams

    from .harness import key_of

    return InsertParams(key=key_of(tokens), value=slots)


def _match(engine: Any, tokens: list[int]) -> Any:
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

    from .harness import key_of

    return MatchPrefixParams(key=key_of(tokens))


def _hashes(engine: Any, tokens: list[int]) -> list[bytes]:
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    from .harness import key_of

    return [bytes.fromhex(h) for h in get_storage_hash_str(key_of(tokens), None, page_size=engine.page)]


def _flip_on_disk(folder: Path, engine: Any, rows: Any, *, page: int) -> None:
    """Flip one bit of the first K row of `page` wherever the segment files hold it."""
    import torch

    first = rows[0][0][page * engine.page].contiguous().view(-1)
    needle = first.view(dtype=torch.uint8).numpy().tobytes()[:32]
    found = 0
    for path in stored_pages(folder):
        data = bytearray(path.read_bytes())
        at = data.find(needle)
        if at >= 0:
            data[at] ^= 1
            path.write_bytes(data)
            found += 1
    assert found == 1
