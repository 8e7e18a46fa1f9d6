"""Chunks that LMCache looked up and may still load, until it loads them, unlocks them, or their lease ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from lmcache.v1.distributed.api import ObjectKey

from kvtier.connectors.lmcache.chunk_store import Found


class Held:
    """A lookup: which of its chunks were neither loaded nor unlocked (`left`), how many are being loaded (`busy`), and
    which were loaded (`used`). Guarded by the lock of its `Leases`."""

    __slots__ = ("busy", "found", "left", "since", "used")

    def __init__(self, found: Found, left: dict[int, ObjectKey]) -> None:
        self.found, self.left = found, left
        self.busy = 0
        self.used: set[int] = set()
        self.since = time.monotonic()


class Leases:
    """release: called once per lookup, with the chunks that were used. Thread-safe.

    LMCache unlocks everything that it looked up, once: what it loads, after the load. A load ends a hold, so the unlock
    that follows it ends none: that would be another request's. What LMCache forgets ends after `lease_s`: pins and what
    is remembered are bounded.
    """

    def __init__(self, lease_s: float, release: Callable[[Found, set[int]], object]) -> None:
        self._lease_s, self._release = lease_s, release
        self._lock = threading.Lock()
        self._by_key: dict[ObjectKey, list[tuple[Held, int]]] = {}
        self._all: dict[Held, None] = {}  # in the order in which they end
        self._loaded: dict[ObjectKey, tuple[int, float]] = {}
        """Loads that are still to be unlocked, and when the last of them was, in this order."""

    def __len__(self) -> int:
        """Lookups that are held."""
        return len(self._all)

    def add(self, keys: Sequence[ObjectKey], found: Found, ready: Sequence[int]) -> None:
        """Chunks `ready` of a lookup of `keys` are held from now on."""
        held = Held(found, {i: keys[i] for i in ready})
        with self._lock:
            self._all[held] = None
            for i in ready:
                self._by_key.setdefault(keys[i], []).append((held, i))

    def load(self, keys: Sequence[ObjectKey]) -> dict[Held, dict[int, int]]:
        """The oldest hold of each key: index in its lookup -> place in `keys`. `end` must follow for each."""
        now = time.monotonic()
        with self._lock:
            for key in keys:
                loads, _ = self._loaded.pop(key, (0, 0.0))
                self._loaded[key] = (loads + 1, now)
            return self._take(enumerate(keys))

    def unlock(self, keys: Sequence[ObjectKey]) -> dict[Held, dict[int, int]]:
        """As `load`, of chunks that will not be loaded. The unlock of one that was loaded takes nothing."""
        left: list[tuple[int, ObjectKey]] = []
        with self._lock:
            for at, key in enumerate(keys):
                loads, last = self._loaded.get(key, (0, 0.0))
                if not loads:
                    left.append((at, key))
                elif loads > 1:
                    self._loaded[key] = (loads - 1, last)
                else:
                    del self._loaded[key]
            return self._take(left)

    def _take(self, keys: Iterable[tuple[int, ObjectKey]]) -> dict[Held, dict[int, int]]:
        taken: dict[Held, dict[int, int]] = {}
        for at, key in keys:
            holds = self._by_key.get(key)
            if not holds:
                continue
            held, i = holds.pop(0)
            if not holds:
                del self._by_key[key]
            del held.left[i]
            held.busy += 1
            taken.setdefault(held, {})[i] = at
        return taken

    def end(self, held: Held, taken: int, used: Iterable[int] = ()) -> None:
        """So many of the chunks that were taken of `held` are done with; these of them were loaded."""
        with self._lock:
            held.busy -= taken
            held.used.update(used)
            over = not held.left and not held.busy and held in self._all
            if over:
                del self._all[held]
        if over:
            self._release(held.found, held.used)

    def expire(self) -> int:
        """Let go of what was looked up longer ago than the lease lasts, and is not being loaded; how many lookups."""
        ended: list[Held] = []
        with self._lock:
            latest = time.monotonic() - self._lease_s
            for held in self._all:
                if held.since > latest:
                    break
                if not held.busy:
                    ended.append(held)
            for held in ended:
                del self._all[held]
                for i, key in held.left.items():
                    holds = self._by_key[key]
                    holds.remove((held, i))
                    if not holds:
                        del self._by_key[key]
            for key in [*takewhile(lambda key: self._loaded[key][1] <= latest, self._loaded)]:
                del self._loaded[key]
        for held in ended:
            self._release(held.found, held.used)
        return len(ended)
