"""Records between slots and callers' buffers: as they are where O_DIRECT can take them, by way of an aligned buffer
elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.abc.tier import PutItem
from kvtier.storage_backends.nvme.aligned import BouncePool, copy, extended, is_aligned, zero
from kvtier.storage_backends.nvme.segments import SegmentFiles
from kvtier.storage_backends.slots.extents import slot_bytes_of


class SlotTransfers:
    """Of the slots in `segments`, by their addresses. Any thread may call it; every method may raise OSError."""

    def __init__(self, segments: SegmentFiles) -> None:
        self._segments = segments
        self._bounce = BouncePool()

    def write(self, item: PutItem, offset: int) -> None:
        nbytes = item.meta.nbytes
        slot_bytes = slot_bytes_of(nbytes)
        if not self._segments.direct or (nbytes == slot_bytes and is_aligned(item.data)):
            self._segments.write(offset, item.data)
        elif item.padded and is_aligned(item.data):
            self._segments.write(offset, extended(item.data, slot_bytes))
        else:
            with self.aligned(slot_bytes) as buffer:
                copy(buffer, item.data)
                zero(buffer[nbytes:])
                self._segments.write(offset, buffer)

    def read(self, offset: int, out: memoryview, nbytes: int) -> bool:
        """Read a record of `nbytes` to the start of `out`, which may be overwritten behind it; False where the file has
        not all of it."""
        slot_bytes = slot_bytes_of(nbytes)
        if not self._segments.direct:
            return self._segments.read(offset, out[:nbytes]) == nbytes
        if len(out) >= slot_bytes and is_aligned(out):
            return self._segments.read(offset, out[:slot_bytes]) >= nbytes
        with self.aligned(slot_bytes) as buffer:
            whole = self._segments.read(offset, buffer) >= nbytes
            copy(out, buffer[:nbytes])
        return whole

    @contextmanager
    def aligned(self, nbytes: int) -> Iterator[memoryview]:
        """Memory of our own for a transfer, which nobody else can touch; what it holds is left over."""
        with self._bounce.buffer(nbytes) as buffer:
            yield buffer
