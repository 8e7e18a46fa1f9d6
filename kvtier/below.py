"""What the lower tiers of a store have: a look into the index of those that are local, less what is being deleted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from kvtier.abc.tier import LENGTH_UNKNOWN, Tier


class Deletion:
    """Of some pages, from the lower tiers, which do so one by one in the background."""

    def __init__(self, tiers: int) -> None:
        self._left = tiers
        self._done = True
        self._changed = threading.Condition()

    def ended(self, done: bool) -> None:
        """One tier has deleted them, or will not."""
        with self._changed:
            self._left -= 1
            self._done &= done
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Whether every tier has deleted them, after at most `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._left == 0, timeout_s) and self._done


class Below:
    """No input or output. Looks may be taken from any thread; what is deleted changes under the store's lock.

    `deleting` counts, by page, the lower tiers that still have to delete it.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._count = len(tiers)
        self._local = tuple(tier for tier in tiers if not tier.capabilities.shared)
        self.deleting: Counter[bytes] = Counter()

    def known(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether a local tier has each page."""
        known = [False] * len(keys)
        for tier in self._local:
            known = [a or b for a, b in zip(known, tier.contains_many(keys), strict=True)]
        if self.deleting:
            known = [has and key not in self.deleting for key, has in zip(keys, known, strict=True)]
        return known

    def find(self, pages: Sequence[int], keys: Sequence[bytes]) -> tuple[dict[int, str], set[int]]:
        """By the numbers of `pages`, whose keys are `keys`: the local tier that has each, and those of which only one
        that is out of service knows."""
        found: dict[int, str] = {}
        down: set[int] = set()
        if self.deleting:
            pages = [page for page, key in zip(pages, keys, strict=True) if key not in self.deleting]
            keys = [key for key in keys if key not in self.deleting]
        for tier in self._local:
            lengths = tier.length_many(keys)
            if lengths and min(lengths) >= 0:
                found.update(dict.fromkeys(pages, tier.name))
                break
            if LENGTH_UNKNOWN in lengths:
                down.update(page for page, n in zip(pages, lengths, strict=True) if n == LENGTH_UNKNOWN)
            found.update((page, tier.name) for page, n in zip(pages, lengths, strict=True) if n >= 0)
            pages = [page for page, n in zip(pages, lengths, strict=True) if n < 0]
            keys = [key for key, n in zip(keys, lengths, strict=True) if n < 0]
        return found, down.difference(found)

    def delete(self, keys: Sequence[bytes]) -> None:
        """Every tier is going to delete these pages."""
        if self._count:
            for key in keys:
                self.deleting[key] += self._count

    def deleted(self, keys: Sequence[bytes]) -> None:
        """One of the tiers has done so."""
        for key in keys:
            self.deleting[key] -= 1
            if self.deleting[key] <= 0:
                del self.deleting[key]
