"""The host tier: cold pages in one anonymous memory arena of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from kvtier.abc.tier import (
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
from kvtier.storage_backends.slots.config import check_capacity, check_max_record
from kvtier.storage_backends.slots.extents import Region, slot_bytes_of
from kvtier.storage_backends.slots.gate import Gate, notify
from kvtier.storage_backends.slots.table import SlotTable, check_meta

_CLOSE_S = 1.8

T = TypeVar("T")


class HostTier(StagingTier):
    """Slots are 4 KiB-aligned. All bookkeeping is under one lock that is never held while bytes move.

    capacity_bytes: hard cap, rounded down to 4 KiB. pretouch: fault the memory in ahead of use. max_record_bytes:
    larger records are TOO_LARGE; by default the capacity.
    """

    capabilities = TierCapabilities(persistent=False, shared=False)

    def __init__(
        self, capacity_bytes: int, *, name: str = "host", pretouch: bool = True, max_record_bytes: int | None = None
    ) -> None:
        self.name = name
        self._capacity_bytes = check_capacity(name, capacity_bytes)
        largest = check_max_record(name, max_record_bytes, self._capacity_bytes)
        self._memory = Arena(self._capacity_bytes, pretouch=pretouch)
        self.arena = self._memory.bytes_
        self._table = SlotTable([Region(0, self._capacity_bytes)], largest)
        self._lock = threading.Lock()
        self._gate = Gate(name)
        self._put_bytes = 0
        self._get_bytes = 0

    # ---- staging

    def reserve_many(self, keys: Sequence[bytes], nbytes: Sequence[int]) -> list[Slot | PutStatus]:
        with self._gate:
            arena = self.arena

            def reserve() -> list[Slot | PutStatus]:
                return [self._reserve(key, n) for key, n in zip(keys, nbytes, strict=True)]

            slots = self._locked(reserve)
            for slot in slots:
                if isinstance(slot, Slot):
                    end = slot.offset + slot.nbytes
                    arena[end : slot.offset + slot_bytes_of(slot.nbytes)] = 0
            return slots

    def commit_many(self, keys: Sequence[bytes], slots: Sequence[Slot], metas: Sequence[PageMeta]) -> None:
        with self._gate:
            for meta, slot in zip(metas, slots, strict=True):
                check_meta(meta)
                if meta.nbytes > slot.nbytes:
                    raise SpecError(f"a record of {meta.nbytes} bytes in a slot reserved for {slot.nbytes}")
            with self._lock:
                for slot, meta in zip(slots, metas, strict=True):
                    self._table.stage(slot.id, meta)
                    self._table.publish(slot.id)
                    self._put_bytes += meta.nbytes

    def abort_many(self, keys: Sequence[bytes], slots: Sequence[Slot]) -> None:
        with self._lock:
            for slot in slots:
                self._table.abort(slot.id)

    def pin_many(self, keys: Sequence[bytes]) -> list[tuple[Slot, PageMeta] | None]:
        with self._gate, self._lock:
            return self._table.pin(keys)

    def unpin_many(self, slots: Sequence[Slot]) -> None:
        with self._lock:
            self._table.unpin([slot.id for slot in slots])

    # ---- tier

    def put_many(self, items: Sequence[PutItem], deadline_s: float | None = None) -> list[PutStatus]:
        until = None if deadline_s is None else time.monotonic() + deadline_s
        return [
            PutStatus.DEADLINE if until is not None and time.monotonic() >= until else self._put(item) for item in items
        ]

    def get_many_into(
        self, keys: Sequence[bytes], outs: Sequence[memoryview], deadline_s: float | None = None
    ) -> list[GetResult]:
        until = None if deadline_s is None else time.monotonic() + deadline_s
        results = []
        for key, out in zip(keys, outs, strict=True):
            if until is not None and time.monotonic() >= until:
                results.append(GetResult(GetStatus.DEADLINE))
            else:
                results.append(self._get(key, out))
        return results

    def length_many(self, keys: Sequence[bytes]) -> list[int]:
        with self._gate, self._lock:
            return self._table.lengths(keys)

    def delete_many(self, keys: Sequence[bytes], removal: Removal = Removal.DELETED) -> int:
        with self._gate:
            return self._locked(lambda: sum(self._table.remove(key, removal) for key in keys))

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
        return row if isinstance(row, PutStatus) else self._table.slot(row)

    def _put(self, item: PutItem) -> PutStatus:
        check_meta(item.meta)
        (slot,) = self.reserve_many([item.key], [item.meta.nbytes])
        if isinstance(slot, PutStatus):
            return slot
        try:
            source = np.frombuffer(item.data, np.uint8)
            if len(source) != item.meta.nbytes:
                raise SpecError(f"data has {len(source)} bytes, its meta says {item.meta.nbytes}")
            self.arena[slot.offset : slot.offset + slot.nbytes] = source
        except BaseException:
            self.abort_many([item.key], [slot])
            raise
        self.commit_many([item.key], [slot], [item.meta])
        self.unpin_many([slot])
        return PutStatus.STORED

    def _get(self, key: bytes, out: memoryview) -> GetResult:
        (page,) = self.pin_many([key])
        if page is None:
            return GetResult(GetStatus.ABSENT)
        slot, meta = page
        try:
            if len(out) < meta.nbytes:
                # Replaced by a longer page since the caller asked for its length.
                return GetResult(GetStatus.FAILED)
            target = np.frombuffer(out, np.uint8, meta.nbytes) if meta.nbytes else np.empty(0, np.uint8)
            target[:] = self.arena[slot.offset : slot.offset + meta.nbytes]
            if checksum(target.data, key) == meta.checksum:
                with self._lock:
                    self._get_bytes += meta.nbytes
                return GetResult(GetStatus.HIT, meta)
            self._locked(lambda: self._table.holds(key, slot.id) and self._table.remove(key, Removal.QUARANTINED))
            return GetResult(GetStatus.CORRUPT)
        finally:
            self.unpin_many([slot])
