"""Where slots lie: a space split into extents of equal slots, one size class per distinct slot size.

An extent is a contiguous run of slots of one size. It is carved from a free range when its class needs room, and
becomes a free range again, joined with its free neighbours, as soon as its last slot is free. Records of one size
therefore fill a region up to less than one slot; records of many sizes share it without a fixed split.

Bookkeeping only, in bytes; not thread-safe: the caller holds its lock.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.abc.tier import SLOT_ALIGN

_MAX_EXTENT_BYTES = 64 << 20
_EXTENTS_PER_SPACE = 128
"""A class that gets little use should not hold more than a small share of the space."""


def slot_bytes_of(nbytes: int) -> int:
    """Bytes that a record of `nbytes` occupies: rounded up to 4 KiB, at least one such block."""
    return max(1, -(-nbytes // SLOT_ALIGN)) * SLOT_ALIGN


class Region(NamedTuple):
    """A stretch of the space that extents never cross, such as one file."""

    start: int
    size: int


class Extent:
    """A run of `slots` slots of `slot_bytes` each, from `start`. `rows[i]` is the user of slot i, -1 where free."""

    __slots__ = ("free", "rows", "slot_bytes", "start", "used")

    def __init__(self, start: int, slot_bytes: int, slots: int) -> None:
        self.start = start
        self.slot_bytes = slot_bytes
        self.rows = array("q", [-1]) * slots
        self.free = array("q", range(slots - 1, -1, -1))
        self.used = 0

    @property
    def end(self) -> int:
        return self.start + self.slot_bytes * len(self.rows)

    def members(self) -> list[int]:
        return [row for row in self.rows if row >= 0]


class ExtentAllocator:
    """Slots for rows: `take` and `release`; `neighbourhood` tells what would have to go to make room.

    `extent_bytes` is the length that extents aim at; they are longer for a larger slot, shorter where space is short.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        self.space_bytes = sum(r.size for r in regions)
        self.extent_bytes = min(_MAX_EXTENT_BYTES, self.space_bytes // _EXTENTS_PER_SPACE)
        self._regions = sorted(regions)
        self._edges = {r.start for r in regions}  # free ranges are not joined across these
        self._free_at: dict[int, int] = {}  # start -> size
        self._free_end: dict[int, int] = {}  # end -> start
        self._by_size: list[tuple[int, int]] = []  # (size, start), sorted
        self.by_start: dict[int, Extent] = {}
        """Extents by where they begin; for reading."""
        self._extent_end: dict[int, Extent] = {}
        self._open: dict[int, dict[int, Extent]] = {}  # slot size -> extents with a free slot, by start
        for region in regions:
            usable = region.size // SLOT_ALIGN * SLOT_ALIGN
            if usable:
                self._add_free(region.start, usable)

    def take(self, slot_bytes: int, row: int) -> tuple[Extent, int] | None:
        """A free slot for `row` as (extent, offset), or None where no class extent or free range has room."""
        candidates = self._open.get(slot_bytes)
        if candidates:
            extent = next(iter(candidates.values()))
        else:
            made = self._carve(slot_bytes)
            if made is None:
                return None
            extent = made
        position = extent.free.pop()
        extent.rows[position] = row
        extent.used += 1
        if not extent.free:
            self._close(extent)
        return extent, extent.start + position * slot_bytes

    def release(self, start: int, offset: int) -> int:
        """Free one slot of the extent that begins at `start`, and tell its size; an extent without users goes back to
        the free ranges."""
        extent = self.by_start[start]
        position = (offset - extent.start) // extent.slot_bytes
        extent.rows[position] = -1
        extent.free.append(position)
        extent.used -= 1
        if not extent.used:
            self._dissolve(extent)
        elif len(extent.free) == 1:  # it had none
            self._open.setdefault(extent.slot_bytes, {})[start] = extent
        return extent.slot_bytes

    def extent_at(self, start: int) -> Extent:
        return self.by_start[start]

    def neighbourhood(
        self, extent: Extent, need_bytes: int, cost: Callable[[Extent], int | None]
    ) -> list[Extent] | None:
        """`extent` and as few of its neighbours as leave a free range of `need_bytes` once all of them are emptied,
        the cheaper side first; None where they cannot, because one may not go (cost None) or the region ends."""
        if cost(extent) is None:
            return None
        chosen = [extent]
        start, end = self._widen(extent.start, extent.end)
        while end - start < need_bytes:
            right = self.by_start.get(end) if end not in self._edges else None
            left = self._extent_end.get(start) if start not in self._edges else None
            sides = [(c, e.start, e) for e in (right, left) if e is not None and (c := cost(e)) is not None]
            if not sides:
                return None
            grown = min(sides)[2]
            chosen.append(grown)
            start, end = self._widen(min(start, grown.start), max(end, grown.end))
        return chosen

    def region_end(self, offset: int) -> int:
        """End of the region that `offset` lies in."""
        at = bisect_right(self._regions, (offset, 1 << 62)) - 1
        start, size = self._regions[at]
        return start + size

    def extents(self) -> list[Extent]:
        return list(self.by_start.values())

    def free_bytes(self) -> int:
        """Bytes in free ranges and in free slots."""
        open_bytes = sum(len(e.free) * e.slot_bytes for e in self.by_start.values())
        return sum(self._free_at.values()) + open_bytes

    def runs(
        self, offsets: npt.NDArray[np.int64], slots: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]
    ) -> Iterator[tuple[int, int, list[int]]]:
        """Group pages, ordered by offset, into extents: start, slot size, row or -1 per slot."""
        at = 0
        while at < len(offsets):
            start, slot_bytes = int(offsets[at]), int(slots[at])
            limit = min(self.region_end(start), start + max(slot_bytes, self.extent_bytes))
            end = at + int(np.searchsorted(offsets[at:], limit - slot_bytes, side="right"))
            places, odd = np.divmod(offsets[at:end] - start, slot_bytes)
            strange = np.flatnonzero((slots[at:end] != slot_bytes) | (odd != 0))
            if len(strange):
                end = at + int(strange[0])
            members = np.full(int(places[end - at - 1]) + 1, -1, np.int64)
            members[places[: end - at]] = rows[at:end]
            yield start, slot_bytes, members.tolist()
            at = end

    def restore(self, start: int, slot_bytes: int, rows: Sequence[int]) -> Extent:
        """Re-create an extent at `start` whose slot i is used by ``rows[i]`` (-1: free). The range must be free."""
        size = slot_bytes * len(rows)
        at = self._free_start_containing(start)
        whole = self._free_at[at]
        self._drop_free(at)
        if at < start:
            self._add_free(at, start - at)
        if start + size < at + whole:
            self._add_free(start + size, at + whole - start - size)
        extent = Extent(start, slot_bytes, len(rows))
        extent.rows = array("q", rows)
        extent.free = array("q", (i for i in range(len(rows) - 1, -1, -1) if rows[i] < 0))
        extent.used = len(rows) - len(extent.free)
        self._register(extent)
        return extent

    def _free_start_containing(self, offset: int) -> int:
        for start in reversed(self._free_at):  # restored in ascending order: the last remainder first
            if start <= offset < start + self._free_at[start]:
                return start
        raise ValueError(f"offset {offset} is not free")

    def _carve(self, slot_bytes: int) -> Extent | None:
        want = max(1, self.extent_bytes // slot_bytes) * slot_bytes
        at = bisect_left(self._by_size, (want, -1))
        if at == len(self._by_size):
            at -= 1  # the largest range, smaller than wanted
        if at < 0:
            return None
        size, start = self._by_size[at]
        slots = min(want, size) // slot_bytes
        if slots < 1:
            return None
        self._drop_free(start)
        used = slots * slot_bytes
        if used < size:
            self._add_free(start + used, size - used)
        extent = Extent(start, slot_bytes, slots)
        self._register(extent)
        return extent

    def _register(self, extent: Extent) -> None:
        self.by_start[extent.start] = extent
        self._extent_end[extent.end] = extent
        if extent.free:
            self._open.setdefault(extent.slot_bytes, {})[extent.start] = extent

    def _close(self, extent: Extent) -> None:
        candidates = self._open[extent.slot_bytes]
        del candidates[extent.start]
        if not candidates:
            del self._open[extent.slot_bytes]

    def _dissolve(self, extent: Extent) -> None:
        if extent.start in self._open.get(extent.slot_bytes, {}):
            self._close(extent)
        del self.by_start[extent.start]
        del self._extent_end[extent.end]
        start, end = self._widen(extent.start, extent.end)
        if start < extent.start:
            self._drop_free(start)
        if end > extent.end:
            self._drop_free(extent.end)
        self._add_free(start, end - start)

    def _widen(self, start: int, end: int) -> tuple[int, int]:
        """The range grown over free ranges that touch it, inside its region."""
        if start not in self._edges:
            start = self._free_end.get(start, start)
        if end not in self._edges:
            end += self._free_at.get(end, 0)
        return start, end

    def _add_free(self, start: int, size: int) -> None:
        self._free_at[start] = size
        self._free_end[start + size] = start
        insort(self._by_size, (size, start))

    def _drop_free(self, start: int) -> None:
        size = self._free_at.pop(start)
        del self._free_end[start + size]
        del self._by_size[bisect_left(self._by_size, (size, start))]
