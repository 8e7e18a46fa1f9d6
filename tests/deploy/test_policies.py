"""Policies hold for every shape and example, and each of them finds what it is there to find."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from . import policies
from .chart import ALL_VALUES, Helm, Object, container, containers, example, one, pod_of, pods

Policy = Callable[[list[Object]], Iterator[str]]


@pytest.mark.parametrize("policy", policies.POLICIES, ids=lambda p: p.__name__)
@pytest.mark.parametrize("name", ALL_VALUES)
def test_policies_hold(helm: Helm, name: str, policy: Policy) -> None:
    assert list(policy(helm.render(ALL_VALUES[name]))) == []


def broken(helm: Helm) -> tuple[list[Object], Object, Object]:
    """A copy of the DaemonSet example to spoil: its objects, the cache server's pod, its container."""
    objects = copy.deepcopy(helm.render(example("daemonset-sglang")))
    pod = pod_of(one(objects, "DaemonSet", "kvtier-cache"))
    return objects, pod, container(pod, "cache")


def _set(path: str, value: Any) -> Callable[[list[Object], Object, Object], None]:
    """Set ``pod.a.b`` or ``cache.a.b``; None removes it."""

    def spoil(_: list[Object], pod: Object, cache: Object) -> None:
        start, *keys = path.split(".")
        where = {"pod": pod, "cache": cache}[start]
        for key in keys[:-1]:
            where = where[key]
        if value is None:
            del where[keys[-1]]
        else:
            where[keys[-1]] = value

    return spoil


def _root_shell(_: list[Object], pod: Object, __: Object) -> None:
    container(pod, "prepare")["command"] = ["/bin/sh", "-c"]


def _root_with_more(_: list[Object], pod: Object, __: Object) -> None:
    container(pod, "prepare")["securityContext"]["capabilities"]["add"].append("SYS_ADMIN")


def _volume(volume: Object) -> Callable[[list[Object], Object, Object], None]:
    def spoil(_: list[Object], pod: Object, __: Object) -> None:
        pod["volumes"].append(volume)

    return spoil


def _open_secret(_: list[Object], pod: Object, __: Object) -> None:
    next(v for v in pod["volumes"] if "secret" in v)["secret"]["defaultMode"] = 0o444


def _no_size_limit(_: list[Object], pod: Object, __: Object) -> None:
    del next(v for v in pod["volumes"] if "emptyDir" in v)["emptyDir"]["sizeLimit"]


def _secret_in_config(objects: list[Object], _: Object, __: Object) -> None:
    one(objects, "ConfigMap", "kvtier-engine")["data"]["engine.yaml"] += "\n  password: hunter2\n"


def _own_secret(objects: list[Object], _: Object, __: Object) -> None:
    objects.append({"kind": "Secret", "metadata": {"name": "kvtier"}})


def _account_token(objects: list[Object], _: Object, __: Object) -> None:
    one(objects, "ServiceAccount", "kvtier")["automountServiceAccountToken"] = True


def _engine_without_prestop(objects: list[Object], _: Object, __: Object) -> None:
    del container(pod_of(one(objects, "StatefulSet", "kvtier-engine")), "engine")["lifecycle"]


def _engine_with_node_directory(objects: list[Object], _: Object, __: Object) -> None:
    volumes = pod_of(one(objects, "StatefulSet", "kvtier-engine"))["volumes"]
    volumes.append({"name": "etc", "hostPath": {"path": "/etc"}})


def _long_name(objects: list[Object], _: Object, __: Object) -> None:
    one(objects, "DaemonSet", "kvtier-cache")["metadata"]["name"] = "k" * 53


def _lost_selector(objects: list[Object], _: Object, __: Object) -> None:
    one(objects, "Service", "kvtier-engine")["spec"]["selector"]["app.kubernetes.io/component"] = "engines"


def _lost_config(objects: list[Object], _: Object, __: Object) -> None:
    objects.remove(one(objects, "ConfigMap", "kvtier-cache"))


@pytest.mark.parametrize(
    ("policy", "spoil", "fault"),
    [
        (policies.no_root, _set("pod.securityContext.runAsUser", 0), "may run as root"),
        (policies.no_root, _set("pod.securityContext.runAsNonRoot", None), "may run as root"),
        (policies.no_root, _set("cache.securityContext.runAsUser", 0), "cache may run as root"),
        (policies.no_root, _root_shell, "more than chown"),
        (policies.no_root, _root_with_more, "prepare may run as root"),
        (policies.restricted, _set("pod.securityContext.seccompProfile", {"type": "Unconfined"}), "seccomp"),
        (policies.restricted, _set("pod.hostIPC", True), "hostIPC"),
        (policies.restricted, _set("cache.securityContext.privileged", True), "privileges"),
        (policies.restricted, _set("cache.securityContext.capabilities", {"add": ["IPC_LOCK"]}), "capabilities"),
        (policies.restricted, _set("cache.securityContext.readOnlyRootFilesystem", False), "root file system"),
        (policies.restricted, _volume({"name": "n", "nfs": {"server": "a", "path": "/"}}), "is a nfs"),
        (policies.restricted, _engine_with_node_directory, "directory of the node"),
        (policies.images_are_pinned, _set("cache.image", "registry.example.com:5000/kvtier/server"), "not pinned"),
        (policies.images_are_pinned, _set("cache.image", "kvtier/server:latest"), "not pinned"),
        (policies.images_are_pinned, _set("cache.image", "kvtier/server@"), "not pinned"),
        (policies.resources_are_set, _set("cache.resources.limits.memory", None), "no memory in limits"),
        (policies.resources_are_set, _set("cache.resources.requests.memory", "1Mi"), "less memory"),
        (policies.resources_are_set, _no_size_limit, "no sizeLimit"),
        (policies.probes_are_there, _set("cache.startupProbe", None), "no startupProbe"),
        (policies.probes_are_there, _set("cache.livenessProbe.httpGet.path", "/readyz"), "slow cache server"),
        (policies.probes_are_there, _set("cache.readinessProbe.httpGet.port", "http"), "a port that it has not"),
        (policies.secrets_are_files, _set("cache.args", ["serve", "--password", "hunter2"]), "is a secret"),
        (policies.secrets_are_files, _set("cache.args", ["--url", "redis://u:hunter2@host/0"]), "is a secret"),
        (policies.secrets_are_files, _set("cache.args", ["--key", "$(API_KEY)"]), "variable that is a secret"),
        (policies.secrets_are_files, _set("cache.env", [{"name": "HF_TOKEN", "value": "x"}]), "secret as text"),
        (policies.secrets_are_files, _set("cache.env", [{"name": "U", "value": "redis://:x@h"}]), "holds a password"),
        (policies.secrets_are_files, _open_secret, "read by every user"),
        (policies.secrets_are_files, _secret_in_config, "holds a secret"),
        (policies.secrets_are_files, _own_secret, "not by the chart"),
        (policies.no_token_of_the_cluster, _set("pod.automountServiceAccountToken", None), "token is mounted"),
        (policies.no_token_of_the_cluster, _account_token, "token is mounted"),
        (policies.stops_are_orderly, _set("pod.terminationGracePeriodSeconds", 20), "of grace"),
        (policies.stops_are_orderly, _engine_without_prestop, "before its Service knows"),
        (policies.names_and_selectors_fit, _long_name, "at most 52"),
        (policies.names_and_selectors_fit, _lost_selector, "selects no pod"),
        (policies.mounts_have_volumes, _lost_config, "kvtier-cache is not there"),
        (policies.mounts_have_volumes, _volume({"name": "spare", "emptyDir": {}}), "spare is not mounted"),
    ],
)
def test_policies_find_what_they_are_for(
    helm: Helm, policy: Policy, spoil: Callable[[list[Object], Object, Object], None], fault: str
) -> None:
    objects, pod, cache = broken(helm)
    assert list(policy(objects)) == []
    spoil(objects, pod, cache)
    assert any(fault in found for found in policy(objects)), list(policy(objects))


def test_every_policy_is_shown_to_fail() -> None:
    marks: list[pytest.Mark] = test_policies_find_what_they_are_for.pytestmark  # type: ignore[attr-defined]
    assert {case[0] for mark in marks for case in mark.args[1]} == set(policies.POLICIES)


def test_policies_see_every_container(helm: Helm) -> None:
    seen = {
        c["name"] for values in ALL_VALUES.values() for _, pod in pods(helm.render(values)) for c in containers(pod)
    }
    assert seen == {"cache", "engine", "prepare", "valkey"}
