"""TieredStore: one host tier that codecs write into and read from, and lower tiers behind it.

Writing: reserve -> fill -> commit; committed pages are written to lower tiers in the background, at once or when they
are about to leave host memory, and are not evicted before that. Reading: `lookup` pins what the host tier has and
starts the promotion of what lower tiers have; only verified, host-resident, pinned pages are ever called ready.
Threads: every method may be called from any thread; `lookup` and `settle` never do input or output, so an engine's own
thread can call them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial

from kvtier.abc.tier import (
    PageMeta,
    PutStatus,
    Removal,
    RemovalListener,
    Slot,
    StagingTier,
    Tier,
)
from kvtier.below import Below, Deletion
from kvtier.breakeven import BreakEven
from kvtier.classification import Classification
from kvtier.counting import Counting
from kvtier.errors import ConfigError, SpecError
from kvtier.evicted import Evicted
from kvtier.inventory import Inventory
from kvtier.ledger import Ledger
from kvtier.lookup import Lookup
from kvtier.observe import Observer
from kvtier.placement import TierRules
from kvtier.promotion import Promotions
from kvtier.protection import Protection
from kvtier.reading import Reading
from kvtier.room import Room
from kvtier.spill import Spiller
from kvtier.workers import WorkerPool

_log = logging.getLogger(__name__)

_TIER_CLOSE_S = 0.5
_LOWER_TIERS_MAX = 7


class TieredStore(Reading):
    """See the module's docstring.

    promote_deadline_s: how long after its first lookup a request may still gain promoted pages. lease_s: a request that
    was looked up and neither polled nor held for this long loses its pins when room is needed; None: never by a clock
    (several ranks, which must answer alike). on_removed: hears of pages that left one of the tiers. rules: which pages
    lower tiers get, by the tier's name; written through by default. break_even: which loads are not worth it. observer:
    hears of what happens to pages, and is closed with the store.
    """

    def __init__(
        self,
        host: StagingTier,
        lower: Sequence[Tier] = (),
        ledger: Ledger | None = None,
        *,
        promote_deadline_s: float = 2.0,
        lease_s: float | None = 30.0,
        promote_threads: int = 2,
        on_removed: RemovalListener | None = None,
        rules: Mapping[str, TierRules] | None = None,
        break_even: BreakEven | None = None,
        observer: Observer | None = None,
    ) -> None:
        names = [host.name, *(t.name for t in lower)]
        if len(set(names)) != len(names):
            raise ConfigError(f"tiers = {names}: every tier needs a name of its own")
        if len(lower) > _LOWER_TIERS_MAX:
            raise ConfigError(f"tiers = {names}: at most {_LOWER_TIERS_MAX} below the host tier")
        for option, value in (
            ("promote_deadline_s", promote_deadline_s),
            ("lease_s", lease_s),
            ("promote_threads", promote_threads),
        ):
            if value is not None and not value > 0:
                raise ConfigError(f"{option} = {value}: must be larger than 0")
        self.host = host
        self.lower = tuple(lower)
        self.ledger = ledger if ledger is not None else Ledger(names)
        if self.ledger.tiers != tuple(names):
            raise ConfigError(f"the ledger counts tiers {list(self.ledger.tiers)}, the store has {names}")
        self._promote_deadline_s = promote_deadline_s
        self._lease_s = lease_s
        self._on_removed = on_removed
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._lookups: dict[str, Lookup] = {}
        self.observer = observer if observer is not None else Observer()
        self._evicted = Evicted()
        self._below = Below(lower)
        self._protection = Protection(host, lower)
        self._closed = False
        self._room = Room(host, self._make_evictable, counts=bool(lower))  # who promotes asks
        self._spillers = {
            tier.name: Spiller(
                tier,
                1 << i,
                (rules or {}).get(tier.name, TierRules()),
                host,
                self.ledger,
                self._room.freed,
                partial(self._worker_error, "spill"),
                partial(self.observer.arrived, tier.name),
            )
            for i, tier in enumerate(lower)
        }
        self._one_tier = not lower
        self._new_bits = sum(s.bit for s in self._spillers.values() if s.takes_new)
        self._used_bits = sum(s.bit for s in self._spillers.values() if s.takes_used)
        self.break_even = break_even if break_even is not None else BreakEven([t.name for t in lower])
        self._promotions = Promotions(
            host,
            lower,
            self._room,
            self._spillers,
            self.ledger,
            self.break_even,
            self._changed,
            self._lookups,
            self._evicted.__contains__,
            deadline_s=promote_deadline_s,
            threads=promote_threads,
            on_error=partial(self._worker_error, "promote"),
            arrived=partial(self.observer.arrived, host.name),
        )
        self._classification = Classification(
            host,
            self._below,
            self._promotions,
            self.break_even,
            self._evicted,
            self._unpin,
            shared=any(t.capabilities.shared for t in lower),
        )
        self._counting = Counting(
            self.ledger,
            self.observer,
            self._evicted,
            self._classification,
            self._used if self._spillers else None,
            partial(self._worker_error, "observe"),
        )
        self._has_shared = any(t.capabilities.shared for t in lower)
        for tier in (host, *lower):
            self.ledger.watch(tier.name, tier.usage)
            tier.set_removal_listener(partial(self._removed, tier.name))
        self.inventory = Inventory(self)
        self.observer.inventory = self.inventory

    # -- writing ---------------------------------------------------------------------------------------------------

    def known_below(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether a local lower tier already has each page. Index only."""
        return self._below.known(keys)

    def reserve(self, keys: Sequence[bytes], nbytes: Sequence[int], wait_s: float = 0.0) -> list[Slot | PutStatus]:
        """Host slots to fill, or why not. With `wait_s` it waits that long for pages being spilled to become evictable:
        for worker threads only. Every Slot must be given to `commit` or `abort`."""
        self._check_open()
        # A slot in which a deleted page arrives says that there is such a page, and then vanishes.
        vanishing = set(self._promotions.cancelled) if self._promotions.cancelled else ()
        answers = self._room.reserve(keys, nbytes, wait_s)
        if not vanishing:
            return answers
        return [
            PutStatus.FULL if answer is PutStatus.EXISTS and key in vanishing else answer
            for key, answer in zip(keys, answers, strict=True)
        ]

    def commit(self, keys: Sequence[bytes], slots: Sequence[Slot], metas: Sequence[PageMeta]) -> None:
        """Publish filled slots, and have them written to the lower tiers in the background. Metas that no tier can keep
        raise SpecError, and the slots are given back."""
        if not keys:
            return
        try:
            self.host.commit_many(keys, slots, metas, self._new_bits)
        except SpecError:
            self.abort(keys, slots)
            raise
        self._protection.stored(keys)
        left = self._evicted.among(keys) if self._used_bits else ()
        again = [key for key in keys if key in left] if left else []
        if again:  # it was here before and left: this is its second use
            self.host.expect_writing(again, self._used_bits)
        for spiller in self._spillers.values():
            spiller.stored(keys if spiller.takes_new else again)
        self.observer.stored(keys, metas)
        self.observer.arrived(self.host.name, keys, metas)
        self._room.filled(slots)

    def reserve_one(self, key: bytes, nbytes: int, wait_s: float = 0.0) -> Slot | PutStatus:
        """As `reserve`, of one page."""
        if self._one_tier and not self._closed:  # nobody asks then how many slots are being filled
            answer = self.host.reserve_one(key, nbytes)
            if answer is not PutStatus.FULL:
                return answer
        return self.reserve([key], [nbytes], wait_s)[0]

    def commit_over(self, key: bytes, slot: Slot, meta: PageMeta, replaces: bytes) -> bool:
        """As `commit`, of one page that takes the place of `replaces` (empty: of none). Whether that is deleted, too;
        `on_removed` does not hear of it then. Where it is not, because it may be in more tiers than the first, the
        caller deletes it (`replaced`)."""
        if not self._one_tier or self._protection.any:
            self.commit([key], [slot], [meta])
            return False
        try:
            gone = self.host.commit_over(key, slot, meta, replaces)
        except SpecError:
            self.abort([key], [slot])
            raise
        if self._room.waiting:
            self._room.freed()
        observer = self.observer
        observer.stored_one(key, meta)
        if observer.hears_moves:
            observer.arrived(self.host.name, [key], [meta])
            if gone:
                observer.left(self.host.name, [replaces])
        if gone and self._evicted.any:
            self._evicted.forget([replaces])
        return gone

    def abort(self, keys: Sequence[bytes], slots: Sequence[Slot]) -> None:
        """Give reserved slots back; nothing becomes visible."""
        self._room.abort(keys, slots)

    def delete(self, keys: Sequence[bytes], *, replaced: bool = False) -> Deletion:
        """Remove pages from every tier; from lower ones in the background, behind the writes that are queued. From now
        on none of them is found, nor arrives from below. replaced: whoever wanted them finds other pages in their
        place, so that this is no news to observers. Returns what becomes of them below."""
        with self._lock:
            if not self._closed:
                self._below.delete(keys)
            self._protection.forget(keys)
            self._promotions.cancel(keys)
        self._evicted.forget(keys)
        self.host.delete_many(keys)
        if not replaced:
            self.observer.deleted(keys)
        deletion = Deletion(len(self._spillers))
        for spiller in self._spillers.values():
            spiller.forget(list(keys), partial(self._deleted_below, list(keys), deletion))
        return deletion

    def deleting(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether pages that were deleted may still be in a lower tier."""
        with self._lock:
            return [key in self._below.deleting for key in keys]

    def _deleted_below(self, keys: list[bytes], deletion: Deletion, done: bool) -> None:
        with self._lock:
            self._below.deleted(keys)
        deletion.ended(done)

    def protect(self, keys: Sequence[bytes], *, dry_run: bool = False) -> list[bool]:
        """Keep pages from being evicted from the local tiers that have them, until `unprotect` or the end of the
        process; which of them are. Not those that no tier here has, nor what exceeds half of the host tier. dry_run:
        which would be."""
        with self._lock:
            return self._protection.add(keys, self._below.deleting, dry_run=dry_run)

    def unprotect(self, keys: Sequence[bytes]) -> None:
        """Pages may make room again, like any other."""
        self._protection.end(keys)
        self._room.freed()

    def protected(self) -> frozenset[bytes]:
        """Pages that are kept so."""
        return self._protection.pages()

    def write_down(self, keys: Sequence[bytes]) -> None:
        """Have pages written to the lower tiers now that would be written when they are about to leave host memory."""
        for spiller in self._spillers.values():
            spiller.write_now(keys)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until every page that a lower tier is to have was offered to it, those written back included; False on
        timeout."""
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        for spiller in self._spillers.values():
            spiller.flush()
        return self.drain(None if give_up is None else max(0.0, give_up - time.monotonic()))

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until everything that is queued for lower tiers was written or deleted; False on timeout."""
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        ended = True
        for spiller in self._spillers.values():
            ended &= spiller.drain(None if give_up is None else max(0.0, give_up - time.monotonic()))
        return ended

    # -- house-keeping -----------------------------------------------------------------------------------------------

    def close(self, timeout_s: float = 1.5) -> None:
        """Write what is in host memory alone for at most `timeout_s`, and close every tier within half a second more:
        one that hangs is left to the end of the process. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            requests = list(self._lookups)
        give_up = time.monotonic() + timeout_s
        self._room.close()
        for spiller in self._spillers.values():
            spiller.flush()
        ended = self._promotions.close(give_up)
        for spiller in self._spillers.values():
            ended &= spiller.close(max(0.05, give_up - time.monotonic()))
        if not ended:
            lost = len(self.host.unwritten(self._new_bits | self._used_bits, 1 << 62)) if self._spillers else 0
            _log.warning("store closed while a tier was still busy: %d pages are not written below and lost", lost)
        for request_id in requests:
            self.settle(request_id, loaded=False)
        self._counting.close(max(0.05, give_up - time.monotonic()))
        tiers = (self.host, *self.lower)
        closer = WorkerPool("kvtier-close", len(tiers), partial(self._worker_error, "spill"))
        for tier in tiers:
            tier.set_removal_listener(None)
            closer.submit(tier.close)
        if not closer.close(give_up + _TIER_CLOSE_S - time.monotonic()):
            _log.warning("store closed while a tier could not be closed: it hangs")
        self.observer.close()

    def stop_waiting(self) -> None:
        """The end is near: nobody waits for room any longer, what finds none is dropped at once."""
        self._room.close()

    def _drop_expired(self) -> None:
        if self._lease_s is None:
            return
        now = time.monotonic()
        with self._lock:
            expired = [r for r, lk in self._lookups.items() if not lk.held and now - lk.asked > self._lease_s]
        for request_id in expired:
            self.settle(request_id, loaded=False)

    def _make_evictable(self) -> None:
        """There is no room in the host tier."""
        self._drop_expired()
        for spiller in self._spillers.values():
            spiller.make_room()

    def _removed(self, tier: str, keys: Sequence[bytes], removal: Removal) -> None:
        if self._on_removed is not None:
            self._on_removed(keys, removal)
        self.observer.left(tier, keys)
        if removal is not Removal.EVICTED:
            return
        self._evicted.add(keys)
        if tier != self.host.name:
            self._spillers[tier].evicted_below(keys)
            return
        for spiller in self._spillers.values():
            spiller.evicted_above(keys)

    def _used(self, keys: Sequence[bytes]) -> None:
        for spiller in self._spillers.values():
            spiller.used(keys)

    def _worker_error(self, site: str, error: BaseException) -> None:
        self.ledger.error(site)
        _log.error("%s failed: %s", site, error, exc_info=error)
