"""Ranks of one engine that do not have the same pages, or not at the same time."""

from __future__ import annotations

import threading

from kvtier.abc.tier import PageMeta, Slot
from kvtier.faults.trial import PATIENCE_S, LocalTier, Trial, expect
from kvtier.keys import checksum
from kvtier.storage_backends.host.tier import HostTier
from kvtier.store import TieredStore
from kvtier.testing.faulty_device import Fault, FaultyDevice
from kvtier.testing.pages import belongs, data_of, key_of
from kvtier.testing.redis_servers import wait_for

RANKS = 2
PAGES = 16
PAGE_BYTES = 20_000
HOST_BYTES = 2 * PAGES * 20_480
CAPACITY_BYTES = 3 << 20


def skew_ranks(trial: Trial) -> None:
    """Promises: what the ranks agree on, the smallest of their ready prefixes, every rank can load, with its own bytes,
    however long the others take and whatever else it serves meanwhile; a rank that was slow does not lose pages; every
    page is counted once."""
    devices = [FaultyDevice() for _ in range(RANKS)]
    tiers = [trial.open([f"rank{r}"], CAPACITY_BYTES, device=devices[r]) for r in range(RANKS)]
    # With several ranks no lease ends by a clock.
    stores = [TieredStore(HostTier(HOST_BYTES), [t], lease_s=None, promote_deadline_s=PATIENCE_S) for t in tiers]
    go_on = threading.Event()
    try:
        for rank, tier in enumerate(tiers):
            trial.put(tier, _numbers(rank), PAGE_BYTES)
        lost = trial.rng.randrange(PAGES)
        behind = trial.rng.randrange(RANKS)
        tiers[behind].delete_many([key_of(_numbers(behind)[lost])])  # evicted there alone

        slow = trial.rng.randrange(RANKS)
        devices[slow].set(Fault(("read",), hold=go_on))
        lookups = [store.lookup("first", _keys(rank)) for rank, store in enumerate(stores)]
        ready = [0 if rank == slow else stores[rank].wait(lookups[rank]) for rank in range(RANKS)]
        agreed = min(ready)
        _load(trial, stores, "first", agreed)
        trial.seen["agreed on nothing, one being slow"] += 1

        lookups = [store.lookup("second", _keys(rank)) for rank, store in enumerate(stores)]
        quick = next(rank for rank in range(RANKS) if rank != slow)
        there = stores[quick].wait(lookups[quick])
        _serve_others(trial, stores[quick])
        expect(lookups[quick].ready_pages == there, "pins of a rank that waits for another were released")
        go_on.set()
        devices[slow].set()
        ready = [store.wait(lookup) for store, lookup in zip(stores, lookups, strict=True)]
        agreed = min(ready)
        expect(agreed == lost, f"ranks with {ready} pages agree on {agreed}, {lost} are in all of them")
        _load(trial, stores, "second", agreed)
        trial.seen["agreed on a shorter prefix"] += 1
        for store, tier in zip(stores, tiers, strict=True):
            _expect_balance(store, tier)
    finally:
        go_on.set()
        for device in devices:
            device.set()
        for store in stores:
            store.close()


def _numbers(rank: int) -> list[int]:
    return [1_000_000 * (1 + rank) + n for n in range(PAGES)]


def _keys(rank: int) -> list[bytes]:
    return [key_of(n) for n in _numbers(rank)]


def _load(trial: Trial, stores: list[TieredStore], request: str, pages: int) -> None:
    """Every rank loads the prefix that was agreed on."""
    for rank, store in enumerate(stores):
        lookup = store.lookup(request, _keys(rank))
        expect(store.hold(lookup, pages), f"rank {rank} cannot load the {pages} pages that were agreed on")
        for key, (slot, meta) in zip(_keys(rank), lookup.ready_slots(pages), strict=False):
            right = belongs(key, store.host.view(slot)[: meta.nbytes])
            expect(right, f"rank {rank} has wrong bytes in a page that was agreed on")
            trial.seen["pages read"] += 1
            trial.seen["hits"] += 1
        store.settle(request)


def _serve_others(trial: Trial, store: TieredStore) -> None:
    """Twice the host tier's size of other pages."""
    for n in range(2 * HOST_BYTES // 20_480):
        key = key_of(50_000_000 + n)
        data = data_of(key, PAGE_BYTES)
        (slot,) = store.reserve([key], [PAGE_BYTES])
        if isinstance(slot, Slot):
            store.host.view(slot)[:PAGE_BYTES] = data
            store.commit([key], [slot], [PageMeta(PAGE_BYTES, 1, 0, checksum(data, key), bytes(16))])
            trial.seen["pages put"] += 1


def _expect_balance(store: TieredStore, tier: LocalTier) -> None:
    def balanced() -> bool:
        ledger = store.ledger.snapshot()
        return ledger.lookups == sum(ledger.hits.values()) + sum(ledger.misses.values()) == 2 * PAGES

    wait_for(balanced, f"pages were not counted once each: {store.ledger.snapshot()}, {tier.usage()}", PATIENCE_S)
