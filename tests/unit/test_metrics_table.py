"""docs/metrics.md names exactly what the ledger exposes, so that neither changes without the other."""

from __future__ import annotations

import re
from pathlib import Path

from kvtier.abc.tier import TierUsage
from kvtier.compression import EvictionMetrics
from kvtier.ghosts import Ghosts
from kvtier.ledger import Ledger, MissReason, OffloadOutcome

TEXT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def section(heading: str) -> str:
    return TEXT.partition(heading)[2].partition("\n## ")[0]


def test_names_types_and_labels() -> None:
    documented = {}
    for name, kind, labels in re.findall(r"^\| `(kvtier_\w+)` \| (\w+) \|([^|]*)\|", section("# Metrics"), re.M):
        documented[name.removesuffix("_total") if kind == "counter" else name] = (
            kind,
            set(re.findall(r"`(\w+)`", labels)),
        )
    ledger = Ledger(["host", "nvme"])
    EvictionMetrics(["triattention"], ledger.registry)
    ledger.registry.register(Ghosts({"host": 1}))
    ledger.sampled(0, "k", 0.1)
    ledger.watch("host", lambda: TierUsage(1, 0, 0, 0, 0, 0, 0, 0, 0, 0))
    exposed = {
        family.name: (family.type, {label for sample in family.samples for label in sample.labels} - {"le"})
        for family in ledger.registry.collect()
    }
    assert documented == exposed


def test_reasons_and_outcomes() -> None:
    reasons = re.findall(r"^\| `(\w+)` \|", section("## Reasons of a miss"), re.M)
    outcomes = re.findall(r"^\| `(\w+)` \|", section("## Outcomes of an offload"), re.M)
    assert reasons == [reason.value for reason in MissReason]
    assert sorted(outcomes) == sorted(outcome.value for outcome in OffloadOutcome)
