"""The Redis tier's own counters, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class RedisCounters:
    """Since the tier was opened. oom_rejections: puts refused because the server is at its maxmemory. bad_puts: pages
    offered that did not match their checksum. error_replies: other errors of a server. healed: values that were no
    records, removed to make way. newer_records: records of a later release met, which stay. redirects: MOVED and ASK
    followed. refreshes: how often the servers were looked up. breaker_opened: servers given up, failed probes included.
    connected: connections opened."""

    oom_rejections: int
    bad_puts: int
    error_replies: int
    healed: int
    newer_records: int
    redirects: int
    refreshes: int
    breaker_opened: int
    connected: int
    open_connections: int
    nodes_up: int
    nodes: int


_GAUGES = ("open_connections", "nodes_up", "nodes")


class RedisCollector(Collector):
    """Shows `counters` of the tier called `tier` as ``kvtier_redis_*``."""

    def __init__(self, tier: str, counters: Callable[[], RedisCounters]) -> None:
        self._tier = tier
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        for name, value in asdict(self._counters()).items():
            text = f"Redis tier: {name.replace('_', ' ')}"
            make = GaugeMetricFamily if name in _GAUGES else CounterMetricFamily
            family = make(f"kvtier_redis_{name}", text, labels=["tier"])
            family.add_metric([self._tier], value)
            yield family
