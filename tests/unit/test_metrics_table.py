"""docs/metrics.md names exactly what the ledger exposes, so that neither changes without the other."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from kvtier.abc.tier import TierUsage
from kvtier.breakeven import BreakEven
from kvtier.compression import EvictionMetrics
from kvtier.ghosts import Ghosts
from kvtier.kv_events import EventOptions, Publisher
from kvtier.ledger import Ledger, MissReason, OffloadOutcome
from kvtier.server.stats import ServerStats
from kvtier.storage_backends.nvme.tier import NvmeTier
from kvtier.storage_backends.redis.metrics import RedisCollector, RedisCounters

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "metrics.md").read_text()


def section(heading: str) -> str:
    return TEXT.partition(heading)[2].partition("\n## ")[0]


def documented(text: str) -> dict[str, tuple[str, set[str]]]:
    """Type and labels of every metric in a table, by its name without _total."""
    return {
        name.removesuffix("_total") if kind == "counter" else name: (kind, set(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in re.findall(r"^\| `(kvtier_\w+)` \| (\w+) \|([^|]*)\|", text, re.M)
    }


def exposed(*collectors: Collector | CollectorRegistry) -> dict[str, tuple[str, set[str]]]:
    return {
        family.name: (family.type, {label for sample in family.samples for label in sample.labels} - {"le"})
        for collector in collectors
        for family in collector.collect()
    }


MAIN, OF_PARTS = section("# Metrics").split("Of single parts")


def test_names_types_and_labels() -> None:
    ledger = Ledger(["host", "nvme"])
    EvictionMetrics(["triattention"], ledger.registry)
    ledger.registry.register(Ghosts({"host": 1}))
    ledger.sampled(0, "k", 0.1)
    ledger.watch("host", lambda: TierUsage(1, 0, 0, 0, 0, 0, 0, 0, 0, 0))
    assert documented(MAIN) == exposed(ledger.registry)


def test_names_types_and_labels_of_single_parts(tmp_path: Path) -> None:
    nvme = NvmeTier(tmp_path, 1 << 20, io_threads=1)
    counters = RedisCounters(*[0] * len(RedisCounters.__slots__))
    stats = ServerStats(("get",), dict, lambda: {"somebody": 0})
    events = Publisher(EventOptions("tcp://127.0.0.1:*"))
    shown = exposed(nvme.collector, RedisCollector("redis", lambda: counters), stats, BreakEven(["nvme"]), events)
    nvme.close()
    events.close()
    # The engines' cannot be imported here: they are read from the source.
    for path in (*(ROOT / "connectors" / "sglang").glob("*.py"), *(ROOT / "connectors" / "lmcache").glob("*.py")):
        text = path.read_text()
        for name, labels in re.findall(r'Gauge\(\s*"(kvtier_\w+_\w+)"(?:, "[^"]*", \[([^]]*)\])?', text):
            shown[name] = ("gauge", set(re.findall(r'"(\w+)"', labels)))
        shown |= {name: ("gauge", set()) for name in re.findall(r'_show\(\s*"(kvtier_\w+)"', text)}
        for name, labels in re.findall(r'Counter\(\s*"(kvtier_\w+)", "[^"]*", \[([^]]*)\]', text):
            shown[name] = ("counter", set(re.findall(r'"(\w+)"', labels)))
    assert documented(OF_PARTS) == {name: kind for name, kind in shown.items() if name not in documented(MAIN)}


def test_reasons_and_outcomes() -> None:
    reasons = re.findall(r"^\| `(\w+)` \|", section("## Reasons of a miss"), re.M)
    outcomes = re.findall(r"^\| `(\w+)` \|", section("## Outcomes of an offload"), re.M)
    assert reasons == [reason.value for reason in MissReason]
    assert sorted(outcomes) == sorted(outcome.value for outcome in OffloadOutcome)
