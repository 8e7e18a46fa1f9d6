"""What an NVMe tier counts per directory, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtier.storage_backends.nvme.health import DeviceCounters, DeviceState


class NvmeCollector(Collector):
    """Shows the directories of the tier called `tier` as ``kvtier_nvme_*``.

    directories: path, state and counters of each, now.
    """

    def __init__(self, tier: str, directories: Callable[[], Sequence[tuple[str, DeviceState, DeviceCounters]]]) -> None:
        self._tier = tier
        self._directories = directories

    def collect(self) -> Iterator[Metric]:
        labels = ["tier", "directory"]
        state = GaugeMetricFamily(
            "kvtier_nvme_state", "1 for the state that a directory is in", labels=[*labels, "state"]
        )
        failures = CounterMetricFamily("kvtier_nvme_failures", "Failed transfers", labels=[*labels, "op"])
        refused = CounterMetricFamily("kvtier_nvme_refused_puts", "Pages not taken in after failures", labels=labels)
        outages = CounterMetricFamily("kvtier_nvme_outages", "How often a directory was given up", labels=labels)
        for path, now, counters in self._directories():
            where = [self._tier, path]
            for one in DeviceState:
                state.add_metric([*where, one.value], float(one is now))
            failures.add_metric([*where, "read"], counters.read_failures)
            failures.add_metric([*where, "write"], counters.write_failures)
            refused.add_metric(where, counters.refused_puts)
            outages.add_metric(where, counters.outages)
        yield from (state, failures, refused, outages)
