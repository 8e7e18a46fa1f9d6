"""Pages that somebody asked to keep: they do not make room for others."""

from __future__ import annotations

import threading
from collections.abc import Container, Sequence

from kvtier.abc.tier import SLOT_ALIGN, StagingTier, Tier

_SHARE = 2
"""They may take one part in so many of the host tier."""


class Protection:
    """Of the pages of one store, in its local tiers. All methods may be called from any thread."""

    def __init__(self, host: StagingTier, lower: Sequence[Tier]) -> None:
        self._host = host
        self._tiers = [host, *(tier for tier in lower if not tier.capabilities.shared)]
        self._limit_bytes = host.usage().capacity_bytes // _SHARE
        self._lock = threading.Lock()
        self._bytes: dict[bytes, int] = {}  # in the host tier, by page
        self.any = False
        """Whether pages are protected."""
        self._sum_bytes = 0

    def add(self, keys: Sequence[bytes], except_for: Container[bytes], *, dry_run: bool = False) -> list[bool]:
        """Which of the pages are protected now: those that a tier has, as far as the limit allows. dry_run: which would
        be."""
        done = []
        with self._lock:
            protected, sum_bytes = dict(self._bytes) if dry_run else self._bytes, self._sum_bytes
            for key in keys:
                nbytes = -(-max(tier.length_many([key])[0] for tier in self._tiers) // SLOT_ALIGN) * SLOT_ALIGN
                fits = key in protected or sum_bytes + nbytes <= self._limit_bytes
                done.append(nbytes > 0 and fits and key not in except_for)
                if done[-1]:
                    sum_bytes += nbytes - protected.get(key, 0)
                    protected[key] = nbytes
                    for tier in () if dry_run else self._tiers:
                        tier.protect_many([key], True)
            if not dry_run:
                self._sum_bytes = sum_bytes
                self.any = bool(protected)
        return done

    def end(self, keys: Sequence[bytes]) -> None:
        """Pages may make room again."""
        self.forget(keys)
        for tier in self._tiers:
            tier.protect_many(keys, False)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Pages were deleted."""
        if self._bytes:
            with self._lock:
                for key in keys:
                    self._sum_bytes -= self._bytes.pop(key, 0)
                self.any = bool(self._bytes)

    def pages(self) -> frozenset[bytes]:
        """Those that are protected now."""
        with self._lock:
            return frozenset(self._bytes)

    def stored(self, keys: Sequence[bytes]) -> None:
        """Pages were stored in the host tier, maybe protected ones that had left it."""
        if self._bytes and (here := [key for key in keys if key in self._bytes]):
            self._host.protect_many(here, True)
