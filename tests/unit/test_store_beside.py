"""Pages that lie beside those that requests are counted in: they are pinned and promoted, and count for nothing; what
lacks them is cut off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier.abc.tier import PageMeta, Slot
from kvtier.keys import checksum
from kvtier.ledger import MissReason
from kvtier.storage_backends.host.tier import HostTier
from kvtier.store import TieredStore
from kvtier.testing.dict_tier import DictTier
from kvtier.testing.store_machine import page_bytes, page_key

SLOT = 4096


def keys(*pages: int) -> list[bytes]:
    return [page_key(p) for p in pages]


def put(store: TieredStore, *pages: int) -> None:
    for page in pages:
        key, data = page_key(page), page_bytes(page)
        (slot,) = store.reserve([key], [len(data)], 120.0)
        assert isinstance(slot, Slot)
        store.host.view(slot)[:] = data
        store.commit([key], [slot], [PageMeta(len(data), 1, page, checksum(data, key), bytes(16))])


@pytest.fixture
def lower() -> DictTier:
    return DictTier("nvme")


@pytest.fixture
def store(lower: DictTier) -> Iterator[TieredStore]:
    store = TieredStore(HostTier(12 * SLOT), [lower], promote_deadline_s=120.0, lease_s=None)
    yield store
    lower.gate.set()
    store.close()


def push_out_of_host(store: TieredStore) -> None:
    assert store.flush(120.0)
    put(store, *range(100, 112))
    assert store.flush(120.0)


def test_pages_beside_others_are_pinned_and_promoted_and_count_for_nothing(store: TieredStore) -> None:
    put(store, 0, 3)
    push_out_of_host(store)
    put(store, 6)
    beside = store.lookup("r beside", keys(0, 3, 6, 9), sparse=True, counted=False)
    store.lookup("r beside", keys(0, 3, 6, 9), sparse=True, counted=False)
    store.wait(beside)
    assert [meta.valid_tokens for _, meta in beside.slots_of([0, 1, 2])] == [0, 3, 6]
    with pytest.raises(ValueError, match="not ready"):
        beside.slots_of([3])
    store.settle("r beside")
    counts = store.ledger.snapshot()
    assert counts.lookups == sum(counts.hits.values()) == sum(counts.misses.values()) == 0
    assert store.open_requests() == []


def test_what_is_cut_off_is_a_miss_and_neither_pinned_nor_waited_for(store: TieredStore, lower: DictTier) -> None:
    put(store, 6)
    push_out_of_host(store)
    put(store, 0, 3)
    lower.gate.clear()
    lookup = store.lookup("r", keys(0, 3, 6, 9))
    assert (lookup.ready_pages, lookup.reach, lookup.pending) == (2, 3, True)
    store.cut(lookup, 1, MissReason.PARTIAL)
    assert (lookup.ready_pages, lookup.reach, lookup.pending) == (1, 1, False)
    assert store.lookup("r", keys(0, 3, 6, 9)) is lookup and not lookup.pending
    lower.gate.set()
    store.settle("r")
    counts = store.ledger.snapshot()
    assert {k: n for k, n in counts.hits.items() if n} == {"host": 1}
    assert {k: n for k, n in counts.misses.items() if n} == {"partial": 2, "absent": 1}


def test_what_a_tier_may_have_is_asked_of_indices_alone(store: TieredStore) -> None:
    put(store, 0)
    push_out_of_host(store)
    put(store, 3)
    assert store.may_have(keys(0, 3, 6)) == ([False, True, False], [True, True, False])
    assert store.ledger.snapshot().lookups == 0 and store.open_requests() == []
