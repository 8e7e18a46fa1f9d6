"""The dashboard and the alerts ask only for series that exist, by labels and values that they have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier.abc.tier import TierUsage
from kvtier.ghosts import Ghosts
from kvtier.ledger import Ledger
from kvtier.storage_backends.nvme.health import DeviceCounters, DeviceState
from kvtier.storage_backends.nvme.metrics import NvmeCollector

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana"
ADDED = {"instance", "job"}
"""Labels that the scraper adds."""
OPEN = {"tier", "layer", "role", "directory"}
"""Labels whose values depend on the configuration and the model."""


def known_series() -> dict[str, dict[str, set[str]]]:
    """Every sample's name, with the values that each of its labels has."""
    ledger = Ledger(["host", "nvme"])
    ledger.sampled(0, "k", 0.1)
    ledger.watch("host", lambda: TierUsage(1, 0, 0, 0, 0, 0, 0, 0, 0, 0))
    ledger.registry.register(Ghosts({"host": 1}))
    ledger.registry.register(NvmeCollector("nvme", lambda: [("/d", DeviceState.SERVING, DeviceCounters())]))
    known: dict[str, dict[str, set[str]]] = {}
    for family in ledger.registry.collect():
        for sample in family.samples:
            labels = known.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return known


KNOWN = known_series()


def faults(expression: str) -> Iterator[str]:
    """What is wrong with a PromQL expression."""
    names = re.findall(r"\bkvtier_\w+", re.sub(r'"[^"]*"', '""', expression))
    if not names and not expression.startswith("up{"):
        yield "asks for nothing of ours"
    for name, matchers in re.findall(r"\b(kvtier_\w+)(?:\{([^}]*)\})?", expression):
        if name not in KNOWN:
            yield f"{name} does not exist"
            continue
        for label, operator, value in re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', matchers):
            if label in ADDED:
                continue
            if label not in KNOWN[name]:
                yield f"{name} has no label {label}"
            elif label not in OPEN:
                for one in value.split("|") if "~" in operator else [value]:
                    if one not in KNOWN[name][label]:
                        yield f"{name}: {label} is never {one!r}"
    present = set().union(ADDED, *(KNOWN.get(name, {}) for name in names))
    for grouped in re.findall(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)", expression):
        for label in filter(None, (part.strip() for part in grouped.split(","))):
            if label not in present:
                yield f"grouped by {label}, which no series here has"


DASHBOARD: dict[str, Any] = json.loads((FOLDER / "kvtier-dashboard.json").read_text())
TARGETS = [
    pytest.param(target["expr"], target["legendFormat"], id=f"{panel['title']} {target['refId']}")
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
]
RULES = yaml.safe_load((FOLDER / "kvtier-alerts.yaml").read_text())["groups"][0]["rules"]


@pytest.mark.parametrize(("expression", "legend"), TARGETS)
def test_panels_ask_for_what_exists(expression: str, legend: str) -> None:
    assert list(faults(expression)) == []
    assert 'instance=~"$instance"' in expression
    grouped = re.findall(r"\bby\s*\(([^)]*)\)", expression)
    labels = {label.strip() for part in grouped for label in part.split(",")}
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= labels


def test_panels_do_not_overlap_and_are_explained() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        assert panel["description"].endswith("."), panel["title"]
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken.get((x, y))}"
                taken[x, y] = panel["title"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alerts_ask_for_what_exists(rule: dict[str, Any]) -> None:
    assert list(faults(rule["expr"])) == []
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description"}
    named = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
    grouped = [set(map(str.strip, part.split(","))) for part in re.findall(r"\bby\s*\(([^)]*)\)", rule["expr"])]
    kept = set.union(*grouped) if grouped else ADDED
    assert named <= kept, "an annotation names a label that the expression drops"


@pytest.mark.parametrize(
    "expression",
    [
        "rate(kvtier_hit_total[5m])",
        'kvtier_misses_total{reason="gone"}',
        'kvtier_misses_total{cause="absent"}',
        'kvtier_spill_pages_total{status=~"failed|lost"}',
        "sum by (reason) (kvtier_hits_total)",
        "node_load1",
    ],
)
def test_faults_are_found(expression: str) -> None:
    assert list(faults(expression))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here: apt-get install prometheus")
@pytest.mark.parametrize(
    "command", [("check", "rules", "kvtier-alerts.yaml"), ("test", "rules", "kvtier-alerts-test.yaml")], ids=" ".join
)
def test_prometheus_accepts_the_rules(command: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *command], cwd=FOLDER, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
