"""Runs a pod of the rendered chart on this machine, without a cluster: its containers' commands, environment, mounts,
user and file systems as they are rendered, in namespaces of their own (`sandbox.py`), and what the kubelet does with
it: volumes, probes, the hook before a stop, the time until it is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ADDRESS = "10.42.0.7"
PATIENCE_S = 240.0
"""How long is waited for what must happen: long, since it says nothing about speed."""
PROBES = 10


class Namespaces:
    """The sandbox process of one pod. Raises OSError with the kernel's reason where it lets nobody have namespaces."""

    def __init__(self) -> None:
        self.as_root = os.geteuid() == 0 and _has_other_users() and _allowed([])
        user = [] if self.as_root else ["--user", "--map-root-user"]
        if not self.as_root and not _allowed(user):
            raise OSError("this kernel lets us have no network and mount namespaces: needs root, or user namespaces")
        command = ["unshare", *user, "--net", sys.executable, "-I", str(Path(__file__).parent / "sandbox.py")]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.order(do="up", address=ADDRESS)

    def order(self, **order: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or '{"error": "the sandbox has ended"}')
        if "error" in answer:
            raise OSError(answer["error"])
        return answer["ok"]

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
        self._process.stdout.close()


def _has_other_users() -> bool:
    """Whether this root may become another user: not the root of a user namespace with nobody else in it."""
    ranges = [list(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return sum(length for _, _, length in ranges) > 1


def _allowed(user: Sequence[str]) -> bool:
    """Whether the kernel grants what a container needs, the mount of a proc file system among it."""
    script = "mount -t tmpfs none /tmp && mount -t proc none /proc"
    command = ["unshare", *user, "--net", "--mount", "--pid", "--fork", "sh", "-c", script]
    return (
        shutil.which("unshare") is not None
        and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


@dataclass(slots=True)
class Container:
    """A container that was started. spec: what the sandbox got. pid: of its process, outside."""

    name: str
    rendered: Mapping[str, Any]
    spec: dict[str, Any]
    pid: int
    output: Path

    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""


@dataclass
class Pod:
    """A pod of a rendered workload. node: folder that stands for the node's disks and claims, and outlives pods.
    secrets: by name, what the user made. stand_ins: other commands for containers, whose programs are not here."""

    folder: Path
    node: Path
    objects: Sequence[Mapping[str, Any]]
    kind: str
    secrets: Mapping[str, Mapping[str, str]]
    stand_ins: Mapping[str, Sequence[str]] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Further files in emptyDir volumes, by the volume's name."""
    address: str = ADDRESS

    def __post_init__(self) -> None:
        (self.workload,) = (o for o in self.objects if o["kind"] == self.kind)
        self.rendered: Mapping[str, Any] = self.workload["spec"]["template"]["spec"]
        self.namespaces = Namespaces()
        self.running: dict[str, Container] = {}
        self._volumes = {volume["name"]: self._volume(volume) for volume in self.rendered["volumes"]}
        for claim in self.workload["spec"].get("volumeClaimTemplates", ()):
            name = claim["metadata"]["name"]
            self._volumes[name] = self._writable(self.node / "claims" / name, fs_group=True)

    @property
    def grace_s(self) -> float:
        return float(self.rendered["terminationGracePeriodSeconds"])

    def volume(self, name: str) -> Path:
        return self._volumes[name]

    def container(self, name: str) -> Mapping[str, Any]:
        (found,) = (
            c for c in (*self.rendered.get("initContainers", ()), *self.rendered["containers"]) if c["name"] == name
        )
        return dict(found)

    # ---- what the kubelet does

    def start(self, name: str) -> Container:
        """Start a container, or start it again with the volumes that it had."""
        rendered = self.container(name)
        spec = self._spec(rendered)
        pid = self.namespaces.order(do="start", spec=spec)
        self.running[name] = Container(name, rendered, spec, pid, Path(spec["output"]))
        return self.running[name]

    def run_to_end(self, name: str) -> Container:
        """An init container that is no sidecar."""
        started = self.start(name)
        assert self.wait(name) == 0, started.text()
        return started

    def wait(self, name: str, timeout_s: float = PATIENCE_S) -> int | None:
        code: int | None = self.namespaces.order(do="wait", pid=self.running[name].pid, timeout_s=timeout_s)
        return code

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        self.namespaces.order(do="signal", pid=self.running[name].pid, signal=int(number))

    def terminate(self, name: str) -> tuple[int | None, float]:
        """The hook, then SIGTERM: exit code, None where it would have been killed, and the seconds that it all took."""
        began = time.monotonic()
        self.run_hook(name)
        self.kill(name, signal.SIGTERM)
        code = self.wait(name, self.grace_s - (time.monotonic() - began))
        return code, time.monotonic() - began

    def run_hook(self, name: str) -> None:
        hook = self.running[name].rendered.get("lifecycle", {}).get("preStop", {})
        if "sleep" in hook:
            time.sleep(hook["sleep"]["seconds"])
        elif "exec" in hook:
            self.execute(name, hook["exec"]["command"], self.grace_s)
        else:
            assert not hook, f"a hook of a kind that is not known here: {hook}"

    def probe(self, name: str, which: str) -> bool:
        """``startupProbe``, ``livenessProbe`` or ``readinessProbe``, as the kubelet makes it: one that is not answered
        in its time is made again, some times."""
        probe = self.running[name].rendered[which]
        timeout_s = float(probe.get("timeoutSeconds", 1))
        for _ in range(PROBES):
            if "exec" in probe:
                code = self.execute(name, probe["exec"]["command"], timeout_s)["code"]
                if code is not None:
                    return bool(code == 0)
                continue
            get = probe["httpGet"]
            status = int(self.get(get["path"], self._port(name, get["port"]), timeout_s=timeout_s)["status"])
            if status:
                return 200 <= status < 400
            if self.namespaces.order(do="wait", pid=self.running[name].pid, timeout_s=0) is not None:
                return False  # it has ended
        return False

    def execute(self, name: str, argv: Sequence[str], timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        running = self.running[name]
        answer: dict[str, Any] = self.namespaces.order(
            do="exec", pid=running.pid, spec=running.spec, argv=list(argv), timeout_s=timeout_s
        )
        return answer

    def get(self, path: str, port: int, *, timeout_s: float = PATIENCE_S, token: str = "") -> dict[str, Any]:
        """From another pod's place: by the pod's address."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        answer: dict[str, Any] = self.namespaces.order(
            do="get", host=self.address, port=port, path=path, timeout_s=timeout_s, headers=headers
        )
        return answer

    def metrics(self, name: str, port: str, token: str) -> dict[str, float]:
        """Of a container, by series; empty while it does not answer."""
        answer = self.get("/metrics", self._port(name, port), token=token)
        rows = [line.rpartition(" ") for line in answer["body"].splitlines() if line and line[0] != "#"]
        return {series: float(value) for series, _, value in rows} if answer["status"] == 200 else {}

    def close(self) -> None:
        self.namespaces.close()
        for volume in self.rendered["volumes"]:  # what lives as long as the pod
            if "emptyDir" in volume:
                shutil.rmtree(self._volumes[volume["name"]], ignore_errors=True)

    # ---- inside

    def _port(self, name: str, port: str | int) -> int:
        ports = {p["name"]: p["containerPort"] for p in self.running[name].rendered["ports"]}
        return int(ports.get(port, port))

    def _spec(self, rendered: Mapping[str, Any]) -> dict[str, Any]:
        name = rendered["name"]
        security = {**self.rendered["securityContext"], **rendered["securityContext"]}
        root = self.folder / f"{name}.root"
        root.mkdir(parents=True, exist_ok=True)
        given = {entry["name"]: entry["value"] for entry in rendered.get("env", ())}
        argv = self.stand_ins.get(name) or [*rendered["command"], *rendered.get("args", ())]
        return {
            "root": str(root),
            "argv": list(argv),
            "env": {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin", **given},
            "mounts": [
                (str(self._volumes[m["name"]]), m["mountPath"], bool(m.get("readOnly")))
                for m in rendered["volumeMounts"]
            ],
            "programs": programs(),
            "read_only": bool(security.get("readOnlyRootFilesystem")),
            "uid": security["runAsUser"],
            "gid": security["runAsGroup"],
            "groups": [self.rendered["securityContext"]["fsGroup"]],
            "capabilities": security["capabilities"].get("add", []),
            "user_namespace": not self.namespaces.as_root,
            "output": str(self.folder / f"{name}.log"),
        }

    def _volume(self, volume: Mapping[str, Any]) -> Path:
        name = str(volume["name"])
        place = self.folder / "volumes" / name
        if "hostPath" in volume:
            return self._writable(self.node / volume["hostPath"]["path"].lstrip("/"), fs_group=False)
        if "ephemeral" in volume or "emptyDir" in volume:
            self._writable(place, fs_group=True)
            for file, text in self.files.get(name, {}).items():
                (place / file).write_text(text)
            return place
        place.mkdir(parents=True)
        if "configMap" in volume:
            (found,) = (
                o["data"] for o in self.objects
                if o["kind"] == "ConfigMap" and o["metadata"]["name"] == volume["configMap"]["name"]
            )  # fmt: skip
            contents, mode = dict(found), 0o644
        else:
            secret = volume["secret"]
            contents = {i["path"]: self.secrets[secret["secretName"]][i["key"]] for i in secret["items"]}
            mode = secret.get("defaultMode", 0o644)
        for file, text in contents.items():
            (place / file).write_text(text)
            (place / file).chmod(mode)
            self._give(place / file)
        return place

    def _writable(self, place: Path, *, fs_group: bool) -> Path:
        place.mkdir(parents=True, exist_ok=True)
        if fs_group:
            self._give(place)
            place.chmod(0o2770)
        return place

    def _give(self, path: Path) -> None:
        if self.namespaces.as_root:
            os.chown(path, -1, self.rendered["securityContext"]["fsGroup"])


def programs() -> list[str]:
    """Folders that Python and kvtier of this environment lie in: the image's part of the root file system."""
    named = [sys.prefix, sys.base_prefix, str(ROOT), *sys.path]
    folders = {Path(p).resolve() for p in named if p and Path(p).is_dir()}
    folders |= {Path(p) for p in (sys.prefix, sys.base_prefix)}
    outside = [f for f in folders if not f.is_relative_to("/usr")]
    return sorted(str(f) for f in outside if not any(f != g and f.is_relative_to(g) for g in outside))


def wait_until(condition: Callable[[], bool], message: Callable[[], str] | str, timeout_s: float = PATIENCE_S) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, message if isinstance(message, str) else message()
        time.sleep(0.05)


@contextmanager
def opened(pod: Pod) -> Iterator[Pod]:
    try:
        yield pod
    finally:
        pod.close()
