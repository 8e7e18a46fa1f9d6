"""TieredStore: one host tier that codecs write into and read from, and lower tiers behind it.

Writing: reserve -> fill -> commit; committed pages are written through to every lower tier in the background and stay
pinned until that is done. Reading: `lookup` pins what the host tier has and starts the promotion of what lower tiers
have; only verified, host-resident, pinned pages are ever called ready. Threads: every method may be called from any
thread; `lookup` and `settle` never do input or output, so an engine's own thread can call them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from kvtier.abc.tier import (
    LENGTH_UNKNOWN,
    SLOT_ALIGN,
    GetStatus,
    PageMeta,
    PutItem,
    PutStatus,
    Removal,
    RemovalListener,
    Slot,
    StagingTier,
    Tier,
)
from kvtier.errors import ClosedError, ConfigError, SpecError
from kvtier.ledger import Ledger, MissReason
from kvtier.lookup import UNPINNED, Lookup
from kvtier.workers import WorkerPool

_log = logging.getLogger(__name__)

_PROMOTE_BATCH = 16
_TIER_CLOSE_S = 0.5
_REMEMBERED_EVICTIONS = 65536
_MISS_OF = {
    GetStatus.CORRUPT: MissReason.CORRUPT,
    GetStatus.FAILED: MissReason.TIER_DOWN,
    GetStatus.DEADLINE: MissReason.DEADLINE,
}


class TieredStore:
    """See the module's docstring.

    promote_deadline_s: how long after its first lookup a request may still gain promoted pages. lease_s: a request that
    was looked up and neither polled nor held for this long loses its pins when room is needed; None: never by a clock
    (several ranks, which must answer alike). on_removed: hears of pages that left one of the tiers.
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
    ) -> None:
        names = [host.name, *(t.name for t in lower)]
        if len(set(names)) != len(names):
            raise ConfigError(f"tiers = {names}: every tier needs a name of its own")
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
        self._promoting: dict[bytes, list[Lookup]] = {}
        self._evicted: dict[bytes, None] = {}
        self._evicted_lock = threading.Lock()
        self._room = threading.Condition()
        self._filling = 0  # slots reserved, and neither committed nor aborted
        self._closed = False
        self._promoter = WorkerPool("kvtier-promote", promote_threads, partial(self._worker_error, "promote"))
        self._shared = tuple(t for t in self.lower if t.capabilities.shared)
        # Threads of their own: a server that does not answer must not hold up the pages of local disks.
        self._asker = WorkerPool(
            "kvtier-shared", promote_threads if self._shared else 0, partial(self._worker_error, "promote")
        )
        self._spillers = {
            t.name: WorkerPool(f"kvtier-spill-{t.name}", 1, partial(self._worker_error, "spill")) for t in lower
        }
        for tier in (host, *lower):
            self.ledger.watch(tier.name, tier.usage)
            tier.set_removal_listener(self._removed)

    # -- writing ---------------------------------------------------------------------------------------------------

    def known_below(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether a local lower tier already has each page. Index only."""
        known = [False] * len(keys)
        for tier in self.lower:
            if not tier.capabilities.shared:
                known = [a or b for a, b in zip(known, tier.contains_many(keys), strict=True)]
        return known

    def reserve(self, keys: Sequence[bytes], nbytes: Sequence[int], wait_s: float = 0.0) -> list[Slot | PutStatus]:
        """Host slots to fill, or why not. With `wait_s` it waits that long for pages being spilled to become evictable:
        for worker threads only. Every Slot must be given to `commit` or `abort`."""
        return self._reserve(keys, nbytes, wait_s, lambda: True)

    def _reserve(
        self, keys: Sequence[bytes], nbytes: Sequence[int], wait_s: float, hope: Callable[[], bool]
    ) -> list[Slot | PutStatus]:
        """As `reserve`, but waits no longer than there is `hope` for room."""
        self._check_open()
        answers = self.host.reserve_many(keys, nbytes)
        give_up = time.monotonic() + wait_s
        while not self._closed and any(a is PutStatus.FULL for a in answers):
            self._drop_expired()
            full = [i for i, a in enumerate(answers) if a is PutStatus.FULL]
            for i, answer in zip(
                full, self.host.reserve_many([keys[i] for i in full], [nbytes[i] for i in full]), strict=True
            ):
                answers[i] = answer
            left = give_up - time.monotonic()
            if left <= 0:
                break
            if any(a is PutStatus.FULL for a in answers):
                if any(isinstance(a, Slot) for a in answers):
                    break  # two writers that hold slots and wait for more would starve each other
                if not hope():
                    break
                with self._room:
                    self._room.wait(min(left, 0.05))
        with self._room:
            self._filling += sum(isinstance(a, Slot) for a in answers)
        return answers

    def commit(self, keys: Sequence[bytes], slots: Sequence[Slot], metas: Sequence[PageMeta]) -> None:
        """Publish filled slots, and write them through to the lower tiers in the background. Metas that no tier can
        keep raise SpecError, and the slots are given back."""
        if not keys:
            return
        try:
            self.host.commit_many(keys, slots, metas)
        except SpecError:
            self.abort(keys, slots)
            raise
        for tier in self.lower:
            pins = self.host.pin_many(keys)
            here = [(key, pin) for key, pin in zip(keys, pins, strict=True) if pin != UNPINNED]
            if not self._spillers[tier.name].submit(partial(self._spill, tier, here)):
                self._unpin([pin for _, pin in here])
        self._filled(slots)

    def abort(self, keys: Sequence[bytes], slots: Sequence[Slot]) -> None:
        """Give reserved slots back; nothing becomes visible."""
        self.host.abort_many(keys, slots)
        with self._room:
            self._filling -= len(slots)
            self._room.notify_all()

    def delete(self, keys: Sequence[bytes]) -> None:
        """Remove pages from every tier; from lower ones in the background, behind the spills that are queued."""
        self.host.delete_many(keys)
        for tier in self.lower:
            self._spillers[tier.name].submit(partial(self._delete_below, tier, list(keys)))

    def _delete_below(self, tier: Tier, keys: list[bytes]) -> None:
        tier.delete_many(keys)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until every committed page was offered to every lower tier; False on timeout."""
        return all(spiller.drain(timeout_s) for spiller in self._spillers.values())

    def _spill(self, tier: Tier, pages: list[tuple[bytes, int]]) -> None:
        pins = [pin for _, pin in pages]
        try:
            # What was deleted while it waited here need not be written.
            there = self.host.contains_many([key for key, _ in pages])
            left = [
                (key, page)
                for (key, _), page, has in zip(pages, self.host.pinned_many(pins), there, strict=True)
                if has
            ]
            if not left:
                return
            puts = [PutItem(key, meta, self.host.view(slot)[: meta.nbytes], padded=True) for key, (slot, meta) in left]
            start = time.perf_counter()
            statuses = tier.put_many(puts)
            self.ledger.time_tier(tier.name, "put", time.perf_counter() - start)
            self.ledger.spilled(tier.name, statuses)
        finally:
            self._unpin(pins)

    # -- reading ---------------------------------------------------------------------------------------------------

    def lookup(self, request_id: str, keys: Sequence[bytes]) -> Lookup:
        """Find the pages of a request, pin those in the host tier and start the promotion of those below it.

        Asking again refreshes the lease; asking for other keys keeps what is still asked for. Index only: no input or
        output on this thread. `settle` must follow when the request starts or is dropped."""
        with self._lock:
            self._check_open()
            lookup = self._lookups.get(request_id)
            if lookup is not None:
                self.ledger.polled()
                lookup.asked = time.monotonic()
                if lookup.keys == keys:
                    return lookup
            if len(set(keys)) != len(keys):
                raise ValueError(f"request {request_id!r} asks for the same page twice")
            if lookup is None:
                lookup = self._lookups[request_id] = Lookup(request_id, self._promote_deadline_s, self.host)
            self._unpin(lookup.replace(keys))
            self._classify(lookup)
            return lookup

    def hold(self, lookup: Lookup, pages: int | None = None) -> bool:
        """The request is being loaded: its pins no longer expire. With `pages`, it starts with that many of its ready
        pages: what arrives from now on is too late for it, and must not be counted as a hit. False, and nothing is
        held, if the lease ended before: its pins are gone."""
        with self._lock:
            if self._lookups.get(lookup.request_id) is not lookup:
                return False
            lookup.held = True
            if pages is None:
                return True
            self._stop_waiting(lookup)
            released = lookup.use(pages)
        self._unpin(released)
        return True

    def wait(self, lookup: Lookup, timeout_s: float | None = None) -> int:
        """Block until nothing more can extend the ready prefix (or `timeout_s`); returns the ready pages. For callers
        that have a thread to block."""
        give_up = lookup.deadline if timeout_s is None else min(lookup.deadline, time.monotonic() + timeout_s)
        with self._changed:
            while lookup.pending and (left := give_up - time.monotonic()) > 0:
                self._changed.wait(left)
            return lookup.ready_pages

    def fail(self, lookup: Lookup, key: bytes) -> None:
        """The page under `key` turned out bad while `lookup` loaded it: it leaves the host tier, and is a miss where
        the request still asks for it."""
        with self._lock:
            self.host.delete_many([key], Removal.QUARANTINED)
            if key in lookup.keys:
                self._unpin(lookup.fail(lookup.keys.index(key), MissReason.CORRUPT))

    def settle(self, request_id: str) -> None:
        """The request started and its loads ended, or it was dropped: count its pages, release its pins. Idempotent."""
        with self._lock:
            lookup = self._lookups.pop(request_id, None)
            if lookup is None:
                return
            hits, misses = lookup.tally()
            self._stop_waiting(lookup)
            lookup.loading = {}
            released = lookup.release()
            self.ledger.settle(hits, misses)
        self._unpin(released)

    def _stop_waiting(self, lookup: Lookup) -> None:
        """Promotions under way go on without `lookup`. Call with the lock held."""
        for key in lookup.loading:
            waiting = self._promoting.get(key)
            if waiting is not None and lookup in waiting:
                waiting.remove(lookup)

    def open_requests(self) -> list[str]:
        """Requests that were looked up and not settled."""
        with self._lock:
            return list(self._lookups)

    def _classify(self, lookup: Lookup) -> None:
        unknown = lookup.unknown()
        pins = self.host.pin_many([lookup.keys[i] for i in unknown])
        if len(unknown) == len(lookup.keys):
            lookup.pins = pins
        else:
            for i, pin in zip(unknown, pins, strict=True):
                lookup.pins[i] = pin
        if UNPINNED not in pins:
            return
        absent = [i for i in unknown if lookup.pins[i] == UNPINNED]
        below = self._find_below([(i, lookup.keys[i]) for i in absent])
        # What only a shared tier can have is asked for by a worker, and counts as on its way until that knows.
        maybe = {i for i in absent if i not in below} if self._shared else set()
        reach = next(
            (
                i
                for i, pin in enumerate(lookup.pins)
                if pin == UNPINNED and i not in below and i not in maybe and lookup.keys[i] not in lookup.loading
            ),
            len(lookup.keys),
        )
        promote: dict[str, list[bytes]] = {}
        ask: list[bytes] = []
        released = []
        for i in unknown:
            key = lookup.keys[i]
            if i > reach and (lookup.pins[i] != UNPINNED or i in below):
                released += lookup.fail(i, MissReason.AFTER_GAP)
            elif lookup.pins[i] != UNPINNED:
                continue
            elif i in below or i in maybe:
                if i in below:
                    lookup.origins[i] = below[i]
                lookup.loading[key] = i
                waiting = self._promoting.get(key)
                if waiting is not None:
                    waiting.append(lookup)
                    continue
                self._promoting[key] = [lookup]
                if i in below:
                    promote.setdefault(below[i], []).append(key)
                else:
                    ask.append(key)
            else:
                lookup.misses[i] = MissReason.EVICTED if key in self._evicted else MissReason.ABSENT
        self._unpin(released)
        for name, keys in promote.items():
            self._start_promotion(self._promoter, name, keys)
        if ask and not self._asker.submit(partial(self._ask_shared, lookup, ask)):
            self._arrived(dict.fromkeys(ask, MissReason.DEADLINE))

    def _start_promotion(self, workers: WorkerPool, name: str, keys: list[bytes]) -> None:
        for at in range(0, len(keys), _PROMOTE_BATCH):
            batch = keys[at : at + _PROMOTE_BATCH]
            if not workers.submit(partial(self._promote, name, batch)):
                self._arrived(dict.fromkeys(batch, MissReason.DEADLINE))

    def _ask_shared(self, lookup: Lookup, keys: list[bytes]) -> None:
        """Look for pages, in prefix order, in the shared tiers; promote those that extend the prefix, and let go of
        those behind a gap that no other request waits for. Runs in a worker."""
        outcome: dict[bytes, MissReason | None] = dict.fromkeys(keys, MissReason.TIER_DOWN)
        promote: dict[str, list[bytes]] = {}
        try:
            found, missing = self._find_shared(keys)
            gap = next((at for at, key in enumerate(keys) if key not in found), len(keys))
            with self._lock:
                behind = [k for k in keys[gap:] if k in found and self._promoting.get(k, []) in ([], [lookup])]
            outcome = {**missing, **dict.fromkeys(behind, MissReason.AFTER_GAP)}
            for key in keys:
                if key not in outcome:
                    promote.setdefault(found[key], []).append(key)
        finally:
            self._arrived(outcome)
        for name, wanted in promote.items():
            self._start_promotion(self._asker, name, wanted)

    def _find_shared(self, keys: list[bytes]) -> tuple[dict[bytes, str], dict[bytes, MissReason]]:
        """The shared tier that has each page, and why no other page was found. Blocks for the network."""
        found: dict[bytes, str] = {}
        down: set[bytes] = set()
        for tier in self._shared:
            left = [key for key in keys if key not in found]
            for key, nbytes in zip(left, tier.length_many(left), strict=True):
                if nbytes >= 0:
                    found[key] = tier.name
                elif nbytes == LENGTH_UNKNOWN:
                    down.add(key)
        missing = {key: self._why_missing(key, key in down) for key in keys if key not in found}
        return found, missing

    def _why_missing(self, key: bytes, down: bool) -> MissReason:
        if down:
            return MissReason.TIER_DOWN
        return MissReason.EVICTED if key in self._evicted else MissReason.ABSENT

    def _find_below(self, pages: list[tuple[int, bytes]]) -> dict[int, str]:
        """The local tier that has each page. Index only."""
        found: dict[int, str] = {}
        for tier in self.lower:
            if tier.capabilities.shared:
                continue
            left = [(i, key) for i, key in pages if i not in found]
            for (i, _), has in zip(left, tier.contains_many([key for _, key in left]), strict=True):
                if has:
                    found[i] = tier.name
        return found

    def _promote(self, name: str, keys: list[bytes]) -> None:
        """Read pages of one lower tier into host slots, verified; runs in a worker."""
        keys = self._still_wanted(keys)
        if not keys:
            return
        outcome: dict[bytes, MissReason | None] = dict.fromkeys(keys, MissReason.TIER_DOWN)
        try:
            start = next(i for i, tier in enumerate(self.lower) if tier.name == name)
            left = keys
            for tier in self.lower[start:]:
                outcome.update(self._read(tier, left))
                # Pages that found no room while slots were held for others ask again without: only then may they wait.
                asked = len(left)
                while 0 < len(full := [key for key in left if outcome[key] is MissReason.NO_ROOM]) < asked:
                    asked = len(full)
                    outcome.update(self._read(tier, full))
                left = [key for key in left if outcome[key] not in (None, MissReason.NO_ROOM)]
                if not left:
                    break
        except ClosedError:  # the store is closing: nobody will use the pages
            outcome = dict.fromkeys(keys, MissReason.DEADLINE)
        finally:
            self._arrived(outcome)

    def _still_wanted(self, keys: list[bytes]) -> list[bytes]:
        """Those that a request waits for; what the rest would push out of the host tier may be of use."""
        with self._lock:
            wanted = [key for key in keys if self._promoting.get(key)]
            for key in set(keys).difference(wanted):
                self._promoting.pop(key, None)
        return wanted

    def _read(self, tier: Tier, keys: list[bytes]) -> dict[bytes, MissReason | None]:
        outcome: dict[bytes, MissReason | None] = {}
        here = []
        for key, nbytes in zip(keys, tier.length_many(keys), strict=True):
            if nbytes < 0:
                outcome[key] = self._why_missing(key, nbytes == LENGTH_UNKNOWN)
            else:
                here.append((key, nbytes))
        fill: list[tuple[bytes, Slot]] = []
        wanted = [key for key, _ in here]
        answers = self._reserve(wanted, [n for _, n in here], self._promote_deadline_s, lambda: self._make_way(wanted))
        for (key, _), answer in zip(here, answers, strict=True):
            if isinstance(answer, Slot):
                fill.append((key, answer))
            else:
                outcome[key] = None if answer is PutStatus.EXISTS else MissReason.NO_ROOM
        committed: list[tuple[bytes, Slot, PageMeta]] = []
        aborted: list[tuple[bytes, Slot]] = list(fill)
        try:
            start = time.perf_counter()
            outs = [self._padded(slot, slot.nbytes) for _, slot in fill]
            results = tier.get_many_into([key for key, _ in fill], outs, self._promote_deadline_s)
            self.ledger.time_tier(tier.name, "get", time.perf_counter() - start)
            aborted = []
            for (key, slot), result in zip(fill, results, strict=True):
                if result.status is GetStatus.HIT and result.meta is not None:
                    committed.append((key, slot, result.meta))
                else:
                    aborted.append((key, slot))
                    outcome[key] = _MISS_OF.get(result.status, MissReason.ABSENT)
        finally:
            if aborted:
                self.abort([k for k, _ in aborted], [s for _, s in aborted])
        if committed:
            self.host.commit_many(
                [k for k, _, _ in committed], [s for _, s, _ in committed], [m for _, _, m in committed]
            )
            outcome.update({key: None for key, _, _ in committed})
            self._hand_over(tier.name, [key for key, _, _ in committed])
            self._filled([slot for _, slot, _ in committed])
        return outcome

    def _make_way(self, keys: Sequence[bytes]) -> bool:
        """Whether room in the host tier may come for pages that requests wait for. Where nothing but those requests
        holds it, they give up their last pages for these, which come before them."""
        released: list[int] = []
        with self._lock:
            waiting = {lookup.request_id: lookup for key in keys for lookup in self._promoting.get(key, ())}
            if not waiting:
                return False
            if self._filling or not all(spiller.idle for spiller in self._spillers.values()):
                return True
            for request_id, lookup in self._lookups.items():
                if request_id not in waiting and lookup.pins.count(UNPINNED) < len(lookup.pins):
                    return True
            for lookup in waiting.values():
                first = min((lookup.loading[key] for key in keys if key in lookup.loading), default=len(lookup.keys))
                released += lookup.give_up_last(len(keys), first)
        self._unpin(released)
        return bool(released)

    def _hand_over(self, name: str, keys: Sequence[bytes]) -> None:
        """Pin committed pages for the requests that wait for them, while their writer still pins them."""
        with self._changed:
            for key in keys:
                for lookup in self._promoting.pop(key, ()):
                    i = lookup.loading.pop(key, -1)
                    if i < 0:
                        continue  # it asks for other pages by now
                    (lookup.pins[i],) = self.host.pin_many([key])
                    lookup.origins[i] = name
                    if lookup.pins[i] == UNPINNED:
                        lookup.misses[i] = MissReason.CORRUPT  # deleted between commit and now: only a bad page is
            self._changed.notify_all()

    def _arrived(self, outcome: dict[bytes, MissReason | None]) -> None:
        """End the wait for promoted pages. None: the page is, or was a moment ago, in the host tier."""
        with self._changed:
            for key, reason in outcome.items():
                for lookup in self._promoting.pop(key, ()):
                    i = lookup.loading.pop(key, -1)
                    if i < 0:
                        continue  # it asks for other pages by now
                    if reason is None:
                        (lookup.pins[i],) = self.host.pin_many([key])
                    if lookup.pins[i] == UNPINNED:
                        lookup.misses[i] = reason if reason is not None else MissReason.DEADLINE
            self._changed.notify_all()

    # -- house-keeping -----------------------------------------------------------------------------------------------

    def close(self, timeout_s: float = 1.5) -> None:
        """Let spills end for at most `timeout_s`, and close every tier within half a second more: one that hangs is
        left to the end of the process. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            requests = list(self._lookups)
        give_up = time.monotonic() + timeout_s
        for pool in (self._promoter, self._asker, *self._spillers.values()):
            if not pool.close(max(0.05, give_up - time.monotonic())):
                _log.warning("store closed while a tier was still busy: pages not yet written below are lost there")
        for request_id in requests:
            self.settle(request_id)
        tiers = (self.host, *self.lower)
        closer = WorkerPool("kvtier-close", len(tiers), partial(self._worker_error, "spill"))
        for tier in tiers:
            tier.set_removal_listener(None)
            closer.submit(tier.close)
        if not closer.close(give_up + _TIER_CLOSE_S - time.monotonic()):
            _log.warning("store closed while a tier could not be closed: it hangs")

    def _drop_expired(self) -> None:
        if self._lease_s is None:
            return
        now = time.monotonic()
        with self._lock:
            expired = [r for r, lk in self._lookups.items() if not lk.held and now - lk.asked > self._lease_s]
        for request_id in expired:
            self.settle(request_id)

    def _removed(self, keys: Sequence[bytes], removal: Removal) -> None:
        if self._on_removed is not None:
            self._on_removed(keys, removal)
        if removal is not Removal.EVICTED:
            return
        with self._evicted_lock:
            for key in keys:
                self._evicted[key] = None
            while len(self._evicted) > _REMEMBERED_EVICTIONS:
                del self._evicted[next(iter(self._evicted))]

    def _padded(self, slot: Slot, nbytes: int) -> memoryview:
        """The slot's first `nbytes` rounded up to the next 4 KiB, which the arena always has."""
        return self.host.arena.data[slot.offset : slot.offset + -(-nbytes // SLOT_ALIGN) * SLOT_ALIGN]

    def _unpin(self, pins: Sequence[int]) -> None:
        if pins:
            self.host.unpin_many(pins)
            self._notify_room()

    def _filled(self, slots: Sequence[Slot]) -> None:
        """Let go of slots whose pages are committed."""
        with self._room:
            self._filling -= len(slots)
        self._unpin([slot.id for slot in slots])

    def _notify_room(self) -> None:
        with self._room:
            self._room.notify_all()

    def _worker_error(self, site: str, error: BaseException) -> None:
        self.ledger.error(site)
        _log.error("%s failed: %s", site, error, exc_info=error)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the store is closed")
