"""What one lower tier is given: written through at once, or back when a page is about to leave host memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from kvtier.abc.tier import PageMeta, PutItem, PutStatus, StagingTier, Tier
from kvtier.errors import ClosedError
from kvtier.ledger import Ledger
from kvtier.placement import Admission, TierRules, Write
from kvtier.workers import WorkerPool

_BATCH = 16
_GATHER = 256
_AHEAD_SHARE = 64
"""Pages are written back whenever one part in so many of the host tier was stored: half of what goes soon."""
_STUCK_S = 5.0
_OFFERED_MAX = 65536
_THERE = (PutStatus.STORED, PutStatus.EXISTS)


class Spiller:
    """Writes host pages to `tier`, in a thread of its own, so that nobody who stores a page waits for the tier.

    A page that the tier is to have cannot be evicted from the host tier before it was offered, whatever became of the
    offer: a tier that refuses pages costs those pages, not the host tier. freed: called when pages became evictable.
    """

    def __init__(
        self,
        tier: Tier,
        bit: int,
        rules: TierRules,
        host: StagingTier,
        ledger: Ledger,
        freed: Callable[[], None],
        on_error: Callable[[BaseException], None],
        arrived: Callable[[Sequence[bytes], Sequence[PageMeta]], None],
    ) -> None:
        self.tier = tier
        self.bit = bit
        self.rules = rules
        self._host = host
        self._ledger = ledger
        self._freed = freed
        self._arrived = arrived
        self._on_error = on_error
        self._stored = 0  # since pages were last written back
        self._due = 1
        self._lock = threading.Lock()
        self._joinable: list[bytes] | None = None  # what a queued write is going to offer: more may join
        self._queued = False  # a turn of writing back
        self._wanted = False  # room, although less than the limit must be written
        self._stopped = False
        self._offered: dict[bytes, None] = {}
        self._busy_since = 0.0
        self._pool = WorkerPool(f"kvtier-spill-{tier.name}", 1, self._failed)

    @property
    def takes_new(self) -> bool:
        """Whether pages are for this tier as soon as they are stored."""
        return self.rules.write is not Write.NONE and self.rules.admit is Admission.ALWAYS

    @property
    def takes_used(self) -> bool:
        """Whether pages are for this tier once they were used again."""
        return self.rules.write is not Write.NONE and self.rules.admit is Admission.SECOND_USE

    @property
    def fills_from_below(self) -> bool:
        """Whether pages that came up from a tier below this one are for it, too: nearer than where they came from."""
        return self.rules.write is not Write.NONE and not self.tier.capabilities.shared

    @property
    def idle(self) -> bool:
        return self._pool.idle

    def stored(self, keys: Sequence[bytes]) -> None:
        """Pages were stored in the host tier, where they wait for this tier."""
        if not keys or self.rules.write is Write.NONE:
            return
        if self.rules.write is Write.BACK:
            self._stored += len(keys)  # two threads may lose a count: it says about when
            if self._stored >= self._due:
                self._write_some_back()
        elif not self._write_soon(keys):
            self._let_go(keys)

    def _write_soon(self, keys: Sequence[bytes]) -> bool:
        """Queue the writing of pages, together with others where such a job waits: a call costs what many pages cost.
        False where nothing is taken any more."""
        with self._lock:
            if self._joinable is None or len(self._joinable) + len(keys) > _BATCH:
                self._joinable = []
                if not self._pool.submit(partial(self._write_joined, self._joinable)):
                    self._joinable = None
                    return False
            self._joinable += keys
            return True

    def _write_joined(self, keys: list[bytes]) -> None:
        with self._lock:
            if self._joinable is keys:
                self._joinable = None
        self._write(keys)

    def used(self, keys: Sequence[bytes]) -> None:
        """Pages were loaded from the host tier."""
        if not keys:
            return
        if self.takes_used:
            self._pool.submit(partial(self._admit, list(keys)))
        if self.rules.write is Write.THROUGH and self.rules.refresh:
            self._pool.submit(partial(self._refresh, list(keys)))

    def make_room(self) -> None:
        """Pages in the host tier should become evictable: it is full. Never blocks."""
        if self.rules.write is Write.BACK:
            with self._lock:
                self._wanted = True
            self._write_some_back()
        if self._busy_since and time.monotonic() - self._busy_since > _STUCK_S:
            self._give_up()

    def evicted_below(self, keys: Sequence[bytes]) -> None:
        """The tier has these pages no more."""
        self._forget_offers(keys)
        if self.rules.write is Write.BACK:
            self._host.expect_writing(keys, self.bit)

    def evicted_above(self, keys: Sequence[bytes]) -> None:
        """The host tier has these pages no more: the copy here is the only one now."""
        if self.rules.write is Write.BACK:
            self.tier.touch_many(keys)

    def promoted(self, keys: Sequence[bytes]) -> None:
        """The host tier has these pages, too, now."""
        if self.rules.write is Write.BACK:
            self.tier.demote_many(keys)

    def forget(self, keys: Sequence[bytes], done: Callable[[bool], None]) -> None:
        """Delete pages, behind everything that was queued, then call `done` with whether that was so."""

        def delete() -> None:
            deleted = False
            try:
                with self._busy():
                    self.tier.delete_many(keys)
                deleted = True
            finally:
                done(deleted)

        self._forget_offers(keys)
        with self._lock:
            self._joinable = None  # what is stored from now on must be written behind this
            queued = self._pool.submit(delete)
        if not queued:
            done(False)

    def write_now(self, keys: Sequence[bytes]) -> None:
        """These pages need not wait until they are about to leave the host tier."""
        if keys and self.rules.write is Write.BACK and self.takes_new:
            self._pool.submit(partial(self._write_all, list(keys)))

    def flush(self) -> None:
        """Queue the writing of everything that the tier is to have and has not."""
        if self.rules.write is Write.BACK:
            self._pool.submit(self._write_everything)

    def drain(self, timeout_s: float | None) -> bool:
        return self._pool.drain(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Take nothing more; what is queued may go on for `timeout_s`."""
        ended = self._pool.close(timeout_s)
        self._stopped = True
        return ended

    def _ended(self) -> bool:
        return self._stopped

    def _failed(self, error: BaseException) -> None:
        if not (self._stopped and isinstance(error, ClosedError)):  # the store could wait no longer, and said so
            self._on_error(error)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Around each call to the tier, for `make_room` to see one that hangs."""
        self._busy_since = time.monotonic()
        try:
            yield
        finally:
            self._busy_since = 0.0

    def _write_some_back(self) -> None:
        with self._lock:
            if self._queued:
                return
            self._queued = True
        if not self._pool.submit(self._turn):
            self._give_up()

    def _turn(self) -> None:
        """Write what is about to leave host memory; where there was no room, something in any case."""
        with self._lock:
            self._queued = False
            wanted, self._wanted = self._wanted, False
        usage = self._host.usage()
        self._stored, self._due = 0, max(1, usage.resident_pages // _AHEAD_SHARE)
        soon_bytes = usage.used_bytes // _AHEAD_SHARE * 2
        if not wanted and usage.capacity_bytes - usage.used_bytes > soon_bytes:
            return
        keys = self._host.unwritten(self.bit, _GATHER, soon=True)
        if wanted and not keys:
            keys = self._host.unwritten(self.bit, _BATCH)
        self._write_all(keys)

    def _write_everything(self) -> None:
        # On a close there may not be time for all: what was used last is written first.
        while not self._ended() and (keys := self._host.unwritten(self.bit, _GATHER, last_first=True)):
            self._write_all(keys)

    def _write_all(self, keys: list[bytes]) -> None:
        for at in range(0, len(keys), _BATCH):
            if not self._ended():
                self._write(keys[at : at + _BATCH])

    def _admit(self, keys: list[bytes]) -> None:
        with self._lock:
            new = [key for key in keys if key not in self._offered]
            self._offered.update(dict.fromkeys(new))
            while len(self._offered) > _OFFERED_MAX:
                del self._offered[next(iter(self._offered))]
        if not new:
            return
        if not self.tier.capabilities.shared:
            with self._busy():
                there = self.tier.contains_many(new)
            new = [key for key, has in zip(new, there, strict=True) if not has]
        self._host.expect_writing(new, self.bit)
        if self.rules.write is Write.THROUGH:
            self._write(new)

    def _forget_offers(self, keys: Sequence[bytes]) -> None:
        if self._offered:
            with self._lock:
                for key in keys:
                    self._offered.pop(key, None)

    def _refresh(self, keys: list[bytes]) -> None:
        with self._busy():
            self.tier.touch_many(keys)

    def _write(self, keys: list[bytes]) -> None:
        """Offer pages that are in the host tier; what left it meanwhile was deleted."""
        found = [(key, pin) for key, pin in zip(keys, self._host.hold_many(keys), strict=True) if pin >= 0]
        if not found:
            return
        pins = [pin for _, pin in found]
        start = time.monotonic()
        try:
            puts = [
                PutItem(key, meta, self._host.view(slot)[: meta.nbytes], padded=True)
                for (key, _), (slot, meta) in zip(found, self._host.pinned_many(pins), strict=True)
            ]
            with self._busy():
                statuses = self.tier.put_many(puts)
            self._ledger.time_tier(self.tier.name, "put", time.monotonic() - start)
            self._ledger.spilled(self.tier.name, statuses)
            here = [put for put, status in zip(puts, statuses, strict=True) if status in _THERE]
            self._arrived([put.key for put in here], [put.meta for put in here])
        finally:
            self._host.written(pins, self.bit)
            self._host.unpin_many(pins)
            self._freed()

    def _let_go(self, keys: Sequence[bytes]) -> None:
        """Pages are not offered after all."""
        pins = [pin for pin in self._host.hold_many(keys) if pin >= 0]
        self._host.written(pins, self.bit)
        self._host.unpin_many(pins)
        self._freed()

    def _give_up(self) -> None:
        """The tier hangs: pages that wait for it would fill the host tier for as long as it does."""
        try:
            while keys := self._host.unwritten(self.bit, _GATHER):
                self._let_go(keys)
                self._ledger.spilled(self.tier.name, [PutStatus.DEADLINE] * len(keys))
        except ClosedError:
            return
