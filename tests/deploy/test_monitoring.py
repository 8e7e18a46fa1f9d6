"""What Prometheus and Grafana get from the chart is what lies in deploy/grafana, and finds what it asks for."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from .chart import ALL_VALUES, DEPLOY, Helm, example, of_kind, one, pods

MONITORED = [name for name, values in ALL_VALUES.items() if values.get("serviceMonitor", {}).get("enabled")]


def test_rules_and_dashboard_are_those_of_deploy_grafana(helm: Helm) -> None:
    objects = helm.render(example("sidecar-sglang"))
    rules = yaml.safe_load((DEPLOY / "grafana" / "kvtier-alerts.yaml").read_text())
    assert one(objects, "PrometheusRule", "kvtier")["spec"] == rules
    shown = one(objects, "ConfigMap", "kvtier-dashboard")
    assert shown["metadata"]["labels"]["grafana_dashboard"] == "1"
    dashboard = json.loads((DEPLOY / "grafana" / "kvtier-dashboard.json").read_text())
    assert json.loads(shown["data"]["kvtier-dashboard.json"]) == dashboard


@pytest.mark.parametrize("name", MONITORED)
def test_everything_that_has_metrics_is_scraped(helm: Helm, name: str) -> None:
    objects = helm.render(ALL_VALUES[name])
    monitor = one(objects, "ServiceMonitor", "kvtier")
    wanted = monitor["spec"]["selector"]["matchLabels"]
    services = [s for s in of_kind(objects, "Service") if wanted.items() <= s["metadata"]["labels"].items()]
    scraped = {port["targetPort"] for s in services for port in s["spec"]["ports"]}
    assert {e["port"] for e in monitor["spec"]["endpoints"]} == scraped
    exposed = {p["name"] for _, pod in pods(objects) for c in pod["containers"] + pod.get("initContainers", [])
               for p in c.get("ports", []) if "metrics" in p["name"]}  # fmt: skip
    assert scraped == exposed
    for service in services:
        assert service["spec"]["publishNotReadyAddresses"] is True  # what fails to become ready is to be seen
    for endpoint in monitor["spec"]["endpoints"]:
        assert endpoint["authorization"]["credentials"] == {"name": "kvtier", "key": "http-token"}


def test_the_job_is_the_one_that_alerts_name(helm: Helm) -> None:
    objects = helm.render({**example("sidecar-sglang"), "nameOverride": "pages"}, release="prod")
    monitor = one(objects, "ServiceMonitor", "prod-pages")
    (service,) = [s for s in of_kind(objects, "Service") if s["metadata"]["name"].endswith("-metrics")]
    job = service["metadata"]["labels"][monitor["spec"]["jobLabel"]]
    rules = one(objects, "PrometheusRule", "prod-pages")["spec"]["groups"][0]["rules"]
    assert f'up{{job="{job}"}} == 0' in [rule["expr"] for rule in rules]


@pytest.mark.parametrize("name", MONITORED)
def test_the_network_policy_lets_prometheus_in_and_nobody_else(helm: Helm, name: str) -> None:
    objects = helm.render(ALL_VALUES[name])
    monitoring = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    ports: dict[str, list[object]] = {}
    for policy in of_kind(objects, "NetworkPolicy"):
        for rule in policy["spec"]["ingress"]:
            for port in rule["ports"]:
                ports.setdefault(port["port"], []).append(rule["from"])
    for port, sources in ports.items():
        assert all(sources), f"{port}: an empty list lets everybody in"
        if "metrics" in port:
            assert sources == [monitoring] * len(sources)
    assert {e["port"] for e in one(objects, "ServiceMonitor", "kvtier")["spec"]["endpoints"]} <= set(ports)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here: apt-get install prometheus")
def test_prometheus_accepts_the_rules(helm: Helm, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump(one(helm.render(example("redis-sglang")), "PrometheusRule", "kvtier")["spec"]))
    command = ["promtool", "check", "rules", str(rules)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
