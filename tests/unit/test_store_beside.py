"""Pages that lie beside those that requests are counted in: they are pinned and promoted, and count for nothing; what
lacks them is cut off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier.ledger import MissReason
from kvtier.storage_backends.host.tier import HostTier
from kvtier.store import TieredStore
from kvtier.testing.dict_tier import DictTier
from tests.store_pages import PATIENCE_S, SLOT, counted, keys, push_out_of_host, put_all


@pytest.fixture
def lower() -> DictTier:
    return DictTier("nvme")


@pytest.fixture
def store(lower: DictTier) -> Iterator[TieredStore]:
    store = TieredStore(HostTier(12 * SLOT), [lower], promote_deadline_s=PATIENCE_S, lease_s=None)
    yield store
    lower.gate.set()
    store.close()


def test_pages_beside_others_are_pinned_and_promoted_and_count_for_nothing(store: TieredStore) -> None:
    put_all(store, [0, 3])
    push_out_of_host(store)
    put_all(store, [6])
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
    put_all(store, [6])
    push_out_of_host(store)
    put_all(store, [0, 3])
    lower.gate.clear()
    lookup = store.lookup("r", keys(0, 3, 6, 9))
    assert (lookup.ready_pages, lookup.reach, lookup.pending) == (2, 3, True)
    store.cut(lookup, 1, MissReason.PARTIAL)
    assert (lookup.ready_pages, lookup.reach, lookup.pending) == (1, 1, False)
    assert store.lookup("r", keys(0, 3, 6, 9)) is lookup and not lookup.pending
    lower.gate.set()
    store.settle("r")
    assert counted(store) == ({"host": 1}, {"partial": 2, "absent": 1})


def test_what_a_tier_may_have_is_asked_of_indices_alone(store: TieredStore) -> None:
    put_all(store, [0])
    push_out_of_host(store)
    put_all(store, [3])
    assert store.may_have(keys(0, 3, 6)) == ([False, True, False], [True, True, False])
    assert store.ledger.snapshot().lookups == 0 and store.open_requests() == []
