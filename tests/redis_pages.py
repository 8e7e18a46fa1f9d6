"""Pages put into a Redis tier, and what became of them."""

from __future__ import annotations

from kvtier.abc.tier import GetStatus, PutStatus
from kvtier.storage_backends.redis.tier import RedisTier
from kvtier.testing.pages import aligned_buffer, belongs, item_of, key_of

PAGE = 30_000
PATIENCE_S = 60.0
"""How long is waited for what must happen: long, since it says nothing about speed."""
DOCUMENTED_RULES = [
    "~kvtier:1:*",
    "+get",
    "+set",
    "+getrange",
    "+unlink",
    "+del",
    "+info",
    "+cluster|slots",
    "+config|get",
    "+asking",
    "+select",
    "+ping",
]
"""From docs/redis.md."""
LRU = ("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")


def put(tier: RedisTier, numbers: range, nbytes: int = PAGE) -> list[PutStatus]:
    return tier.put_many([item_of(key_of(n), nbytes) for n in numbers])


def get(tier: RedisTier, numbers: range, nbytes: int = PAGE, deadline_s: float | None = None) -> list[GetStatus]:
    """Statuses, after every hit's bytes were found right."""
    keys = [key_of(n) for n in numbers]
    outs = [aligned_buffer(nbytes) for _ in keys]
    results = tier.get_many_into(keys, outs, deadline_s)
    for key, out, result in zip(keys, outs, results, strict=True):
        if result.status is GetStatus.HIT:
            assert belongs(key, out)
    return [r.status for r in results]
