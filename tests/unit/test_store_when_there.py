"""Who asks for many requests at once hears of each when nothing is on its way to it any more."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvtier.storage_backends.host.tier import HostTier
from kvtier.store import TieredStore
from kvtier.testing.dict_tier import DictTier
from kvtier.testing.store_machine import page_key
from tests.store_pages import PATIENCE_S, SLOT, keys, put_all


@pytest.fixture
def lower() -> DictTier:
    return DictTier("nvme")


@pytest.fixture
def store(lower: DictTier) -> Iterator[TieredStore]:
    store = TieredStore(HostTier(16 * SLOT), [lower], promote_deadline_s=120.0, lease_s=None)
    yield store
    lower.gate.set()
    store.close()


def put_below(store: TieredStore, *pages: int) -> list[bytes]:
    put_all(store, pages)
    assert store.flush(PATIENCE_S)
    store.host.delete_many(keys(*pages))
    return keys(*pages)


def test_the_last_page_to_come_is_told(store: TieredStore, lower: DictTier) -> None:
    below = put_below(store, 1, 2, 3)
    absent = page_key(9)
    lower.gate.clear()
    lookup = store.lookup("r", [*below, absent], sparse=True)
    told, seen = threading.Event(), list[tuple[int, bool]]()

    def call() -> None:
        seen.append((lookup.ready_pages, lookup.pending))
        told.set()

    assert store.when_there(lookup, call)
    assert not seen
    lower.gate.set()
    assert told.wait(PATIENCE_S), "nobody was told"
    store.settle("r")
    assert seen == [(3, False)], "once, and with every page in its place"
    assert lookup.when_there is None, "or the two would keep each other alive"


def test_what_is_deleted_on_its_way_is_no_longer_waited_for(store: TieredStore, lower: DictTier) -> None:
    below = put_below(store, 1, 2)
    lower.gate.clear()
    lookup = store.lookup("r", below, sparse=True)
    told = threading.Event()
    assert store.when_there(lookup, told.set)
    store.delete(below)
    assert told.is_set() and lookup.ready_pages == 0


def test_nothing_is_told_where_nothing_is_on_its_way(store: TieredStore, lower: DictTier) -> None:
    below = put_below(store, 1)
    lookup = store.lookup("r", below, sparse=True)
    assert store.wait(lookup, PATIENCE_S) == 1

    def call() -> None:
        raise AssertionError("told")

    assert not store.when_there(lookup, call)
    assert not store.when_there(store.lookup("absent", [page_key(7)], sparse=True), call)
