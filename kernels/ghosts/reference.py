"""What `kernels/csrc/ghosts.cpp` does, in plain Python: a sampled list of pages in the order of their last use.

The distance of a use is the bytes of the pages that were used since the page's last use, and its own: an LRU cache of
that many bytes or more would have had the page. Pages are sampled by their keys alone (SHARDS: Waldspurger et al., FAST
2015): a page is followed if its hash is below a threshold, and the sampled bytes of a distance stand for
``2^32 / threshold`` times as many. When the list holds more than `max_keys` pages, the threshold is lowered.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

KEY_BYTES = 32
HASH_SPACE = 1 << 32
SUB_BUCKETS = 16
BUCKETS = SUB_BUCKETS + 60 * SUB_BUCKETS


def bucket_of(distance: int) -> int:
    """The histogram's bucket of a distance in bytes: sixteen to each doubling."""
    if distance < SUB_BUCKETS:
        return distance
    shift = distance.bit_length() - 5
    return (shift << 4) + (distance >> shift)


def bucket_starts() -> npt.NDArray[np.float64]:
    """float64 ``[BUCKETS + 1]``: the smallest distance of each bucket, and the end of the last one."""
    starts = [*range(SUB_BUCKETS), *((SUB_BUCKETS + sub) << shift for shift in range(60) for sub in range(SUB_BUCKETS))]
    return np.array([*starts, 1 << 64], np.float64)


class GhostStack:
    """Keys are given joined, 32 bytes each. Pages are remembered up to `max_bytes` of distance."""

    def __init__(self, max_keys: int, max_bytes: int) -> None:
        self._max_keys = max_keys
        self._max_bytes = max_bytes
        self._pages: OrderedDict[int, tuple[int, int]] = OrderedDict()  # id: hash, bytes; the last used is the last
        self._histogram = np.zeros(BUCKETS + 1)
        self.threshold = HASH_SPACE
        self.lookups = 0

    @property
    def keys(self) -> int:
        return len(self._pages)

    def looked_up(self, keys: bytes) -> None:
        """Pages were asked for: count the distance of each, the unknown ones apart."""
        for page, page_hash in _split(keys):
            self.lookups += 1
            if page_hash >= self.threshold:
                continue
            weight = HASH_SPACE / self.threshold
            if page not in self._pages:
                self._histogram[BUCKETS] += weight
                continue
            newer = 0
            for other, (_, nbytes) in reversed(self._pages.items()):
                if other == page:
                    break
                newer += nbytes
            self._histogram[bucket_of(self._scaled(newer) + self._pages[page][1])] += weight
            self._pages.move_to_end(page)

    def stored(self, keys: bytes, nbytes: npt.NDArray[np.int64]) -> None:
        """Pages were stored, `nbytes` each: they are the last used from now on."""
        for (page, page_hash), size in zip(_split(keys), nbytes.tolist(), strict=True):
            if page_hash >= self.threshold:
                continue
            self._pages[page] = (page_hash, size)
            self._pages.move_to_end(page)
            while len(self._pages) > self._max_keys:
                self.threshold -= self.threshold // 8 or 1
                self._pages = OrderedDict((k, v) for k, v in self._pages.items() if v[0] < self.threshold)
            while len(self._pages) > 1 and self._scaled(sum(n for _, n in self._pages.values())) > self._max_bytes:
                self._pages.popitem(last=False)

    def dropped(self, keys: bytes) -> None:
        """Pages were deleted, not evicted: no cache of any size would have them."""
        for page, page_hash in _split(keys):
            if page_hash < self.threshold:
                self._pages.pop(page, None)

    def histogram(self, out: npt.NDArray[np.float64]) -> None:
        """float64 ``[BUCKETS + 1]``: lookups by distance; the last number counts those of unknown pages."""
        out[:] = self._histogram

    def _scaled(self, nbytes: int) -> int:
        return nbytes * HASH_SPACE // self.threshold


def _split(keys: bytes) -> list[tuple[int, int]]:
    """Per key an id, its first 8 bytes, and a hash, the next 4; keys are digests, so both are evenly spread."""
    return [
        (int.from_bytes(keys[at : at + 8], "little"), int.from_bytes(keys[at + 8 : at + 12], "little"))
        for at in range(0, len(keys), KEY_BYTES)
    ]
