"""The readiness check of a store: a real put and get in every tier."""

from __future__ import annotations

import os

from kvtier.abc.codec import Form
from kvtier.abc.tier import FINGERPRINT_BYTES, KEY_BYTES, PROBE_PREFIX, GetStatus, PageMeta, PutItem, PutStatus, Tier
from kvtier.keys import checksum
from kvtier.store import TieredStore

TIER_DEADLINE_S = 2.0


def store_ready(store: TieredStore, nbytes: int) -> str | None:
    """Put a record of `nbytes` into every tier, get it back and delete it; None, or the reason why that failed.

    Give the size of a real page: a record of another size would make a tier set memory aside for it. Nothing is
    counted, neither as a lookup nor among a local tier's pages. A local tier all of whose pages are in use right now is
    as ready as one can be. Blocks for input and output."""
    reasons = [reason for tier in (store.host, *store.lower) if (reason := _probe(tier, nbytes)) is not None]
    return "; ".join(reasons) or None


def _probe(tier: Tier, nbytes: int) -> str | None:
    key = PROBE_PREFIX + os.urandom(KEY_BYTES - len(PROBE_PREFIX))
    data = os.urandom(16) * (nbytes // 16) + bytes(nbytes % 16)
    meta = PageMeta(nbytes, Form.RAW, 0, checksum(data, key), bytes(FINGERPRINT_BYTES))
    (put,) = tier.put_many([PutItem(key, meta, memoryview(data))], TIER_DEADLINE_S)
    if put is PutStatus.FULL and not tier.capabilities.shared and tier.usage().resident_pages:
        return None
    if put is not PutStatus.STORED:
        return f"{tier.name} tier: put answered {put.value}"
    try:
        out = bytearray(nbytes)
        (got,) = tier.get_many_into([key], [memoryview(out)], TIER_DEADLINE_S)
        if got.status is not GetStatus.HIT:
            return f"{tier.name} tier: get answered {got.status.value}"
        return None if out == data else f"{tier.name} tier: get answered other bytes"
    finally:
        tier.delete_many([key])
