"""Pages whose content follows from their number, put into a store, and what its ledger says of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvtier.abc.tier import PageMeta, PutStatus, Slot
from kvtier.keys import checksum
from kvtier.store import TieredStore
from kvtier.testing.store_machine import page_bytes, page_key

SLOT = 4096
PATIENCE_S = 60.0
"""How long is waited for what must happen: long, since it says nothing about speed."""


def keys(*pages: int) -> list[bytes]:
    return [page_key(page) for page in pages]


def meta_of(key: bytes, data: bytes, tokens: int, **more: Any) -> PageMeta:
    return PageMeta(len(data), 1, tokens, checksum(data, key), bytes(16), **more)


def put_value(
    store: TieredStore, key: bytes, data: bytes, tokens: int, wait_s: float = PATIENCE_S, **more: Any
) -> Slot | PutStatus:
    """more: of the page's record."""
    (slot,) = store.reserve([key], [len(data)], wait_s)
    if isinstance(slot, Slot):
        store.host.view(slot)[:] = data
        store.commit([key], [slot], [meta_of(key, data, tokens, **more)])
    return slot


def put(store: TieredStore, page: int, wait_s: float = 0.0) -> Slot | PutStatus:
    return put_value(store, page_key(page), page_bytes(page), page, wait_s)


def put_all(store: TieredStore, pages: Iterable[int], wait_s: float = PATIENCE_S, **more: Any) -> None:
    """more: of the pages' records."""
    for page in pages:
        slot = put_value(store, page_key(page), page_bytes(page), page, wait_s, **more)
        assert isinstance(slot, Slot), (page, slot)


def push_out_of_host(store: TieredStore, pages: range = range(100, 112)) -> None:
    """Fill the host tier with other pages, so that what was there is only below."""
    assert store.flush(PATIENCE_S)
    for page in pages:
        put(store, page, PATIENCE_S)
    assert store.flush(PATIENCE_S)


def counted(store: TieredStore) -> tuple[dict[str, int], dict[str, int]]:
    """Hits by tier and misses by reason, without those that there are none of; each lookup is one of the two."""
    snapshot = store.ledger.snapshot()
    assert snapshot.lookups == sum(snapshot.hits.values()) + sum(snapshot.misses.values())
    return {k: v for k, v in snapshot.hits.items() if v}, {k: v for k, v in snapshot.misses.items() if v}
