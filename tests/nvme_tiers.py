"""A small NVMe tier of known pages, and what became of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtier.abc.tier import GetStatus, PutStatus, Tier
from kvtier.storage_backends.nvme.tier import NvmeTier
from kvtier.testing.pages import aligned_buffer, belongs, item_of, key_of

CAPACITY_BYTES = 1 << 20
PATIENCE_S = 60.0
"""How long is waited for what must happen: long, since it says nothing about speed."""
PAGE_BYTES = 20_000
PAGES = 20


def put(tier: Tier, first: int, count: int) -> list[PutStatus]:
    return tier.put_many([item_of(key_of(n), PAGE_BYTES) for n in range(first, first + count)])


def statuses(tier: NvmeTier, first: int = 0, count: int = PAGES) -> list[GetStatus]:
    """Get pages one by one; a hit must be the key's own bytes."""
    found = []
    for n in range(first, first + count):
        out = aligned_buffer(PAGE_BYTES)
        (result,) = tier.get_many_into([key_of(n)], [out])
        assert result.status is not GetStatus.HIT or belongs(key_of(n), out), "wrong bytes were served"
        found.append(result.status)
    return found


def reopened(tier: NvmeTier, change: Callable[[Path], object]) -> NvmeTier:
    tier.close()
    change(tier.path)
    return NvmeTier(tier.path, CAPACITY_BYTES)


class FailingCall:
    """Stands in for an `os` function: raises `code` while `failing`."""

    def __init__(self, real: Callable[..., Any], code: int) -> None:
        self.real, self.code, self.failing, self.calls = real, code, True, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        if self.failing:
            raise OSError(self.code, os.strerror(self.code))
        return self.real(*args)
