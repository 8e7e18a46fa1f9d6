"""What lower tiers are given and when, what is declined, and what a delete or a full host tier does to promotions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvtier.abc.tier import PutStatus, Removal
from kvtier.breakeven import BreakEven
from kvtier.keys import checksum
from kvtier.lookup import Lookup
from kvtier.placement import Admission, TierRules, Write
from kvtier.server.auth import User, Users
from kvtier.server.keyspace import Keyspace, Reservation
from kvtier.storage_backends.host.tier import HostTier
from kvtier.store import TieredStore
from kvtier.testing.dict_tier import DictTier
from kvtier.testing.store_machine import page_bytes, page_key
from tests import store_pages
from tests.store_pages import PATIENCE_S, SLOT, counted, put_all


def pages(count: int, first: int = 0) -> list[int]:
    """Numbers of pages that take one slot each."""
    return list(range(3 * first, 3 * (first + count), 3))


def keys(numbers: list[int]) -> list[bytes]:
    return store_pages.keys(*numbers)


def load(store: TieredStore, request: str, numbers: list[int]) -> int:
    lookup = store.lookup(request, keys(numbers))
    ready = store.wait(lookup, PATIENCE_S)
    for n, (slot, meta) in zip(numbers, lookup.ready_slots(ready), strict=False):
        assert bytes(store.host.view(slot)[: meta.nbytes]) == page_bytes(n)
    store.settle(request)
    return ready


def on_its_way(lookup: Lookup) -> bool:
    return lookup.pending


def here(store: TieredStore, numbers: list[int]) -> list[bool]:
    return store.host.contains_many(keys(numbers))


@pytest.fixture
def lower() -> Iterator[DictTier]:
    tier = DictTier("nvme")
    yield tier
    tier.gate.set()


def store_of(
    lower: DictTier, slots: int, write: Write, admit: Admission = Admission.ALWAYS, **options: Any
) -> TieredStore:
    options = {"promote_deadline_s": PATIENCE_S, **options}
    return TieredStore(HostTier(slots * SLOT), [lower], rules={"nvme": TierRules(write, admit)}, **options)


def test_written_back_pages_go_below_only_when_the_host_tier_gets_full(lower: DictTier) -> None:
    store = store_of(lower, 64, Write.BACK)
    put_all(store, pages(32))
    assert store.drain(PATIENCE_S)
    assert not lower.pages
    put_all(store, pages(128, 32))
    assert store.drain(PATIENCE_S)
    everything = pages(160)
    below = lower.contains_many(keys(everything))
    assert all(a or b for a, b in zip(here(store, everything), below, strict=True)), "evicted, and nowhere else"
    assert below[:90] == [True] * 90 and below.count(False) > 10, "the oldest are below, some of the rest in host alone"
    assert load(store, "r", pages(20)) == 20
    store.close()


def test_an_orderly_close_writes_back_what_is_in_host_memory_alone(lower: DictTier) -> None:
    store = store_of(lower, 64, Write.BACK)
    put_all(store, pages(40))
    store.close(PATIENCE_S)
    assert lower.contains_many(keys(pages(40))) == [True] * 40


def test_a_close_without_time_writes_what_was_used_last_and_says_what_is_lost(
    lower: DictTier, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_of(lower, 64, Write.BACK)
    put_all(store, pages(40))
    lower.gate.clear()
    start = time.monotonic()
    store.close(0.1)
    assert time.monotonic() - start < PATIENCE_S / 2
    assert "40 pages are not written below and lost" in caplog.text
    lower.gate.set()


def test_flush_writes_back_everything_and_keeps_it(lower: DictTier) -> None:
    store = store_of(lower, 64, Write.BACK)
    put_all(store, pages(40))
    assert store.flush(PATIENCE_S)
    assert lower.contains_many(keys(pages(40))) == here(store, pages(40)) == [True] * 40
    store.close()


def test_a_lower_tier_that_takes_nothing_does_not_fill_the_host_tier(lower: DictTier) -> None:
    lower.fail_puts.update(keys(pages(200)))
    store = store_of(lower, 16, Write.BACK)
    put_all(store, pages(200))
    assert store.flush(PATIENCE_S)
    assert store.ledger.snapshot().spills["nvme"]["failed"] > 150
    assert here(store, pages(200)).count(True) == 16
    store.close()


def test_a_full_lower_tier_is_counted_and_costs_its_pages_only() -> None:
    lower = DictTier("nvme", capacity_pages=4)
    store = store_of(lower, 16, Write.BACK)
    put_all(store, pages(60))
    assert store.flush(PATIENCE_S)
    spills = store.ledger.snapshot().spills["nvme"]
    assert (spills["stored"], len(lower.pages)) == (4, 4) and spills["full"] >= 40
    store.close()


@pytest.mark.parametrize("write", [Write.BACK, Write.THROUGH])
def test_a_lower_tier_that_hangs_is_given_up_after_a_while(
    lower: DictTier, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.spill._STUCK_S", 0.2)
    store = store_of(lower, 64, write)
    lower.gate.clear()
    put_all(store, pages(200))
    assert store.ledger.snapshot().spills["nvme"]["deadline"] > 0
    lower.gate.set()
    assert store.flush(PATIENCE_S)
    store.close()


def test_a_page_that_the_lower_tier_dropped_is_written_again_before_it_leaves(lower: DictTier) -> None:
    store = store_of(lower, 16, Write.BACK)
    put_all(store, pages(8))
    assert store.flush(PATIENCE_S)
    gone = keys(pages(3))
    for key in gone:
        del lower.pages[key]
    store._removed("nvme", gone, Removal.EVICTED)
    assert set(store.host.unwritten(1, 100)) == set(gone)
    put_all(store, pages(40, 8))
    assert store.flush(PATIENCE_S)
    assert lower.contains_many(gone) == [True] * 3
    store.close()


def test_nothing_is_written_where_nothing_is_to_be(lower: DictTier) -> None:
    store = store_of(lower, 16, Write.NONE)
    put_all(store, pages(40))
    assert store.flush(PATIENCE_S) and not lower.pages
    store.close()


@pytest.mark.parametrize("write", [Write.THROUGH, Write.BACK])
def test_admission_on_second_use(lower: DictTier, write: Write) -> None:
    store = store_of(lower, 16, write, Admission.SECOND_USE)
    put_all(store, pages(8))
    assert store.flush(PATIENCE_S) and not lower.pages
    store.settle("dropped", loaded=False)
    lookup = store.lookup("dropped", keys(pages(2)))
    assert lookup.ready_pages == 2
    store.settle("dropped", loaded=False)
    assert store.flush(PATIENCE_S) and not lower.pages, "it was not loaded"
    assert load(store, "r", pages(3)) == 3
    assert store.flush(PATIENCE_S)
    assert set(lower.pages) == set(keys(pages(3)))
    put_all(store, pages(40, 100))  # the first ones are evicted, and were never used
    put_all(store, pages(1, 7))  # this one comes back
    assert store.flush(PATIENCE_S)
    assert page_key(21) in lower.pages and len(lower.pages) == 4
    store.close()


def test_a_hit_in_host_memory_refreshes_pages_below(lower: DictTier, monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[bytes] = []
    monkeypatch.setattr(lower, "touch_many", touched.extend)
    store = store_of(lower, 16, Write.THROUGH)
    put_all(store, pages(4))
    assert load(store, "r", pages(3)) == 3
    assert store.drain(PATIENCE_S)
    assert touched == keys(pages(3))
    store.close()


def test_low_priorities_make_room_first(lower: DictTier) -> None:
    store = store_of(lower, 8, Write.NONE)
    put_all(store, pages(2), priority=1)
    put_all(store, pages(3, 2), priority=-1)
    put_all(store, pages(3, 5))
    put_all(store, pages(3, 8))
    assert here(store, pages(11)) == [True] * 2 + [False] * 3 + [True] * 6
    put_all(store, pages(6, 11))
    assert here(store, pages(11)) == [True] * 2 + [False] * 9
    store.close()


def test_values_of_a_user_with_a_low_priority_make_room_first() -> None:
    users = Users([User("batch", b"", (b"batch:",), priority=-1), User("chat", b"", (b"chat:",), priority=1)])
    keyspace = Keyspace(users.owner, users.quota, 1 << 20, users.priority)
    store = TieredStore(HostTier(6 * SLOT), on_removed=keyspace.removed)
    keyspace.attach(store)
    for name in (b"chat:0", b"chat:1", b"other", b"batch:0", b"batch:1", b"batch:2", b"chat:2", b"chat:3"):
        reservation = keyspace.reserve(0, name, 10)
        assert isinstance(reservation, Reservation) and reservation.view is not None
        reservation.view[:] = b"0123456789"
        reservation.checksum = checksum(reservation.view, reservation.page)
        assert keyspace.commit(0, name, reservation)
    there = [n for n in (b"chat:0", b"chat:1", b"other", b"batch:0", b"batch:1", b"batch:2") if keyspace.find(0, n)]
    assert there == [b"chat:0", b"chat:1", b"other", b"batch:2"]
    store.close()


def test_protected_pages_stay(lower: DictTier) -> None:
    store = store_of(lower, 8, Write.NONE)
    put_all(store, pages(8))
    assert store.protect([*keys(pages(3)), page_key(777)]) == [True, True, True, False]
    assert store.protect(keys(pages(5))) == [True] * 4 + [False], "at most half of the tier"
    put_all(store, pages(30, 100))
    assert here(store, pages(8)) == [True] * 4 + [False] * 4
    store.unprotect(keys(pages(5)))
    put_all(store, pages(8, 200))
    assert here(store, pages(8)) == [False] * 8
    store.close()


def test_a_page_not_used_for_its_time_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("kvtier.storage_backends.slots.order.monotonic", lambda: now[0])
    for policy in ("lru", "s3fifo"):
        tier = HostTier(64 * SLOT, policy=policy, ttl_s=64.0)
        store = TieredStore(tier)
        put_all(store, pages(4))
        now[0] += 60.0
        assert load(store, "r", pages(1)) == 1
        now[0] += 6.0
        assert here(store, pages(4)) == [True, False, False, False]
        now[0] += 60.0
        assert here(store, pages(4)) == [False] * 4
        assert tier.usage().evicted_pages == 4
        store.close()


# -- promotions --------------------------------------------------------------------------------------------------------


def test_a_delete_stops_a_promotion_under_way(lower: DictTier) -> None:
    store = store_of(lower, 16, Write.THROUGH)
    put_all(store, pages(2))
    put_all(store, pages(40, 100))
    assert store.flush(PATIENCE_S) and not any(here(store, pages(2)))
    lower.gate.clear()
    lookup = store.lookup("r", keys(pages(2)))
    assert on_its_way(lookup)
    store.delete(keys(pages(1)))
    assert not on_its_way(lookup) and store.lookup("again", keys(pages(1))).ready_pages == 0
    lower.gate.set()
    assert store._promotions.drain(PATIENCE_S) and store.flush(PATIENCE_S)
    assert here(store, pages(2)) == [False, True]
    assert lower.contains_many(keys(pages(2))) == [False, True]
    assert store.host.usage().used_bytes <= 16 * SLOT
    for request in ("r", "again"):
        store.settle(request)
    assert counted(store)[1] == {"absent": 2, "after_gap": 1}
    put_all(store, pages(1))  # it may come back
    assert load(store, "new", pages(1)) == 1
    store.close()


def test_a_deleted_page_is_not_found_below_before_it_is_gone_there(lower: DictTier) -> None:
    store = store_of(lower, 16, Write.THROUGH)
    put_all(store, pages(2))
    assert store.flush(PATIENCE_S)
    lower.gate.clear()
    put_all(store, pages(1, 50))  # a write that the delete has to wait for
    store.delete(keys(pages(2)))
    lookup = store.lookup("r", keys(pages(2)))
    assert (lookup.ready_pages, lookup.pending) == (0, False)
    assert store.known_below(keys(pages(2))) == [False, False]
    lower.gate.set()
    store.close()


def test_requests_that_fill_the_host_tier_together_do_not_wait_for_each_other(lower: DictTier) -> None:
    store = store_of(lower, 16, Write.THROUGH)
    put_all(store, pages(24))
    put_all(store, pages(24, 100))
    assert store.flush(PATIENCE_S)
    lower.gate.clear()
    old = store.lookup("old", keys(pages(12)))
    deadline = time.monotonic() + PATIENCE_S
    while store._room.filling < 12:  # the older one has its slots: else a worker may serve the younger one first
        assert time.monotonic() < deadline, "no worker reserved slots for the older request"
        time.sleep(0.001)
    young = store.lookup("young", keys(pages(12, 12)))
    start = time.monotonic()
    lower.gate.set()
    assert store.wait(old, PATIENCE_S) == 12, "the older one gets all of its pages"
    assert time.monotonic() - start < PATIENCE_S / 2
    assert store.wait(young, 1.0) <= 4
    assert store.hold(old, 12)
    store.settle("old")
    store.settle("young")
    hits = sum(store.ledger.snapshot().hits.values())
    assert hits + sum(counted(store)[1].values()) == 24
    store.close()


def test_a_request_whose_pages_gave_way_is_not_held(lower: DictTier) -> None:
    store = store_of(lower, 16, Write.THROUGH)
    put_all(store, pages(3))
    lookup = store.lookup("r", keys(pages(3)))
    assert not store.hold(lookup, 4)
    assert store.hold(lookup, 3)
    store.settle("r")
    store.close()


def test_pages_that_are_being_loaded_do_not_give_way(lower: DictTier) -> None:
    """Not even where their request waited for more in vain: a decoder reads them."""
    store = store_of(lower, 16, Write.THROUGH)
    put_all(store, pages(24))
    assert store.flush(PATIENCE_S)
    here_now = [n for n in pages(24) if store.host.contains_many(keys([n]))[0]]
    below = [n for n in pages(24) if n not in here_now]
    lower.gate.clear()
    loaded = store.lookup("loaded", keys([below[0], *here_now]), sparse=True)  # its last would give way to its first
    ready = [i for i, pin in enumerate(loaded.pins) if pin >= 0]
    assert len(ready) == len(here_now) == 16 and loaded.loading
    pins = store.take(loaded, ready)
    waits = store.lookup("waits", keys(below[1:3]))
    lower.gate.set()
    assert store.wait(waits, 0.5) == 0, "there is no room for as long as the load goes on"
    assert [loaded.pins[i] for i in ready] == pins
    for i, (slot, meta) in zip(ready, store.host.pinned_many(pins), strict=True):
        assert bytes(store.host.view(slot)[: meta.nbytes]) == page_bytes(here_now[i - 1])
    store.settle("loaded")
    assert store.wait(waits, PATIENCE_S) == 2, "its end is the room that was waited for"
    store.settle("waits")
    assert sum(store.ledger.snapshot().hits.values()) == 16 + 2
    store.close()


# -- the break-even rule -----------------------------------------------------------------------------------------------


def test_loads_that_take_longer_than_computing_are_declined(lower: DictTier) -> None:
    store = store_of(lower, 16, Write.THROUGH, break_even=BreakEven(["nvme"]))
    store.break_even.page_holds(64)
    put_all(store, pages(4))
    put_all(store, pages(40, 100))
    assert store.flush(PATIENCE_S)
    for _ in range(9):
        assert not store.break_even.declines("nvme"), "not known yet"
        store.break_even.promoted("nvme", 10, 1.0)  # 100 ms for each page
    assert not store.break_even.declines("nvme")
    for _ in range(9):
        store.break_even.prefilled(2048, 0.2048)  # 6.4 ms for each page
    lookup = store.lookup("r", keys([*pages(2), *pages(1, 139)]))
    assert (lookup.ready_pages, lookup.pending) == (0, False)
    store.settle("r")
    assert counted(store)[1] == {"declined": 2, "after_gap": 1}
    asked = sum(store.break_even.declines("nvme") for _ in range(64))
    assert asked == 62, "one in 32 loads all the same, to see whether that is still so"
    store.close()


def test_pages_in_host_memory_are_declined_where_even_decoding_is_slower() -> None:
    store = TieredStore(HostTier(16 * SLOT), break_even=BreakEven([], prefill_s_per_token=1e-5))
    store.break_even.page_holds(64)
    put_all(store, pages(2))
    for _ in range(9):
        store.break_even.decoded(2, 0.1)
    assert store.lookup("r", keys(pages(3))).ready_pages == 0
    store.settle("r")
    assert counted(store)[1] == {"declined": 2, "absent": 1}
    put_all(store, pages(30, 50))  # they were not left pinned
    assert here(store, pages(2)) == [False, False]
    store.close()


def test_the_rule_can_be_turned_off_and_medians_ignore_a_hiccup() -> None:
    off = BreakEven(["nvme"], enabled=False, prefill_s_per_token=1e-9)
    on = BreakEven(["nvme"], prefill_s_per_token=1e-4)
    for rule in (off, on):
        rule.page_holds(64)
        for n in range(30):
            rule.promoted("nvme", 1, 10.0 if n % 3 == 0 else 0.001)
            rule.decoded(1, 0.0001)
    assert not off.declines("nvme") and not on.declines("nvme")
    assert on.load_s_per_page("nvme") == pytest.approx(0.0011)
    on.prefilled(64, 1.0)
    assert on.prefill_s_per_token == 1e-4, "given, not measured"


def test_full_is_full_where_every_page_must_still_be_written(lower: DictTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.spill._STUCK_S", 10 * PATIENCE_S)
    store = store_of(lower, 4, Write.THROUGH)
    lower.gate.clear()
    put_all(store, pages(4))
    assert store.reserve([page_key(300)], [100]) == [PutStatus.FULL]
    lower.gate.set()
    put_all(store, [300])
    store.close()
