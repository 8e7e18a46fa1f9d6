"""Which pages of a replayed log can be kept: those that lie whole in a file, inside the capacity, and alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvtier.storage_backends.nvme.segments import SegmentFiles
from kvtier.storage_backends.slots.extents import slot_bytes_of
from kvtier.storage_backends.slots.table import Entry


class SortedOut(NamedTuple):
    """kept: in the order of their puts. behind: whole pages past a capacity that was lowered. gone: pages whose file
    is missing or cut, or whose place a later page took (a damaged log may have lost the record that said so)."""

    kept: list[Entry]
    behind: list[Entry]
    gone: list[Entry]


def sort_out(entries: Sequence[Entry], segments: SegmentFiles, max_record_bytes: int) -> SortedOut:
    """`entries` in the order of their puts."""
    behind: list[Entry] = []
    gone: list[Entry] = []
    placed: list[tuple[int, int, int]] = []  # offset, end, order
    for order, entry in enumerate(entries):
        slot_bytes = slot_bytes_of(entry.meta.nbytes)
        if not segments.inside(entry.offset, slot_bytes, found=True):
            gone.append(entry)
        elif not segments.inside(entry.offset, slot_bytes, found=False) or entry.meta.nbytes > max_record_bytes:
            behind.append(entry)
        else:
            placed.append((entry.offset, entry.offset + slot_bytes, order))
    placed.sort()
    alone: list[tuple[int, int, int]] = []
    for place in placed:
        if alone and place[0] < alone[-1][1]:
            older, newer = sorted((alone[-1], place), key=lambda p: p[2])
            gone.append(entries[older[2]])
            alone[-1] = newer
        else:
            alone.append(place)
    return SortedOut([entries[order] for order in sorted(p[2] for p in alone)], behind, gone)
