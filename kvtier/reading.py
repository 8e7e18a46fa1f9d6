"""What requests do with a store: they look pages up, wait for them, load them, and are counted when they end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from kvtier.abc.tier import Removal, StagingTier
from kvtier.below import Below
from kvtier.classification import Classification
from kvtier.counting import Counting
from kvtier.errors import ClosedError
from kvtier.ledger import Ledger, MissReason
from kvtier.lookup import Lookup
from kvtier.observe import Observer
from kvtier.promotion import Promotions
from kvtier.room import Room


class Reading:
    """The half of `TieredStore` that requests use. Its constructor sets what is named here.

    `lookup` and `settle` never do input or output, so an engine's own thread can call them."""

    host: StagingTier
    ledger: Ledger
    observer: Observer
    _lock: threading.RLock
    _changed: threading.Condition
    _closed: bool
    _promote_deadline_s: float
    _lookups: dict[str, Lookup]
    _room: Room
    _below: Below
    _has_shared: bool
    _promotions: Promotions
    _classification: Classification
    _counting: Counting

    def lookup(
        self,
        request_id: str,
        keys: Sequence[bytes],
        *,
        hashes: Sequence[bytes] = (),
        sparse: bool = False,
        counted: bool = True,
    ) -> Lookup:
        """Find the pages of a request, pin those in the host tier and start the promotion of those below it.

        Asking again refreshes the lease; asking for other keys keeps what is still asked for. Index only: no input or
        output on this thread. `settle` must follow when the request starts or is dropped. hashes: the engine's own, one
        per key: they tell pages that are stored under another namespace. sparse: pages behind one that is missing are
        of use too. counted: whether the ledger counts these pages (`Lookup`)."""
        with self._lock:
            self._check_open()
            lookup = self._lookups.get(request_id)
            if lookup is not None:
                self._polled(lookup)
                if lookup.keys == keys:
                    return lookup
            if len(set(keys)) != len(keys):
                raise ValueError(f"request {request_id!r} asks for the same page twice")
            if lookup is None:
                lookup = Lookup(request_id, self._promote_deadline_s, self.host, sparse, counted)
                self._lookups[request_id] = lookup
            self._unpin(lookup.replace(keys))
            lookup.hashes = list(hashes)
            lookup.behind_pages = 0
            self._classification.classify(lookup, lookup.unknown())
            return lookup

    def extend(self, lookup: Lookup, keys: Sequence[bytes], *, hashes: Sequence[bytes]) -> bool:
        """The pages that follow those which a prefix was asked for, found as in `lookup`. hashes: one per key. Counts
        as no repeated lookup. False if the lookup has ended."""
        with self._lock:
            if self._lookups.get(lookup.request_id) is not lookup:
                return False
            self._classification.classify(lookup, lookup.extend(keys, hashes))
            return True

    def poll(self, lookup: Lookup) -> bool:
        """As `lookup` for the pages that it was asked for: it is still waited for. False if it has ended."""
        with self._lock:
            if self._lookups.get(lookup.request_id) is not lookup:
                return False
            self._polled(lookup)
            return True

    def _polled(self, lookup: Lookup) -> None:
        if lookup.counted:
            self.ledger.polled()
        lookup.asked = time.monotonic()

    def hold(self, lookup: Lookup, pages: int | None = None, *, rest: MissReason = MissReason.DEADLINE) -> bool:
        """The request is being loaded: its pins no longer expire. With `pages`, it starts with that many of its ready
        pages: what arrives from now on is too late for it, and must not be counted as a hit. `rest`: why ready pages
        behind these are not used. False, and nothing is held, if the lease ended before, or pages gave way to an older
        request: so many are not ready."""
        with self._lock:
            if self._lookups.get(lookup.request_id) is not lookup or (pages or 0) > lookup.ready_pages:
                return False
            lookup.held = True
            if pages is None:
                return True
            self._promotions.stop_waiting(lookup)
            released = lookup.use(pages, rest)
        self._unpin(released)
        return True

    def take(self, lookup: Lookup, pages: Sequence[int]) -> list[int]:
        """The pins of pages, given by index, that are going to be read: from now on they stay until `settle`, whatever
        others wait for. ValueError unless all of them are ready."""
        with self._lock:
            pins = lookup.pins_of(pages)
            lookup.held = lookup.taken = True
            return pins

    def freeze(self, lookup: Lookup) -> int:
        """The request starts with no more than the pages that are ready now, whose number is returned; they are held as
        in `hold`, which may still leave some of them out."""
        with self._lock:
            pages = lookup.ready_pages
            return pages if self.hold(lookup, pages) else 0

    def wait(self, lookup: Lookup, timeout_s: float | None = None) -> int:
        """Block until nothing more can extend the ready prefix (or `timeout_s`); returns the ready pages. For callers
        that have a thread to block."""
        give_up = lookup.deadline if timeout_s is None else min(lookup.deadline, time.monotonic() + timeout_s)
        with self._changed:
            while lookup.pending and (left := give_up - time.monotonic()) > 0:
                self._changed.wait(left)
            return lookup.ready_pages

    def when_there(self, lookup: Lookup, call: Callable[[], object]) -> bool:
        """Have `call` called when nothing is on its way to the request any more, for callers that have many of them
        and no thread for each: by whoever brings its last page, with the store's lock held, so that it may only pass
        the news on. False, and it is not called, if nothing is on its way now."""
        with self._lock:
            if not lookup.loading:
                return False
            lookup.when_there = call
            return True

    def give_back(self, lookup: Lookup, pages: Sequence[int]) -> None:
        """The request does not use these of its ready pages, by index: they are misses, since nothing was restored, and
        their pins are released."""
        with self._lock:
            released = [pin for i in pages for pin in lookup.fail(i, MissReason.DROPPED)]
        self._unpin(released)

    def cut(self, lookup: Lookup, pages: int, reason: MissReason) -> None:
        """Only the first `pages` of the request are of use to it: what it has, or waits for, behind them is a miss."""
        with self._lock:
            self._promotions.stop_waiting(lookup, lookup.keys[pages:])
            released = lookup.cut(pages, reason)
        self._unpin(released)

    def may_have(self, keys: Sequence[bytes]) -> tuple[list[bool], list[bool]]:
        """Of each page, whether the host tier has it now, and whether some tier may: local ones by their index, shared
        ones always. Nothing is pinned or counted; index only."""
        here = self.host.contains_many(keys)
        if self._has_shared:
            return here, [True] * len(keys)
        below = self._below.known(keys)
        return here, [a or b for a, b in zip(here, below, strict=True)]

    def fail(self, lookup: Lookup, key: bytes, reason: MissReason = MissReason.CORRUPT) -> None:
        """The page under `key` turned out bad while `lookup` loaded it: it leaves the host tier, and is a miss where
        the request still asks for it."""
        with self._lock:
            self.host.delete_many([key], Removal.QUARANTINED)
            if key in lookup.keys:
                self._unpin(lookup.fail(lookup.keys.index(key), reason))

    def settle(self, request_id: str, *, loaded: bool = True, later: bool = False) -> None:
        """The request started and its loads ended, or it was dropped: count its pages, release its pins. Idempotent.
        With `loaded` False its ready pages were not used: they are misses, since nothing was restored. later: they are
        counted by another thread, for which readers of the ledger wait; where the observer allows it."""
        with self._lock:
            lookup = self._lookups.pop(request_id, None)
            if lookup is None:
                return
            self._promotions.stop_waiting(lookup)
            later = later and not self.observer.prompt
            if not later:
                self._counting.now(lookup, loaded)
            was, released = lookup.end()
        self._unpin(released)
        if later:
            self._counting.later(was, loaded)

    def wait_counted(self) -> None:
        """Wait until every request that was settled is counted. For who is about to store what they missed."""
        self._counting.finish()

    def open_requests(self) -> list[str]:
        """Requests that were looked up and not settled."""
        with self._lock:
            return list(self._lookups)

    def _unpin(self, pins: Sequence[int]) -> None:
        self._room.unpin(pins)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the store is closed")
