"""TieredStore over shared tiers: what other machines have is asked for by workers, never by the engine's own thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from kvtier.abc.tier import LENGTH_UNKNOWN, PageMeta, TierCapabilities
from kvtier.keys import checksum
from kvtier.storage_backends.host.tier import HostTier
from kvtier.store import TieredStore
from kvtier.testing.dict_tier import DictTier
from kvtier.testing.store_machine import page_bytes, page_key
from tests.store_pages import PATIENCE_S, SLOT, counted, keys, meta_of, put_all


class SharedTier(DictTier):
    """Remembers who asked it; `asking` holds questions back, `down` leaves them without an answer."""

    capabilities = TierCapabilities(persistent=True, shared=True)

    def __init__(self, name: str = "redis") -> None:
        super().__init__(name)
        self.askers: set[int] = set()
        self.asked: list[bytes] = []
        self.read: list[bytes] = []
        self.asking = threading.Event()
        self.asking.set()
        self.down = False
        self.broken = False

    def length_many(self, keys: Sequence[bytes]) -> list[int]:
        self.askers.add(threading.get_ident())
        self.asked += keys
        self.asking.wait()
        if self.broken:
            raise RuntimeError("a bug")
        return [LENGTH_UNKNOWN] * len(keys) if self.down else super().length_many(keys)

    def get_many_into(self, keys, outs, deadline_s=None):  # type: ignore[no-untyped-def]
        self.read += keys
        return super().get_many_into(keys, outs, deadline_s)

    def has(self, *pages: int) -> None:
        for page in pages:
            key, data = page_key(page), page_bytes(page)
            self.pages[key] = (meta_of(key, data, page), data)


@pytest.fixture
def shared() -> SharedTier:
    return SharedTier()


@pytest.fixture
def local() -> DictTier:
    return DictTier("nvme")


@pytest.fixture
def store(local: DictTier, shared: SharedTier) -> Iterator[TieredStore]:
    store = TieredStore(HostTier(32 * SLOT), [local, shared], promote_deadline_s=PATIENCE_S)
    yield store
    for gate in (local.gate, shared.gate, shared.asking):
        gate.set()
    store.close()


def put(store: TieredStore, page: int) -> None:
    put_all(store, [page])
    assert store.flush(PATIENCE_S)


def test_a_lookup_never_asks_a_shared_tier_on_the_callers_thread(store: TieredStore, shared: SharedTier) -> None:
    shared.has(0, 3)
    shared.asking.clear()
    start = time.perf_counter()
    lookup = store.lookup("r", keys(0, 3, 6))
    assert time.perf_counter() - start < PATIENCE_S / 2, "it waited for the tier"
    assert (lookup.ready_pages, lookup.pending) == (0, True)
    shared.asking.set()
    assert store.wait(lookup) == 2
    assert not lookup.pending, "an absent page is a miss as soon as the worker knows"
    assert threading.get_ident() not in shared.askers
    store.settle("r")
    assert counted(store) == ({"redis": 2}, {"absent": 1})


def test_pages_of_all_tiers_make_one_prefix(store: TieredStore, local: DictTier, shared: SharedTier) -> None:
    put(store, 0)
    shared.pages.clear()
    shared.has(3, 9)
    for page in (6, 9):
        data = page_bytes(page)
        local.pages[page_key(page)] = (PageMeta(len(data), 1, page, checksum(data, page_key(page)), bytes(16)), data)
    lookup = store.lookup("r", keys(0, 3, 6, 9))
    assert store.wait(lookup) == 4
    for page, (slot, meta) in zip((0, 3, 6, 9), lookup.ready_slots(4), strict=True):
        assert bytes(store.host.view(slot)[: meta.nbytes]) == page_bytes(page)
    store.settle("r")
    assert counted(store) == ({"host": 1, "redis": 1, "nvme": 2}, {})
    assert shared.asked.count(page_key(9)) == 0, "what a local tier has is not asked for"


def test_pages_behind_a_gap_are_not_read(store: TieredStore, shared: SharedTier) -> None:
    shared.has(0, 6, 9)
    lookup = store.lookup("r", keys(0, 3, 6, 9))
    assert store.wait(lookup) == 1
    assert store._promotions.drain(PATIENCE_S)
    assert shared.read == keys(0)
    store.settle("r")
    assert counted(store) == ({"redis": 1}, {"absent": 1, "after_gap": 2})


def test_a_page_behind_a_gap_is_read_if_another_request_waits_for_it(store: TieredStore, shared: SharedTier) -> None:
    shared.has(3)
    shared.asking.clear()
    store.lookup("a", keys(0, 3))
    b = store.lookup("b", keys(3))
    shared.asking.set()
    assert store.wait(b) == 1
    store.settle("b")
    store.settle("a")
    assert counted(store) == ({"redis": 1}, {"absent": 1, "after_gap": 1})


def test_a_tier_that_does_not_answer_is_the_reason(store: TieredStore, shared: SharedTier) -> None:
    shared.down = True
    lookup = store.lookup("r", keys(0, 3))
    assert store.wait(lookup) == 0
    store.settle("r")
    assert counted(store) == ({}, {"tier_down": 2})


def test_an_error_in_the_tier_ends_the_wait(store: TieredStore, shared: SharedTier) -> None:
    shared.broken = True
    start = time.perf_counter()
    assert store.wait(store.lookup("r", keys(0, 3))) == 0
    assert time.perf_counter() - start < PATIENCE_S / 2
    store.settle("r")
    assert counted(store) == ({}, {"tier_down": 2})
    assert store.ledger.snapshot().errors["promote"] == 1


def test_a_stuck_shared_tier_does_not_hold_up_local_pages(
    store: TieredStore, local: DictTier, shared: SharedTier
) -> None:
    shared.asking.clear()
    for n in range(4):
        store.lookup(f"stuck{n}", keys(100 + n))
    data = page_bytes(0)
    local.pages[page_key(0)] = (PageMeta(len(data), 1, 0, checksum(data, page_key(0)), bytes(16)), data)
    assert store.wait(store.lookup("r", keys(0)), PATIENCE_S / 2) == 1


def test_settling_before_the_answer_counts_once(store: TieredStore, shared: SharedTier) -> None:
    shared.has(0)
    shared.asking.clear()
    store.lookup("r", keys(0, 3))
    store.settle("r")
    shared.asking.set()
    assert store._promotions.drain(PATIENCE_S)
    assert counted(store) == ({}, {"deadline": 2})


def test_two_shared_tiers(local: DictTier) -> None:
    near, far = SharedTier("near"), SharedTier("far")
    near.has(0)
    far.has(0, 3)
    store = TieredStore(HostTier(32 * SLOT), [near, far], promote_deadline_s=PATIENCE_S)
    lookup = store.lookup("r", keys(0, 3, 6))
    assert store.wait(lookup) == 2
    store.settle("r")
    assert counted(store) == ({"near": 1, "far": 1}, {"absent": 1})
    store.close()
    local.close()
