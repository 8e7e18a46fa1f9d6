"""The index of a local tier: which page lies in which slot, who holds it, and which one goes next.

Both local tiers keep their pages in one SlotTable. Bookkeeping only: it moves no bytes, does no input or output and
is not thread-safe; every call is made under the tier's lock.

A page's life: `reserve` -> (bytes are written) -> `stage` -> `publish`, or `abort` anywhere before `publish`. An order
(`kvtier.storage_backends.slots.order`) says which page makes room; only published pages that are neither pinned nor
kept for another reason may. Where the next page to go has slots of another size, its whole extent is emptied, and its
neighbours' where one is not enough, so that the space moves between size classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.abc.tier import (
    CHECKSUM_BYTES,
    KEY_BYTES,
    PRIORITY_MAX,
    PRIORITY_MIN,
    PROBE_PREFIX,
    SLOT_ALIGN,
    PageMeta,
    PutStatus,
    Removal,
    Slot,
    TierUsage,
)
from kvtier.errors import SpecError
from kvtier.storage_backends.slots.columns import Entry, PageColumns
from kvtier.storage_backends.slots.descriptions import ORIGIN_MAX_BYTES, Descriptions, check_meta
from kvtier.storage_backends.slots.extents import Extent, ExtentAllocator, Region, slot_bytes_of
from kvtier.storage_backends.slots.order import Age, LruOrder, Order
from kvtier.storage_backends.slots.rows import CHECKSUM_AT, DOOMED, FILLING, FREE, LIVE, ROW_BYTES, STAGED, Rows

_MANY = 32  # rows from which whole columns are faster than one row after the other
_SOON_SHARE = 32
_SOON_MIN = 16
"""Pages that would make room soon: one part in so many, at least so many, at most half."""
_PROTECTED = 1 << 7
"""The bit of a row's `keep` that says: not to be evicted, because somebody asked so."""


class Removed(NamedTuple):
    key: bytes
    why: Removal


class SlotTable:
    """See the module's docstring. A `row` is the handle of a reserved or pinned page.

    order: which page makes room. ttl_s: pages that were not used for this long are gone, counted as evicted.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        max_record_bytes: int,
        order: type[Order] = LruOrder,
        ttl_s: float | None = None,
    ) -> None:
        self.max_record_bytes = max_record_bytes
        self._slots = ExtentAllocator(regions)
        self.rows = Rows()
        self._order = order(self.rows, self._slots.space_bytes)
        self._described = Descriptions(self.rows, self._order)
        self._age = None if ttl_s is None else Age(ttl_s)
        self._live: dict[bytes, int] = {}
        self._filling: dict[bytes, int] = {}
        self.removed: list[Removed] = []  # since `take_removed`
        self._changes = 0  # moves whenever a slot may have become evictable or free
        self._spare = -1  # a free row that still has its slot: of the page replaced last, mostly what is wanted next
        self._full_since: dict[int, int] = {}  # slot size -> _changes when no room could be made
        self._counts = dict.fromkeys(Removal, 0)
        self._replaced = 0  # of those that were deleted
        self._probes = 0
        self.used_bytes = 0
        self.recovered_pages = 0
        self.stored_pages = 0

    # ---- writing

    def reserve(self, key: bytes, nbytes: int) -> int | PutStatus:
        """The row of a slot for `nbytes`, pinned and invisible; or EXISTS, TOO_LARGE, FULL."""
        if len(key) != KEY_BYTES:
            raise SpecError(f"a page key has {KEY_BYTES} bytes, got {len(key)}")
        if nbytes < 0:
            raise SpecError(f"a record cannot have {nbytes} bytes")
        if self._age is not None:
            self._expire()
        if key in self._live or key in self._filling:
            return PutStatus.EXISTS
        if nbytes > self.max_record_bytes:
            return PutStatus.TOO_LARGE
        slot_bytes = -(-nbytes // SLOT_ALIGN) * SLOT_ALIGN or SLOT_ALIGN
        rows = self.rows
        row, self._spare = self._spare, -1
        if row >= 0 and self._slots.by_start[rows.extent[row]].slot_bytes == slot_bytes:
            rows.nbytes[row], rows.state[row], rows.pin[row] = nbytes, FILLING, 1
            rows.key_bytes[row * KEY_BYTES : (row + 1) * KEY_BYTES] = key
            self._filling[key] = row
            self.used_bytes += slot_bytes
            return row
        if row >= 0:
            self._slots.release(rows.extent[row], rows.offset[row])
            rows.vacate(row)
        row = rows.vacant.pop() if rows.vacant else rows.new()
        taken = self._slots.take(slot_bytes, row)
        if taken is None and self._make_room(slot_bytes):
            taken = self._slots.take(slot_bytes, row)
        if taken is None:
            rows.vacate(row)
            return PutStatus.FULL
        extent, offset = taken
        rows.offset[row], rows.extent[row], rows.nbytes[row] = offset, extent.start, nbytes
        rows.state[row], rows.pin[row] = FILLING, 1
        rows.key_bytes[row * KEY_BYTES : (row + 1) * KEY_BYTES] = key
        self._filling[key] = row
        self.used_bytes += slot_bytes
        return row

    def stage(self, row: int, meta: PageMeta) -> None:
        """Describe the page in a reserved row. It stays invisible, but is part of `entries`."""
        self._expect(row, FILLING)
        check_meta(meta)
        rows = self.rows
        if slot_bytes_of(meta.nbytes) > self._slots.extent_at(rows.extent[row]).slot_bytes:
            raise SpecError(f"a record of {meta.nbytes} bytes in a slot reserved for {rows.nbytes[row]}")
        self._described.set(row, meta)
        rows.state[row] = STAGED

    def publish(self, row: int, priority: int = 0, keep: int = 0) -> None:
        """Make a staged page visible and the most recently used. It stays pinned once, by its writer, and cannot be
        evicted while a bit of `keep` is set."""
        self._expect(row, STAGED)
        key = self.rows.key(row)
        del self._filling[key]
        self._live[key] = row
        self.rows.state[row] = LIVE
        self._order.insert(row, key, priority)
        self.rows.keep[row] = keep
        if key.startswith(PROBE_PREFIX):
            self._probes += 1
        else:
            self.stored_pages += 1

    def commit(self, rows: Sequence[int], keys: Sequence[bytes], metas: Sequence[PageMeta], keep: int = 0) -> None:
        """`stage` and `publish` of reserved rows, whose keys are `keys`; all are checked before one is."""
        r, filling, live, described = self.rows, self._filling, self._live, self._described
        for row, key, meta in zip(rows, keys, metas, strict=True):
            if filling.get(key) != row or r.state[row] != FILLING:
                raise _misused(row)
            check_meta(meta)
            if meta[0] > r.nbytes[row]:
                raise SpecError(f"a record of {meta.nbytes} bytes in a slot reserved for {r.nbytes[row]}")
        for row, key, meta in zip(rows, keys, metas, strict=True):
            described.set(row, meta)
            del filling[key]
            live[key] = row
            r.state[row], r.keep[row] = LIVE, keep
            self._order.insert(row, key, meta[6])
            if key.startswith(PROBE_PREFIX):
                self._probes += 1
            else:
                self.stored_pages += 1

    def publish_over(self, row: int, key: bytes, meta: PageMeta, replaces: bytes) -> bool:
        """`stage`, `publish` and `unpin` of a reserved row, whose key is `key`, and `remove` of the page under
        `replaces` (empty: none), which is not among `removed`; whether it was there. In one, since the cache server
        does so with every value."""
        rows, live = self.rows, self._live
        if rows.state[row] != FILLING:
            self._expect(row, FILLING)
        nbytes, form, valid_tokens, checksum, spec, origin, priority = meta
        spec_id = self._described.spec_ids.get(spec, -1)
        if (
            spec_id < 0  # one that is known was checked
            or len(checksum) != CHECKSUM_BYTES
            or len(origin) > ORIGIN_MAX_BYTES
            or nbytes < 0
            or not 0 <= form < 1 << 16
            or not 0 <= valid_tokens < 1 << 31
            or not PRIORITY_MIN <= priority <= PRIORITY_MAX
        ):
            check_meta(meta)
            spec_id = self._described.spec_id(spec)
        if nbytes > rows.nbytes[row]:
            raise SpecError(f"a record of {nbytes} bytes in a slot reserved for {rows.nbytes[row]}")
        del self._filling[key]
        rows.nbytes[row], rows.form[row], rows.valid_tokens[row] = nbytes, form, valid_tokens
        at = row * ROW_BYTES + CHECKSUM_AT
        rows.raw[at : at + CHECKSUM_BYTES] = checksum
        rows.spec[row] = spec_id
        if origin:
            self._described.origins[row] = origin
        live[key] = row
        rows.state[row], rows.pin[row], rows.keep[row] = LIVE, 0, 0
        self._changes += 1
        if key.startswith(PROBE_PREFIX):
            self._probes += 1
        else:
            self.stored_pages += 1
        old = live.pop(replaces, -1)
        if old < 0:
            self._order.insert(row, key, priority)
            return False
        self._order.replace(row, key, priority, old, replaces)
        self._replaced += 1
        rows.keep[old] = 0
        if rows.pin[old]:
            rows.state[old] = DOOMED
            return True
        self._described.origins.pop(old, None)
        rows.state[old] = FREE
        start = rows.extent[old]
        if self._spare < 0:
            self._spare = old
            self.used_bytes -= self._slots.by_start[start].slot_bytes
        else:
            rows.vacant.append(old)
            self.used_bytes -= self._slots.release(start, rows.offset[old])
        return True

    def abort(self, row: int) -> bytes:
        """Give a reserved or staged row back; returns its key."""
        if self.rows.state[row] != STAGED:
            self._expect(row, FILLING)
        key = self.rows.key(row)
        del self._filling[key]
        self._free(row)
        return key

    # ---- reading

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Rows of published pages, -1 where absent."""
        get = self._live.get
        return [get(key, -1) for key in keys]

    def lengths(self, keys: Sequence[bytes]) -> list[int]:
        """Record lengths in bytes, -1 where absent."""
        self._expire()
        get, nbytes = self._live.get, self.rows.nbytes
        return [-1 if (row := get(key, -1)) < 0 else nbytes[row] for key in keys]

    def pin(self, keys: Sequence[bytes], *, use: bool = True) -> list[int]:
        """Pin published pages and, with `use`, make them the most recently used, in the order of `keys`. Their rows, -1
        where absent."""
        self._expire()
        found = self.find(keys)
        present = np.array([row for row in found if row >= 0] if -1 in found else found, np.int64)
        if len(present):
            if len(found) < _MANY:
                pin = self.rows.pin
                for row in found:
                    if row >= 0:
                        pin[row] += 1
            else:
                np.add.at(self.rows.pins, present, 1)
            if use:
                self._order.use(present)
        return found

    def pin_one(self, key: bytes) -> tuple[int, int, int, bytes] | None:
        """As `pin`, of one page: its row, the offset and the bytes of its record, and its checksum."""
        if self._age is not None:
            self._expire()
        row = self._live.get(key, -1)
        if row < 0:
            return None
        rows = self.rows
        rows.pin[row] += 1
        self._order.use_one(row)
        at = row * ROW_BYTES + CHECKSUM_AT
        return row, rows.offset[row], rows.nbytes[row], bytes(rows.raw[at : at + CHECKSUM_BYTES])

    def touch(self, keys: Sequence[bytes]) -> None:
        """Pages were used, in the order of `keys`, without being read here."""
        self._expire()
        present = np.array([row for row in self.find(keys) if row >= 0], np.int64)
        if len(present):
            self._order.use(present)

    def demote(self, keys: Sequence[bytes]) -> None:
        """Let pages be the next to go, until they are used again."""
        for row in self.find(keys):
            if row >= 0:
                self._order.demote(row)

    def pages(self, found: Sequence[int]) -> list[tuple[Slot, PageMeta] | None]:
        """What lies in pinned rows; None for -1."""
        described = iter(self.describe([row for row in found if row >= 0]))
        return [None if row < 0 else next(described) for row in found]

    def unpin(self, rows: Sequence[int]) -> None:
        """Let pinned rows go, one count each. A removed page's slot becomes free with its last pin."""
        pin, state = self.rows.pin, self.rows.state
        self._changes += 1
        if len(rows) >= _MANY:
            several = np.array(rows, np.int64)
            left = self.rows.pins[several] - 1
            if left.min() >= 0 and not (self.rows.states[several] == DOOMED).any() and len(set(rows)) == len(rows):
                self.rows.pins[several] = left
                return
        for row in rows:
            if pin[row] < 1:
                raise SpecError(f"slot {row} is not pinned")
            pin[row] -= 1
            if not pin[row] and state[row] == DOOMED:
                self._free(row)

    def describe(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> list[tuple[Slot, PageMeta]]:
        """What lies in pinned rows, and where."""
        return self._described.of(rows)

    def slot(self, row: int) -> Slot:
        return Slot(row, self.rows.offset[row], self.rows.nbytes[row])

    def holds(self, key: bytes, row: int) -> bool:
        """Whether the page under `key` is the one in `row`, and visible."""
        return self._live.get(key) == row

    def columns(self, *, staged: bool) -> PageColumns:
        """Published pages, and with `staged` the staged ones too, the least recently used first. A snapshot."""
        states = self.rows.states[: self.rows.count]
        rows = np.flatnonzero((states == LIVE) | (states == STAGED) if staged else states == LIVE)
        rows = rows[np.argsort(self._order.ranks(rows), kind="stable")]
        return self._described.columns(rows)

    def entries(self, *, staged: bool) -> list[Entry]:
        """As `columns`, page by page."""
        return self.columns(staged=staged).entries()

    # ---- keeping

    def keep(self, keys: Sequence[bytes], bits: int) -> int:
        """Set `bits` of the published pages under `keys`: they cannot be evicted while one is set. How many those
        are."""
        rows = [row for row in self.find(keys) if row >= 0]
        for row in rows:
            self.rows.keep[row] |= bits
        return len(rows)

    def let_go(self, rows: Sequence[int], bits: int) -> None:
        """Clear `bits` of rows."""
        keep = self.rows.keep
        for row in rows:
            keep[row] &= ~bits & 0xFF
        self._changes += 1

    def kept(self, bits: int, limit: int, *, last_first: bool = False, soon: bool = False) -> list[bytes]:
        """Keys of up to `limit` published pages with one of `bits` set, in the order in which they would make room, or
        in the opposite one. soon: only among the pages that would make room before others."""
        count = self.rows.count
        if soon:
            rows = self._order.soon(max(1, min(max(_SOON_MIN, len(self._live) // _SOON_SHARE), len(self._live) // 2)))
            rows = rows[self.rows.keeps[rows] & bits != 0]
        else:
            rows = np.flatnonzero((self.rows.keeps[:count] & bits != 0) & (self.rows.states[:count] == LIVE))
        ranks = self._order.ranks(rows)
        if last_first:
            ranks = -ranks
        if limit < len(rows):
            first = np.argpartition(ranks, limit)[:limit]
            rows, ranks = rows[first], ranks[first]
        return [self.rows.key(row) for row in rows[np.argsort(ranks, kind="stable")].tolist()]

    def protect(self, keys: Sequence[bytes], protected: bool) -> int:
        """Keep pages from being evicted, or end that; how many of them are here."""
        if protected:
            return self.keep(keys, _PROTECTED)
        rows = [row for row in self.find(keys) if row >= 0]
        self.let_go(rows, _PROTECTED)
        return len(rows)

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

    # ---- removing

    def remove(self, key: bytes, why: Removal) -> bool:
        """Make a published page invisible; its slot is freed now, or with its last pin."""
        row = self._live.pop(key, -1)
        if row < 0:
            return False
        self._order.remove(row, key, evicted=why is Removal.EVICTED)
        self.rows.keep[row] = 0
        if key.startswith(PROBE_PREFIX):
            self._probes -= 1
        else:
            self._counts[why] += 1
        self.removed.append(Removed(key, why))
        if self.rows.pin[row]:
            self.rows.state[row] = DOOMED
        else:
            self._free(row)
        return True

    def take_removed(self) -> list[Removed]:
        """Pages that left since the last call, in order."""
        removed, self.removed = self.removed, []
        return removed

    # ---- opening, counting

    def recover(self, pages: PageColumns) -> None:
        """Fill an empty table, the least recently used page first. Slots must not overlap."""
        rows = self.rows
        first = self._described.recover(pages)
        last = first + len(pages)
        self._order.recover(first, last)
        rows.states[first:last] = LIVE
        self._live = dict(zip(pages.keys(), range(first, last), strict=True))
        slots = np.maximum(1, -(-pages.pages["nbytes"] // SLOT_ALIGN)) * SLOT_ALIGN
        order = np.argsort(pages.pages["offset"], kind="stable")
        for start, slot_bytes, members in self._slots.runs(pages.pages["offset"][order], slots[order], order + first):
            extent = self._slots.restore(start, slot_bytes, members)
            rows.extents[extent.members()] = start
        self.used_bytes += int(slots.sum())
        self.recovered_pages += len(pages)

    def count_lost(self, pages: int, why: Removal) -> None:
        """Pages found on opening that could not be kept."""
        self.recovered_pages += pages
        self._counts[why] += pages

    def __len__(self) -> int:
        return len(self._live)

    def usage(self, *, capacity_bytes: int, put_bytes: int, get_bytes: int) -> TierUsage:
        return TierUsage(
            capacity_bytes=capacity_bytes,
            used_bytes=self.used_bytes,
            resident_pages=len(self._live) - self._probes,
            recovered_pages=self.recovered_pages,
            stored_pages=self.stored_pages,
            evicted_pages=self._counts[Removal.EVICTED],
            deleted_pages=self._counts[Removal.DELETED] + self._replaced,
            quarantined_pages=self._counts[Removal.QUARANTINED],
            put_bytes=put_bytes,
            get_bytes=get_bytes,
        )

    # ---- inside

    def _expect(self, row: int, state: int) -> None:
        if not 0 <= row < self.rows.count or self.rows.state[row] != state:
            raise _misused(row)

    def _free(self, row: int) -> None:
        rows = self.rows
        self.used_bytes -= self._slots.release(rows.extent[row], rows.offset[row])
        self._described.origins.pop(row, None)
        rows.vacate(row)
        self._changes += 1

    def _make_room(self, slot_bytes: int) -> bool:
        """Evict until a slot of `slot_bytes` can be had; False where nothing more can go."""
        if self._full_since.get(slot_bytes) == self._changes:
            return False
        blocked: set[int] = set()
        for row in self._order.victims():
            extent = self._slots.extent_at(self.rows.extent[row])
            if extent.slot_bytes == slot_bytes:
                self.remove(self.rows.key(row), Removal.EVICTED)
                return True
            if extent.start in blocked:
                continue
            emptied = self._slots.neighbourhood(extent, slot_bytes, self._newest_use)
            if emptied is None:
                blocked.add(extent.start)
                continue
            for member in [m for e in emptied for m in e.members()]:
                self.remove(self.rows.key(member), Removal.EVICTED)
            return True
        self._full_since[slot_bytes] = self._changes
        return False

    def _newest_use(self, extent: Extent) -> int | None:
        """The rank of the page of an extent that would go last; None where one of its pages may not go."""
        pin, state, keep, rank = self.rows.pin, self.rows.state, self.rows.keep, self._order.rank
        newest: int | None = None
        for row in extent.members():
            if pin[row] or keep[row] or state[row] != LIVE:
                return None
            newest = rank(row) if newest is None else max(newest, rank(row))
        return newest

    def _expire(self) -> None:
        """Let go of pages that are older than their time."""
        if self._age is None or (horizon := self._age.horizon(self._order.clock)) < 0:
            return
        rows, count = self.rows, self.rows.count
        old = (rows.states[:count] == LIVE) & (rows.pins[:count] == 0) & (rows.keeps[:count] == 0)
        for row in np.flatnonzero(old & (self._order.last_use() <= horizon)).tolist():
            self.remove(rows.key(row), Removal.EVICTED)


def _misused(row: int) -> SpecError:
    return SpecError(f"slot {row} is not reserved, or was published or given back already")
