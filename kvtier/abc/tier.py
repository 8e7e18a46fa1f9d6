"""The contract of a tier: a place that keeps cold pages as opaque bytes under 32-byte keys.

Synchronous, thread-safe, batched. No call raises for what can happen to stored data: it answers with a named
state per key, in the order of the keys. Errors are raised for misuse only (closed tier, wrong argument).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

KEY_BYTES = 32
CHECKSUM_BYTES = 16
FINGERPRINT_BYTES = 16
PRIORITY_MIN, PRIORITY_MAX = -1, 1
PROBE_PREFIX = b"kvtier readiness"
"""Keys of records that only try whether a tier works begin with this: they are not among the counts of its pages."""
SLOT_ALIGN = 4096
"""Slots of local tiers start at multiples of this, so that O_DIRECT can move them as they are."""


LENGTH_ABSENT = -1
LENGTH_UNKNOWN = -2


class PutStatus(Enum):
    """What became of one page offered to a tier."""

    STORED = "stored"
    EXISTS = "exists"  # the tier already has a page under this key; nothing was written
    FULL = "full"  # no room could be made: everything evictable was evicted
    TOO_LARGE = "too_large"  # larger than the tier's largest record
    FAILED = "failed"  # input/output error; the page is not in the tier
    DEADLINE = "deadline"


class GetStatus(Enum):
    """What became of one page asked from a tier."""

    HIT = "hit"
    ABSENT = "absent"
    CORRUPT = "corrupt"  # found, bad, deleted and counted as quarantined
    FAILED = "failed"  # input/output error
    DEADLINE = "deadline"


class Removal(Enum):
    """Why a tier let a page go."""

    EVICTED = "evicted"
    DELETED = "deleted"
    QUARANTINED = "quarantined"


class Note(Enum):
    """What is kept beside the pages. NAMESPACES: what they are. PINS: which of them somebody pinned."""

    NAMESPACES = "namespaces"
    PINS = "pins"


class PageMeta(NamedTuple):
    """What a tier keeps beside a page's bytes. A tuple, because one is made per page of every look-up.

    nbytes: length of the record. form: how the bytes are encoded (`kvtier.abc.codec.Form`).
    valid_tokens: rows past these are zeros. checksum: 16 bytes, xxh3-128 seeded with the page key
    (`kvtier.keys.checksum`). spec: fingerprint of the PageSpec, 16 bytes. origin: the engine's own key, opaque,
    at most 255 bytes. priority: pages of a lower one make room first, PRIORITY_MIN to PRIORITY_MAX; known until the
    tier is closed.
    """

    nbytes: int
    form: int
    valid_tokens: int
    checksum: bytes
    spec: bytes
    origin: bytes = b""
    priority: int = 0


class PutItem(NamedTuple):
    """One page to put: `data` is `meta.nbytes` long. A buffer that is 4 KiB-aligned and followed by readable
    bytes up to the next multiple of 4 KiB (a host slot) is written without a copy where `padded` says so."""

    key: bytes
    meta: PageMeta
    data: memoryview
    padded: bool = False


class GetResult(NamedTuple):
    """The answer for one key. `meta` is set for a HIT only, and its bytes are then in the caller's buffer,
    verified against `meta.checksum`."""

    status: GetStatus
    meta: PageMeta | None = None


@dataclass(frozen=True, slots=True)
class TierCapabilities:
    """Declared, never guessed. persistent: survives the process. shared: other processes see the same pages."""

    persistent: bool
    shared: bool


@dataclass(frozen=True, slots=True)
class TierUsage:
    """Counts since the tier was opened, except `recovered_pages`: what was found on opening.

    ``recovered + stored - evicted - deleted - quarantined == resident`` holds at any time.
    """

    capacity_bytes: int
    used_bytes: int
    resident_pages: int
    recovered_pages: int
    stored_pages: int
    evicted_pages: int
    deleted_pages: int
    quarantined_pages: int
    put_bytes: int
    get_bytes: int


RemovalListener = Callable[[Sequence[bytes], Removal], None]


class Tier(ABC):
    """See the module's docstring. Every method may be called from any thread, several at once."""

    name: str
    capabilities: TierCapabilities

    @abstractmethod
    def put_many(self, items: Sequence[PutItem], deadline_s: float | None = None) -> list[PutStatus]:
        """Store pages; blocks until they are committed or given up. A page is visible only once all of its bytes
        are stored. Evicts to make room. Order of the answers is the order of `items`. With `deadline_s` (seconds
        from now), pages that could not be started in time are DEADLINE."""

    @abstractmethod
    def get_many_into(
        self, keys: Sequence[bytes], outs: Sequence[memoryview], deadline_s: float | None = None
    ) -> list[GetResult]:
        """Read pages into `outs` and verify them; blocks. `outs[i]` is writable and at least
        ``length_many([keys[i]])[0]`` long; what lies behind the record may be overwritten up to the buffer's end. A
        page that fails verification is deleted, and CORRUPT. Reading a page refreshes its recency."""

    @abstractmethod
    def length_many(self, keys: Sequence[bytes]) -> list[int]:
        """Length of each page in bytes, LENGTH_ABSENT where there is none. Index only where the tier is local: fast, no
        data read. A shared tier asks its servers, and answers LENGTH_UNKNOWN for those that do not answer; a local one
        for pages whose device is out of service."""

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        return [n >= 0 for n in self.length_many(keys)]

    @abstractmethod
    def delete_many(self, keys: Sequence[bytes], removal: Removal = Removal.DELETED) -> int:
        """Remove pages; returns how many were there. Pinned pages go as soon as they are unpinned, and are
        invisible from now on."""

    @abstractmethod
    def usage(self) -> TierUsage: ...

    def scan(self) -> Iterable[tuple[bytes, PageMeta]]:
        """Pages that were in the tier at some moment of the call, index only; none of a shared tier's."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Release everything within 2 s; waits for calls under way. Safe to call twice."""

    def touch_many(self, keys: Sequence[bytes]) -> None:
        """Pages were used, in the order of `keys`, where another tier had them too. Index only; nothing where the tier
        keeps no order of its own."""
        return

    def demote_many(self, keys: Sequence[bytes]) -> None:
        """Let pages be the next to make room until they are used again: a tier above has them too. As `touch_many`."""
        return

    def protect_many(self, keys: Sequence[bytes], protected: bool) -> int:
        """Let pages not make room for others from now on, or end that; how many of them are here. Ends with closing.
        Does nothing where the tier keeps no order of its own."""
        return 0

    def rank_many(self, keys: Sequence[bytes], priority: int) -> int:
        """Give pages another priority (`PageMeta.priority`): what a restart found has none of its own. Inside that
        priority they count as used now, in the order of `keys`. How many of them are here. Does nothing where the tier
        keeps no order of its own, or no pages over a restart."""
        return 0

    def note(self, data: bytes, note: Note = Note.NAMESPACES) -> None:
        """Keep `data` beside the pages, in place of an earlier note of the kind. Never raises: pages are served without
        it. Nothing where pages do not outlive the process, or are not this process's alone."""
        return

    def notes(self, note: Note = Note.NAMESPACES) -> list[bytes]:
        """What is kept by `note`, of every place that the tier has; found on opening, too."""
        return []

    def set_removal_listener(self, listener: RemovalListener | None) -> None:
        """`listener(keys, why)` is called, outside the tier's lock, after pages left the tier."""
        self._removal_listener = listener

    _removal_listener: RemovalListener | None = None


class Slot(NamedTuple):
    """A pinned place in a staging tier's arena: `offset` and `nbytes` in bytes. `id` is the tier's own handle."""

    id: int
    offset: int
    nbytes: int


class StagingTier(Tier):
    """A tier whose bytes lie in this process's memory: codecs write into its slots and read from them.

    A page is written as reserve -> fill -> commit (or abort), and read as pin -> read -> unpin. Reserved slots are
    invisible; pinned pages are never evicted or moved. No method here blocks on input or output.
    """

    arena: npt.NDArray[np.uint8]
    """All of the tier's memory, one-dimensional, writable, for the codec and for lower tiers to read and write."""
    memory: memoryview
    """The same."""

    @abstractmethod
    def reserve_many(self, keys: Sequence[bytes], nbytes: Sequence[int]) -> list[Slot | PutStatus]:
        """A slot to fill per key, or EXISTS (committed or being filled), FULL or TOO_LARGE. Evicts to make room;
        never waits. Padding behind `nbytes` up to 4 KiB is zeroed here."""

    @abstractmethod
    def commit_many(
        self, keys: Sequence[bytes], slots: Sequence[Slot], metas: Sequence[PageMeta], unwritten: int = 0
    ) -> None:
        """Publish filled slots. Each stays pinned once, by its writer, until `unpin_many`. `meta.nbytes` may be
        smaller than the slot's. unwritten: as of `expect_writing`."""

    def reserve_one(self, key: bytes, nbytes: int) -> Slot | PutStatus:
        """As `reserve_many`, of one page."""
        return self.reserve_many([key], [nbytes])[0]

    @abstractmethod
    def commit_over(self, key: bytes, slot: Slot, meta: PageMeta, replaces: bytes) -> bool:
        """Publish a filled slot and let go of it. `replaces`: a page that is removed in the same step, without news to
        the listener (empty: none); whether it was here."""

    @abstractmethod
    def abort_many(self, keys: Sequence[bytes], slots: Sequence[Slot]) -> None:
        """Give reserved slots back unpublished."""

    @abstractmethod
    def pin_many(self, keys: Sequence[bytes]) -> list[int]:
        """Pin the committed page under each key and refresh its recency. The ids of their slots, -1 where absent.
        Counts nest. Fast: an engine's own thread calls it with thousands of keys; `pinned_many` tells the rest."""

    @abstractmethod
    def pin_one(self, key: bytes) -> tuple[int, int, int, bytes] | None:
        """As `pin_many`, of one page: the id of its slot, where its record lies in `memory`, its length and checksum;
        None where it is absent."""

    @abstractmethod
    def unpin_one(self, slot: int) -> None:
        """As `unpin_many`, of one slot by its id."""

    @abstractmethod
    def hold_many(self, keys: Sequence[bytes]) -> list[int]:
        """As `pin_many`, but the pages do not count as used."""

    @abstractmethod
    def expect_writing(self, keys: Sequence[bytes], tiers: int) -> None:
        """Pages must be offered to lower tiers before they may be evicted: a bit per tier, at most seven of them."""

    @abstractmethod
    def written(self, ids: Sequence[int], tiers: int) -> None:
        """The pages in these pinned slots were offered to those tiers."""

    @abstractmethod
    def unwritten(self, tiers: int, limit: int, *, last_first: bool = False, soon: bool = False) -> list[bytes]:
        """Up to `limit` pages that must still be offered to one of `tiers`, the next to be evicted first (or last).
        soon: only among those whose turn comes soon, a 32nd of all; how many pages between them need no writing does
        not matter."""

    @abstractmethod
    def pinned_many(self, ids: Sequence[int]) -> list[tuple[Slot, PageMeta]]:
        """Where the pages in pinned slots lie, and what they are."""

    @abstractmethod
    def unpin_many(self, ids: Sequence[int]) -> None:
        """Let go of slots by their ids, one count each."""

    def view(self, slot: Slot) -> memoryview:
        """The slot's bytes, `slot.nbytes` long, writable. Valid while the slot is reserved or pinned."""
        return self.arena.data[slot.offset : slot.offset + slot.nbytes]
