"""Pages on their way up: found in lower tiers, read into host slots, verified, and handed to the requests that wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from kvtier.abc.tier import (
    LENGTH_UNKNOWN,
    SLOT_ALIGN,
    GetStatus,
    PageMeta,
    PutStatus,
    Slot,
    StagingTier,
    Tier,
)
from kvtier.breakeven import BreakEven
from kvtier.errors import ClosedError
from kvtier.ledger import Ledger, MissReason
from kvtier.lookup import UNPINNED, Lookup
from kvtier.room import Room
from kvtier.spill import Spiller
from kvtier.workers import WorkerPool

_BATCH = 16
_MISS_OF = {
    GetStatus.CORRUPT: MissReason.CORRUPT,
    GetStatus.FAILED: MissReason.TIER_DOWN,
    GetStatus.DEADLINE: MissReason.DEADLINE,
}
_NOT_ASKED: Mapping[bytes, int] = {}
Outcome = dict[bytes, "MissReason | None"]
"""What became of pages that were wanted; None: in the host tier."""
_Wait = tuple[bytes, Lookup, int]
"""A request that waits for a page, and the page's index in it."""


class Promotions:
    """The promotions of one store. Shares the store's lock; `changed` is notified whenever a request's pages change.

    lookups: the open requests. spillers: by tier. was_evicted: whether a page was here and made room.
    """

    def __init__(
        self,
        host: StagingTier,
        lower: Sequence[Tier],
        room: Room,
        spillers: Mapping[str, Spiller],
        ledger: Ledger,
        break_even: BreakEven,
        changed: threading.Condition,
        lookups: Mapping[str, Lookup],
        was_evicted: Callable[[bytes], bool],
        *,
        deadline_s: float,
        threads: int,
        on_error: Callable[[BaseException], None],
        arrived: Callable[[Sequence[bytes], Sequence[PageMeta]], None],
    ) -> None:
        self._host = host
        self._lower = tuple(lower)
        self._room = room
        self._spillers = spillers
        self._ledger = ledger
        self._break_even = break_even
        self._changed = changed
        self._lookups = lookups
        self._was_evicted = was_evicted
        self._told = arrived
        self._deadline_s = deadline_s
        self.waiting: dict[bytes, list[Lookup]] = {}
        """Requests by the page that they wait for."""
        self._reading: set[bytes] = set()
        self.cancelled: set[bytes] = set()
        """Pages that were deleted while they were being read: their slots are still in use."""
        self._shared = tuple(t for t in lower if t.capabilities.shared)
        self._readers = WorkerPool("kvtier-promote", threads, on_error)
        # Threads of their own: a server that does not answer must not hold up the pages of local disks.
        self._askers = WorkerPool("kvtier-shared", threads if self._shared else 0, on_error)

    # -- called with the store's lock held -------------------------------------------------------------------------

    def want(self, lookup: Lookup, keys: Sequence[bytes]) -> list[bytes]:
        """`lookup` waits for pages; those of which somebody must start the promotion."""
        new = []
        for key in keys:
            there = self.waiting.get(key)
            if there is None:
                self.waiting[key] = [lookup]
                new.append(key)
            else:
                there.append(lookup)
        return new

    def start(self, by_tier: Mapping[str, list[bytes]], lookup: Lookup, ask: list[bytes]) -> None:
        """Read pages that tiers are known to have, and look for the others, `ask`, in shared tiers for `lookup`."""
        for name, keys in by_tier.items():
            self._read_all(self._readers, name, keys)
        if ask and not self._askers.submit(partial(self._ask_shared, lookup, ask)):
            self._arrived(dict.fromkeys(ask, MissReason.DEADLINE))

    def stop_waiting(self, lookup: Lookup, keys: Sequence[bytes] | None = None) -> None:
        """Promotions under way, of all or of `keys`, go on without `lookup`."""
        for key in lookup.loading if keys is None else [key for key in keys if key in lookup.loading]:
            waiting = self.waiting.get(key)
            if waiting is not None and lookup in waiting:
                waiting.remove(lookup)

    def cancel(self, keys: Sequence[bytes]) -> None:
        """Pages are being deleted: what is on its way up arrives nowhere."""
        self.cancelled.update(key for key in keys if key in self._reading)
        self._arrived({key: MissReason.ABSENT for key in keys if key in self.waiting})

    # -- workers -----------------------------------------------------------------------------------------------------

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is on its way; False on timeout."""
        return self._askers.drain(timeout_s) and self._readers.drain(timeout_s)

    def close(self, give_up: float) -> bool:
        """Take no more and let what is under way end until `give_up`, seconds of the monotonic clock."""
        ended = [pool.close(max(0.05, give_up - time.monotonic())) for pool in (self._readers, self._askers)]
        return all(ended)

    def _read_all(
        self, workers: WorkerPool, name: str, keys: list[bytes], lengths: Mapping[bytes, int] = _NOT_ASKED
    ) -> None:
        for at in range(0, len(keys), _BATCH):
            batch = keys[at : at + _BATCH]
            if not workers.submit(partial(self._promote, name, batch, lengths)):
                self._arrived(dict.fromkeys(batch, MissReason.DEADLINE))

    def _ask_shared(self, lookup: Lookup, keys: list[bytes]) -> None:
        """Look for pages, in prefix order, in the shared tiers; promote those that extend the prefix, and let go of
        those behind a gap that no other request waits for."""
        outcome: Outcome = dict.fromkeys(keys, MissReason.TIER_DOWN)
        promote: dict[str, list[bytes]] = {}
        try:
            found, missing, lengths = self._find_shared(keys)
            declined = {name for name in set(found.values()) if self._break_even.declines(name)}
            for key in [key for key, name in found.items() if name in declined]:
                del found[key]
                missing[key] = MissReason.DECLINED
            gap = len(keys)
            if not lookup.sparse:
                gap = next((at for at, key in enumerate(keys) if key not in found), gap)
            with self._changed:
                behind = [k for k in keys[gap:] if k in found and self.waiting.get(k, []) in ([], [lookup])]
            outcome = {**missing, **dict.fromkeys(behind, MissReason.AFTER_GAP)}
            for key in keys:
                if key not in outcome:
                    promote.setdefault(found[key], []).append(key)
        finally:
            self._arrived(outcome)
        for name, wanted in promote.items():
            self._read_all(self._askers, name, wanted, lengths)

    def _find_shared(self, keys: list[bytes]) -> tuple[dict[bytes, str], dict[bytes, MissReason], dict[bytes, int]]:
        """The shared tier that has each page, why no other page was found, and how long those are that were. Blocks for
        the network."""
        found: dict[bytes, str] = {}
        lengths: dict[bytes, int] = {}
        down: set[bytes] = set()
        for tier in self._shared:
            left = [key for key in keys if key not in found]
            for key, nbytes in zip(left, tier.length_many(left), strict=True):
                if nbytes >= 0:
                    found[key], lengths[key] = tier.name, nbytes
                elif nbytes == LENGTH_UNKNOWN:
                    down.add(key)
        missing = {key: self._why_missing(key, key in down) for key in keys if key not in found}
        return found, missing, lengths

    def _why_missing(self, key: bytes, down: bool) -> MissReason:
        if down:
            return MissReason.TIER_DOWN
        return MissReason.EVICTED if self._was_evicted(key) else MissReason.ABSENT

    def _promote(self, name: str, keys: list[bytes], lengths: Mapping[bytes, int]) -> None:
        """Read pages of one lower tier, and of those behind it where that fails, into host slots, verified. lengths: of
        pages in the tier `name`, where somebody has asked for them before."""
        keys = self._still_wanted(keys)
        if not keys:
            return
        outcome: Outcome = dict.fromkeys(keys, MissReason.TIER_DOWN)
        try:
            start = next(i for i, tier in enumerate(self._lower) if tier.name == name)
            left = keys
            for tier in self._lower[start:]:
                known = lengths if tier.name == name else _NOT_ASKED
                outcome.update(self._read(tier, left, known))
                # Pages that found no room while slots were held for others ask again without: only then may they wait.
                asked = len(left)
                while 0 < len(full := [key for key in left if outcome[key] is MissReason.NO_ROOM]) < asked:
                    asked = len(full)
                    outcome.update(self._read(tier, full, known))
                left = [key for key in left if outcome[key] not in (None, MissReason.NO_ROOM)]
                if not left:
                    break
        except ClosedError:  # the store is closing: nobody will use the pages
            outcome = dict.fromkeys(keys, MissReason.DEADLINE)
        finally:
            with self._changed:
                self._reading.difference_update(keys)
                self.cancelled.difference_update(keys)
                self._arrived(outcome)

    def _still_wanted(self, keys: list[bytes]) -> list[bytes]:
        """Those that a request waits for; what the rest would push out of the host tier may be of use."""
        with self._changed:
            wanted = [key for key in keys if self.waiting.get(key)]
            for key in set(keys).difference(wanted):
                self.waiting.pop(key, None)
            self._reading.update(wanted)
        return wanted

    def _read(self, tier: Tier, keys: list[bytes], lengths: Mapping[bytes, int]) -> Outcome:
        outcome: Outcome = {}
        wanted: list[bytes] = []
        nbytes_of: list[int] = []
        sizes = [lengths[key] for key in keys] if lengths else tier.length_many(keys)
        for key, nbytes in zip(keys, sizes, strict=True):
            if nbytes < 0:
                outcome[key] = self._why_missing(key, nbytes == LENGTH_UNKNOWN)
            else:
                wanted.append(key)
                nbytes_of.append(nbytes)
        fill: list[tuple[bytes, Slot]] = []
        answers = self._room.reserve(wanted, nbytes_of, self._deadline_s, lambda: self._make_way(wanted))
        for key, answer in zip(wanted, answers, strict=True):
            if isinstance(answer, Slot):
                fill.append((key, answer))
            else:
                outcome[key] = None if answer is PutStatus.EXISTS else MissReason.NO_ROOM
        committed: list[tuple[bytes, Slot, PageMeta]] = []
        aborted: list[tuple[bytes, Slot]] = list(fill)
        try:
            start = time.perf_counter()
            memory = self._host.memory  # which a slot has up to the next 4 KiB
            outs = [memory[at : at + -(-nbytes // SLOT_ALIGN) * SLOT_ALIGN] for _, (_, at, nbytes) in fill]
            results = tier.get_many_into([key for key, _ in fill], outs, self._deadline_s)
            self._ledger.time_tier(tier.name, "get", time.perf_counter() - start)
            aborted = []
            for (key, slot), result in zip(fill, results, strict=True):
                if result.status is GetStatus.HIT and result.meta is not None:
                    committed.append((key, slot, result.meta))
                else:
                    aborted.append((key, slot))
                    outcome[key] = _MISS_OF.get(result.status) or self._why_missing(key, False)
        finally:
            if aborted:
                self._room.abort([k for k, _ in aborted], [s for _, s in aborted])
        if committed:
            outcome.update(self._publish(tier, committed))
        return outcome

    def _publish(self, tier: Tier, pages: list[tuple[bytes, Slot, PageMeta]]) -> Outcome:
        """Make verified pages visible and hand them over, except those that were deleted meanwhile."""
        above = self._lower[: self._lower.index(tier)]
        fills = [s for t in above if (s := self._spillers[t.name]).fills_from_below]
        with self._changed:  # a delete either sees these pages here, or is seen
            gone = [(key, slot) for key, slot, _ in pages if key in self.cancelled]
            pages = [page for page in pages if page[0] not in self.cancelled]
            keys, slots = [k for k, _, _ in pages], [s for _, s, _ in pages]
            if pages:
                self._host.commit_many(keys, slots, [m for _, _, m in pages], sum(s.bit for s in fills))
                self._hand_over(tier.name, keys)
        if gone:
            self._room.abort([key for key, _ in gone], [slot for _, slot in gone])
        if pages:
            self._told(keys, [meta for _, _, meta in pages])
            self._spillers[tier.name].promoted(keys)
            for spiller in fills:
                spiller.stored(keys)
            self._room.filled(slots)
        return {**dict.fromkeys(keys, None), **{key: MissReason.ABSENT for key, _ in gone}}

    def _make_way(self, keys: Sequence[bytes]) -> bool:
        """Whether room in the host tier may come for pages that requests wait for.

        It comes from requests that have all of their pages or are being loaded, from slots being filled and from pages
        being written below. Where nothing but requests that wait for more holds it, the youngest of these gives up its
        last pages: for its own first ones, or for older requests."""
        released: list[int] = []
        with self._changed:
            waiting = {lookup.request_id: lookup for key in keys for lookup in self.waiting.get(key, ())}
            if not waiting:
                return False
            if self._room.filling or not all(spiller.idle for spiller in self._spillers.values()):
                return True
            holding = [lk for lk in self._lookups.values() if lk.pins.count(UNPINNED) < len(lk.pins)]
            if any(lk.taken or not lk.loading for lk in holding):
                return True
            youngest = max(holding, key=lambda lk: lk.deadline, default=None)
            if youngest is None or youngest.request_id in waiting:
                for lookup in waiting.values():
                    first = min((lookup.loading[k] for k in keys if k in lookup.loading), default=len(lookup.keys))
                    released += lookup.give_up_last(len(keys), first)
            elif youngest.deadline > min(lookup.deadline for lookup in waiting.values()):
                released += youngest.give_up_last(len(keys), -1)
            else:
                return True  # older requests first: they end, or give up pages of their own
            self._changed.notify_all()
        self._room.unpin(released)
        return bool(released)

    def _hand_over(self, name: str, keys: Sequence[bytes]) -> None:
        """Pin committed pages for the requests that wait for them, while their writer still pins them."""
        now = time.monotonic()
        wanted = self._end_wait(keys)
        pins = self._host.hold_many([key for key, _, _ in wanted])
        for (_, lookup, i), pin in zip(wanted, pins, strict=True):
            lookup.pins[i] = pin
            lookup.origins[i] = name
            lookup.arrivals[i] = now
            if pin == UNPINNED:
                lookup.misses[i] = MissReason.CORRUPT  # deleted between commit and now: only a bad page is
            lookup.promoted[name] += 1
        for lookup in _complete(wanted):
            if lookup.counted and len(lookup.promoted) == 1:
                self._break_even.promoted(name, lookup.promoted[name], time.monotonic() - lookup.began)
        self._tell(wanted)

    def _arrived(self, outcome: Outcome) -> None:
        """End the wait for promoted pages. None: the page is, or was a moment ago, in the host tier."""
        with self._changed:
            wanted = self._end_wait(outcome)
            there = [key for key, _, _ in wanted if outcome[key] is None]
            pins = iter(self._host.hold_many(there) if there else ())
            for key, lookup, i in wanted:
                reason = outcome[key]
                if reason is None:
                    lookup.pins[i] = next(pins)
                    lookup.arrivals[i] = time.monotonic()
                if lookup.pins[i] == UNPINNED:
                    lookup.misses[i] = reason if reason is not None else MissReason.DEADLINE
            self._tell(wanted)

    def _tell(self, ended: Sequence[_Wait]) -> None:
        """What was waited for has come, or will not."""
        for lookup in _complete(ended):
            if lookup.when_there is not None:
                lookup.when_there()
        self._changed.notify_all()

    def _end_wait(self, keys: Iterable[bytes]) -> list[_Wait]:
        """Who waited for pages; requests that ask for other pages by now are left out."""
        return [
            (key, lookup, i)
            for key in keys
            for lookup in self.waiting.pop(key, ())
            if (i := lookup.loading.pop(key, -1)) >= 0
        ]


def _complete(ended: Sequence[_Wait]) -> list[Lookup]:
    """Requests that wait for nothing any more, each once."""
    return [lookup for lookup in dict.fromkeys(lookup for _, lookup, _ in ended) if not lookup.loading]
