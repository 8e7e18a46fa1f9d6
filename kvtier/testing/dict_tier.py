"""A lower tier over a plain dict whose reads can be delayed, failed or damaged: for tests of what stands above it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvtier.abc.tier import (
    GetResult,
    GetStatus,
    PageMeta,
    PutItem,
    PutStatus,
    Removal,
    Tier,
    TierCapabilities,
    TierUsage,
)
from kvtier.keys import checksum


class DictTier(Tier):
    """`gate`: reads and writes wait for it. `fail_gets`, `fail_puts`: keys that fail with an input/output error.
    Never evicts; `capacity_pages` makes puts FULL beyond it."""

    capabilities = TierCapabilities(persistent=False, shared=False)

    def __init__(self, name: str = "dict", capacity_pages: int = 1 << 30) -> None:
        self.name = name
        self.pages: dict[bytes, tuple[PageMeta, bytes]] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.fail_gets: set[bytes] = set()
        self.fail_puts: set[bytes] = set()
        self.closed = False
        self._capacity_pages = capacity_pages
        self._stored = self._deleted = self._quarantined = 0

    def put_many(self, items: Sequence[PutItem], deadline_s: float | None = None) -> list[PutStatus]:
        self.gate.wait()
        return [self._put(item) for item in items]

    def _put(self, item: PutItem) -> PutStatus:
        if item.key in self.fail_puts:
            return PutStatus.FAILED
        if item.key in self.pages:
            return PutStatus.EXISTS
        if len(self.pages) >= self._capacity_pages:
            return PutStatus.FULL
        self.pages[item.key] = (item.meta, bytes(item.data[: item.meta.nbytes]))
        self._stored += 1
        return PutStatus.STORED

    def get_many_into(
        self, keys: Sequence[bytes], outs: Sequence[memoryview], deadline_s: float | None = None
    ) -> list[GetResult]:
        if not self.gate.wait(deadline_s):
            return [GetResult(GetStatus.DEADLINE)] * len(keys)
        return [self._get(key, out) for key, out in zip(keys, outs, strict=True)]

    def _get(self, key: bytes, out: memoryview) -> GetResult:
        if key in self.fail_gets:
            return GetResult(GetStatus.FAILED)
        if key not in self.pages:
            return GetResult(GetStatus.ABSENT)
        meta, data = self.pages[key]
        if checksum(data, key) != meta.checksum:
            self._quarantined += self.pages.pop(key, None) is not None
            return GetResult(GetStatus.CORRUPT)
        out[: meta.nbytes] = data
        return GetResult(GetStatus.HIT, meta)

    def length_many(self, keys: Sequence[bytes]) -> list[int]:
        return [self.pages[key][0].nbytes if key in self.pages else -1 for key in keys]

    def delete_many(self, keys: Sequence[bytes], removal: Removal = Removal.DELETED) -> int:
        gone = sum(self.pages.pop(key, None) is not None for key in keys)
        self._deleted += gone
        return gone

    def usage(self) -> TierUsage:
        used = sum(len(data) for _, data in self.pages.values())
        return TierUsage(1 << 40, used, len(self.pages), 0, self._stored, 0, self._deleted, self._quarantined, 0, 0)

    def close(self) -> None:
        self.closed = True
