"""Which pages were stored under which hash of the engine: the same hash under another key is the same text under
another namespace, so that a miss after a change of weights or form can say so."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

ROWS = 1 << 17
"""Hashes that are remembered at most; 2 MiB. A newer one takes the place of an older one that falls on the same row."""


class Origins:
    """Thread-safe. Hashes are the engine's, any bytes; keys are page keys."""

    def __init__(self, rows: int = ROWS) -> None:
        self._lock = threading.Lock()
        self._hashes = np.zeros(rows, np.uint64)
        self._keys = np.zeros(rows, np.uint64)

    def stored(self, origins: Sequence[bytes], keys: Sequence[bytes]) -> None:
        """Pages were stored; those without an origin are left out."""
        hashes, ids = memoryview(self._hashes), memoryview(self._keys)
        with self._lock:
            for origin, key in zip(origins, keys, strict=True):
                if origin:
                    of_origin = xxh3_64_intdigest(origin)
                    row = of_origin % len(hashes)
                    hashes[row], ids[row] = of_origin, xxh3_64_intdigest(key)

    def elsewhere(self, origins: Sequence[bytes], keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """bool ``[len(keys)]``: whether the page of each hash was last stored under another key than this one."""
        hashes, ids = _numbers(origins), _numbers(keys)
        rows = hashes % np.uint64(len(self._hashes))
        with self._lock:
            found: npt.NDArray[np.bool_] = (self._hashes[rows] == hashes) & (self._keys[rows] != ids) & (hashes != 0)
        return found


def _numbers(digests: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    return np.fromiter(map(xxh3_64_intdigest, digests), np.uint64, len(digests))
