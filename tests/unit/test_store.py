"""TieredStore: room for what is stored and promoted, what replaces what, what fails, and how a store closes. A dict
stands in for the lower tier, as in test_store_lookups.py."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from kvtier.abc.tier import PageMeta, PutItem, PutStatus, Slot
from kvtier.errors import ClosedError, ConfigError, SpecError
from kvtier.observe import Observer
from kvtier.storage_backends.host.tier import HostTier
from kvtier.store import TieredStore
from kvtier.testing.dict_tier import DictTier
from kvtier.testing.redis_servers import wait_for
from kvtier.testing.store_machine import check_usage, page_bytes, page_key
from tests.store_pages import PATIENCE_S, SLOT, counted, keys, meta_of, push_out_of_host, put


@pytest.fixture
def lower() -> DictTier:
    return DictTier("nvme")


@pytest.fixture
def store(lower: DictTier) -> Iterator[TieredStore]:
    store = TieredStore(HostTier(12 * SLOT), [lower], promote_deadline_s=PATIENCE_S)
    yield store
    lower.gate.set()
    store.close()
    wait_for(lambda: lower.closed, "the lower tier was not closed")


@pytest.fixture
def patient_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lower tier that takes nothing is waited for, however long the machine stands still."""
    monkeypatch.setattr("kvtier.spill._STUCK_S", 10 * PATIENCE_S)


@pytest.mark.usefixtures("patient_spill")
def test_reserve_waits_for_pages_being_spilled(store: TieredStore, lower: DictTier) -> None:
    lower.gate.clear()
    for page in range(0, 36, 3):
        assert isinstance(put(store, page), Slot)
    assert put(store, 60, wait_s=0.1) is PutStatus.FULL
    lower.gate.set()
    assert isinstance(put(store, 60, wait_s=PATIENCE_S), Slot)


def put_below(lower: DictTier, pages: range) -> list[bytes]:
    """Pages of three size classes, one slot each where the number is a multiple of 3."""
    made = [(page_key(page), page_bytes(page)) for page in pages]
    metas = [meta_of(key, data, 1) for key, data in made]
    lower.put_many([PutItem(key, meta, memoryview(data)) for (key, data), meta in zip(made, metas, strict=True)])
    return [key for key, _ in made]


def test_a_prefix_larger_than_the_host_tier_does_not_wait_for_room_it_holds_itself(lower: DictTier) -> None:
    store = TieredStore(HostTier(16 * SLOT), [lower], promote_deadline_s=PATIENCE_S)
    wanted = put_below(lower, range(0, 180, 3))
    start = time.monotonic()
    lookup = store.lookup("r", wanted)
    assert store.wait(lookup) == 16
    assert time.monotonic() - start < PATIENCE_S / 2
    store.settle("r")
    hits, misses = counted(store)
    assert hits == {"nvme": 16}
    assert set(misses) <= {"no_room", "deadline"} and sum(misses.values()) == 44
    store.close()


def test_the_end_of_a_prefix_gives_way_to_its_beginning(lower: DictTier) -> None:
    """The host tier holds the last pages of a prefix that does not fit: they are of no use without the first ones."""
    store = TieredStore(HostTier(8 * SLOT), [lower], promote_deadline_s=PATIENCE_S)
    for page in range(0, 60, 3):
        put(store, page, wait_s=PATIENCE_S)
    assert store.flush(PATIENCE_S)
    start = time.monotonic()
    lookup = store.lookup("r", keys(*range(0, 60, 3)))
    assert store.wait(lookup) == 8
    assert time.monotonic() - start < PATIENCE_S / 2
    for page, (slot, meta) in zip(range(0, 24, 3), lookup.ready_slots(8), strict=True):
        assert bytes(store.host.view(slot)[: meta.nbytes]) == page_bytes(page)
    store.settle("r")
    hits, misses = counted(store)
    assert hits == {"nvme": 8} and sum(misses.values()) == 12 and "absent" not in misses
    store.close()


def test_room_that_another_request_holds_is_waited_for(lower: DictTier) -> None:
    store = TieredStore(HostTier(4 * SLOT), [lower], promote_deadline_s=PATIENCE_S)
    wanted = put_below(lower, range(0, 24, 3))
    assert store.wait(store.lookup("first", wanted[:4])) == 4
    second = store.lookup("second", wanted[4:])
    assert store.wait(second, 0.2) == 0
    assert second.pending
    store.settle("first")
    assert store.wait(second) == 4
    store.close()


def test_pages_that_no_request_waits_for_any_more_push_nothing_out(lower: DictTier) -> None:
    store = TieredStore(HostTier(64 * SLOT), [lower], promote_deadline_s=PATIENCE_S, promote_threads=1)
    wanted = put_below(lower, range(0, 300, 3))
    lower.gate.clear()
    store.lookup("r", wanted)
    store.settle("r")
    lower.gate.set()
    assert store.wait(store.lookup("next", wanted[-1:])) == 1
    assert store.host.usage().stored_pages <= 16 + 1, "the batch that was under way, and the page asked for"
    store.close()


def test_a_record_that_no_tier_can_describe_gives_its_slot_back(store: TieredStore) -> None:
    key, data = page_key(0), page_bytes(0)
    meta = meta_of(key, data, 1, origin=bytes(256))
    (slot,) = store.reserve([key], [len(data)])
    assert isinstance(slot, Slot)
    with pytest.raises(SpecError, match="origin has 256 bytes"):
        store.commit([key], [slot], [meta])
    assert store.host.usage().used_bytes == 0
    assert isinstance(put(store, 0), Slot), "nothing says that the page is there already"


def test_a_failing_lower_tier_keeps_pages_in_host_and_counts(store: TieredStore, lower: DictTier) -> None:
    lower.fail_puts.update(keys(0))
    put(store, 0)
    put(store, 3)
    assert store.flush(PATIENCE_S)
    spills = store.ledger.snapshot().spills["nvme"]
    assert (spills["failed"], spills["stored"]) == (1, 1)
    assert store.host.contains_many(keys(0)) == [True]


def test_known_below_and_duplicates(store: TieredStore) -> None:
    put(store, 0)
    assert put(store, 0) is PutStatus.EXISTS
    push_out_of_host(store)
    assert store.known_below(keys(0, 3)) == [True, False]
    with pytest.raises(ValueError, match="same page twice"):
        store.lookup("r", keys(0, 0))


@pytest.mark.usefixtures("patient_spill")
def test_close_is_quick_settles_and_refuses_further_use(lower: DictTier) -> None:
    store = TieredStore(HostTier(12 * SLOT), [lower])
    put(store, 0)
    store.lookup("r", keys(0, 3))
    lower.gate.clear()
    put(store, 3)
    start = time.perf_counter()
    store.close()
    assert time.perf_counter() - start < PATIENCE_S / 2, "closing is to take 2 s, and waited for the tier"
    lower.gate.set()
    assert counted(store) == ({}, {"absent": 1, "dropped": 1})
    with pytest.raises(ClosedError):
        store.lookup("r", keys(0))
    with pytest.raises(ClosedError):
        store.reserve(keys(0), [10])
    store.close()


def test_tiers_that_hang_do_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tier may take 2 s; together with a spill that hangs in one they may not take more. The best of some tries,
    since a busy machine makes it longer and never shorter."""
    monkeypatch.setattr("kvtier.store._TIER_CLOSE_S", 0.5)
    took_s: list[float] = []
    while min(took_s, default=math.inf) >= 2.3 and len(took_s) < 8:
        lower = DictTier("nvme")
        store = TieredStore(HostTier(12 * SLOT), [lower])
        lower.close = partial(close_late, lower)  # type: ignore[method-assign]
        lower.gate.clear()
        put(store, 3)
        start = time.perf_counter()
        store.close()
        took_s.append(time.perf_counter() - start)
        assert not lower.closed
        lower.gate.set()
        wait_for(lambda tier=lower: tier.closed, "the tier was not closed once it answered")  # type: ignore[misc]
    assert 1.4 < min(took_s) < 2.3, took_s


def close_late(tier: DictTier) -> None:
    tier.gate.wait(10 * PATIENCE_S)
    DictTier.close(tier)


@pytest.mark.parametrize(
    "option", [{"promote_deadline_s": 0.0}, {"promote_deadline_s": -1.0}, {"lease_s": 0.0}, {"promote_threads": 0}]
)
def test_options_that_cannot_work_are_named(option: dict[str, Any]) -> None:
    ((name, value),) = option.items()
    with pytest.raises(ConfigError, match=f"{name} = {value}: must be larger than 0"):
        TieredStore(HostTier(SLOT), **option)


def test_names_must_differ() -> None:
    host, other = HostTier(12 * SLOT), DictTier("host")
    with pytest.raises(ConfigError, match=r"\['host', 'host'\]"):
        TieredStore(host, [other])
    host.close()


def test_usage_adds_up_after_all_of_it(store: TieredStore, lower: DictTier) -> None:
    for page in range(40):
        put(store, page, wait_s=PATIENCE_S)
        store.lookup(f"r{page}", keys(page, page - 1 if page else 77))
        store.settle(f"r{page}")
    assert store.flush(PATIENCE_S)
    check_usage(store.host.usage())
    check_usage(lower.usage())
    assert counted(store)[0]["host"] >= 40


class Hearing(Observer):
    """Writes down what it hears of."""

    def __init__(self, *, moves: bool) -> None:
        self.hears_moves = moves
        self.heard: list[tuple[str, list[bytes]]] = []

    def stored(self, keys: Sequence[bytes], metas: Sequence[PageMeta]) -> None:
        self.heard.append(("stored", list(keys)))

    def arrived(self, tier: str, keys: Sequence[bytes], metas: Sequence[PageMeta]) -> None:
        self.heard.append(("arrived", list(keys)))

    def left(self, tier: str, keys: Sequence[bytes]) -> None:
        self.heard.append(("left", list(keys)))

    def deleted(self, keys: Sequence[bytes]) -> None:
        self.heard.append(("deleted", list(keys)))


def replace(store: TieredStore, page: int, replaces: bytes) -> bool:
    key, data = page_key(page), bytes([page]) * (SLOT - 1)
    slot = store.reserve_one(key, len(data))
    assert isinstance(slot, Slot)
    store.host.view(slot)[:] = data
    return store.commit_over(key, slot, meta_of(key, data, page), replaces)


@pytest.mark.parametrize("moves", [False, True])
def test_a_page_replaces_another_in_one_step(moves: bool) -> None:
    told: list[bytes] = []
    observer = Hearing(moves=moves)
    store = TieredStore(HostTier(4 * SLOT), observer=observer, on_removed=lambda keys, why: told.extend(keys))
    assert not replace(store, 1, b"")
    assert replace(store, 2, page_key(1))
    assert not replace(store, 3, page_key(1)), "it is gone already"
    assert store.may_have(keys(1, 2, 3))[0] == [False, True, True]
    assert not told and store._room.filling == 0
    news = [("arrived", keys(1)), ("arrived", keys(2)), ("left", keys(1)), ("arrived", keys(3))] if moves else []
    assert [h for h in observer.heard if h[0] != "stored"] == news
    assert [h for h in observer.heard if h[0] == "stored"] == [("stored", keys(n)) for n in (1, 2, 3)]
    for page in (4, 5, 6):  # nobody holds what was replaced: there is room again
        assert not replace(store, page, b"")
    assert told == keys(2)
    assert store.reserve_one(page_key(6), 1) is PutStatus.EXISTS
    assert store.reserve_one(page_key(7), 5 * SLOT) is PutStatus.TOO_LARGE
    slot = store.reserve_one(page_key(8), 1)
    assert isinstance(slot, Slot)
    with pytest.raises(SpecError):
        store.commit_over(page_key(8), slot, PageMeta(2, 1, 0, bytes(16), bytes(16)), b"")
    assert store._room.filling == 0
    check_usage(store.host.usage())
    store.close()
    with pytest.raises(ClosedError):
        store.reserve_one(page_key(9), 1)
    with pytest.raises(ClosedError):
        store.host.reserve_one(page_key(9), 1)


def test_what_may_be_below_or_is_protected_is_not_replaced_in_one_step(store: TieredStore) -> None:
    assert not replace(store, 1, b"")
    assert not replace(store, 2, page_key(1)), "it may be below: the caller deletes it"
    assert store.drain(PATIENCE_S) and store.known_below(keys(1, 2)) == [True, True]
    store.delete(keys(1), replaced=True)
    assert store.drain(PATIENCE_S) and store.known_below(keys(1, 2)) == [False, True]
    alone = TieredStore(HostTier(12 * SLOT))
    assert not replace(alone, 1, b"") and alone.protect(keys(1)) == [True]
    assert not replace(alone, 2, page_key(1))
    alone.delete(keys(1), replaced=True)
    assert not alone.protected() and replace(alone, 3, page_key(2))
    alone.close()
