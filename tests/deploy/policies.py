"""What every object of the chart must hold to. Each policy gives the faults that it finds, in words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

from .chart import Object, containers, pods

SECRET_NAME = re.compile(r"(?i)(passw|secret|token|api_?key|credential)")
SECRET_ARGUMENT = re.compile(r"(?i)(^|\s)--?([a-z0-9]+[-_])*(api[-_]?key|password|token|secret)([=\s]|$)")
URL_WITH_PASSWORD = re.compile(r"\w+://[^/@\s]*:[^/@\s]+@")
ROOT_ALLOWED = "prepare"
"""The init container that gives a node's directories away: the only one that may be root, with CHOWN alone."""
WRITES = {"engine"}
"""Containers whose root file system may be written: engines compile kernels where they are installed."""


def no_root(objects: list[Object]) -> Iterator[str]:
    for where, pod in pods(objects):
        security = pod.get("securityContext", {})
        if not (security.get("runAsNonRoot") and security.get("runAsUser", 0) > 0):
            yield f"{where}: the pod may run as root"
        for one in containers(pod):
            own = one.get("securityContext", {})
            if own.get("runAsNonRoot") and own.get("runAsUser", 1) > 0:
                continue
            if one["name"] != ROOT_ALLOWED or own["capabilities"] != {"drop": ["ALL"], "add": ["CHOWN"]}:
                yield f"{where}: {one['name']} may run as root"
            elif one["command"] != ["chown"]:
                yield f"{where}: {one['name']} runs more than chown as root"


def restricted(objects: list[Object]) -> Iterator[str]:
    """The restricted Pod Security Standard, but for hostPath volumes and the container that `no_root` knows."""
    for where, pod in pods(objects):
        if pod.get("securityContext", {}).get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{where}: no seccomp profile"
        for option in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
            if pod.get(option):
                yield f"{where}: {option}"
        for volume in pod.get("volumes", []):
            kind = next(key for key in volume if key != "name")
            if kind not in ("configMap", "secret", "emptyDir", "ephemeral", "hostPath", "projected"):
                yield f"{where}: volume {volume['name']} is a {kind}"
            if kind == "hostPath" and "DaemonSet" not in where and volume["name"] != "socket":
                yield f"{where}: volume {volume['name']} is a directory of the node"
        for one in containers(pod):
            own = one.get("securityContext", {})
            if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
                yield f"{where}: {one['name']} may gain privileges"
            if own.get("capabilities", {}).get("drop") != ["ALL"]:
                yield f"{where}: {one['name']} keeps capabilities"
            if own.get("capabilities", {}).get("add") and one["name"] != ROOT_ALLOWED:
                yield f"{where}: {one['name']} is given capabilities"
            if not own.get("readOnlyRootFilesystem") and one["name"] not in WRITES:
                yield f"{where}: {one['name']} may write to its root file system"


def images_are_pinned(objects: list[Object]) -> Iterator[str]:
    for where, pod in pods(objects):
        for one in containers(pod):
            _, at, digest = one["image"].partition("@")
            tag = one["image"].rpartition("/")[2].partition(":")[2]
            if not (digest.startswith("sha256:") if at else tag and tag != "latest"):
                yield f"{where}: image {one['image']} of {one['name']} is not pinned"


def resources_are_set(objects: list[Object]) -> Iterator[str]:
    for where, pod in pods(objects):
        for one in containers(pod):
            for kind in ("requests", "limits"):
                for resource in ("cpu", "memory"):
                    if resource not in one.get("resources", {}).get(kind, {}):
                        yield f"{where}: {one['name']} has no {resource} in {kind}"
            requests, limits = (one.get("resources", {}).get(kind, {}) for kind in ("requests", "limits"))
            if one["name"] != ROOT_ALLOWED and requests.get("memory") != limits.get("memory"):
                yield f"{where}: {one['name']} asks for less memory than it may take"
        for volume in pod.get("volumes", []):
            if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
                yield f"{where}: volume {volume['name']} has no sizeLimit"


def probes_are_there(objects: list[Object]) -> Iterator[str]:
    for where, pod in pods(objects):
        for one in containers(pod):
            if one in pod.get("initContainers", []) and one.get("restartPolicy") != "Always":
                continue  # it ends by itself
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                if probe not in one:
                    yield f"{where}: {one['name']} has no {probe}"
                elif "httpGet" in one[probe] and one[probe]["httpGet"]["port"] not in [
                    port["name"] for port in one["ports"]
                ]:
                    yield f"{where}: {probe} of {one['name']} asks a port that it has not"
            liveness = one.get("livenessProbe", {}).get("httpGet", {})
            if one["name"] == "cache" and liveness.get("path") != "/livez":
                yield f"{where}: a slow cache server would be restarted: liveness asks {liveness.get('path')}"


def secrets_are_files(objects: list[Object]) -> Iterator[str]:
    """No secret in arguments, in variables as text, or in a ConfigMap."""
    for where, pod in pods(objects):
        for one in containers(pod):
            for text in [*one.get("command", []), *one.get("args", [])]:
                if SECRET_ARGUMENT.search(text) or URL_WITH_PASSWORD.search(text):
                    yield f"{where}: an argument of {one['name']} is a secret"
                if re.search(r"\$\((\w*(?i:passw|secret|token|key)\w*)\)", text):
                    yield f"{where}: an argument of {one['name']} holds a variable that is a secret"
            for variable in one.get("env", []):
                if "value" in variable and SECRET_NAME.search(variable["name"]):
                    yield f"{where}: {variable['name']} of {one['name']} is a secret as text"
                if URL_WITH_PASSWORD.search(variable.get("value", "")):
                    yield f"{where}: {variable['name']} of {one['name']} holds a password"
        for volume in pod.get("volumes", []):
            if "secret" in volume and volume["secret"].get("defaultMode", 0o644) & 0o007:
                yield f"{where}: secret volume {volume['name']} can be read by every user"
    for found in objects:
        if found["kind"] == "ConfigMap":
            text = json.dumps(found["data"])
            if re.search(r"(?m)(^|\\n)\s*(password|token)\s*:", text) or URL_WITH_PASSWORD.search(text):
                yield f"ConfigMap/{found['metadata']['name']} holds a secret"
        if found["kind"] == "Secret":
            yield f"Secret/{found['metadata']['name']}: secrets are made by whoever installs, not by the chart"


def no_token_of_the_cluster(objects: list[Object]) -> Iterator[str]:
    for where, pod in pods(objects):
        if pod.get("automountServiceAccountToken") is not False:
            yield f"{where}: the service account's token is mounted"
    for found in objects:
        if found["kind"] == "ServiceAccount" and found.get("automountServiceAccountToken") is not False:
            yield f"ServiceAccount/{found['metadata']['name']}: its token is mounted"


def stops_are_orderly(objects: list[Object]) -> Iterator[str]:
    """What is told to stop has time for what it does then."""
    for where, pod in pods(objects):
        grace = pod.get("terminationGracePeriodSeconds", 0)
        waits = [c.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0) for c in containers(pod)]
        if grace < max(waits) + 25:
            yield f"{where}: {grace} s of grace, of which preStop takes {max(waits)}"
        for one in containers(pod):
            if one["name"] == "engine" and "preStop" not in one.get("lifecycle", {}):
                yield f"{where}: the engine is told to stop before its Service knows"


def names_and_selectors_fit(objects: list[Object]) -> Iterator[str]:
    labels_of_pods = [
        found["spec"]["template"]["metadata"]["labels"] for found in objects if "template" in found.get("spec", {})
    ]
    for found in objects:
        where = f"{found['kind']}/{found['metadata']['name']}"
        limit = 52 if found["kind"] in ("StatefulSet", "DaemonSet") else 63
        if not re.fullmatch(rf"[a-z]([a-z0-9-]{{0,{limit - 2}}}[a-z0-9])?", found["metadata"]["name"]):
            yield f"{where}: no name of at most {limit} characters"
        for key, value in found["metadata"].get("labels", {}).items():
            if not re.fullmatch(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?", value):
                yield f"{where}: label {key} = {value!r}"
        selector = found.get("spec", {}).get("selector", found.get("spec", {}).get("podSelector"))
        if found["kind"] in ("ServiceMonitor",) or selector is None:
            continue
        wanted = selector.get("matchLabels", selector)
        if not any(wanted.items() <= labels.items() for labels in labels_of_pods):
            yield f"{where}: selects no pod of these objects"


def mounts_have_volumes(objects: list[Object]) -> Iterator[str]:
    claims = {
        found["metadata"]["name"]: [c["metadata"]["name"] for c in found["spec"].get("volumeClaimTemplates", [])]
        for found in objects
        if found["kind"] == "StatefulSet"
    }
    maps = {o["metadata"]["name"] for o in objects if o["kind"] == "ConfigMap"}
    for where, pod in pods(objects):
        volumes = [v["name"] for v in pod.get("volumes", [])] + claims.get(where.partition("/")[2], [])
        mounted = [m["name"] for c in containers(pod) for m in c.get("volumeMounts", [])]
        if len(set(volumes)) < len(volumes):
            yield f"{where}: a volume is there twice"
        for name in set(mounted) ^ set(volumes):
            yield f"{where}: volume {name} is {'not there' if name in mounted else 'not mounted'}"
        for volume in pod.get("volumes", []):
            if "configMap" in volume and volume["configMap"]["name"] not in maps:
                yield f"{where}: ConfigMap {volume['configMap']['name']} is not there"
        for one in containers(pod):
            paths = [m["mountPath"] for m in one.get("volumeMounts", [])]
            if len(set(paths)) < len(paths):
                yield f"{where}: two volumes of {one['name']} on one path"


POLICIES: tuple[Callable[[list[Object]], Iterator[str]], ...] = (
    no_root,
    restricted,
    images_are_pinned,
    resources_are_set,
    probes_are_there,
    secrets_are_files,
    no_token_of_the_cluster,
    stops_are_orderly,
    names_and_selectors_fit,
    mounts_have_volumes,
)
