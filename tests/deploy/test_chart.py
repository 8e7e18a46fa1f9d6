"""The chart renders for every shape and example, to objects that Kubernetes knows and files that kvtier reads."""

from __future__ import annotations

import copy
import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier.config import Config, RedisTierConfig, parse_config
from kvtier.server.options import Listen

from . import kubernetes
from .chart import (
    ALL_VALUES,
    CHART,
    DEPLOY,
    EXAMPLES,
    ROOT,
    Helm,
    Object,
    container,
    containers,
    example,
    merged,
    mib,
    of_kind,
    one,
    pod_of,
    pods,
)

MIB_PER_GIB = 1024


def configuration(objects: list[Object], name: str, file: str) -> Config:
    """The file of a ConfigMap as kvtier itself reads it."""
    return parse_config(yaml.safe_load(one(objects, "ConfigMap", name)["data"][file]))


@pytest.mark.parametrize("name", ALL_VALUES)
def test_lint_has_nothing_to_say(helm: Helm, name: str) -> None:
    said = [m for m in helm.lint(ALL_VALUES[name]) if m["error"] != "icon is recommended"]
    assert said == []


def test_lint_finds_what_is_wrong(helm: Helm) -> None:
    assert any(m["severity"] >= 2 for m in helm.lint({"shape": "cluster"}))


@pytest.mark.parametrize("version", [kubernetes.OLDEST, kubernetes.newest()])
@pytest.mark.parametrize("name", ALL_VALUES)
def test_kubernetes_knows_every_object(helm: Helm, name: str, version: str) -> None:
    objects = helm.render(ALL_VALUES[name])
    assert objects
    for found in objects:
        assert kubernetes.faults(found, version) == [], f"{found['kind']}/{found['metadata']['name']}"


def test_unknown_fields_and_wrong_types_are_found(helm: Helm) -> None:
    objects = copy.deepcopy(helm.render(example("sidecar-sglang")))
    engine = one(objects, "StatefulSet", "kvtier-engine")
    container(pod_of(engine), "cache")["livenesProbe"] = {}
    assert any("livenesProbe" in fault for fault in kubernetes.faults(engine, kubernetes.newest()))
    engine["spec"]["replicas"] = "two"
    assert any("two" in fault for fault in kubernetes.faults(engine, kubernetes.newest()))
    monitor = one(objects, "ServiceMonitor", "kvtier")
    monitor["spec"]["endpoints"][0]["bearerToken"] = "x"
    assert any("bearerToken" in fault for fault in kubernetes.faults(monitor, kubernetes.newest()))
    rule = one(objects, "PrometheusRule", "kvtier")
    rule["spec"]["groups"][0]["rules"][0]["for"] = "soon"
    assert any("soon" in fault for fault in kubernetes.faults(rule, kubernetes.newest()))


@pytest.mark.parametrize("name", ALL_VALUES)
def test_objects_are_there_once(helm: Helm, name: str) -> None:
    names = [(o["kind"], o["metadata"]["name"]) for o in helm.render(ALL_VALUES[name])]
    assert len(set(names)) == len(names)
    assert {o["metadata"]["namespace"] for o in helm.render(ALL_VALUES[name])} == {"kvtier"}


@pytest.mark.parametrize("name", ALL_VALUES)
def test_kvtier_reads_its_configuration(helm: Helm, name: str) -> None:
    """The files in the ConfigMaps are valid, and everything that they name is mounted where they look for it."""
    objects = helm.render(ALL_VALUES[name])
    for map_ in of_kind(objects, "ConfigMap"):
        for file, text in map_["data"].items():
            if not file.endswith(".yaml"):
                continue
            config = parse_config(yaml.safe_load(text))
            role = {"server.yaml": "cache", "engine.yaml": "engine"}[file]
            (pod,) = [p for _, p in pods(objects) if any(c["name"] == role for c in containers(p))]
            reads = container(pod, role)
            mounts = [m["mountPath"] for m in reads["volumeMounts"]]
            for path in _paths(yaml.safe_load(text)):
                assert any(path == m or path.startswith(m + "/") for m in mounts), f"{file}: {path} is not mounted"
            for path in _secret_files(text):
                items = next(v for v in pod["volumes"] if v["name"] == f"{role}-secret")["secret"]["items"]
                assert path in [item["path"] for item in items]
            ports = {p["containerPort"] for p in reads["ports"]}
            assert config.http is not None and config.http.port in ports
            if config.server is not None:
                listens = [Listen.parse(text) for text in config.server.listen]
                assert {where.port for where in listens if where.path is None} <= ports
                assert f"/etc/kvtier/{file}" in reads["args"]
            else:
                assert f"/etc/kvtier/{file}" in " ".join(reads["args"])


def _paths(block: Any) -> list[str]:
    """Everything in a block that is a path."""
    if isinstance(block, dict):
        return [path for value in block.values() for path in _paths(value)]
    if isinstance(block, list):
        return [path for value in block for path in _paths(value)]
    text = str(block).removeprefix("unix://").removeprefix("unix:")
    return [text] if text.startswith("/") else []


def _secret_files(text: str) -> list[str]:
    prefix = "/run/secrets/kvtier/"
    return [path.removeprefix(prefix) for path in _paths(yaml.safe_load(text)) if path.startswith(prefix)]


def test_engines_use_the_cache_of_their_shape(helm: Helm) -> None:
    def url(name: str) -> RedisTierConfig:
        tier = configuration(helm.render(example(name)), "kvtier-engine", "engine.yaml").tiers[-1]
        assert isinstance(tier, RedisTierConfig)
        return tier

    assert url("sidecar-sglang").url == url("daemonset-sglang").url == "unix:///run/kvtier/cache.sock"
    shared = url("redis-sglang")
    assert (shared.mode, shared.ttl) == ("cluster", 86400.0)
    assert shared.url.startswith("rediss://pages@cache-1") and shared.password_file is not None
    objects = helm.render(example("redis-lmcache-vllm"))
    host = url("redis-lmcache-vllm").url.removeprefix("redis://").partition(":")[0]
    assert one(objects, "Service", host)["spec"]["ports"][0]["port"] == 6379


def test_engine_and_cache_meet_in_one_directory(helm: Helm) -> None:
    """The socket is on the same volume in the sidecar, and in the same directory of the node in the DaemonSet."""
    sidecar = pod_of(one(helm.render(example("sidecar-sglang")), "StatefulSet", "kvtier-engine"))
    objects = helm.render(example("daemonset-sglang"), release="a", namespace="b")
    engine = pod_of(one(objects, "StatefulSet", "a-kvtier-engine"))
    cache = pod_of(one(objects, "DaemonSet", "a-kvtier-cache"))
    for pod, names in ((sidecar, ("cache", "engine")), (engine, ("engine",)), (cache, ("cache", "prepare"))):
        for name in names:
            assert "/run/kvtier" in [
                m["mountPath"] for m in container(pod, name)["volumeMounts"] if m["name"] == "socket"
            ]
    paths = [next(v for v in pod["volumes"] if v["name"] == "socket")["hostPath"]["path"] for pod in (engine, cache)]
    assert paths == ["/run/kvtier/b-a-kvtier"] * 2
    assert engine["securityContext"]["runAsUser"] == cache["securityContext"]["runAsUser"]  # the socket's mode is 0600


def test_sidecar_starts_before_the_engine_and_ends_after_it(helm: Helm) -> None:
    pod = pod_of(one(helm.render(example("sidecar-sglang")), "StatefulSet", "kvtier-engine"))
    (cache,) = pod["initContainers"]
    assert (cache["name"], cache["restartPolicy"]) == ("cache", "Always")
    assert cache["readinessProbe"]["httpGet"]["path"] == "/livez"  # the engine serves without its cache
    gated = pod_of(one(helm.render(ALL_VALUES["sidecar-emptydir"]), "StatefulSet", "kvtier-engine"))
    assert container(gated, "cache")["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_grace_is_enough_for_both(helm: Helm) -> None:
    values = {"cache": {"drainSeconds": 90}, "engine": {"drainSeconds": 300, "preStopSeconds": 20}}
    pod = pod_of(one(helm.render(values), "StatefulSet", "kvtier-engine"))
    assert pod["terminationGracePeriodSeconds"] >= 20 + 300 + 90 + 15
    assert configuration(helm.render(values), "kvtier-cache", "server.yaml").server.drain == 90  # type: ignore[union-attr]
    alone = pod_of(one(helm.render({**values, "shape": "daemonset"}), "DaemonSet", "kvtier-cache"))
    assert alone["terminationGracePeriodSeconds"] >= 5 + 90 + 15


@pytest.mark.parametrize(
    ("host", "nvme", "value"), [("16GiB", "", "1MiB"), ("64GiB", "1TiB", "256KiB"), ("10GB", "2TB", "4MiB")]
)
def test_memory_follows_capacities(helm: Helm, host: str, nvme: str, value: str) -> None:
    from kvtier.config import parse_bytes

    volume = {"type": "emptyDir"} if nvme else {}
    values = {"cache": {"hostCapacity": host, "valueSize": value, "nvme": {"capacity": nvme, "volume": volume}}}
    pod = pod_of(one(helm.render(values), "StatefulSet", "kvtier-engine"))
    held = parse_bytes(host) + (parse_bytes(nvme) if nvme else 0)
    least = parse_bytes(host) + held // parse_bytes(value) * 1536 + (512 << 20)
    got = mib(container(pod, "cache")["resources"]["limits"]["memory"]) << 20
    assert least <= got <= least * 1.02 + (2 << 20)
    if nvme:
        disk = next(v for v in pod["volumes"] if v["name"] == "nvme0")["emptyDir"]["sizeLimit"]
        assert parse_bytes(nvme) * 1.05 < mib(disk) << 20


def test_memory_of_engines_is_the_sum_of_its_parts(helm: Helm) -> None:
    values = {"engine": {"memory": "10GiB", "hostCapacity": "20GiB", "sharedMemory": "4GiB"}}
    pod = pod_of(one(helm.render(values), "StatefulSet", "kvtier-engine"))
    got = mib(container(pod, "engine")["resources"]["limits"]["memory"])
    assert 34 * MIB_PER_GIB < got < 35 * MIB_PER_GIB
    assert next(v for v in pod["volumes"] if v["name"] == "shm")["emptyDir"] == {
        "medium": "Memory",
        "sizeLimit": "4096Mi",
    }


def test_more_memory_may_be_given(helm: Helm) -> None:
    pod = pod_of(one(helm.render({"cache": {"memory": "40GiB"}}), "StatefulSet", "kvtier-engine"))
    assert mib(container(pod, "cache")["resources"]["limits"]["memory"]) == 40 * MIB_PER_GIB


def test_huge_pages_are_moved_out_of_memory(helm: Helm) -> None:
    objects = helm.render(ALL_VALUES["sidecar-emptydir"])
    resources = container(pod_of(one(objects, "StatefulSet", "kvtier-engine")), "cache")["resources"]
    assert resources["limits"]["hugepages-2Mi"] == resources["requests"]["hugepages-2Mi"] == "16384Mi"
    assert mib(resources["limits"]["memory"]) < 2 * MIB_PER_GIB
    assert configuration(objects, "kvtier-cache", "server.yaml").tiers[0].huge_pages == "reserved"  # type: ignore[union-attr]


def test_two_releases_share_nothing_in_a_namespace_or_on_a_node(helm: Helm) -> None:
    values = merged(example("daemonset-sglang"), {"grafanaDashboard": {"enabled": True}})
    first, second = (helm.render(values, release=name, namespace="ai") for name in ("one", "two"))
    names = [{(o["kind"], o["metadata"]["name"]) for o in objects} for objects in (first, second)]
    assert not names[0] & names[1]
    directories = [
        {v["hostPath"]["path"] for _, pod in pods(objects) for v in pod["volumes"] if "hostPath" in v}
        for objects in (first, second)
    ]
    assert len(directories[0]) == 3 and not directories[0] & directories[1]
    for service in of_kind(first, "Service"):
        for found in second:
            if "template" in found.get("spec", {}):
                labels = found["spec"]["template"]["metadata"]["labels"]
                assert not service["spec"]["selector"].items() <= labels.items()


@pytest.mark.parametrize("shape", ["sidecar", "daemonset", "redis"])
def test_long_names_stay_different(helm: Helm, shape: str) -> None:
    """Helm takes releases of 53 characters; names made of them have no room for more than a few of ours."""
    from . import policies

    values: Object = {"shape": shape, "fullnameOverride": "", "nameOverride": "a-name-that-is-rather-long"}
    if shape == "redis":
        values["valkey"] = {"enabled": True}
    seen: set[tuple[str, str]] = set()
    for last in "ab":
        objects = helm.render(values, release="r" * 52 + last)
        assert list(policies.names_and_selectors_fit(objects)) == []
        names = {(o["kind"], o["metadata"]["name"]) for o in objects if "valkey" not in o["metadata"]["name"]}
        assert not names & seen
        seen |= names


def test_images_come_from_the_registry_that_is_named(helm: Helm) -> None:
    digest = "sha256:" + hashlib.sha256(b"").hexdigest()
    values = {
        "global": {"imageRegistry": "mirror.example.org:5000/ai/"},
        "engine": {"image": {"digest": digest}},
        "shape": "daemonset",
    }
    objects = helm.render(values)
    assert {c["image"] for _, pod in pods(objects) for c in containers(pod)} == {
        "mirror.example.org:5000/ai/kvtier/server:0.1.0.dev0",
        f"mirror.example.org:5000/ai/kvtier/sglang@{digest}",
    }


def test_placement_reaches_the_pods(helm: Helm) -> None:
    where: Object = {
        "nodeSelector": {"disk": "nvme"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "high",
        "podAnnotations": {"a.example/b": "c"},
        "podLabels": {"team": "x"},
    }
    values = {
        "shape": "daemonset",
        "daemonset": where,
        "engine": {**where, "topologySpreadConstraints": [{"maxSkew": 1}], "runtimeClassName": "nvidia"},
        "imagePullSecrets": [{"name": "registry"}],
    }
    objects = helm.render(values)
    for kind, name in (("DaemonSet", "kvtier-cache"), ("StatefulSet", "kvtier-engine")):
        template = one(objects, kind, name)["spec"]["template"]
        for key in ("nodeSelector", "tolerations", "affinity", "priorityClassName"):
            assert template["spec"][key] == where[key], key
        assert template["spec"]["imagePullSecrets"] == [{"name": "registry"}]
        assert template["metadata"]["annotations"]["a.example/b"] == "c"
        assert template["metadata"]["labels"]["team"] == "x"
    engine = pod_of(one(objects, "StatefulSet", "kvtier-engine"))
    assert engine["runtimeClassName"] == "nvidia" and engine["topologySpreadConstraints"] == [{"maxSkew": 1}]


def test_both_families_are_listened_on(helm: Helm) -> None:
    objects = helm.render(ALL_VALUES["daemonset-alone"])
    config = configuration(objects, "kvtier-cache", "server.yaml")
    assert config.http is not None and config.http.host == "::"
    assert config.server is not None and "tls:[::]:6380" in config.server.listen
    assert {s["spec"]["ipFamilyPolicy"] for s in of_kind(objects, "Service")} == {"PreferDualStack"}


def test_a_changed_configuration_is_a_new_pod_and_a_new_chart_is_not(helm: Helm) -> None:
    def template(values: Object) -> Object:
        found: Object = one(helm.render({**values, "shape": "daemonset"}), "DaemonSet", "kvtier-cache")["spec"][
            "template"
        ]
        return found

    assert template({}) != template({"cache": {"maxConnections": 512}})
    assert template({}) == template({"engine": {"replicas": 3}})
    assert "helm.sh/chart" not in template({})["metadata"]["labels"]


def test_never_two_servers_on_the_directories_of_a_node(helm: Helm) -> None:
    strategy = one(helm.render(example("daemonset-sglang")), "DaemonSet", "kvtier-cache")["spec"]["updateStrategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}}


def test_an_archive_of_the_chart_is_the_chart(helm: Helm, tmp_path: Path) -> None:
    files = helm.packed(tmp_path)
    notes = files.pop("kvtier/templates/NOTES.txt")
    assert "The Secret kvtier must be there" in notes and "17084 MiB for 16GiB of values" in notes
    found = [o for text in files.values() for o in yaml.safe_load_all(text) if o]
    assert sorted(found, key=str) == sorted(helm.render({}), key=str)


def test_generated_files_are_in_step() -> None:
    """deploy/k8s is what the chart makes of its examples, and the chart's copies are what lies in deploy/grafana."""
    command = [sys.executable, str(ROOT / "tools" / "render_k8s.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}: run tools/render_k8s.py, or `make deploy-render`"
    assert {path.name for path in (DEPLOY / "k8s").glob("*.yaml")} == {path.name for path in EXAMPLES}


def test_every_value_is_in_the_schema_and_explained() -> None:
    """The defaults' keys are the schema's, so that a new value is not forgotten in either."""
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare(values: Object, node: Object, where: str) -> None:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        if node.get("additionalProperties") is not False:
            return
        assert set(values) == set(node["properties"]), where
        for key, value in values.items():
            if isinstance(value, dict):
                compare(value, node["properties"][key], f"{where}.{key}")

    compare(defaults, schema, "values")
