"""The index of an NVMe tier: pages that a restart finds get their priority anew, since the log does not have it."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.abc.tier import PRIORITY_MAX, PRIORITY_MIN
from kvtier.errors import SpecError
from kvtier.storage_backends.slots.table import SlotTable


class RankedTable(SlotTable):
    """A `SlotTable` whose published pages can change their priority."""

    def rank(self, keys: Sequence[bytes], priority: int) -> int:
        """Give published pages another priority; inside it they count as used now, in the order of `keys`. How many of
        them are here."""
        if not PRIORITY_MIN <= priority <= PRIORITY_MAX:
            raise SpecError(f"priority = {priority}: must be from {PRIORITY_MIN} to {PRIORITY_MAX}")
        there = 0
        for key, row in zip(keys, self.find(keys), strict=True):
            there += row >= 0
            if row >= 0 and self._order.priority(row) != priority:
                self._order.remove(row, key, evicted=False)
                self._order.insert(row, key, priority)
        return there
