"""The host tier: cold pages in one anonymous memory arena of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from kvtier.abc.tier import (
    SLOT_ALIGN,
    GetResult,
    GetStatus,
    PageMeta,
    PutItem,
    PutStatus,
    Removal,
    Slot,
    StagingTier,
    TierCapabilities,
    TierUsage,
)
from kvtier.errors import SpecError
from kvtier.keys import checksum
from kvtier.storage_backends.host.arena import Arena
from kvtier.storage_backends.host.budget import NodeBudget
from kvtier.storage_backends.slots.config import check_capacity, check_max_record
from kvtier.storage_backends.slots.descriptions import check_meta
from kvtier.storage_backends.slots.extents import Region
from kvtier.storage_backends.slots.gate import Gate, notify
from kvtier.storage_backends.slots.order import order_of
from kvtier.storage_backends.slots.table import SlotTable

_CLOSE_S = 1.8
_ZEROS = bytes(SLOT_ALIGN)
_CHUNK = 16
"""Pages per turn of the lock, and how many a put or get pins at a time."""

_new = tuple.__new__
"""Named construction would be a call in Python."""

T = TypeVar("T")


class HostTier(StagingTier):
    """Slots are 4 KiB-aligned. All bookkeeping is under one lock that is never held while bytes move.

    capacity_bytes: hard cap, rounded down to 4 KiB. pretouch: fault the memory in ahead of use. max_record_bytes:
    larger records are TOO_LARGE; by default the capacity. policy, ttl_s: what makes room, and pages that were not used
    for this long are gone. budget: the share of a node's memory that this tier lives in; given back when it is closed.
    huge_pages: transparent, or reserved ones of the system; CapacityError where it has too few of those.
    """

    capabilities = TierCapabilities(persistent=False, shared=False)

    def __init__(
        self,
        capacity_bytes: int,
        *,
        name: str = "host",
        pretouch: bool = True,
        max_record_bytes: int | None = None,
        policy: str = "lru",
        ttl_s: float | None = None,
        budget: NodeBudget | None = None,
        huge_pages: str = "transparent",
    ) -> None:
        self.name = name
        self._budget = budget
        self._capacity_bytes = check_capacity(name, capacity_bytes)
        order = order_of(policy)
        largest = check_max_record(name, max_record_bytes, self._capacity_bytes)
        self._memory = Arena(self._capacity_bytes, pretouch=pretouch, reserved=huge_pages == "reserved")
        self.arena = self._memory.bytes_
        self.memory = memoryview(self.arena)
        self._table = SlotTable([Region(0, self._capacity_bytes)], largest, order, ttl_s)
        self._lock = threading.Lock()
        self._gate = Gate(name)
        self._put_bytes = 0
        self._get_bytes = 0

    # ---- staging

    def reserve_many(self, keys: Sequence[bytes], nbytes: Sequence[int]) -> list[Slot | PutStatus]:
        with self._gate:
            return self._locked(lambda: [self._reserve(key, n) for key, n in zip(keys, nbytes, strict=True)])

    def reserve_one(self, key: bytes, nbytes: int) -> Slot | PutStatus:
        with self._lock:
            if self._gate.closed:
                self._gate.refuse()
            try:
                answer = self._reserve(key, nbytes)
            finally:
                removed = self._table.take_removed() if self._table.removed else None
        if removed:
            notify(self._removal_listener, removed)
        return answer

    def commit_over(self, key: bytes, slot: Slot, meta: PageMeta, replaces: bytes) -> bool:
        with self._lock:
            if self._gate.closed:
                self._gate.refuse()
            self._put_bytes += meta.nbytes
            return self._table.publish_over(slot.id, key, meta, replaces)

    def view(self, slot: Slot) -> memoryview:
        return self.memory[slot.offset : slot.offset + slot.nbytes]

    def commit_many(
        self, keys: Sequence[bytes], slots: Sequence[Slot], metas: Sequence[PageMeta], unwritten: int = 0
    ) -> None:
        with self._gate, self._lock:
            self._table.commit([slot.id for slot in slots], keys, metas, unwritten)
            self._put_bytes += sum(meta.nbytes for meta in metas)

    def abort_many(self, keys: Sequence[bytes], slots: Sequence[Slot]) -> None:
        with self._lock:
            for slot in slots:
                self._table.abort(slot.id)

    def pin_many(self, keys: Sequence[bytes]) -> list[int]:
        with self._gate, self._lock:
            return self._table.pin(keys)

    def pin_one(self, key: bytes) -> tuple[int, int, int, bytes] | None:
        with self._lock:
            if self._gate.closed:
                self._gate.refuse()
            return self._table.pin_one(key)

    def unpin_one(self, slot: int) -> None:
        with self._lock:
            self._table.unpin((slot,))

    def hold_many(self, keys: Sequence[bytes]) -> list[int]:
        with self._gate, self._lock:
            return self._table.pin(keys, use=False)

    def expect_writing(self, keys: Sequence[bytes], tiers: int) -> None:
        with self._gate, self._lock:
            self._table.keep(keys, tiers)

    def written(self, ids: Sequence[int], tiers: int) -> None:
        with self._lock:
            self._table.let_go(ids, tiers)

    def unwritten(self, tiers: int, limit: int, *, last_first: bool = False, soon: bool = False) -> list[bytes]:
        with self._gate, self._lock:
            return self._table.kept(tiers, limit, last_first=last_first, soon=soon)

    def pinned_many(self, ids: Sequence[int]) -> list[tuple[Slot, PageMeta]]:
        with self._lock:
            return self._table.describe(ids)

    def unpin_many(self, ids: Sequence[int]) -> None:
        with self._lock:
            self._table.unpin(ids)

    # ---- tier

    def put_many(self, items: Sequence[PutItem], deadline_s: float | None = None) -> list[PutStatus]:
        for item in items:
            check_meta(item.meta)
            if len(item.data) != item.meta.nbytes:
                raise SpecError(f"data has {len(item.data)} bytes, its meta says {item.meta.nbytes}")
        until = None if deadline_s is None else time.monotonic() + deadline_s
        statuses: list[PutStatus] = []
        for start in range(0, len(items), _CHUNK):
            if until is not None and time.monotonic() >= until:
                return statuses + [PutStatus.DEADLINE] * (len(items) - start)
            chunk = items[start : start + _CHUNK]
            answers = self._put(chunk)
            # Room may have been held by other pages of the same chunk.
            again = [i for i, status in enumerate(answers) if status is PutStatus.FULL and len(chunk) > 1]
            for i in again:
                answers[i] = self._put(chunk[i : i + 1])[0]
            statuses += answers
        return statuses

    def get_many_into(
        self, keys: Sequence[bytes], outs: Sequence[memoryview], deadline_s: float | None = None
    ) -> list[GetResult]:
        if len(keys) != len(outs):
            raise SpecError(f"{len(keys)} keys for {len(outs)} buffers")
        until = None if deadline_s is None else time.monotonic() + deadline_s
        results: list[GetResult] = []
        for start in range(0, len(keys), _CHUNK):
            if until is not None and time.monotonic() >= until:
                return results + [GetResult(GetStatus.DEADLINE)] * (len(keys) - start)
            results += self._get(keys[start : start + _CHUNK], outs[start : start + _CHUNK])
        return results

    def length_many(self, keys: Sequence[bytes]) -> list[int]:
        with self._gate, self._lock:
            return self._table.lengths(keys)

    def delete_many(self, keys: Sequence[bytes], removal: Removal = Removal.DELETED) -> int:
        with self._gate:
            return self._locked(lambda: sum(self._table.remove(key, removal) for key in keys))

    def touch_many(self, keys: Sequence[bytes]) -> None:
        with self._gate, self._lock:
            self._table.touch(keys)

    def demote_many(self, keys: Sequence[bytes]) -> None:
        with self._gate, self._lock:
            self._table.demote(keys)

    def protect_many(self, keys: Sequence[bytes], protected: bool) -> int:
        with self._gate, self._lock:
            return self._table.protect(keys, protected)

    def scan(self) -> list[tuple[bytes, PageMeta]]:
        """Every page's key and description, the least recently used first. A snapshot."""
        with self._gate, self._lock:
            return [(e.key, e.meta) for e in self._table.entries(staged=False)]

    def usage(self) -> TierUsage:
        with self._lock:
            return self._table.usage(
                capacity_bytes=self._capacity_bytes, put_bytes=self._put_bytes, get_bytes=self._get_bytes
            )

    def close(self) -> None:
        self._gate.close(_CLOSE_S)
        self._memory.close()
        self.arena = self._memory.bytes_
        self.memory = memoryview(self.arena)
        if self._budget is not None:
            self._budget.close()

    # ---- inside

    def _locked(self, action: Callable[[], T]) -> T:
        """Run `action` under the lock, then tell the listener what it removed."""
        with self._lock:
            try:
                result = action()
            finally:
                removed = self._table.take_removed()
        notify(self._removal_listener, removed)
        return result

    def _reserve(self, key: bytes, nbytes: int) -> Slot | PutStatus:
        row = self._table.reserve(key, nbytes)
        if isinstance(row, PutStatus):
            return row
        offset = self._table.rows.offset[row]
        end = offset + nbytes
        if padding := -nbytes % SLOT_ALIGN or (0 if nbytes else SLOT_ALIGN):
            self.memory[end : end + padding] = _ZEROS[:padding]
        return _new(Slot, (row, offset, nbytes))

    def _put(self, items: Sequence[PutItem]) -> list[PutStatus]:
        answers = self.reserve_many([item.key for item in items], [item.meta.nbytes for item in items])
        taken = [(item, slot) for item, slot in zip(items, answers, strict=True) if isinstance(slot, Slot)]
        slots = [slot for _, slot in taken]
        arena = self.arena
        try:
            for item, slot in taken:
                if slot.nbytes:
                    arena[slot.offset : slot.offset + slot.nbytes] = np.frombuffer(item.data, np.uint8)
            self.commit_many([item.key for item, _ in taken], slots, [item.meta for item, _ in taken])
        except BaseException:
            self.abort_many([item.key for item, _ in taken], slots)
            raise
        self.unpin_many([slot.id for slot in slots])
        return [PutStatus.STORED if isinstance(answer, Slot) else answer for answer in answers]

    def _get(self, keys: Sequence[bytes], outs: Sequence[memoryview]) -> list[GetResult]:
        with self._gate, self._lock:
            found = self._table.pin(keys)
            pages = self._table.pages(found)
        results, hit_bytes = [], 0
        try:
            for key, page, out in zip(keys, pages, outs, strict=True):
                if page is None:
                    results.append(GetResult(GetStatus.ABSENT))
                    continue
                status = self._copy_out(key, page[0], page[1], out)
                results.append(GetResult(status, page[1] if status is GetStatus.HIT else None))
                hit_bytes += page[1].nbytes if status is GetStatus.HIT else 0
        except BaseException:
            self.unpin_many([row for row in found if row >= 0])
            raise

        def settle() -> None:
            self._get_bytes += hit_bytes
            for key, page, result in zip(keys, pages, results, strict=True):
                if page is not None and result.status is GetStatus.CORRUPT and self._table.holds(key, page[0].id):
                    self._table.remove(key, Removal.QUARANTINED)
            self._table.unpin([page[0].id for page in pages if page is not None])

        self._locked(settle)
        return results

    def _copy_out(self, key: bytes, slot: Slot, meta: PageMeta, out: memoryview) -> GetStatus:
        if len(out) < meta.nbytes:
            # Replaced by a longer page since the caller asked for its length.
            return GetStatus.FAILED
        record = out[: meta.nbytes]
        if meta.nbytes:
            np.frombuffer(record, np.uint8)[:] = self.arena[slot.offset : slot.offset + meta.nbytes]
        return GetStatus.HIT if checksum(record, key) == meta.checksum else GetStatus.CORRUPT
