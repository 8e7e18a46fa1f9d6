"""What requests look up and load on the staged path: from the first question to the moment the request starts.

SGLang asks in one thread what there is and loads in another, and its interface names no request in between. The names
come from the hooks of `hicache_hooks`, so that a page counts once per request, as on the direct path, however often it
is asked for. Thread-safe; nothing here raises for what can happen to a page.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvtier.hot import HotPool
from kvtier.ledger import MissReason
from kvtier.lookup import Lookup
from kvtier.mover import PageMover
from kvtier.store import TieredStore

_POLL_S = 0.02
_FORGOTTEN_S = 60.0
"""A request that is in no queue is given up after this long: queues of disaggregated prefill are not looked into."""
_COUNTED_PAGES = 64
"""Of requests with more, another thread counts the pages."""


class _Asked:
    """A request's lookup; guarded by the lock of `Reads`, but for `ended`. loaded: pages of its prefix that the engine
    was given. busy: loads under way."""

    __slots__ = ("at", "busy", "ended", "loaded", "lookup", "rid")

    def __init__(self, rid: str, lookup: Lookup) -> None:
        self.rid = rid
        self.lookup = lookup
        self.loaded = 0
        self.busy = 0
        self.ended = False
        self.at = time.monotonic()


class Reads:
    """Lookups by request in one store."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._asked: dict[str, _Asked] = {}
        self._local = threading.local()
        self._nameless = itertools.count()

    # -- which request a thread works for ----------------------------------------------------------------------------

    @contextmanager
    def serving(self, rid: str) -> Iterator[None]:
        """What this thread asks for in between is asked by request `rid`."""
        before, self._local.rid = self.request, rid
        try:
            yield
        finally:
            self._local.rid = before

    @property
    def request(self) -> str | None:
        """The request that this thread works for, where that is known."""
        return getattr(self._local, "rid", None)

    # -- questions ---------------------------------------------------------------------------------------------------

    def find(self, rid: str, keys: Sequence[bytes], hashes: Sequence[bytes]) -> Lookup:
        """The lookup of `rid` for these pages; promotions start. Asked again for pages of which none was there, it
        looks again: another request may have stored them meanwhile."""
        with self._lock:
            return self._find(rid, keys, hashes).lookup

    def _find(self, rid: str, keys: Sequence[bytes], hashes: Sequence[bytes]) -> _Asked:
        asked, name = self._asked.get(rid), rid
        if asked is not None and asked.busy:
            # Its pages are being decoded, and must stay pinned whatever is asked for now.
            asked.ended, asked, name = True, None, f"{rid} {self.nameless()}"
        if asked is not None:
            name = asked.lookup.request_id
            if asked.lookup.keys == keys and asked.lookup.reach == 0:
                self._store.lookup(name, [])  # forgets why they were missing, and counts nothing
        lookup = self._store.lookup(name, keys, hashes=hashes)
        if asked is None:
            asked = self._asked[rid] = _Asked(rid, lookup)
        asked.lookup, asked.loaded, asked.at = lookup, 0, time.monotonic()
        return asked

    def promised(self, lookup: Lookup) -> int:
        """Length of the prefix that is there or known to be on its way. Blocks for the network where only a shared tier
        can tell."""
        reach = lookup.reach
        self._store.wait(lookup, 0.0)  # a page that arrived between two looks is seen by the second
        reach = max(reach, lookup.reach)
        shared = [tier for tier in self._store.lower if tier.capabilities.shared]
        unsure = [i for i in range(reach) if i not in lookup.origins and lookup.keys[i] in lookup.loading]
        if not shared or not unsure:
            return reach
        keys = [lookup.keys[i] for i in unsure]
        there = np.any([tier.contains_many(keys) for tier in shared], axis=0)
        return next((i for i, found in zip(unsure, there.tolist(), strict=True) if not found), reach)

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether some tier has each page, asking the shared ones. Counts nothing, starts nothing."""
        here, somewhere = self._store.may_have(keys)
        unsure = [i for i, (a, b) in enumerate(zip(here, somewhere, strict=True)) if b and not a]
        shared = [tier for tier in self._store.lower if tier.capabilities.shared]
        if not unsure or not shared:
            return somewhere
        asked = [keys[i] for i in unsure]
        there = np.any([self._store.known_below(asked), *(tier.contains_many(asked) for tier in shared)], axis=0)
        answers = list(here)
        for i, found in zip(unsure, there.tolist(), strict=True):
            answers[i] = bool(found)
        return answers

    # -- loads -------------------------------------------------------------------------------------------------------

    def load(
        self,
        rid: str,
        keys: Sequence[bytes],
        hashes: Sequence[bytes],
        mover: PageMover,
        hot: HotPool,
        page_ids: npt.NDArray[np.int64],
    ) -> int:
        """Bring the leading pages of `keys` into `hot`; how many arrived. Blocks until they did, or the deadline has
        passed. A request may load its pages in several calls, from the first on."""
        with self._lock:
            asked = self._asked.get(rid)
            start = 0
            if asked is None or not keys or keys[0] not in asked.lookup.keys:
                asked = self._find(rid, keys, hashes)
            else:
                start = asked.lookup.keys.index(keys[0])
                if start != asked.loaded:  # it does not want what lies before: the device has that by now
                    lookup = asked.lookup
                    asked = self._find(rid, lookup.keys[start:], lookup.hashes[start:])
                    start = 0
            asked.busy += 1
        arrived = 0
        try:
            arrived = self._load(asked, start, len(keys), mover, hot, page_ids)
        finally:
            with self._lock:
                asked.loaded = start + arrived
                asked.busy -= 1
                if asked.ended and asked.busy == 0:
                    self._settle(asked)
        return arrived

    def load_beside(
        self, keys: Sequence[bytes], mover: PageMover, hot: HotPool, page_ids: npt.NDArray[np.int64]
    ) -> list[bool]:
        """As `load`, of pages that lie beside those that are counted, each of use by itself."""
        rid = f"hicache beside {next(self._nameless)}"
        lookup = self._store.lookup(rid, keys, sparse=True, counted=False)
        try:
            self._store.wait(lookup)
            there = [i for i in range(len(keys)) if lookup.outcomes()[i] in self._tiers()]
            while there:
                result = mover.onboard(lookup, hot, page_ids[there], pages=there).result()
                if result.ok:
                    break
                there = [i for i in there if i not in result.failed_pages] if result.failed_pages else []
            return [i in set(there) for i in range(len(keys))]
        finally:
            self._store.settle(rid)

    def _tiers(self) -> tuple[str, ...]:
        return (self._store.host.name, *(tier.name for tier in self._store.lower))

    def nameless(self) -> str:
        """A name for a load of which nobody says whose it is; `ended` must follow."""
        return f"hicache {next(self._nameless)}"

    def _load(
        self,
        asked: _Asked,
        start: int,
        pages: int,
        mover: PageMover,
        hot: HotPool,
        page_ids: npt.NDArray[np.int64],
    ) -> int:
        lookup = asked.lookup
        while lookup.ready_pages < start + pages and lookup.pending and not asked.ended:
            self._store.wait(lookup, _POLL_S)
        ready = min(pages, lookup.ready_pages - start)
        while ready > 0:
            result = mover.onboard(lookup, hot, page_ids[:ready], pages=range(start, start + ready)).result()
            if result.ok:
                return ready
            # Nothing was decoded of a load with a bad page: what lies before it is good, and is loaded.
            ready = min(result.failed_pages) - start if result.failed_pages else 0
        return 0

    # -- the end of a request ----------------------------------------------------------------------------------------

    def ended(self, rid: str) -> None:
        """The request starts, or was dropped: its pages are counted once its loads have ended. Idempotent."""
        with self._lock:
            asked = self._asked.get(rid)
            if asked is None:
                return
            asked.ended = True
            if asked.busy == 0:
                self._settle(asked)

    def keep(self, rids: Collection[str]) -> None:
        """Let go of requests that are in no queue, and left it in a way that nobody reported."""
        if not self._asked:
            return
        old = time.monotonic() - _FORGOTTEN_S
        with self._lock:
            gone = [rid for rid, asked in self._asked.items() if rid not in rids and asked.at < old]
        for rid in gone:
            self.ended(rid)

    def end_all(self) -> None:
        """Every request that is known ends."""
        for rid in list(self._asked):
            self.ended(rid)

    @property
    def open(self) -> int:
        return len(self._asked)

    def _settle(self, asked: _Asked) -> None:
        """With the lock held. Hits are what the engine was given."""
        if self._asked.get(asked.rid) is asked:
            del self._asked[asked.rid]
        loaded = asked.loaded > 0
        if loaded:
            self._store.hold(asked.lookup, asked.loaded, rest=MissReason.DROPPED)
        # On the scheduler's thread: of many pages that takes too long.
        self._store.settle(asked.lookup.request_id, loaded=loaded, later=len(asked.lookup.keys) > _COUNTED_PAGES)
