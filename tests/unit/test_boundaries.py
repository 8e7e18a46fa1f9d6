"""Where prefixes may end in models with pools beside KV: a dict of what is stored, and the store's own lookups."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvtier.abc.tier import Slot
from kvtier.connectors.sglang.boundaries import Beside, Boundaries, complete, lookup_name
from kvtier.storage_backends.host.tier import HostTier
from kvtier.store import TieredStore
from kvtier.testing.dict_tier import DictTier
from tests.store_pages import PATIENCE_S, SLOT, put_value

PAGES = 8


def key_of(pool: str, page: int) -> bytes:
    return f"{pool} {page}".encode().ljust(32)


def put(store: TieredStore, pool: str, *pages: int) -> None:
    for page in pages:
        assert isinstance(put_value(store, key_of(pool, page), bytes([page]) * 100, page), Slot)


@pytest.fixture
def lower() -> DictTier:
    return DictTier("nvme")


@pytest.fixture
def store(lower: DictTier) -> Iterator[TieredStore]:
    store = TieredStore(HostTier(40 * SLOT), [lower], promote_deadline_s=PATIENCE_S, lease_s=None)
    yield store
    lower.gate.set()
    store.close()


def below(store: TieredStore) -> None:
    """What is stored is in the lower tier alone."""
    assert store.flush(PATIENCE_S)
    store.host.delete_many([key_of(pool, page) for pool in ("kv", "swa", "state") for page in range(PAGES)])


@pytest.fixture
def ask(store: TieredStore) -> Callable[..., Boundaries]:
    def look_up(spare: bool = False, **windows: int) -> Boundaries:
        kv = store.lookup("r", [key_of("kv", n) for n in range(PAGES)])
        beside = {
            name: Beside(store, lookup_name("r", name), [key_of(name, n) for n in range(PAGES)], window, spare=spare)
            for name, window in windows.items()
        }
        return Boundaries(store, kv, beside)

    return look_up


def settle(store: TieredStore) -> dict[str, int]:
    for name in store.open_requests():
        store.settle(name)
    counts = store.ledger.snapshot()
    assert counts.lookups == PAGES == sum(counts.hits.values()) + sum(counts.misses.values())
    return {k: n for k, n in {**counts.hits, **counts.misses}.items() if n}


def wait(store: TieredStore, boundaries: Boundaries) -> list[int]:
    for _ in range(20):
        boundaries.restorable()
        if not boundaries.pending:  # what has arrived since may have opened the way to more
            lengths = boundaries.restorable()
            if not boundaries.pending:
                return lengths
        for lookup in (boundaries.kv, *(pool.lookup for pool in boundaries.beside.values())):
            if lookup is not None:
                store.wait(lookup, PATIENCE_S)
    raise AssertionError("pages are still on their way")


def test_a_window_that_lacks_a_page_ends_no_prefix(store: TieredStore, ask: Callable[..., Boundaries]) -> None:
    put(store, "kv", *range(7))
    put(store, "swa", 0, 1, 2, 3, 5, 6)
    boundaries = ask(swa=3)
    assert boundaries.restorable() == [4] and not boundaries.pending
    assert settle(store) == {"host": 4, "partial": 3, "absent": 1}


def test_ranks_know_every_prefix_that_host_memory_has_all_of(
    store: TieredStore, ask: Callable[..., Boundaries]
) -> None:
    put(store, "kv", *range(7))
    put(store, "swa", 0, 1, 2, 3, 5, 6)
    put(store, "state", 0, 2, 3, 6)
    assert ask(swa=3, spare=True).restorable() == [1, 2, 3, 4]
    store.settle("r")
    store.settle(lookup_name("r", "swa"))
    assert ask(swa=2, state=1, spare=True).restorable() == [1, 3, 4, 7]


def test_a_prefix_ends_where_there_is_a_state(store: TieredStore, ask: Callable[..., Boundaries]) -> None:
    put(store, "kv", *range(6))
    put(store, "state", 1, 4, 7)
    put(store, "swa", *range(6))
    boundaries = ask(state=1, swa=2, spare=True)
    assert boundaries.restorable() == [2, 5]
    state, swa = boundaries.beside["state"], boundaries.beside["swa"]
    assert state.take(1, 2) is not None and swa.take(0, 2) == [0, 1]
    assert state.lookup is not None and state.lookup.pins.count(-1) == len(state.lookup.pins) - 1
    assert state.take(0, 1) is None
    assert settle(store) == {"host": 5, "partial": 1, "absent": 2}


def test_without_anything_beside_nothing_is_restored(store: TieredStore, ask: Callable[..., Boundaries]) -> None:
    put(store, "kv", *range(PAGES))
    boundaries = ask(state=1)
    assert boundaries.restorable() == [] and not boundaries.pending
    assert settle(store) == {"partial": PAGES}


def test_only_what_the_longest_prefix_needs_is_read(
    store: TieredStore, lower: DictTier, ask: Callable[..., Boundaries]
) -> None:
    put(store, "kv", *range(7))
    put(store, "swa", *range(7))
    put(store, "state", 1, 3, 5)
    below(store)
    boundaries = ask(swa=2, state=1)
    assert wait(store, boundaries) == [6]
    here = {
        pool: [n for n in range(PAGES) if store.host.contains_many([key_of(pool, n)])[0]] for pool in ("swa", "state")
    }
    assert here == {"swa": [4, 5], "state": [5]}
    assert settle(store) == {"nvme": 6, "partial": 1, "absent": 1}


def test_a_page_beside_that_turns_out_bad_leaves_a_shorter_prefix(
    store: TieredStore, lower: DictTier, ask: Callable[..., Boundaries]
) -> None:
    put(store, "kv", *range(7))
    put(store, "state", 2, 6)
    below(store)
    lower.pages[key_of("state", 6)] = (lower.pages[key_of("state", 6)][0], b"x" * 100)
    boundaries = ask(state=1)
    assert wait(store, boundaries) == [3]
    counts = settle(store)
    assert counts["nvme"] == 3 and counts["partial"] == 4


def test_a_lease_that_ended_is_no_miss(lower: DictTier) -> None:
    store = TieredStore(HostTier(40 * SLOT), [lower], promote_deadline_s=PATIENCE_S, lease_s=None)
    put(store, "kv", 0, 1)
    put(store, "state", 1)
    kv = store.lookup("r", [key_of("kv", 0), key_of("kv", 1)])
    name = lookup_name("r", "state")
    boundaries = Boundaries(store, kv, {"state": Beside(store, name, [key_of("state", n) for n in (0, 1)], 1)})
    assert boundaries.restorable() == [2]
    store.settle(name, loaded=False)  # what the end of a lease does
    assert boundaries.restorable() == [2]
    store.close()


def test_complete_windows_are_those_without_a_gap() -> None:
    draw = random.Random(3)
    for _ in range(200):
        there = np.array([draw.random() < 0.7 for _ in range(draw.randrange(12))], dtype=np.bool_)
        window = draw.randrange(1, 6)
        want = [all(there[max(0, i + 1 - window) : i + 1]) for i in range(len(there))]
        assert complete(there, window).tolist() == want
