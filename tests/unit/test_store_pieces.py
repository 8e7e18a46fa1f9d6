"""A prefix that is asked for piece by piece finds, and counts, what it would as a whole; and what another thread counts
is counted before anybody reads it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.abc.tier import PutItem, TierCapabilities
from kvtier.ledger import Ledger, MissReason
from kvtier.lookup import Lookup
from kvtier.observe import ObserveOptions, Observer, Watch
from kvtier.storage_backends.host.tier import HostTier
from kvtier.store import TieredStore
from kvtier.testing.dict_tier import DictTier
from kvtier.testing.store_machine import page_bytes, page_key
from tests.store_pages import PATIENCE_S, counted, meta_of, put

PAGES = 24


@contextmanager
def opened(
    here: set[int], below: set[int], evicted: set[int], observer: Observer | None = None, ledger: Ledger | None = None
) -> Iterator[TieredStore]:
    """A store with pages in the host tier, others in the tier below, and others that it remembers."""
    lower = DictTier("nvme")
    for page in below:
        key, data = page_key(page), page_bytes(page)
        lower.put_many([PutItem(key, meta_of(key, data, page), memoryview(data))])
    store = TieredStore(
        HostTier(1 << 20), [lower], promote_deadline_s=PATIENCE_S, lease_s=None, observer=observer, ledger=ledger
    )
    store._evicted.add([page_key(page) for page in evicted])
    for page in here:
        put(store, page)
    try:
        yield store
    finally:
        store.close()


def ask(store: TieredStore, pieces: list[int]) -> Lookup:
    """Ask for `PAGES` pages in pieces of these sizes, the rest as one, until a page is missing."""
    keys = [page_key(page) for page in range(PAGES)]
    hashes = [key[::-1] for key in keys]
    first = min(pieces[0], PAGES) if pieces else PAGES
    lookup = store.lookup("r", keys[:first], hashes=hashes[:first])
    for size in [*pieces[1:], PAGES]:
        at = len(lookup.keys)
        if at == PAGES or lookup.misses:
            break
        assert store.extend(lookup, keys[at : at + size], hashes=hashes[at : at + size])
    at = len(lookup.keys)
    lookup.behind = lambda i, j: (keys[at + i : at + j], hashes[at + i : at + j])
    lookup.behind_pages = PAGES - at
    return lookup


@settings(max_examples=40, deadline=None)
@given(
    places=st.lists(st.sampled_from(["host", "nvme", "both", "evicted", "nowhere"]), min_size=PAGES, max_size=PAGES),
    good=st.integers(0, PAGES),
    pieces=st.lists(st.integers(0, 9), max_size=8),
    later=st.booleans(),
    loaded=st.booleans(),
)
def test_pieces_find_and_count_what_the_whole_does(
    places: list[str], good: int, pieces: list[int], later: bool, loaded: bool
) -> None:
    """The first `good` pages are in some tier, so that prefixes are not only short ones."""
    places = ["nvme" if place in ("evicted", "nowhere") and i < good else place for i, place in enumerate(places)]
    where = {name: {i for i, place in enumerate(places) if place == name} for name in set(places)}
    here = where.get("host", set()) | where.get("both", set())
    below = where.get("nvme", set()) | where.get("both", set())
    results = []
    for sizes in ([], pieces):
        with opened(here, below, where.get("evicted", set())) as store:
            lookup = ask(store, sizes)
            ready = store.wait(lookup, PATIENCE_S)
            pinned = [meta.valid_tokens for _, meta in lookup.ready_slots(ready)]
            store.settle("r", loaded=loaded, later=later)
            results.append((ready, pinned, counted(store)))
            assert store.open_requests() == []
    whole, piecewise = results
    assert piecewise == whole
    assert sum(whole[2][0].values()) + sum(whole[2][1].values()) == PAGES
    assert whole[0] >= good


def test_a_page_may_not_be_asked_for_twice() -> None:
    with opened(set(), set(), set()) as store:
        lookup = store.lookup("r", [page_key(0), page_key(1)], hashes=[b"0", b"1"])
        with pytest.raises(ValueError, match="asks for the same page twice"):
            store.extend(lookup, [page_key(2), page_key(1)], hashes=[b"2", b"1"])


def test_a_request_that_has_ended_is_not_asked_for_more() -> None:
    with opened({0}, set(), set()) as store:
        lookup = store.lookup("r", [page_key(0)], hashes=[b"0"])
        assert store.poll(lookup)
        store.settle("r")
        assert not store.poll(lookup)
        assert not store.extend(lookup, [page_key(1)], hashes=[b"1"])
        assert counted(store) == ({"host": 1}, {})


def test_a_tail_that_got_shorter_keeps_its_pages_and_what_was_not_asked_for() -> None:
    with opened({0, 1, 2, 3}, {4}, set()) as store:
        lookup = ask(store, [3, 2])  # the rest follows; page 5 is nowhere
        assert store.wait(lookup, PATIENCE_S) == 5
        store.lookup("r", [page_key(page) for page in range(2, 5)], hashes=[page_key(p)[::-1] for p in range(2, 5)])
        assert (
            lookup.ready_pages == 3 and lookup.behind_pages == 0 and lookup.restored_from(3) == {"host": 2, "nvme": 1}
        )
        store.settle("r")
        assert counted(store) == ({"host": 2, "nvme": 1}, {"superseded": 2, "absent": PAGES - 5})


@settings(max_examples=60, deadline=None)
@given(
    places=st.lists(st.sampled_from(["host", "nvme", "nowhere"]), min_size=PAGES, max_size=PAGES),
    skipped=st.integers(1, PAGES - 1),
)
def test_skipping_pages_leaves_what_any_exchange_would(places: list[str], skipped: int) -> None:
    """While some are on their way: the tier below does not answer."""
    where = {name: {i for i, place in enumerate(places) if place == name} for name in set(places)}
    with opened(where.get("host", set()), where.get("nvme", set()), set()) as store:
        lower = store.lower[0]
        assert isinstance(lower, DictTier)
        lower.gate.clear()
        lookup = ask(store, [])
        other = copy.deepcopy(state_of(lookup))
        tail = lookup.keys[skipped:]
        twin = copy.copy(lookup)
        for name, value in other.items():
            setattr(twin, name, value)
        assert lookup.replace(tail) == twin.exchange(tail)
        assert state_of(lookup) == state_of(twin)
        lower.gate.set()


def state_of(lookup: Lookup) -> dict[str, object]:
    return {name: getattr(lookup, name) for name in ("keys", "pins", "origins", "misses", "loading", "superseded")}


def test_what_another_thread_counts_is_there_for_who_reads() -> None:
    """The thread stands still while a page is looked at; whoever reads the ledger waits for it."""

    class Slow(Observer):
        def __init__(self) -> None:
            self.going = threading.Event()
            self.threads: list[str] = []

        def settled(self, *_: object) -> None:
            self.threads.append(threading.current_thread().name)
            assert self.going.wait(PATIENCE_S), "the test never let it go"

    observer = Slow()
    with opened({0}, set(), set(), observer) as store:
        ask(store, [])
        store.settle("r", later=True)
        assert store.open_requests() == []
        reader = threading.Timer(0.0, observer.going.set)
        reader.start()
        assert counted(store) == ({"host": 1}, {"absent": PAGES - 1})
        reader.join()
        assert observer.threads == ["kvtier-count-0"]


def test_requests_whose_pages_are_explained_are_counted_while_these_are_there() -> None:
    ledger = Ledger(["host", "nvme"])
    watch = Watch(ObserveOptions(explain_sample=1.0, debug=True), ledger, {}, None)
    with opened({0, 1}, set(), set(), watch, ledger) as store:
        ask(store, [1, 1, 1])
        store.settle("r", later=True)
        record = watch.explain("r")
        assert record is not None and store.ledger.violations == 0
        assert [page["outcome"] for page in record["pages"]] == ["hit: host"] * 2 + ["miss: absent"] * (PAGES - 2)
        assert [page["bytes"] for page in record["pages"][:3]] == [len(page_bytes(0)), len(page_bytes(1)), 0]


def test_behind_a_page_of_a_tier_that_is_down_nothing_more_is_known() -> None:
    """A shared tier is asked for pages in a row only; what it may have behind a gap counts as what the gap was."""
    lower = DictTier("redis")
    lower.capabilities = TierCapabilities(persistent=False, shared=True)
    store = TieredStore(HostTier(1 << 20), [lower], promote_deadline_s=PATIENCE_S, lease_s=None)
    try:
        assert store._classification.reasons([page_key(0)], MissReason.TIER_DOWN) == [MissReason.TIER_DOWN]
        assert store._classification.reasons([page_key(0)], MissReason.ABSENT) == [MissReason.ABSENT]
    finally:
        store.close()
