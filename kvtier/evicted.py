"""Which pages left a tier to make room, and when: a miss can say so, and a page that comes again was used twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

_REMEMBERED = 65536


class Evicted:
    """The last pages that were evicted. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._when_s: dict[bytes, float] = {}  # of the monotonic clock; the latest are at the end
        self.any = False
        """Whether there are some."""

    def __contains__(self, key: object) -> bool:
        return key in self._when_s

    def among(self, keys: Iterable[bytes]) -> set[bytes]:
        """Those of `keys` that left."""
        when = self._when_s
        return {key for key in keys if key in when} if when else set()

    def add(self, keys: Sequence[bytes]) -> None:
        """Pages have just left."""
        with self._lock:
            now = time.monotonic()
            for key in keys:
                self._when_s.pop(key, None)
                self._when_s[key] = now
            self.any = bool(self._when_s)
            while len(self._when_s) > _REMEMBERED:
                del self._when_s[next(iter(self._when_s))]

    def forget(self, keys: Sequence[bytes]) -> None:
        """Pages were deleted: that is why they are missing from now on."""
        with self._lock:
            for key in keys:
                self._when_s.pop(key, None)
            self.any = bool(self._when_s)

    def ages_s(self, keys: Sequence[bytes]) -> list[float]:
        """How long ago each page left; 0 of those that were forgotten."""
        now = time.monotonic()
        return [now - self._when_s.get(key, now) for key in keys]
