"""What eviction did, for Prometheus: a user must see that it ran."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class EvictionMetrics:
    """One per process and registry. Every series of `methods` exists at 0 from the start.

    Evicted tokens are counted per sequence, whatever the number of layers and heads: a per-head mode drops the same
    number in every head.
    """

    def __init__(self, methods: Sequence[str], registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self._evicted = Counter(
            "kvtier_evicted_tokens", "Generated tokens evicted from live caches", ["method"], registry=self.registry
        )
        self._rounds = Counter(
            "kvtier_eviction_rounds", "Eviction rounds, one per sequence", ["method"], registry=self.registry
        )
        self._kept = Histogram(
            "kvtier_eviction_kept_tokens",
            "Rows of a sequence after a round, its prompt included",
            ["method"],
            buckets=_TOKENS,
            registry=self.registry,
        )
        self._seconds = Histogram(
            "kvtier_eviction_round_seconds",
            "Host time of the rounds of one step",
            ["method"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        for method in methods:
            for family in (self._evicted, self._rounds, self._kept, self._seconds):
                family.labels(method)

    def round(self, method: str, evicted: Sequence[int], kept: Sequence[int], seconds: float) -> None:
        """Count the rounds of one step: per sequence the rows evicted and the rows left."""
        self._evicted.labels(method).inc(sum(evicted))
        self._rounds.labels(method).inc(len(evicted))
        for rows in kept:
            self._kept.labels(method).observe(rows)
        self._seconds.labels(method).observe(seconds)

    def evicted_tokens(self, method: str) -> int:
        return int(self._value("kvtier_evicted_tokens_total", method))

    def rounds(self, method: str) -> int:
        return int(self._value("kvtier_eviction_rounds_total", method))

    def seconds(self, method: str) -> float:
        return self._value("kvtier_eviction_round_seconds_sum", method)

    def _value(self, name: str, method: str) -> float:
        return self.registry.get_sample_value(name, {"method": method}) or 0.0
