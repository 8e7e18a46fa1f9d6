"""Which chunks the tiers of this node hold, in the order in which listeners hear of it."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class Known(NamedTuple):
    """A chunk that is in a tier: the key that it was stored under, and its bytes there."""

    origin: bytes
    nbytes: int


Listener = Callable[[Sequence[Known]], object]


class Catalogue:
    """Chunks by page key. on_stored, on_removed: told of every change exactly once and in order, with no lock held, in
    the thread of one of those who change it. Thread-safe."""

    def __init__(self, on_stored: Listener, on_removed: Listener) -> None:
        self._on_stored, self._on_removed = on_stored, on_removed
        self._lock = threading.Lock()
        self._known: dict[bytes, Known] = {}
        self._keys_of: dict[bytes, tuple[bytes, ...]] = {}
        self._sorted: list[bytes] = []
        self._unsorted: list[bytes] = []
        self._events: deque[tuple[Listener, list[Known]]] = deque()
        self._telling = False

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: bytes) -> bool:
        return key in self._known

    def add(self, chunks: Iterable[tuple[bytes, Known]]) -> list[bool]:
        """Which of them are new."""
        with self._lock:
            fresh = []
            added = []
            for key, known in chunks:
                fresh.append(key not in self._known)
                if not fresh[-1]:
                    continue
                self._known[key] = known
                self._keys_of[known.origin] = (*self._keys_of.get(known.origin, ()), key)
                self._unsorted.append(key)
                added.append(known)
            if added:
                self._events.append((self._on_stored, added))
        self._tell()
        return fresh

    def remove(self, keys: Sequence[bytes]) -> None:
        """Those of them that are there."""
        with self._lock:
            lost = []
            for key in keys:
                known = self._known.pop(key, None)
                if known is None:
                    continue
                left = tuple(k for k in self._keys_of[known.origin] if k != key)
                if left:
                    self._keys_of[known.origin] = left
                else:
                    del self._keys_of[known.origin]
                lost.append(known)
            if lost:
                self._events.append((self._on_removed, lost))
        self._tell()

    def stored_under(self, origins: Iterable[bytes]) -> set[bytes]:
        """Page keys of the chunks with these keys, of whatever layout they are."""
        with self._lock:
            return {key for origin in origins for key in self._keys_of.get(origin, ())}

    def behind(self, key: bytes, most: int) -> list[tuple[bytes, Known]]:
        """The first `most` chunks behind `key`, in the order of their page keys."""
        with self._lock:
            if len(self._sorted) > 2 * len(self._known) + 1024:
                self._sorted, self._unsorted = sorted(self._known), []
            elif self._unsorted:
                self._sorted += self._unsorted
                self._sorted.sort()  # two runs, one of them short: hardly more than a look at each key
                self._unsorted = []
            found: list[tuple[bytes, Known]] = []
            last = key
            for at in range(bisect_right(self._sorted, key), len(self._sorted)):
                if len(found) == most:
                    break
                candidate = self._sorted[at]
                known = self._known.get(candidate)
                if known is not None and candidate != last:  # one that left and came back is in there twice
                    found.append((candidate, known))
                last = candidate
            return found

    def _tell(self) -> None:
        """Whoever comes first tells everything, also what others add meanwhile: one order for all."""
        with self._lock:
            if self._telling:
                return
            self._telling = True
        while True:
            with self._lock:
                if not self._events:
                    self._telling = False
                    return
                listener, chunks = self._events.popleft()
            try:
                listener(chunks)
            except BaseException:
                with self._lock:
                    self._telling = False
                raise
