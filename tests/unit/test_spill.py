"""Pages that a lower tier is given at once: those stored while a write waits join it, none overtakes a delete, and a
tier that hangs, fails or is closed costs the pages only."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from itertools import chain

import pytest

from kvtier import spill
from kvtier.abc.tier import PutItem, PutStatus, Removal, Slot
from kvtier.errors import ClosedError
from kvtier.storage_backends.host.tier import HostTier
from kvtier.store import TieredStore
from kvtier.testing.dict_tier import DictTier
from kvtier.testing.redis_servers import wait_for
from kvtier.testing.store_machine import page_bytes, page_key
from tests.store_pages import PATIENCE_S, SLOT, keys, meta_of, put_all

BATCH = spill._BATCH
FIRST = 999
"""The page that is being written while others wait."""


def pages(count: int, first: int = 0) -> list[int]:
    """Numbers of pages that take one slot each."""
    return list(range(3 * first, 3 * (first + count), 3))


class WatchedTier(DictTier):
    """puts: the pages of each call, noted before it waits for the gate."""

    def __init__(self) -> None:
        super().__init__("nvme")
        self.puts: list[list[bytes]] = []
        self.broken = False
        self.deletes = 0

    @property
    def offered(self) -> list[bytes]:
        return list(chain.from_iterable(self.puts))

    def put_many(self, items: Sequence[PutItem], deadline_s: float | None = None) -> list[PutStatus]:
        self.puts.append([item.key for item in items])
        self.gate.wait()
        if self.broken:
            raise OSError("the device is gone")
        return super().put_many(items, deadline_s)

    def delete_many(self, keys: Sequence[bytes], removal: Removal = Removal.DELETED) -> int:
        self.deletes += 1
        self.gate.wait()
        if self.closed:
            raise ClosedError(self.name)
        return super().delete_many(keys, removal)


@pytest.fixture
def lower() -> Iterator[WatchedTier]:
    tier = WatchedTier()
    yield tier
    tier.gate.set()


@pytest.fixture
def store(lower: WatchedTier) -> Iterator[TieredStore]:
    store = TieredStore(HostTier(80 * SLOT), [lower], promote_deadline_s=PATIENCE_S)
    yield store
    lower.gate.set()
    store.close()


@pytest.fixture
def held(store: TieredStore, lower: WatchedTier, monkeypatch: pytest.MonkeyPatch) -> TieredStore:
    """A store whose lower tier is at the write of a page of its own: whatever is stored now waits."""
    monkeypatch.setattr(spill, "_STUCK_S", 10 * PATIENCE_S)
    lower.gate.clear()
    put_all(store, [FIRST])
    wait_for(lambda: bool(lower.puts), "the first page is not written")
    return store


def store_together(store: TieredStore, numbers: Sequence[int]) -> None:
    """In one commit."""
    data = [page_bytes(n) for n in numbers]
    slots = store.reserve(keys(*numbers), [len(d) for d in data], PATIENCE_S)
    metas = []
    taken: list[Slot] = []
    for n, slot, d in zip(numbers, slots, data, strict=True):
        assert isinstance(slot, Slot)
        store.host.view(slot)[:] = d
        taken.append(slot)
        metas.append(meta_of(page_key(n), d, n))
    store.commit(keys(*numbers), taken, metas)


def let_go(store: TieredStore, lower: WatchedTier) -> None:
    lower.gate.set()
    assert store.drain(PATIENCE_S)
    assert not store.host.unwritten(1, 1000)


def spilled(store: TieredStore) -> dict[str, int]:
    return {status: n for status, n in store.ledger.snapshot().spills["nvme"].items() if n}


def test_pages_stored_while_a_write_waits_are_written_together(held: TieredStore, lower: WatchedTier) -> None:
    put_all(held, pages(2 * BATCH + 5))
    let_go(held, lower)
    assert [len(put) for put in lower.puts] == [1, BATCH, BATCH, 5]
    assert lower.offered[1:] == keys(*pages(2 * BATCH + 5))
    assert spilled(held) == {"stored": 2 * BATCH + 6}


def test_pages_of_one_commit_stay_together(held: TieredStore, lower: WatchedTier) -> None:
    at = 0
    for count in (10, 10, 6, 1, BATCH + 4, 2, BATCH - 2, 1):
        store_together(held, pages(count, at))
        at += count
    let_go(held, lower)
    assert [len(put) for put in lower.puts] == [1, 10, BATCH, 1, BATCH + 4, BATCH, 1]
    assert lower.offered[1:] == keys(*pages(at))


def test_a_write_that_has_begun_is_joined_by_nothing(held: TieredStore, lower: WatchedTier) -> None:
    put_all(held, pages(3))
    let_go(held, lower)
    put_all(held, pages(2, 3))
    let_go(held, lower)
    assert sorted(lower.offered) == sorted(keys(FIRST, *pages(5)))
    assert lower.puts[1] == keys(*pages(3))


def test_a_page_deleted_and_stored_again_is_below_in_the_end(held: TieredStore, lower: WatchedTier) -> None:
    put_all(held, pages(2))
    deletion = held.delete(keys(0))
    put_all(held, [0, 6])
    let_go(held, lower)
    assert deletion.wait(PATIENCE_S)
    assert lower.contains_many(keys(0, 3, 6)) == [True] * 3
    assert held.host.contains_many(keys(0, 3, 6)) == [True] * 3
    assert lower.pages[page_key(0)][1] == page_bytes(0)


def test_a_deleted_page_does_not_stay_below(held: TieredStore, lower: WatchedTier) -> None:
    """Neither the one that is being written nor one that waits, whatever is stored behind the delete."""
    put_all(held, pages(2))
    deletion = held.delete(keys(FIRST, 0))
    put_all(held, pages(2, 2))
    let_go(held, lower)
    assert deletion.wait(PATIENCE_S)
    assert lower.contains_many(keys(FIRST, 0, 3, 6, 9)) == [False, False, True, True, True]


@pytest.mark.parametrize("seed", range(8))
def test_stores_and_deletes_end_below_as_the_last_of_them_says(
    store: TieredStore, lower: WatchedTier, seed: int
) -> None:
    """There is room for all in host memory. A page is stored again only where it is not there."""
    draw = random.Random(seed)
    there: set[int] = set()
    for _ in range(300):
        page = draw.choice(pages(20))
        if draw.random() < 0.1:
            lower.gate.clear() if lower.gate.is_set() else lower.gate.set()
        if page in there:
            store.delete(keys(page))
            there.remove(page)
        else:
            put_all(store, [page])
            there.add(page)
    let_go(store, lower)
    assert lower.contains_many(keys(*pages(20))) == [page in there for page in pages(20)]
    assert store.host.contains_many(keys(*pages(20))) == [page in there for page in pages(20)]


def test_threads_that_store_at_once_lose_no_page(store: TieredStore, lower: WatchedTier) -> None:
    shares = [pages(18, 18 * n) for n in range(4)]
    threads = [threading.Thread(target=put_all, args=(store, share)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    let_go(store, lower)
    everything = sorted(keys(*pages(72)))
    assert sorted(lower.offered) == sorted(lower.pages) == everything, "each once"
    assert max(map(len, lower.puts)) <= BATCH


def test_a_tier_that_hangs_costs_joined_pages_their_place_below_only(
    held: TieredStore, lower: WatchedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_all(held, pages(79))
    assert len(held.host.unwritten(1, 1000)) == 80
    monkeypatch.setattr(spill, "_STUCK_S", 0.0)
    put_all(held, pages(1, 79))  # there is room: pages that wait are given up
    assert spilled(held)["deadline"] == 80
    assert held.host.contains_many(keys(FIRST)) == [True], "it is being written"
    lower.gate.set()
    assert held.drain(PATIENCE_S)
    assert not held.host.unwritten(1, 1000)
    assert sorted(lower.pages) == sorted(keys(FIRST, *pages(80)[1:])), "all that are still in host memory"
    assert spilled(held) == {"deadline": 80, "stored": 80}


def test_a_tier_that_hangs_in_a_delete_does_not_fill_the_host_tier(
    store: TieredStore, lower: WatchedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_all(store, [FIRST])
    let_go(store, lower)
    lower.gate.clear()
    deletion = store.delete(keys(FIRST))
    wait_for(lambda: lower.deletes > 0, "nothing is deleted")
    put_all(store, pages(80))
    monkeypatch.setattr(spill, "_STUCK_S", 0.0)
    put_all(store, pages(1, 80))
    assert spilled(store) == {"stored": 1, "deadline": 80}
    lower.gate.set()
    assert deletion.wait(PATIENCE_S)
    let_go(store, lower)
    assert sorted(lower.pages) == sorted(keys(*pages(81)[1:]))


def test_a_write_that_fails_is_counted_and_its_pages_make_room(held: TieredStore, lower: WatchedTier) -> None:
    put_all(held, pages(BATCH))
    lower.broken = True
    let_go(held, lower)
    assert held.ledger.snapshot().errors["spill"] == 2 and not lower.pages
    lower.broken = False
    put_all(held, pages(80, 100))
    let_go(held, lower)
    assert len(lower.pages) == 80


def test_pages_that_joined_are_written_before_the_end(held: TieredStore, lower: WatchedTier) -> None:
    put_all(held, pages(2 * BATCH))
    lower.gate.set()
    held.close(PATIENCE_S)
    assert sorted(lower.pages) == sorted(keys(FIRST, *pages(2 * BATCH)))
    assert spilled(held) == {"stored": 2 * BATCH + 1}


def test_an_end_without_time_says_what_is_lost(
    held: TieredStore, lower: WatchedTier, caplog: pytest.LogCaptureFixture
) -> None:
    put_all(held, pages(2 * BATCH))
    deletion = held.delete(keys(FIRST))
    held.close(0.1)
    assert f"{2 * BATCH} pages are not written below and lost" in caplog.text
    wait_for(lambda: lower.closed, "the lower tier was not closed")
    lower.gate.set()
    assert held.drain(PATIENCE_S)
    assert len(lower.puts) == 1, "the host tier is closed"
    assert not deletion.wait(PATIENCE_S)
    assert held.ledger.snapshot().errors["spill"] == 0, "what was still queued is no error"


def test_pages_stored_after_the_end_are_let_go(store: TieredStore, lower: WatchedTier) -> None:
    assert store._spillers["nvme"].close(PATIENCE_S)
    deletions = [store.delete(keys(0))]
    put_all(store, pages(100))
    assert not lower.puts and not store.host.unwritten(1, 1000)
    deletions.append(store.delete(keys(*pages(100))))
    assert not any(deletion.wait(PATIENCE_S) for deletion in deletions)
