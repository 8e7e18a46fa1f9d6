"""Tails that are looked up over several scheduling steps: never more pages in one than its budget, whatever waits; what
is restored, and what is counted, is what one lookup of the whole would have said."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("engine_hooks")

PAGE = 16
STEP_S = 0.001
"""The promise. A quarter of the steps must keep to five times of it on a core: machines differ, and what else runs on
one only slows."""


def prompt(n: int, pages: int) -> list[int]:
    return [(n * 7919 + i * (2 * n + 3)) % 50_000 + 5 for i in range(PAGE * pages)]


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step looks up few pages, so that short tails are long ones, and counts none on the scheduler's thread."""
    from kvtier.connectors.sglang import steps

    small = {"STEP_PAGES": 12, "NEW_PAGES": 6, "FIRST_PAGES": 4, "REQUEST_PAGES": 2, "COUNTED_PAGES": 0}
    for name, value in small.items():
        monkeypatch.setattr(steps, name, value)


class Steps:
    """Scheduling steps of an engine without a model: the connector's part of them, and what they looked up."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch, *, busy: bool = True) -> None:
        self.engine = engine
        self.queue: list[Any] = []
        self.pages: list[int] = []  # looked up, by step
        self.core_s: list[float] = []  # of this thread for that, by step; without SGLang's matching and hashing
        self._running = SimpleNamespace(is_empty=lambda: not busy)
        self._ready: list[Any] = []
        store, linker = engine.linker._store, engine.linker
        for name in ("lookup", "extend"):
            monkeypatch.setattr(store, name, self._counting(getattr(store, name)))
        for name in ("lookup", "look_on"):
            monkeypatch.setattr(linker, name, self._timed(getattr(linker, name)))

    def _counting(self, real: Any) -> Any:
        def call(of: Any, keys: Sequence[bytes], **named: Any) -> Any:
            if self.pages and not named.get("sparse"):
                self.pages[-1] += len(keys)
            return real(of, keys, **named)

        return call

    def _timed(self, real: Any) -> Any:
        def call(*arguments: Any) -> Any:
            begin = time.thread_time()
            try:
                return real(*arguments)
            finally:
                if self.core_s:
                    self.core_s[-1] += time.thread_time() - begin

        return call

    def add(self, rid: str, tokens: Sequence[int]) -> Any:
        from kvtier.connectors.sglang import hold

        req = self.engine.new_request(rid, tokens)
        self.queue.append(req)
        hold.request_queued(None, self._scheduler(), req)
        return req

    def _scheduler(self) -> Any:
        return SimpleNamespace(tree_cache=self.engine.cache, waiting_queue=self.queue, mbs=[])

    def step(self) -> list[str]:
        """One of them; which requests could be admitted in it."""
        from kvtier.connectors.sglang import hold

        def nothing(scheduler: Any, delayer: Any, running: Any) -> Any:
            self._ready = [req.rid for req in scheduler.waiting_queue]
            return None, running

        self.pages.append(0)
        self.core_s.append(0.0)
        hold.build_batch(nothing, self._scheduler(), None, self._running)
        return self._ready

    def until_ready(self, *rids: str) -> int:
        """Steps until all of these can be admitted; their number."""
        from .harness import PATIENCE_S

        give_up, steps = time.monotonic() + PATIENCE_S, 1
        while not set(rids) <= set(self.step()):
            assert time.monotonic() < give_up, f"{rids} still wait"
            steps += 1
            if not self.engine.linker.looks_up:
                time.sleep(0.002)  # pages are on their way up
        return steps

    def admit(self, req: Any) -> Any:
        self.queue.remove(req)
        return self.engine.admit(req, wait=False)

    def drop(self, req: Any) -> None:
        self.queue.remove(req)
        self.engine.abort(req)


@pytest.mark.parametrize("pages", [500, 2000])
def test_a_step_looks_up_no_more_than_its_budget(
    start: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    """Of long tails that are in host memory, in the tier below or nowhere, with short ones between them."""
    from kvtier.connectors.sglang.steps import FIRST_PAGES, STEP_PAGES

    from .harness import config

    engine = start(tiny, config(tmp_path, host="64MiB", promote_deadline="600s"), pages=pages + 8)
    store = engine.linker._store
    engine.compute(prompt(1, pages))
    engine.flush()
    steps = Steps(engine, monkeypatch)
    below = {key for n in (2, 3) for key in keys_of(engine, prompt(n, pages))}
    monkeypatch.setattr(store.lower[0], "length_many", lambda keys: [4096 if k in below else -1 for k in keys])
    monkeypatch.setattr(store._promotions._readers, "submit", lambda job: True)
    tails = {name: steps.add(name, prompt(n, pages)) for n, name in enumerate(["nowhere", "host", "nvme", "nvme too"])}
    short = [steps.add(f"short {n}", prompt(100 + n, 3)) for n in range(20)]
    steps.until_ready("nowhere", "host", *(req.rid for req in short))
    assert not engine.linker.looks_up or steps.step() is not None
    while engine.linker.looks_up:
        steps.step()
    assert max(steps.pages) <= STEP_PAGES
    assert sum(steps.pages) == 3 * pages + FIRST_PAGES + 3 * len(short), (
        "only where a page is missing is more not asked"
    )
    assert all(engine.linker.waits(name) for name in ("nvme", "nvme too"))
    print(
        f"\n{pages} pages: {len(steps.pages)} steps, median {statistics.median(steps.core_s) * 1e6:.0f} us on a core, "
        f"longest {max(steps.core_s) * 1e6:.0f} us"
    )
    assert statistics.quantiles(steps.core_s, n=4)[0] < 5 * STEP_S
    for req in [*tails.values(), *short]:
        steps.drop(req)
    engine.assert_nothing_held()
    counts = engine.counts
    assert counts.lookups == 4 * pages + 3 * len(short) == sum(counts.misses.values())
    assert (counts.misses["dropped"], counts.misses["deadline"]) == (pages, 2 * pages)


def keys_of(engine: Any, tokens: list[int]) -> list[bytes]:
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    from .harness import key_of

    hashes = get_storage_hash_str(key_of(tokens), None, page_size=PAGE)
    keys: list[bytes] = engine.linker._namespace.page_keys([bytes.fromhex(h) for h in hashes])
    return keys


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("lower", [False, True])
def test_what_was_looked_up_in_pieces_is_restored_bit_for_bit(
    start: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lower: bool
) -> None:
    from .harness import config, same

    folder = tmp_path if lower else None
    engine = start(tiny, config(folder))
    tokens = prompt(0, 40)
    computed = engine.compute(tokens)
    engine.flush()
    if lower:  # only the tier below has them
        engine.close()
        engine = start(tiny, config(folder))
    steps = Steps(engine, monkeypatch)
    req = steps.add("r", tokens)
    assert steps.until_ready("r") >= 4
    assert max(steps.pages) <= 12 and sum(steps.pages) == 40
    restored = steps.admit(req)
    assert restored.loaded == len(tokens)
    assert same(restored.forward(), computed, len(tokens)) and restored.finish()
    engine.assert_nothing_held()
    assert engine.counts.hits == ({"host": 0, "nvme": 40} if lower else {"host": 40})


@pytest.mark.usefixtures("small_steps")
def test_behind_a_gap_nothing_is_looked_up_and_everything_is_counted(
    start: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from .harness import config

    engine = start(tiny, config())
    tokens = prompt(0, 40)
    engine.compute(tokens)
    engine.flush()
    engine.linker._store.host.delete_many([keys_of(engine, tokens)[10]])
    steps = Steps(engine, monkeypatch)
    req, cold = steps.add("r", tokens), steps.add("cold", prompt(1, 40))
    steps.until_ready("r", "cold")
    assert sum(steps.pages) <= 12 + 12, "of one until behind the gap, of the other its first pages"
    restored = steps.admit(req)
    assert restored.loaded == 10 * PAGE
    restored.forward()
    assert restored.finish()
    assert steps.admit(cold).loaded == 0
    engine.assert_nothing_held()
    counts = engine.counts
    assert counts.hits == {"host": 10} and counts.lookups == 80
    assert (counts.misses["absent"], counts.misses["after_gap"]) == (41, 29)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("how", ["abort", "flush", "weights", "vanish"])
def test_a_request_that_ends_half_looked_up_leaves_nothing(
    start: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    from .harness import config

    engine = start(tiny, config())
    tokens = prompt(0, 40)
    engine.compute(tokens)
    engine.flush()
    steps = Steps(engine, monkeypatch)
    req = steps.add("r", tokens)
    steps.step()
    assert engine.linker.waits("r") and engine.linker.looks_up and 0 < sum(steps.pages) < 40
    if how == "abort":
        steps.drop(req)
    elif how == "flush":
        steps.queue.remove(req)
        engine.flush()
    elif how == "weights":
        engine.linker.weights_changed()
    else:
        steps.queue.remove(req)
        steps.step()
    assert not engine.linker.looks_up
    engine.assert_nothing_held()
    counts = engine.counts
    assert counts.lookups == sum(counts.misses.values()) == 40
    if how == "weights":  # it is in the queue still, and looked up anew when it is its turn
        steps.until_ready("r")
        assert steps.admit(req).loaded == 0
        engine.assert_nothing_held()


@pytest.mark.usefixtures("small_steps")
def test_the_deadline_begins_with_the_first_piece(start: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it has passed, the request starts with what was looked up until then."""
    from .harness import config, expire

    engine = start(tiny, config())
    tokens = prompt(0, 40)
    engine.compute(tokens)
    engine.flush()
    steps = Steps(engine, monkeypatch)
    req = steps.add("r", tokens)
    steps.step()
    deadline = engine.linker._asked["r"].lookup.deadline
    steps.step()
    assert engine.linker._asked["r"].lookup.deadline == deadline
    found = sum(steps.pages)
    expire(engine, "r")
    assert steps.step() == ["r"] and not engine.linker.looks_up
    restored = steps.admit(req)
    assert restored.loaded == found * PAGE < len(tokens)
    restored.forward()
    assert restored.finish()
    engine.assert_nothing_held()
    counts = engine.counts
    assert counts.hits == {"host": found} and counts.lookups == 40


@pytest.mark.usefixtures("small_steps")
def test_a_tail_whose_beginning_another_request_has_computed_meanwhile_goes_on(
    start: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is matched anew in the middle of its lookup: what was looked up of it is not again."""
    from .harness import config, same

    engine = start(tiny, config(), pages=96)
    tokens = prompt(0, 40)
    computed = engine.compute(tokens)
    engine.flush()
    steps = Steps(engine, monkeypatch)
    req = steps.add("r", tokens)
    steps.step()
    steps.step()
    engine.compute(tokens[: 5 * PAGE], seed=1)  # the device has these by now
    before = sum(steps.pages)
    req.init_next_round_input(engine.cache)
    assert engine.linker.waits("r")
    assert sum(steps.pages) - before == before - 5, "those that are left, of which only the pins were kept"
    steps.until_ready("r")
    restored = steps.admit(req)
    assert (restored.device, restored.loaded) == (5 * PAGE, 35 * PAGE)
    rows = restored.forward()
    assert same(rows, [(k[5 * PAGE :], v[5 * PAGE :]) for k, v in computed], 35 * PAGE) and restored.finish()
    engine.assert_nothing_held()
    counts = engine.counts
    assert counts.hits == {"host": 35} and counts.misses["superseded"] == 5 and counts.lookups == 40


@pytest.mark.usefixtures("small_steps")
def test_a_tail_that_got_longer_is_looked_up_from_its_new_beginning(
    start: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device had its beginning when it was looked up first, and has lost it."""
    from .harness import config

    engine = start(tiny, config(), pages=96)
    tokens = prompt(0, 40)
    engine.compute(tokens)
    engine.flush()
    engine.compute(tokens[: 5 * PAGE])
    steps = Steps(engine, monkeypatch)
    req = steps.add("r", tokens)
    steps.until_ready("r")
    assert sum(steps.pages) == 35
    engine.cache.evict(evict_all())
    steps.pages.append(0)
    req.init_next_round_input(engine.cache)
    steps.until_ready("r")
    restored = steps.admit(req)
    assert (restored.device, restored.loaded) == (0, 40 * PAGE)
    restored.forward()
    assert restored.finish()
    engine.assert_nothing_held()
    assert engine.counts.hits == {"host": 40} and engine.counts.lookups == 40


def evict_all() -> Any:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    return EvictParams(num_tokens=10_000)


@pytest.mark.usefixtures("small_steps")
def test_a_lookup_that_fails_in_the_middle_lets_the_request_start(
    start: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from .harness import config

    engine = start(tiny, config())
    tokens = prompt(0, 40)
    engine.compute(tokens)
    engine.flush()
    steps = Steps(engine, monkeypatch)
    req = steps.add("r", tokens)
    steps.step()

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(engine.linker._store, "extend", fails)
        assert steps.step() == ["r"]
    steps.until_ready("r")
    assert steps.admit(req).loaded == 0 or engine.counts.errors["engine"] == 1
    engine.linker.request_dropped("r")
    assert engine.counts.errors["engine"] == 1


@pytest.mark.usefixtures("small_steps")
def test_an_engine_with_nothing_else_to_do_does_not_pause_between_pieces(
    start: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtier.connectors.sglang import hold

    from .harness import config

    engine = start(tiny, config())
    tokens = prompt(0, 40)
    engine.compute(tokens)
    engine.flush()
    pauses: list[float] = []
    monkeypatch.setattr(hold, "time", SimpleNamespace(sleep=pauses.append, perf_counter=time.perf_counter))
    steps = Steps(engine, monkeypatch, busy=False)
    req = steps.add("r", tokens)
    assert steps.until_ready("r") >= 4 and pauses == []
    steps.drop(req)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("kind", ["swa", "mamba", "dsa"])
def test_pools_beside_are_asked_for_when_the_tail_is_known(
    start_pools: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from .harness import config
    from .pool_engines import equal

    page = 64 if kind == "dsa" else 16
    engine = start_pools(tiny, config(), kind, page=page)
    tokens = [(7 * n) % 400 + 5 for n in range(page * 12)]
    computed = engine.fill_prefix(tokens)
    engine.flush()
    steps = Steps(engine, monkeypatch)
    req = steps.add("r", tokens)
    assert steps.until_ready("r") >= 2
    restored = steps.admit(req)
    assert restored.loaded == len(tokens)
    assert equal(engine.forward(restored), computed) and engine.finish(restored)
    engine.assert_nothing_held()
    assert engine.counts.hits == {"host": 12} and not sum(engine.counts.misses.values())
