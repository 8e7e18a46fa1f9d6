"""TieredStore: what lookups pin, promote, keep and count. A dict stands in for the lower tier where reads must be
delayed or fail; the real tiers run under the state machine and in the integration tests."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kvtier.abc.tier import GetStatus, PutStatus, Slot
from kvtier.ledger import MissReason
from kvtier.lookup import UNPINNED, Lookup
from kvtier.storage_backends.host.tier import HostTier
from kvtier.store import TieredStore
from kvtier.testing.dict_tier import DictTier
from kvtier.testing.redis_servers import wait_for
from kvtier.testing.store_machine import page_bytes, page_key
from tests.store_pages import PATIENCE_S, SLOT, counted, keys, push_out_of_host, put

LEASE_S = 1000.0


@pytest.fixture
def lower() -> DictTier:
    return DictTier("nvme")


@pytest.fixture
def store(lower: DictTier) -> Iterator[TieredStore]:
    store = TieredStore(HostTier(12 * SLOT), [lower], promote_deadline_s=PATIENCE_S, lease_s=LEASE_S)
    yield store
    lower.gate.set()
    store.close()
    wait_for(lambda: lower.closed, "the lower tier was not closed")


def end_lease(lookup: Lookup) -> None:
    """As if it had been asked for last before so long."""
    lookup.asked -= 2 * LEASE_S


def test_host_hits_are_pinned_until_settled(store: TieredStore) -> None:
    put(store, 0)
    put(store, 3)
    lookup = store.lookup("r", keys(0, 3, 6))
    assert (lookup.ready_pages, lookup.pending) == (2, False)
    for page in range(30, 60):
        put(store, page, wait_s=0.1)
    assert bytes(store.host.view(lookup.ready_slots(2)[0][0])) == page_bytes(0)
    store.settle("r")
    store.settle("r")
    assert counted(store) == ({"host": 2}, {"absent": 1})
    push_out_of_host(store)
    assert store.host.contains_many(keys(0, 3)) == [False, False]


def test_promotion_makes_pages_ready_and_counts_the_tier_they_came_from(store: TieredStore) -> None:
    for page in (0, 3, 6):
        put(store, page)
    push_out_of_host(store)
    lookup = store.lookup("r", keys(0, 3, 6, 9))
    assert store.wait(lookup) == 3
    for page, (slot, meta) in zip((0, 3, 6), lookup.ready_slots(3), strict=True):
        assert bytes(store.host.view(slot)[: meta.nbytes]) == page_bytes(page)
    assert lookup.restored_from(3) == {"nvme": 3}
    store.settle("r")
    assert counted(store) == ({"nvme": 3}, {"absent": 1})
    again = store.lookup("r", keys(0, 3, 6))
    assert again.ready_pages == 3
    store.settle("r")
    assert counted(store)[0] == {"nvme": 3, "host": 3}


def test_promotion_never_runs_on_the_callers_thread(store: TieredStore, lower: DictTier) -> None:
    put(store, 0)
    push_out_of_host(store)
    lower.gate.clear()
    start = time.perf_counter()
    lookup = store.lookup("r", keys(0))
    assert time.perf_counter() - start < PATIENCE_S / 2, "it waited for the tier"
    assert (lookup.ready_pages, lookup.pending) == (0, True)
    lower.gate.set()
    assert store.wait(lookup) == 1
    assert not lookup.pending


def test_a_deadline_passed_is_a_miss_with_that_reason(lower: DictTier) -> None:
    store = TieredStore(HostTier(12 * SLOT), [lower], promote_deadline_s=0.5)
    put(store, 0)
    push_out_of_host(store)
    lower.gate.clear()
    start = time.perf_counter()
    lookup = store.lookup("r", keys(0))
    assert store.wait(lookup) == 0
    assert 0.5 <= time.perf_counter() - start < PATIENCE_S / 2
    store.settle("r")
    assert counted(store) == ({}, {"deadline": 1})
    lower.gate.set()
    store.close()


def test_settling_before_the_page_arrives_counts_once_and_leaks_no_pin(store: TieredStore, lower: DictTier) -> None:
    put(store, 0)
    push_out_of_host(store)
    lower.gate.clear()
    store.lookup("r", keys(0))
    store.settle("r")
    lower.gate.set()
    assert counted(store) == ({}, {"deadline": 1})
    assert store._promotions.drain(PATIENCE_S)
    push_out_of_host(store, range(200, 230))
    assert store.host.contains_many(keys(0)) == [False]


def test_a_page_behind_a_gap_is_counted_as_such_and_not_pinned(store: TieredStore) -> None:
    put(store, 0)
    put(store, 6)
    lookup = store.lookup("r", keys(0, 3, 6))
    assert lookup.ready_pages == 1
    push_out_of_host(store, range(30, 60))
    assert store.host.contains_many(keys(0, 6)) == [True, False]
    store.settle("r")
    assert counted(store) == ({"host": 1}, {"absent": 1, "after_gap": 1})


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(GetStatus.FAILED, "tier_down"), (GetStatus.CORRUPT, "corrupt"), (GetStatus.ABSENT, "absent")],
)
def test_a_failed_page_in_the_middle_ends_the_prefix(
    store: TieredStore, lower: DictTier, damage: GetStatus, reason: str
) -> None:
    for page in (0, 3, 6):
        put(store, page)
    push_out_of_host(store)
    store._evicted._when_s.clear()
    lower.gate.clear()
    lookup = store.lookup("r", keys(0, 3, 6))
    if damage is GetStatus.FAILED:
        lower.fail_gets.add(page_key(3))
    elif damage is GetStatus.CORRUPT:
        meta, data = lower.pages[page_key(3)]
        lower.pages[page_key(3)] = (meta, bytes([data[0] ^ 1]) + data[1:])
    else:
        del lower.pages[page_key(3)]
    lower.gate.set()
    assert store.wait(lookup) == 1
    assert store.flush(PATIENCE_S) and store._promotions.drain(PATIENCE_S)
    store.settle("r")
    assert counted(store) == ({"nvme": 1}, {reason: 1, "after_gap": 1})


def test_an_evicted_page_says_so(store: TieredStore, lower: DictTier) -> None:
    put(store, 0)
    push_out_of_host(store)
    lower.pages.clear()
    store.lookup("r", keys(0, 3))
    store.settle("r")
    assert counted(store) == ({}, {"evicted": 1, "absent": 1})


def test_two_requests_share_one_promotion(store: TieredStore, lower: DictTier) -> None:
    put(store, 0)
    push_out_of_host(store)
    lower.gate.clear()
    a, b = store.lookup("a", keys(0)), store.lookup("b", keys(0, 3))
    lower.gate.set()
    assert store.wait(a) == store.wait(b) == 1
    store.settle("a")
    assert bytes(store.host.view(b.ready_slots(1)[0][0]))[:64] == page_bytes(0)[:64]
    store.settle("b")
    assert counted(store) == ({"nvme": 2}, {"absent": 1})


def test_asking_for_other_keys_keeps_pins_and_counts_each_page_once(store: TieredStore) -> None:
    for page in (0, 3, 6):
        put(store, page)
    store.lookup("r", keys(0, 3, 6, 9))
    lookup = store.lookup("r", keys(6, 9, 12))
    assert lookup.ready_pages == 1
    assert store.lookup("r", keys(6, 9, 12)) is lookup
    store.settle("r")
    assert counted(store) == ({"host": 1}, {"superseded": 2, "absent": 2})
    assert store.ledger.snapshot().lookup_polls == 2


def test_a_page_that_fails_while_loading_becomes_a_miss_and_is_gone(store: TieredStore) -> None:
    for page in (0, 3, 6):
        put(store, page)
    lookup = store.lookup("r", keys(0, 3, 6))
    store.hold(lookup)
    store.fail(lookup, page_key(3))
    store.fail(lookup, page_key(77))
    store.settle("r")
    assert counted(store) == ({"host": 1}, {"corrupt": 1, "after_gap": 1})
    assert store.host.contains_many(keys(0, 3, 6)) == [True, False, True]
    assert store.host.usage().quarantined_pages == 1


def test_a_lookup_without_a_load_is_evictable_after_its_lease(store: TieredStore) -> None:
    for page in range(0, 36, 3):
        put(store, page, wait_s=PATIENCE_S)
    lookup = store.lookup("r", keys(*range(0, 36, 3)))
    assert lookup.ready_pages == 12
    assert put(store, 60) is PutStatus.FULL
    end_lease(lookup)
    assert isinstance(put(store, 60, wait_s=PATIENCE_S), Slot)
    assert store.open_requests() == []
    assert counted(store) == ({}, {"dropped": 12})


def test_a_held_lookup_never_expires(store: TieredStore) -> None:
    for page in range(0, 36, 3):
        put(store, page, wait_s=PATIENCE_S)
    lookup = store.lookup("r", keys(*range(0, 36, 3)))
    store.hold(lookup)
    end_lease(lookup)
    assert put(store, 60, wait_s=0.1) is PutStatus.FULL


def test_a_lookup_whose_lease_ended_is_not_held(lower: DictTier) -> None:
    store = TieredStore(HostTier(8 * SLOT), [lower], lease_s=LEASE_S)
    put(store, 1)
    lookup = store.lookup("r", keys(1))
    assert lookup.ready_pages == 1
    end_lease(lookup)
    store._drop_expired()  # what a writer does that needs room
    assert not store.hold(lookup) and not store.hold(lookup, 1)
    again = store.lookup("r", keys(1))
    assert store.hold(again, 1)
    end_lease(again)
    store._drop_expired()
    assert store.open_requests() == ["r"]
    store.settle("r")
    store.close()


def test_a_frozen_lookup_gains_nothing_and_may_start_with_less(store: TieredStore, lower: DictTier) -> None:
    """Ranks of one engine: each says what it has and keeps it, then all start with what they have in common."""
    put(store, 9)
    push_out_of_host(store)
    for page in (0, 3, 6):
        put(store, page)
    assert store.flush(PATIENCE_S)
    lower.gate.clear()
    lookup = store.lookup("r", keys(0, 3, 6, 9))
    assert store.freeze(lookup) == 3 and not lookup.pending
    lower.gate.set()
    assert store.hold(lookup, 2, rest=MissReason.AFTER_GAP)
    assert store.lookup("r", keys(0, 3, 6, 9)).ready_pages == 2
    store.settle("r")
    assert counted(store) == ({"host": 2}, {"after_gap": 1, "deadline": 1})
    assert store.freeze(lookup) == 0  # it has ended


def test_a_page_may_arrive_while_the_ready_prefix_is_measured(lower: DictTier) -> None:
    class Arriving(list[int]):
        """Another thread pins the last page right after this one has seen that it is missing."""

        def __contains__(self, pin: object) -> bool:
            found = super().__contains__(pin)
            self[:] = range(len(self))
            return found

    store = TieredStore(HostTier(8 * SLOT), [lower])
    lookup = Lookup("r", 1.0, store.host)
    lookup.keys = keys(1, 2)
    lookup.loading = {lookup.keys[1]: 1}
    lookup.pins = Arriving([0, -1])
    assert lookup.pending
    assert lookup.ready_pages in (1, 2)
    store.close()


def test_a_sparse_lookup_uses_pages_behind_a_gap(store: TieredStore) -> None:
    put(store, 5)
    push_out_of_host(store)
    put(store, 0)
    put(store, 3)
    lookup = store.lookup("r", keys(0, 1, 2, 3, 4, 5, 6), sparse=True)
    store.wait(lookup, PATIENCE_S)
    assert not lookup.pending and [pin != UNPINNED for pin in lookup.pins] == [i in (0, 3, 5) for i in range(7)]
    assert [bytes(store.host.view(slot)) for slot, _ in lookup.slots_of([3, 5])] == [page_bytes(3), page_bytes(5)]
    with pytest.raises(ValueError, match=r"pages \[4\] of request 'r' are not ready"):
        lookup.slots_of([3, 4])
    store.give_back(lookup, [0])
    store.settle("r")
    assert counted(store) == ({"host": 1, "nvme": 1}, {"absent": 4, "dropped": 1})
