"""Which pages of a replayed log can be kept: those that lie whole in a file, inside the capacity, and alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.abc.tier import SLOT_ALIGN
from kvtier.storage_backends.nvme.segments import SegmentFiles
from kvtier.storage_backends.slots.columns import PageColumns


class SortedOut(NamedTuple):
    """kept: in the order of their puts. behind: whole pages past a capacity that was lowered. gone: pages whose file
    is missing or cut, or whose place a later page took (a damaged log may have lost the record that said so)."""

    kept: PageColumns
    behind: PageColumns
    gone: PageColumns


def sort_out(pages: PageColumns, segments: SegmentFiles, max_record_bytes: int) -> SortedOut:
    """`pages` in the order of their puts."""
    offsets, nbytes = pages.pages["offset"], pages.pages["nbytes"]
    ends = offsets + np.maximum(1, -(-nbytes // SLOT_ALIGN)) * SLOT_ALIGN
    whole = segments.inside(offsets, ends - offsets, found=True)
    within = segments.inside(offsets, ends - offsets, found=False) & (nbytes <= max_record_bytes)
    placed = np.flatnonzero(whole & within)
    overrun = _overrun(offsets, ends, placed)
    kept = np.setdiff1d(placed, overrun, assume_unique=True)
    gone = np.union1d(np.flatnonzero(~whole), overrun)
    all_kept = len(kept) == len(pages)
    return SortedOut(
        pages if all_kept else pages.take(kept), pages.take(np.flatnonzero(whole & ~within)), pages.take(gone)
    )


def _overrun(
    offsets: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], placed: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Those of the positions `placed` whose slots a later put overlaps."""
    by_place = placed[np.argsort(offsets[placed], kind="stable")]
    if not (offsets[by_place[1:]] < ends[by_place[:-1]]).any():
        return np.empty(0, np.int64)
    gone: list[int] = []
    alone: list[int] = []
    for at in by_place.tolist():
        if alone and offsets[at] < ends[alone[-1]]:
            older, newer = sorted((alone[-1], at))
            gone.append(older)
            alone[-1] = newer
        else:
            alone.append(at)
    return np.array(sorted(gone), np.int64)
