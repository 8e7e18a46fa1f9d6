"""The chart as the tests ask for it: rendered, linted, and its objects found."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "kvtier"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))

Object = dict[str, Any]


class RefusedError(Exception):
    """The chart does not take these values; the text is what a user reads."""


class Helm:
    """`helm_worker.py` as a process, until `close`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("helm_worker.py")), str(ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._rendered: dict[str, list[Object]] = {}

    def render(self, values: Object, release: str = "kvtier", namespace: str = "kvtier") -> list[Object]:
        """Raises RefusedError where the chart does not take the values. Answers are kept: do not change them."""
        asked = json.dumps({"values": values, "release": release, "namespace": namespace})
        if asked not in self._rendered:
            answer = self._ask(asked)
            if "error" in answer:
                raise RefusedError(answer["error"])
            self._rendered[asked] = [found for found in yaml.safe_load_all(answer["text"]) if found]
        return self._rendered[asked]

    def lint(self, values: Object) -> list[Object]:
        messages: list[Object] = self._ask(json.dumps({"lint": values}))["messages"]
        return messages

    def packed(self, folder: Path) -> dict[str, str]:
        """What the chart renders with its defaults once it was packed into an archive, and its notes."""
        files: dict[str, str] = self._ask(json.dumps({"package": str(folder)}))["files"]
        return files

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(30)

    def _ask(self, line: str) -> Object:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the process that renders the chart ended with {self._process.wait(30)}"
        found: Object = json.loads(answer)
        return found


def example(name: str) -> Object:
    values: Object = yaml.safe_load((CHART / "examples" / f"{name}.yaml").read_text())
    return values


def merged(values: Object, more: Object) -> Object:
    """`values` with those of `more`, deeply, as Helm does with several files."""
    result = dict(values)
    for key, value in more.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [found for found in objects if found["kind"] == kind]


def one(objects: list[Object], kind: str, name: str) -> Object:
    """The object of that kind and name, which must be there once."""
    (found,) = [o for o in of_kind(objects, kind) if o["metadata"]["name"] == name]
    return found


def pod_of(workload: Object) -> Object:
    pod: Object = workload["spec"]["template"]["spec"]
    return pod


def pods(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Every pod that the objects make, with its workload's name."""
    for found in objects:
        if found["kind"] in ("StatefulSet", "DaemonSet", "Deployment"):
            yield f"{found['kind']}/{found['metadata']['name']}", pod_of(found)


def containers(pod: Object) -> Iterator[Object]:
    yield from pod.get("initContainers", [])
    yield from pod["containers"]


def container(pod: Object, name: str) -> Object:
    (found,) = [c for c in containers(pod) if c["name"] == name]
    return found


def mib(quantity: str) -> int:
    assert quantity.endswith("Mi"), quantity
    return int(quantity[:-2])


VARIANTS: dict[str, Object] = {
    "defaults": {},
    "daemonset-alone": {
        "shape": "daemonset",
        "engine": {"enabled": False},
        "ipv6": True,
        "cache": {
            "tcp": {"enabled": True, "tlsSecretName": "cache-tls"},
            "nvme": {"capacity": "400GB", "volume": {"type": "claim", "storageClassName": "local-nvme"}},
            "users": [
                {"name": "team-a", "passwordKey": "team-a", "prefixes": ["a:"], "quota": "4GiB", "priority": "high"},
                {"name": "dashboard", "passwordKey": "dashboard", "readOnly": True},
            ],
        },
        "networkPolicy": {"cacheFrom": [{"podSelector": {"matchLabels": {"kvtier.dev/client": "true"}}}]},
        "serviceMonitor": {"enabled": True},
    },
    "sidecar-emptydir": {
        "cache": {
            "hugePages": True,
            "nvme": {"capacity": "100GiB", "volume": {"type": "emptyDir"}},
            "env": [{"name": "MALLOC_ARENA_MAX", "value": "2"}],
        },
        "sidecar": {"gateTraffic": True},
        "engine": {"ranks": 4, "gpu": {"count": 4}, "runtimeClassName": "nvidia", "priorityClassName": "high"},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    },
    "redis-sentinel": {
        "shape": "redis",
        "redis": {"url": "redis://s-1:26379,s-2:26379", "mode": "sentinel", "service": "pages"},
        "networkPolicy": {"enabled": False},
        "podDisruptionBudget": {"enabled": False},
        "serviceAccount": {"create": False},
    },
}
"""Further values than the examples', so that every branch of the templates is rendered."""

ALL_VALUES = {**{path.stem: example(path.stem) for path in EXAMPLES}, **VARIANTS}
