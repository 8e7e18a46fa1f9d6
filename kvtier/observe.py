"""What is watched while a store works: ghosts, slow restores, explained and recorded requests, spans, and whether the
accounting adds up. The store calls an `Observer` at the few places where something happens to pages. None of its
methods may raise or block, since an engine's own thread calls them."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.abc.tier import PageMeta, TierUsage
from kvtier.explain import Explainer
from kvtier.ghosts import GhostCurves, Ghosts
from kvtier.ledger import Ledger, LedgerSnapshot, MissReason
from kvtier.lookup import Lookup
from kvtier.origins import ROWS, Origins
from kvtier.workers import WorkerPool

if TYPE_CHECKING:
    from kvtier.breakeven import BreakEven
    from kvtier.config import KvEventsConfig
    from kvtier.inventory import Inventory
    from kvtier.kv_events import KvEvents
    from kvtier.replay.recorded import LookupRecorder
    from kvtier.telemetry import Spans

_log = logging.getLogger(__name__)

_LOG_EVERY_S = 1.0
_CHECK_EVERY_S = 1.0
_CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class ObserveOptions:
    """As in the configuration block (`kvtier.config.Config`)."""

    ghosts: bool = True
    explain_sample: float = 0.0
    slow_restore_s: float | None = 1.0
    record: Path | None = None
    opentelemetry: bool = False
    debug: bool = False
    kv_events: KvEventsConfig | None = None
    origins: bool = True
    """Whether misses tell pages of another namespace: only where pages' origins are an engine's hashes."""


class Observer:
    """Watches nothing. The contract, and what a store has that was opened without one."""

    inventory: Inventory | None = None
    """Of the store that is watched, for the status page; None: nobody may ask over HTTP."""
    prompt = False
    """Whether requests must be told while their pins are still there."""
    hears_moves = False
    """Whether `arrived` and `left` do anything."""

    def page_holds(self, tokens: int, spec: bytes = b"") -> None:
        """Pages, by the fingerprint of their geometry, hold so many tokens; called before the first of them moves. May
        raise what keeps an engine from starting."""

    def looked_up(self, keys: Sequence[bytes]) -> None:
        """Pages were asked for and counted outside of a `Lookup`."""

    def looked_up_one(self, key: bytes) -> None:
        """As `looked_up`, of one page."""
        self.looked_up([key])

    def settled(self, lookup: Lookup, hits: Mapping[str, int], misses: Mapping[MissReason, int], loaded: bool) -> None:
        """A request is counted. With `prompt` its pins are still there, and the store's lock is held."""

    def stored(self, keys: Sequence[bytes], metas: Sequence[PageMeta]) -> None:
        """New pages were committed."""

    def stored_one(self, key: bytes, meta: PageMeta) -> None:
        """As `stored`, of one page."""
        self.stored([key], [meta])

    def arrived(self, tier: str, keys: Sequence[bytes], metas: Sequence[PageMeta]) -> None:
        """Pages are in one of the tiers now, new ones in the first, too; may be told twice."""

    def left(self, tier: str, keys: Sequence[bytes]) -> None:
        """Pages are no longer in one of the tiers, whatever the reason."""

    def deleted(self, keys: Sequence[bytes]) -> None:
        """Pages were deleted on somebody's wish."""

    def offloaded(self, began_s: float, outcomes: Mapping[str, int]) -> None:
        """An offload that was queued at `began_s` (monotonic) ended."""

    def elsewhere(self, hashes: Sequence[bytes], keys: Sequence[bytes]) -> Sequence[bool]:
        """Whether the page of each of the engine's hashes is known under another key."""
        return [False] * len(keys)

    def curves(self) -> GhostCurves | None:
        return None

    def explain(self, request_id: str) -> Mapping[str, Any] | None:
        return None

    def close(self) -> None:
        """Safe to call twice."""


class Watch(Observer):
    """Watches what `options` ask for. usages: by tier. exclusive: see `Ghosts`. holds: which pages a tier has now, of
    tiers that know. Raises MissingExtraError for spans without their extra."""

    def __init__(
        self,
        options: ObserveOptions,
        ledger: Ledger,
        usages: Mapping[str, Callable[[], TierUsage]],
        break_even: BreakEven | None = None,
        *,
        exclusive: bool = False,
        holds: Mapping[str, Callable[[Sequence[bytes]], Sequence[bool]]] | None = None,
    ) -> None:
        self._options = options
        self._ledger = ledger
        self._usages = dict(usages)
        self._break_even = break_even
        self._page_tokens = 0
        self._origins: Origins | None = Origins() if options.origins else None
        self._explainer = Explainer(options.explain_sample)
        self.prompt = options.explain_sample > 0  # the sizes of its pages are looked up
        self._ghosts: Ghosts | None = None
        if options.ghosts:
            capacities = {name: usage().capacity_bytes for name, usage in usages.items()}
            self._ghosts = Ghosts(capacities, self._bits_per_value, exclusive=exclusive)
            ledger.registry.register(self._ghosts)
            if not options.origins:
                # The same, by one call.
                self.stored_one = self._ghosts.stored_one  # type: ignore[method-assign]
                self.looked_up_one = self._ghosts.looked_up_one  # type: ignore[method-assign]
        self._spans: Spans | None = None
        if options.opentelemetry:
            from kvtier.telemetry import Spans

            self._spans = Spans()
        self._events: KvEvents | None = None
        if options.kv_events is not None:
            from kvtier.kv_events import EventOptions, KvEvents, Publisher

            asked = options.kv_events
            publisher = Publisher(EventOptions(asked.endpoint, asked.topic, asked.queue))
            ledger.registry.register(publisher)
            self._events = KvEvents(publisher, holds)
            self.hears_moves = True
        self._recorder: LookupRecorder | None = None
        # Recorded by a thread of its own: hashing a thousand keys takes a millisecond, a full disk longer.
        self._writer = WorkerPool("kvtier-record", 1 if options.record else 0, partial(self._failed, "record"))
        self._lock = threading.Lock()
        self._logged_s = self._checked_s = float("-inf")
        self._unlogged = 0

    def learn(self, pages: Iterable[tuple[bytes, PageMeta]]) -> None:
        """Pages that a tier had when it was opened."""
        found = list(islice(pages, ROWS))
        if self._origins is not None:
            self._origins.stored([meta.origin for _, meta in found], [key for key, _ in found])

    def page_holds(self, tokens: int, spec: bytes = b"") -> None:
        self._page_tokens = tokens
        if self._events is not None:
            self._events.page_holds(tokens, spec)
        if self._options.record is not None and self._recorder is None:
            from kvtier.replay.recorded import LookupRecorder

            self._recorder = LookupRecorder(self._options.record, page_tokens=tokens)

    def looked_up(self, keys: Sequence[bytes]) -> None:
        if self._ghosts is not None:
            self._ghosts.looked_up(keys)

    def stored(self, keys: Sequence[bytes], metas: Sequence[PageMeta]) -> None:
        if self._ghosts is not None:
            self._ghosts.stored(keys, [meta.nbytes for meta in metas])
        if self._origins is not None:
            self._origins.stored([meta.origin for meta in metas], keys)

    def arrived(self, tier: str, keys: Sequence[bytes], metas: Sequence[PageMeta]) -> None:
        if self._events is not None:
            self._events.stored(tier, keys, metas)

    def left(self, tier: str, keys: Sequence[bytes]) -> None:
        if self._events is not None:
            self._events.removed(tier, keys)

    def deleted(self, keys: Sequence[bytes]) -> None:
        if self._ghosts is not None:
            self._ghosts.dropped(keys)

    def elsewhere(self, hashes: Sequence[bytes], keys: Sequence[bytes]) -> Sequence[bool]:
        if self._origins is None:
            return super().elsewhere(hashes, keys)
        return [bool(found) for found in self._origins.elsewhere(hashes, keys)]

    def offloaded(self, began_s: float, outcomes: Mapping[str, int]) -> None:
        if self._spans is not None:
            self._spans.offload(began_s, time.monotonic(), outcomes=outcomes)

    def settled(self, lookup: Lookup, hits: Mapping[str, int], misses: Mapping[MissReason, int], loaded: bool) -> None:
        try:
            self._settled(lookup, hits, misses, loaded)
        except Exception as error:  # noqa: BLE001 - watching must not end what is watched
            self._failed("observe", error)

    def _settled(self, lookup: Lookup, hits: Mapping[str, int], misses: Mapping[MissReason, int], loaded: bool) -> None:
        now = time.monotonic()
        self.looked_up(lookup.keys)
        waited_s = max(lookup.arrivals.values(), default=lookup.began) - lookup.began
        saved_s = self._saved_s(hits) if hits else None
        if saved_s is not None:
            self._ledger.saved(saved_s)
        if hits:
            self._restored(lookup, hits, misses, waited_s)
        if self._explainer.wants():
            self._explainer.add(lookup, loaded=loaded, waited_s=waited_s, saved_s=saved_s)
        if self._recorder is not None and lookup.keys:
            tokens = len(lookup.keys) * self._page_tokens
            self._writer.submit(partial(self._recorder.record, list(lookup.keys), input_tokens=tokens))
        if self._spans is not None:
            self._spans.restore(
                lookup.request_id,
                lookup.began,
                now,
                hits=hits,
                misses={reason.value: n for reason, n in misses.items()},
                waited_s=waited_s,
                load_s=lookup.load_s,
                loaded=loaded,
            )
        if self._options.debug:
            self._check(lookup, hits, misses, loaded, now)

    def _saved_s(self, hits: Mapping[str, int]) -> float | None:
        """Prefill that hits made unnecessary, less what loading such pages costs; None while that is not known."""
        if self._break_even is None:
            return None
        token_s = self._break_even.prefill_s_per_token
        if token_s is None or not self._page_tokens:
            return None
        page_s = token_s * self._page_tokens
        costs = {tier: self._break_even.load_s_per_page(tier) or 0.0 for tier in hits}
        return max(0.0, sum(n * (page_s - costs[tier]) for tier, n in hits.items()))

    def _restored(
        self, lookup: Lookup, hits: Mapping[str, int], misses: Mapping[MissReason, int], waited_s: float
    ) -> None:
        took_s = waited_s + lookup.load_s
        limit_s = self._options.slow_restore_s
        slow = limit_s is not None and took_s > limit_s
        self._ledger.restored(took_s, slow=slow)
        if not slow:
            return
        with self._lock:
            now = time.monotonic()
            if now - self._logged_s < _LOG_EVERY_S:
                self._unlogged += 1
                return
            self._logged_s, unlogged, self._unlogged = now, self._unlogged, 0
        line = {
            "request": lookup.request_id,
            "seconds": round(took_s, 4),
            "waited_s": round(waited_s, 4),
            "load_s": round(lookup.load_s, 4),
            "limit_s": limit_s,
            "hits": dict(hits),
            "misses": {reason.value: n for reason, n in misses.items() if n},
            "unlogged": unlogged,
        }
        _log.warning("slow restore %s", json.dumps(line), extra={"kvtier": line})

    # -- whether the accounting adds up ----------------------------------------------------------------------------

    def _check(
        self,
        lookup: Lookup,
        hits: Mapping[str, int],
        misses: Mapping[MissReason, int],
        loaded: bool,
        now: float,
    ) -> None:
        asked = len(lookup.keys) + len(lookup.superseded)
        counted = sum(hits.values()) + sum(misses.values())
        if counted != asked:
            self._violated(f"request {lookup.request_id!r} asked for {asked} pages, {counted} were counted")
        found: dict[str, int] = {}
        for outcome in lookup.outcomes():
            if not isinstance(outcome, MissReason):
                found[outcome] = found.get(outcome, 0) + 1
        if found != (dict(hits) if loaded else found):
            self._violated(f"request {lookup.request_id!r}: {hits} were counted, its pages say {found}")
        if now - self._checked_s >= _CHECK_EVERY_S:
            self._checked_s = now
            self.check()

    def check(self) -> None:
        """Check every sum of `docs/metrics.md` now."""
        for fault in [*ledger_faults(self._ledger.snapshot()), *usage_faults(self._usages)]:
            self._violated(fault)

    def _violated(self, what: str) -> None:
        self._ledger.violated()
        _log.error("the accounting does not add up: %s", what)

    def _failed(self, what: str, error: BaseException) -> None:
        self._ledger.error("observe")
        _log.error("%s failed: %s", what, error, exc_info=error)

    def _bits_per_value(self) -> float | None:
        snapshot = self._ledger.snapshot()
        hot = snapshot.hot_bytes_16bit["offload"]
        return 16.0 * snapshot.cold_bytes["offload"] / hot if hot else None

    # -- asked by the status page ----------------------------------------------------------------------------------

    def curves(self) -> GhostCurves | None:
        return None if self._ghosts is None else self._ghosts.curves()

    def explain(self, request_id: str) -> Mapping[str, Any] | None:
        return self._explainer.find(request_id)

    def close(self) -> None:
        if not self._writer.close(_CLOSE_S):
            _log.warning("closed while lookups were still being recorded: the last ones are lost")
        if self._recorder is not None:
            self._recorder.close()
        if self._events is not None:
            self._events.close()


def ledger_faults(snapshot: LedgerSnapshot) -> list[str]:
    """What does not add up in a ledger's totals."""
    counted = sum(snapshot.hits.values()) + sum(snapshot.misses.values())
    if counted == snapshot.lookups:
        return []
    return [f"{snapshot.lookups} pages were looked up, {counted} are hits and misses"]


def usage_faults(usages: Mapping[str, Callable[[], TierUsage]]) -> list[str]:
    """What does not add up in the counts of tiers, or lies over their capacity."""
    faults = []
    for name, usage in usages.items():
        u = usage()
        there = u.recovered_pages + u.stored_pages - u.evicted_pages - u.deleted_pages - u.quarantined_pages
        if there != u.resident_pages:
            faults.append(f"tier {name} should have {there} pages and has {u.resident_pages}")
        if u.used_bytes > u.capacity_bytes > 0:
            faults.append(f"tier {name} uses {u.used_bytes} bytes of {u.capacity_bytes}")
    return faults
