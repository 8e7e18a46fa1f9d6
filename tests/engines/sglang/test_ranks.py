"""Several ranks of one engine, as real processes over gloo with SGLang's own radix cache: whatever one of them has
lost, all decide alike, none hangs, and what is restored is what each had computed."""

from __future__ import annotations

import os
import random
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from .ranked import PAGE, Rank, Scheduler, prompt, run_ranks

pytestmark = pytest.mark.timeout(600)
SHAPES = [pytest.param((2, 1), id="tp2"), pytest.param((1, 2), id="pp2"), pytest.param((2, 2), id="tp2-pp2")]
PAGES = 8
long = pytest.mark.skipif(
    os.environ.get("KVTIER_TEST_LONG") != "1", reason="takes minutes: make test-sglang-long runs it"
)


def block(folder: Path, **more: Any) -> dict[str, Any]:
    from .harness import config

    return config(folder, **{"host": "16MiB", **more})


# Capacities are a node's, so four ranks have 4 MiB of host memory each.


def filled(rank: Rank, name: str, prompts: list[list[int]], **more: Any) -> tuple[Any, Scheduler, list[Any]]:
    """An engine that has only in its lower tier what another one computed; each rank computed other values."""
    nvme = rank.folder / name
    first = rank.engine(block(nvme))
    scheduler = rank.scheduler(first)
    computed = []
    for n, tokens in enumerate(prompts):
        computed.append(first.compute(tokens, seed=1000 * rank.rank + n, wait=False))
        scheduler.settle()
        first.flush()
    first.close()
    rank.meet()
    engine = rank.engine(block(nvme, **more))
    return engine, rank.scheduler(engine), computed


def keys_of(engine: Any, tokens: list[int]) -> list[bytes]:
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    from .harness import key_of

    hashes = get_storage_hash_str(key_of(tokens), None, page_size=PAGE)
    keys: list[bytes] = engine.linker._namespace.page_keys([bytes.fromhex(h) for h in hashes])
    return keys


def check_rows(scheduler: Scheduler, rid: str, computed: Any) -> None:
    from .harness import same

    tokens = scheduler.results[rid][1]
    assert same(scheduler.rows[rid], computed, tokens) if tokens else rid not in scheduler.rows


def lose_pages(rank: Rank) -> Any:
    """One rank has lost a page, in one way after the other."""
    broken = rank.rank == rank.tp * rank.pp - 1
    prompts = [prompt(n) for n in range(8)]
    engine, scheduler, computed = filled(rank, "lost", prompts)
    tier, store, linker = engine.linker._store.lower[0], engine.linker._store, engine.linker

    scheduler.add("whole", prompts[0])
    scheduler.run()
    check_rows(scheduler, "whole", computed[0])

    if broken:
        tier.delete_many([keys_of(engine, prompts[1])[5]])
    scheduler.add("deleted", prompts[1])
    scheduler.run()
    check_rows(scheduler, "deleted", computed[1])

    scheduler.add("warm", prompts[2])
    scheduler.run()
    again = scheduler.add("again", prompts[2])
    while again in scheduler.waiting_queue:
        scheduler.step()
    bad = keys_of(engine, prompts[2])[3]
    if broken:  # its bytes are wrong in host memory, which shows when they are decoded
        lookup = store.lookup("find", [bad])
        (slot, _), *_ = lookup.ready_slots(1)
        store.host.arena[slot.offset + 100] ^= 1
        store.settle("find", loaded=False)
    scheduler.add("rotten", prompts[2])
    scheduler.run()

    go = threading.Event()
    if broken:  # a slow disk: all wait for it, others go on
        real = tier.get_many_into

        def late(*args: Any, **kwargs: Any) -> Any:
            assert go.wait(120.0)
            return real(*args, **kwargs)

        tier.get_many_into = late
    scheduler.add("slow", prompts[3])
    scheduler.add("quick", prompts[0])
    for _ in range(20):
        scheduler.step()
    assert [r.rid for r in scheduler.waiting_queue] == ["slow"] and "quick" in scheduler.results
    go.set()
    scheduler.run()
    check_rows(scheduler, "slow", computed[3])

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError("injected")

    saved = {name: getattr(store, name) for name in ("lookup", "freeze", "hold")}
    if broken:  # a store that fails in every way
        store.lookup = fails
    scheduler.add("no lookup", prompts[4])
    scheduler.run()

    def fails_later(*arguments: Any, **named: Any) -> Any:
        if named:  # what was frozen cannot be held when it is loaded
            raise OSError("injected")
        return saved["hold"](*arguments)

    for name, rid, n, failing in (("freeze", "no freeze", 5, fails), ("hold", "no hold", 6, fails_later)):
        if broken:
            for method, function in saved.items():
                setattr(store, method, function)
            setattr(store, name, failing)
        scheduler.add(rid, prompts[n])
        scheduler.run()
    if broken:
        for method, function in saved.items():
            setattr(store, method, function)
        mover_offload, linker._mover.offload = linker._mover.offload, fails
    engine.compute(prompt(99), seed=rank.rank, wait=False)
    scheduler.settle()
    if broken:
        linker._mover.offload = mover_offload
    scheduler.add("after", prompts[7])
    scheduler.run()
    check_rows(scheduler, "after", computed[7])
    engine.flush()
    engine.assert_nothing_held()
    assert engine.allocator.available_size() == engine.free_at_start
    engine.close()
    return scheduler.results, scheduler.failed, rank.decisions


@pytest.mark.parametrize("shape", SHAPES)
def test_one_rank_has_lost_pages(tiny: Path, tmp_path: Path, shape: tuple[int, int]) -> None:
    tp, pp = shape
    answers = run_ranks(lose_pages, tmp_path, tiny, tp=tp, pp=pp)
    assert all(answer == answers[0] for answer in answers), answers
    results, failed, _ = answers[0]
    whole = PAGES * PAGE
    assert results["whole"] == (0, whole)
    assert results["deleted"] == (0, 5 * PAGE)
    assert results["slow"] == results["quick"] == results["after"] == (0, whole)
    assert results["no lookup"] == results["no freeze"] == (0, 0)
    assert failed == ["rotten", "no hold"], (results, failed)


def late(rank: Rank) -> Any:
    """One rank's disk is too slow for the deadline, and one has no room at all."""
    broken = rank.rank == 0
    prompts = [prompt(n) for n in range(3)]
    engine, scheduler, computed = filled(rank, "late", prompts, promote_deadline="400ms")
    tier = engine.linker._store.lower[0]
    go = threading.Event()
    if broken:
        real = tier.get_many_into

        def slow(*args: Any, **kwargs: Any) -> Any:
            assert go.wait(120.0)
            return real(*args, **kwargs)

        tier.get_many_into = slow
    scheduler.add("late", prompts[0])
    begin = time.monotonic()
    scheduler.run()
    waited = time.monotonic() - begin
    go.set()
    assert waited > 0.3
    misses = {reason: n for reason, n in engine.counts.misses.items() if n}
    engine.flush()
    engine.close()

    engine, scheduler, computed = filled(rank, "room", prompts, promote_deadline="2s")
    store = engine.linker._store
    held: list[tuple[bytes, Any]] = []
    if broken:  # what it could restore is locked by others
        from kvtier.abc.tier import Slot

        nbytes = engine.linker._mover.layout(engine.linker._stored[0].codec).cold_page_bytes
        while isinstance((slot := store.reserve([len(held).to_bytes(32, "little")], [nbytes])[0]), Slot):
            held.append((len(held).to_bytes(32, "little"), slot))
        store.abort([key for key, _ in held[:2]], [slot for _, slot in held[:2]])
    scheduler.add("full", prompts[1])
    scheduler.run()
    check_rows(scheduler, "full", computed[1])
    store.abort([key for key, _ in held[2:]], [slot for _, slot in held[2:]])
    engine.flush()
    engine.assert_nothing_held()
    engine.close()
    return rank.decisions, misses


def test_one_rank_is_late_and_then_full(tiny: Path, tmp_path: Path) -> None:
    answers = run_ranks(late, tmp_path, tiny, tp=2)
    assert answers[0][0] == answers[1][0]
    assert answers[0][0][0] == ("late", 0, 0)
    rid, device, restored = answers[0][0][1]
    assert (rid, device) == ("full", 0) and restored < PAGES * PAGE
    assert answers[0][1] == {"deadline": PAGES} and sum(answers[1][1].values()) == PAGES


def chaos(rank: Rank) -> Any:
    """Requests with shared beginnings, aborts, evictions and flushes, while each rank loses pages of its own."""
    prompts = [prompt(n % 3, 4 * PAGE) + prompt(50 + n, 4 * PAGE) for n in range(9)]
    engine, scheduler, _ = filled(rank, "chaos", prompts, promote_deadline="5s")
    tier = engine.linker._store.lower[0]
    alike, own = random.Random(7), random.Random(rank.rank)
    for n in range(60):
        which = alike.randrange(len(prompts))
        scheduler.add(f"r{n}", prompts[which])
        if own.random() < 0.3:
            victim = own.choice(keys_of(engine, own.choice(prompts)))
            tier.delete_many([victim])
            engine.linker._store.host.delete_many([victim])
        if alike.random() < 0.3:
            scheduler.abort(f"r{alike.randrange(n + 1)}")
        if alike.random() < 0.5:
            scheduler.step()
        if alike.random() < 0.1:
            scheduler.run()
            scheduler.settle()
            engine.flush()
    scheduler.run()
    for rid, rows in scheduler.rows.items():
        assert rows and rid not in scheduler.failed
    engine.flush()
    engine.assert_nothing_held()
    assert engine.allocator.available_size() == engine.free_at_start
    engine.close()
    return rank.decisions


@pytest.mark.parametrize("shape", [pytest.param((4, 1), id="tp4"), pytest.param((2, 2), id="tp2-pp2")])
def test_ranks_that_lose_pages_at_random_decide_alike(tiny: Path, tmp_path: Path, shape: tuple[int, int]) -> None:
    answers = run_ranks(chaos, tmp_path, tiny, tp=shape[0], pp=shape[1])
    assert all(answer == answers[0] for answer in answers)
    assert len(answers[0]) > 30 and any(restored for _, _, restored in answers[0])


def in_pieces(script: Any, rank: Rank) -> Any:
    """`script` where a step looks up so few pages that every request is looked up in several."""
    from kvtier.connectors.sglang import steps

    steps.STEP_PAGES, steps.NEW_PAGES, steps.FIRST_PAGES, steps.REQUEST_PAGES, steps.COUNTED_PAGES = 8, 4, 3, 1, 0
    return script(rank)


def test_ranks_that_look_tails_up_in_pieces_decide_alike(tiny: Path, tmp_path: Path) -> None:
    answers = run_ranks(partial(in_pieces, chaos), tmp_path, tiny, tp=2)
    assert answers[0] == answers[1]
    assert len(answers[0]) > 30 and any(restored for _, _, restored in answers[0])


def test_stages_that_look_tails_up_in_pieces_decide_alike(tiny: Path, tmp_path: Path) -> None:
    """And one has lost pages, in every way."""
    answers = run_ranks(partial(in_pieces, lose_pages), tmp_path, tiny, pp=2)
    assert answers[0] == answers[1]
    results, failed, _ = answers[0]
    assert results["whole"] == results["after"] == (0, PAGES * PAGE) and results["deleted"] == (0, 5 * PAGE)
    assert failed == ["rotten", "no hold"], (results, failed)


def shared_block(folder: Path) -> dict[str, Any]:
    from .harness import config

    given = config()
    given["tiers"].append({"type": "redis", "url": f"unix://{folder / 'socket'}", "timeout": "60s"})
    return given


def share(rank: Rank) -> Any:
    """All ranks of a host keep their pages in one cache server, in which an engine of one rank had its own; one of them
    cannot reach it for a while."""
    prompts = [prompt(n) for n in range(2)]
    given = shared_block(rank.folder)
    first = rank.engine(given)
    scheduler = rank.scheduler(first)
    scheduler.add("one rank's", prompts[0])
    scheduler.run()
    computed = []
    for n, tokens in enumerate(prompts):
        computed.append(first.compute(tokens, seed=1000 * rank.rank + n, wait=False))
        scheduler.settle()
        first.flush()
    first.close()
    rank.meet()

    engine = rank.engine(given)
    scheduler = rank.scheduler(engine)
    scheduler.add("whole", prompts[0])
    scheduler.run()
    check_rows(scheduler, "whole", computed[0])  # its own part of each page, not another rank's
    if rank.rank == 1:
        engine.linker._store.lower[0].length_many = lambda keys: [-1] * len(keys)
    scheduler.add("unreachable", prompts[1])
    scheduler.run()
    engine.flush()
    engine.assert_nothing_held()
    engine.close()
    return rank.decisions


@pytest.mark.usefixtures("engine_hooks")
def test_ranks_of_a_host_share_a_cache_server(start: Any, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """And an engine of one rank does not find pages of two there, nor they its own, though all are of one size."""
    from .cache_server import Server
    from .harness import same

    pytest.importorskip("redis", reason="redis is not installed: pip install 'kvtier[redis]'")
    folder = tmp_path_factory.mktemp("r")
    whole = PAGES * PAGE
    server = Server(folder, "socket")
    try:
        alone = start(tiny, shared_block(folder), page=PAGE)
        computed = alone.compute(prompt(0), seed=77)
        alone.close()
        server.written(PAGES)
        answers = run_ranks(share, folder, tiny, tp=2)
        again = start(tiny, shared_block(folder), page=PAGE)
        others = again.admit(again.request("of two ranks", prompt(1)))
        assert others.loaded == 0 and others.finish()
        own = again.admit(again.request("own", prompt(0)))
        assert own.loaded == whole and same(own.forward(), computed, whole) and own.finish()
        again.close()
    finally:
        server.kill()
    assert answers[0] == answers[1] == [("one rank's", 0, 0), ("whole", 0, whole), ("unreachable", 0, 0)]


def stored_bits_flipped(folder: Path) -> None:
    """Damage the second half of every 4 KiB slot that holds something, behind the tier's back."""
    segments = [p for p in folder.rglob("*") if p.is_file() and p.stat().st_size >= 1 << 20]
    assert segments, f"nothing is stored in {folder}"
    for path in segments:
        with path.open("r+b") as file:
            for slot in range(128):
                file.seek(slot * 4096)
                if any(data := file.read(256)):
                    file.seek(slot * 4096)
                    file.write(bytes(255 - byte for byte in data))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"tp_size": 2}, id="tp2"),
        pytest.param({"pp_size": 2}, id="pp2", marks=long),
        pytest.param({"tp_size": 2, "pp_size": 2}, id="tp2-pp2", marks=long),
    ],
)
def test_an_engine_of_several_ranks(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any]
) -> None:
    """The whole engine, from whose last rank every stored page is taken away while it runs."""
    from .engine_process import EngineProcess, cores_of
    from .engine_process import prompt as ids
    from .test_engine import RAW

    ranks = sizes.get("tp_size", 1) * sizes.get("pp_size", 1)
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", cores_of(ranks))
    block = {
        "tiers": [
            {"type": "host", "capacity": "256KiB"},  # 16 pages on each rank, which has its part of each
            {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": f"{ranks * 64}MiB"},
        ],
        "kv_cache_compression_config": [RAW],
        "promote_deadline": "60s",
        "break_even": False,
        "debug": True,
    }
    engine = EngineProcess(tiny, block, tmp_path / "run", ranks=ranks, page_size=16, dtype="float32", **sizes)
    try:
        cold = [engine.one(f"cold{n}", ids(n)) for n in range(3)]
        for rank in range(ranks):
            engine.stored(36, rank=rank)
        assert engine.flush()
        warm = engine.one("warm", ids(0))  # from disk: the others' pages have pushed its own out of host memory
        assert warm["ids"] == cold[0]["ids"] and warm["cached"] == 192 and warm["details"]["host"] == 192
        for rank in range(ranks):
            metrics = engine.metrics(rank)
            assert metrics['kvtier_hits_total{tier="nvme"}'] == 12, rank

        folders = sorted((tmp_path / "kv").glob("*/rank*"))
        assert [f.name for f in folders] == [f"rank{rank}" for rank in range(ranks)]
        stored_bits_flipped(folders[-1])
        assert engine.flush()
        recomputed = engine.generate(*({"rid": f"again{n}", "ids": ids(n)} for n in (1, 2)))
        assert [a["ids"] for a in recomputed] == [c["ids"] for c in cold[1:]]
        last, first = engine.metrics(ranks - 1), engine.metrics(0)
        assert last['kvtier_misses_total{reason="corrupt"}'] > 0 == first['kvtier_misses_total{reason="corrupt"}']
        requests = [
            {"rid": f"many{n:03}", "ids": ids(n % 7, 150 + n), "abort_after_s": 0.05 * n if n % 3 == 0 else None}
            for n in range(30)
        ]
        answers = engine.generate(*requests)
        done = [a for a in answers if "error" not in a and (a.get("finish") or {}).get("type") == "length"]
        assert len(done) >= 20
        assert engine.flush()
        for rank in range(ranks):
            metrics = engine.metrics(rank)
            assert metrics["kvtier_open_requests"] == metrics["kvtier_pending_offloads"] == 0
            hits = sum(v for k, v in metrics.items() if k.startswith("kvtier_hits_total"))
            misses = sum(v for k, v in metrics.items() if k.startswith("kvtier_misses_total"))
            assert metrics["kvtier_lookups_total"] == hits + misses > 0
            assert metrics['kvtier_errors_total{site="engine"}'] == metrics["kvtier_accounting_violations_total"] == 0
        assert engine.one("still", ids(0))["ids"] == cold[0]["ids"]
    finally:
        engine.kill()
