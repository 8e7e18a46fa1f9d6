"""What requests asked for, counted once they start or are dropped: hits by tier, and misses by reason."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvtier.classification import Classification
from kvtier.evicted import Evicted
from kvtier.ledger import Ledger, MissReason
from kvtier.lookup import Lookup
from kvtier.observe import Observer
from kvtier.workers import WorkerPool

_CHUNK = 128
"""Pages between two moments in which a thread that counts lets others have the interpreter."""
_FINISH_S = 5.0
"""Nobody waits longer, whatever keeps the thread from running."""


class Counting:
    """Of one store. used: hears of pages that were loaded from the host tier.

    Lookups are counted at once, or later in a thread of its own, which is started with the first of those. Whoever
    reads the ledger waits for it, so that nobody sees a request that has ended uncounted; and so should who stores what
    requests missed, or their pages would be found where they were not.
    """

    def __init__(
        self,
        ledger: Ledger,
        observer: Observer,
        evicted: Evicted,
        classification: Classification,
        used: Callable[[Sequence[bytes]], None] | None,
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._ledger = ledger
        self._observer = observer
        self._evicted = evicted
        self._classification = classification
        self._used = used
        self._on_error = on_error
        self._lock = threading.Lock()
        self._worker: WorkerPool | None = None
        self._reads_itself = threading.local()
        ledger.before_reading(self.finish)

    def later(self, lookup: Lookup, loaded: bool) -> None:
        """Count a lookup that nobody else changes any more."""
        with self._lock:
            if self._worker is None:
                self._worker = WorkerPool("kvtier-count", 1, self._on_error)
            worker = self._worker
        if not worker.submit(partial(self._count_yielding, lookup, loaded)):
            self.now(lookup, loaded)

    def now(self, lookup: Lookup, loaded: bool) -> None:
        """Count a lookup whose pins are still there, or one that nobody else changes."""
        for _ in self._steps(lookup, loaded):
            pass

    def _count_yielding(self, lookup: Lookup, loaded: bool) -> None:
        self._reads_itself.yes = True
        for _ in self._steps(lookup, loaded):
            time.sleep(0)  # an engine's thread may wait for the interpreter

    def close(self, timeout_s: float) -> bool:
        """Let what is queued be counted for at most `timeout_s`; what comes later is counted at once. False if that
        was not enough."""
        with self._lock:
            worker = self._worker
        return worker is None or worker.close(timeout_s)

    def _steps(self, lookup: Lookup, loaded: bool) -> Iterator[None]:
        """The work, in pieces that take some ten microseconds."""
        for at in range(0, lookup.behind_pages, _CHUNK):
            keys, hashes = lookup.behind(at, min(at + _CHUNK, lookup.behind_pages))
            lookup.missed(keys, hashes, self._classification.reasons(keys, lookup.gap_reason))
            yield
        lookup.behind_pages = 0
        if lookup.counted:
            yield from self._tell_misses(lookup)
        hits, misses = lookup.tally()
        yield
        used: list[bytes] = []
        if not loaded:
            misses[MissReason.DROPPED] += sum(hits.values())
            hits = {}
        elif self._used is not None and lookup.host.name in hits:
            used = lookup.host_hits()
        if lookup.counted:
            self._ledger.settle(hits, misses)
            self._observer.settled(lookup, hits, misses, loaded)
        if self._used is not None:
            self._used(used)

    def _tell_misses(self, lookup: Lookup) -> Iterator[None]:
        """How long ago evicted pages left, and which absent ones are stored under another namespace."""
        reasons = lookup.misses
        evicted = [lookup.keys[i] for i, why in reasons.items() if why is MissReason.EVICTED]
        if evicted:
            self._ledger.evicted_ages(self._evicted.ages_s(evicted))
        yield
        absent = [i for i, why in reasons.items() if why is MissReason.ABSENT] if lookup.hashes else []
        for at in range(0, len(absent), _CHUNK):
            some = absent[at : at + _CHUNK]
            hashes, keys = [lookup.hashes[i] for i in some], [lookup.keys[i] for i in some]
            for i, elsewhere in zip(some, self._observer.elsewhere(hashes, keys), strict=True):
                if elsewhere:
                    reasons[i] = MissReason.NAMESPACE
            yield

    def finish(self) -> None:
        """Wait until everything that is to be counted is. The worker itself may call it, when it checks sums."""
        worker = self._worker
        if worker is not None and not getattr(self._reads_itself, "yes", False):
            worker.drain(_FINISH_S)
