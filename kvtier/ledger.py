"""The accounting. Every page that was looked up is one hit in one tier or one miss with one reason.

Counts are kept here as integers under one lock, so that a snapshot adds up; `Ledger.registry` shows the same
numbers to Prometheus. Every series exists from the start, at 0. All methods may be called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtier.abc.tier import PutStatus, TierUsage
from kvtier.errors import KVTierError


class MissReason(str, Enum):
    """Why a page that was looked up did not come from a tier."""

    ABSENT = "absent"
    EVICTED = "evicted"  # it was here, and made room for others
    CORRUPT = "corrupt"  # its bytes did not match their checksum, or could not be decoded
    DEADLINE = "deadline"  # it was on its way when the request started or was dropped
    AFTER_GAP = "after_gap"  # it is here, but a page before it is not
    NO_ROOM = "no_room"  # the host tier had no evictable page to make room for it
    TIER_DOWN = "tier_down"  # the tier that has it failed to read it
    DROPPED = "dropped"  # it was ready, and the request ended before it was loaded
    DECLINED = "declined"  # loading it would have taken longer than computing it again
    PARTIAL = "partial"  # a part of it is missing: a buffer, or the record's end
    NAMESPACE = "namespace"  # the same tokens are stored under another namespace: other weights, another form
    SUPERSEDED = "superseded"  # the engine had it on the device by the time the request started


class OffloadOutcome(str, Enum):
    """What became of one page offered for offload."""

    STORED = "stored"
    EXISTS = "exists"  # already in a tier: not encoded again
    STORED_RAW = "stored_raw"  # the codec refused it (NaN or infinity): stored without compression
    STORED_OVER_BUDGET = "stored_over_budget"  # its error was over max_relative_error: stored without compression
    FULL = "full"  # no room in the host tier within the deadline
    TOO_LARGE = "too_large"
    FAILED = "failed"  # an error, logged
    CLOSED = "closed"


class Direction(str, Enum):
    OFFLOAD = "offload"
    ONBOARD = "onboard"


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """Totals since the ledger was made. ``lookups == sum(hits.values()) + sum(misses.values())``.

    Bytes are of pages whose encode or decode completed: `hot_bytes` as they lie in the engine's cache,
    `hot_bytes_16bit` with attention values counted at 16 bits, `cold_bytes` as stored; keys are directions.
    codec_seconds: spent in codec calls, by what they did; threads that work at the same time add up.
    """

    lookups: int
    hits: dict[str, int]
    misses: dict[str, int]
    lookup_polls: int
    offloads: dict[str, int]
    hot_bytes: dict[str, int]
    hot_bytes_16bit: dict[str, int]
    cold_bytes: dict[str, int]
    spills: dict[str, dict[str, int]]
    load_failures: int
    errors: dict[str, int]
    codec_seconds: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


ERROR_SITES = ("lookup", "load", "offload", "promote", "spill", "engine", "http", "observe")
"""Places where an error is caught so that the engine keeps serving; each is a label of `kvtier_errors_total`."""

CODEC_OPS = ("encode", "decode", "verify")

_RELATIVE_ERRORS = (0.001, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.09, 0.1, 0.12, 0.15, 0.2, 0.3, 0.5, 1.0)
_AGES = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 43200.0, 86400.0)
_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Ledger(Collector):
    """One per connector or server. `tiers` are the names that hits can be counted under, fastest first."""

    def __init__(self, tiers: Sequence[str]) -> None:
        if not tiers or len(set(tiers)) != len(tiers):
            raise KVTierError(f"a ledger needs distinct tier names, got {list(tiers)}")
        self._lock = threading.Lock()
        self.tiers = tuple(tiers)
        self._lookups = 0
        self._polls = 0
        self._load_failures = 0
        self._hits = dict.fromkeys(tiers, 0)
        self._misses = {r.value: 0 for r in MissReason}
        self._offloads = {o.value: 0 for o in OffloadOutcome}
        self._hot = {d.value: 0 for d in Direction}
        self._hot_16bit = {d.value: 0 for d in Direction}
        self._cold = {d.value: 0 for d in Direction}
        self._spills = {t: {s.value: 0 for s in PutStatus} for t in tiers[1:]}
        self._errors = dict.fromkeys(ERROR_SITES, 0)
        self._switches = dict.fromkeys(("k", "v", "latent"), 0)
        self._slow_restores = 0
        self._violations = 0
        self._saved_s = 0.0
        self._codec_s = dict.fromkeys(CODEC_OPS, 0.0)
        self._ages = np.zeros(len(_AGES) + 1, np.int64)
        self._ages_sum_s = 0.0
        self._usages: dict[str, Callable[[], TierUsage]] = {}
        self._before_reading: Callable[[], None] | None = None

        self.registry = CollectorRegistry()
        self.registry.register(self)
        codec = self._histogram("kvtier_codec_seconds", "Time of one codec call on a batch of pages", "op")
        tier_call = self._histogram("kvtier_tier_seconds", "Time of one tier call on a batch of pages", "tier", "op")
        self._engine_seconds = self._histogram(
            "kvtier_engine_thread_seconds", "Time taken from the engine's own thread, per call", "call"
        )
        self._codec_seconds = {op: codec.labels(op) for op in CODEC_OPS}
        self._tier_seconds = {(tier, op): tier_call.labels(tier, op) for tier in tiers for op in ("get", "put")}
        for call in ("waiting", "lookup", "load", "offload"):
            self._engine_seconds.labels(call)
        self._restore_seconds = self._histogram(
            "kvtier_restore_seconds", "Time to bring a request's pages back: waiting for lower tiers, and loading"
        )
        self._relative_error = Histogram(
            "kvtier_relative_error",
            "Relative error of sampled pages, by layer and role",
            ("layer", "role"),
            buckets=_RELATIVE_ERRORS,
            registry=self.registry,
        )

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=_SECONDS, registry=self.registry)

    def watch(self, tier: str, usage: Callable[[], TierUsage]) -> None:
        """Show `usage()` of `tier` among the metrics."""
        with self._lock:
            self._usages[tier] = usage

    def settle(self, hits: Mapping[str, int], misses: Mapping[MissReason, int]) -> None:
        """Count the pages of one request, once, when it starts or is dropped."""
        with self._lock:
            for tier, n in hits.items():
                self._hits[tier] += n
                self._lookups += n
            for reason, n in misses.items():
                self._misses[reason.value] += n
                self._lookups += n

    def hit_one(self, tier: str) -> None:
        """As `settle`, of one page that was found in `tier`."""
        with self._lock:
            self._hits[tier] += 1
            self._lookups += 1

    def polled(self) -> None:
        """Count a repeated lookup of a request whose pages are already known."""
        with self._lock:
            self._polls += 1

    def offloaded(self, outcomes: Mapping[OffloadOutcome, int]) -> None:
        with self._lock:
            for outcome, n in outcomes.items():
                self._offloads[outcome.value] += n

    def moved(self, direction: Direction, *, hot: int, hot_16bit: int, cold: int) -> None:
        """Count the bytes of pages that were encoded and committed, or decoded."""
        with self._lock:
            self._hot[direction.value] += hot
            self._hot_16bit[direction.value] += hot_16bit
            self._cold[direction.value] += cold

    def spilled(self, tier: str, statuses: Sequence[PutStatus]) -> None:
        with self._lock:
            for status in statuses:
                self._spills[tier][status.value] += 1

    def restored(self, seconds: float, *, slow: bool) -> None:
        """A request's pages were brought back, in so long; `slow`: over the limit that is logged."""
        self._restore_seconds.observe(seconds)
        if slow:
            with self._lock:
                self._slow_restores += 1

    def saved(self, seconds: float) -> None:
        """Time to the first token that a request did not need, estimated."""
        with self._lock:
            self._saved_s += seconds

    def evicted_ages(self, seconds: Sequence[float]) -> None:
        """How long ago pages were evicted that are asked for now; one number per page."""
        ages = np.asarray(seconds, np.float64)
        buckets = np.bincount(np.searchsorted(_AGES, ages), minlength=len(_AGES) + 1)
        with self._lock:
            self._ages += buckets
            self._ages_sum_s += float(ages.sum())

    @property
    def violations(self) -> int:
        """Sums that were found not to hold; 0 unless somebody checks."""
        return self._violations

    def violated(self) -> None:
        """A sum that must hold was found not to; checked with `debug` only."""
        with self._lock:
            self._violations += 1

    def load_failed(self) -> None:
        """Count a load that failed after it had started."""
        with self._lock:
            self._load_failures += 1

    def error(self, site: str) -> None:
        """Count an exception that was caught at `site` (one of ERROR_SITES) and logged there."""
        with self._lock:
            self._errors[site] += 1

    def time_codec(self, op: str, seconds: float) -> None:
        self._codec_seconds[op].observe(seconds)
        with self._lock:
            self._codec_s[op] += seconds

    def time_tier(self, tier: str, op: str, seconds: float) -> None:
        self._tier_seconds[tier, op].observe(seconds)

    def time_engine(self, call: str, seconds: float) -> None:
        """Time spent on the engine's own thread in `call`: lookup, load or offload; waiting: to choose, in each step,
        which requests wait."""
        self._engine_seconds.labels(call).observe(seconds)

    def sampled(self, layer: int, role: str, relative_error: float) -> None:
        """The relative L2 error of one buffer of a sampled page."""
        self._relative_error.labels(str(layer), role).observe(relative_error)

    def precision_switched(self, role: str) -> None:
        """Count that a layer's K, V or latent is stored finer from now on."""
        with self._lock:
            self._switches[role] += 1

    def before_reading(self, call: Callable[[], None]) -> None:
        """`call()` before the totals are read: what has happened and is not counted yet is counted now."""
        self._before_reading = call

    def snapshot(self) -> LedgerSnapshot:
        if self._before_reading is not None:
            self._before_reading()
        with self._lock:
            return LedgerSnapshot(
                lookups=self._lookups,
                hits=dict(self._hits),
                misses=dict(self._misses),
                lookup_polls=self._polls,
                offloads=dict(self._offloads),
                hot_bytes=dict(self._hot),
                hot_bytes_16bit=dict(self._hot_16bit),
                cold_bytes=dict(self._cold),
                spills={t: dict(s) for t, s in self._spills.items()},
                load_failures=self._load_failures,
                errors=dict(self._errors),
                codec_seconds=dict(self._codec_s),
            )

    def collect(self) -> Iterator[Metric]:
        """For Prometheus. Names and labels are part of the interface (`docs/metrics.md`)."""
        s = self.snapshot()
        yield _counter("kvtier_lookups", "Pages looked up", s.lookups)
        yield _counter("kvtier_lookup_polls", "Repeated lookups of a waiting request", s.lookup_polls)
        yield _counters("kvtier_hits", "Pages found, by the tier they came from", "tier", s.hits)
        yield _counters("kvtier_misses", "Pages not found, by reason", "reason", s.misses)
        yield _counters("kvtier_offload_pages", "Pages offered for offload, by outcome", "outcome", s.offloads)
        yield _counters("kvtier_hot_bytes", "Bytes of moved pages in the engine's cache", "direction", s.hot_bytes)
        yield _counters("kvtier_cold_bytes", "Bytes of moved pages as stored", "direction", s.cold_bytes)
        yield _counter("kvtier_load_failures", "Loads that failed after their start", s.load_failures)
        yield _counters("kvtier_errors", "Exceptions caught so that the engine keeps serving", "site", s.errors)
        with self._lock:
            switches = dict(self._switches)
        yield _counters("kvtier_precision_switches", "Layers stored finer since, by role", "role", switches)
        spills = CounterMetricFamily("kvtier_spill_pages", "Pages written to lower tiers", labels=["tier", "status"])
        for tier, statuses in s.spills.items():
            for status, n in statuses.items():
                spills.add_metric([tier, status], n)
        yield spills
        with self._lock:
            slow, violations, saved_s = self._slow_restores, self._violations, self._saved_s
            ages, ages_sum_s = self._ages.cumsum().tolist(), self._ages_sum_s
        yield _counter("kvtier_slow_restores", "Restores over the limit that is logged", slow)
        yield _counter("kvtier_accounting_violations", "Sums that did not hold (checked with debug only)", violations)
        yield CounterMetricFamily(
            "kvtier_ttft_saved_seconds", "Time to first token saved by hits, estimated", value=saved_s
        )
        age = HistogramMetricFamily("kvtier_evicted_age_seconds", "How long ago evicted pages left that are asked for")
        bounds = [*map(str, _AGES), "+Inf"]
        age.add_metric([], list(zip(bounds, ages, strict=True)), ages_sum_s)
        yield age
        yield from self._collect_usage()

    def _collect_usage(self) -> Iterator[Metric]:
        with self._lock:
            watched = dict(self._usages)
        usages = {tier: usage() for tier, usage in watched.items()}
        gauges = {"capacity_bytes": "Capacity", "used_bytes": "Bytes in use", "resident_pages": "Pages resident"}
        for name, text in gauges.items():
            gauge = GaugeMetricFamily(f"kvtier_tier_{name}", text, labels=["tier"])
            for tier, usage in usages.items():
                gauge.add_metric([tier], getattr(usage, name))
            yield gauge
        counts = {
            "recovered_pages": "Pages found on opening",
            "stored_pages": "Pages stored",
            "evicted_pages": "Pages evicted",
            "deleted_pages": "Pages deleted",
            "quarantined_pages": "Pages removed because they were bad",
            "put_bytes": "Bytes written",
            "get_bytes": "Bytes read",
        }
        for name, text in counts.items():
            yield _counters(f"kvtier_tier_{name}", text, "tier", {t: getattr(u, name) for t, u in usages.items()})


def _counter(name: str, text: str, value: int) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _counters(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
