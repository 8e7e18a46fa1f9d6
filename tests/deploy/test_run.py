"""The chart, run: the cache server with the arguments, environment, mounts, user and read-only root that are rendered,
in a network of its own; killed, drained and upgraded while engines work. The engines are stand-ins (`engine.py`) in the
engine's container as rendered."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli.config_validate import examine
from kvtier.cli.doctor_line import State
from kvtier.config import load_config

from .chart import ALL_VALUES, DEPLOY, Helm
from .pod import PATIENCE_S, ROOT, Namespaces, Pod, opened, programs, wait_until

pytest.importorskip("redis", reason="redis-py is not installed: pip install 'kvtier[redis]'")

PAGES, PAGE_BYTES = 96, 128 << 10
SIZES = {
    "hostCapacity": "6MiB",
    "nvme": {"capacity": "128MiB", "volume": {"type": "claim"}},
    "drainSeconds": 60,
    "maxValue": "1MiB",
}
ENGINE = {"hostCapacity": "4MiB"}
"""Less than the pages take, in the engine and in the cache server, so that NVMe has to serve."""
SECRETS = {"kvtier": {"http-token": "s3cret", "password": "hunter2", "redis-password": "hunter3"}}
WAITS_FOR_MEMORY = """
import os, time
from kvtier.storage_backends.host import arena
have = arena.Arena.__init__
def wait_then_have(self, *arguments, **options):
    while os.path.exists("/tmp/hold"):
        time.sleep(0.01)
    have(self, *arguments, **options)
arena.Arena.__init__ = wait_then_have
"""
"""Memory that takes as long to be had as the test wants: what pinning is on a large machine."""
ENV = [{"name": "PYTHONPATH", "value": "/tmp"}]
SLOW = {"cache-tmp": {"sitecustomize.py": WAITS_FOR_MEMORY, "hold": ""}}


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    try:
        Namespaces().close()
    except OSError as error:
        pytest.skip(f"no namespaces of Linux can be made here: {error}")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)  # files of another user


def rendered(helm: Helm, shape: str, **cache: Any) -> list[dict[str, Any]]:
    return helm.render({"shape": shape, "cache": {**SIZES, "env": ENV, **cache}, "engine": ENGINE})


def engine_command(first: int = 0) -> list[str]:
    return ["python", str(ROOT / "tests" / "deploy" / "engine.py"), str(PAGES), str(PAGE_BYTES), str(first)]


class Engine:
    """The rows that a stand-in printed."""

    def __init__(self, pod: Pod) -> None:
        self._container = pod.start("engine")
        self.pod = pod

    def rows(self) -> list[dict[str, Any]]:
        text = self._container.text()
        rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if line.startswith("{")]
        return rows

    def wait_for(self, what: str, condition: Any, after: int = -1) -> dict[str, Any]:
        """The first row behind round `after` that fulfils the condition."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            assert self.pod.namespaces.order(do="wait", pid=self._container.pid, timeout_s=0) is None, self.tail()
            found.extend(row for row in self.rows() if row["round"] > after and condition(row))
            return bool(found)

        wait_until(look, lambda: f"no round of the engine {what}:\n{self.tail()}")
        return found[0]

    def last(self) -> int:
        return int(rows[-1]["round"]) if (rows := self.rows()) else -1

    def tail(self) -> str:
        return self._container.text()[-3000:]

    def stop(self) -> list[dict[str, Any]]:
        """SIGTERM after the hook would have run; all rows, after what has to hold for each of them was looked at."""
        self.pod.kill("engine", signal.SIGTERM)
        assert self.pod.wait("engine") == 0, self.tail()
        rows = self.rows()
        for row in rows:
            assert (row["wrong"], row["errors"], row["unstored"], row["sound"]) == (0, 0, 0, True), row
        assert "Traceback" not in self._container.text(), self.tail()
        return rows


def found_all(row: dict[str, Any]) -> bool:
    return not row["misses"] and row["hits"]["redis"] > 0


def metrics(pod: Pod) -> dict[str, float]:
    return pod.metrics("cache", "cache-metrics", "s3cret")


def reason(pod: Pod) -> dict[str, Any]:
    return pod.get("/readyz", 9404, token="s3cret")


def start_slowly(pod: Pod) -> None:
    """Start the cache server while its memory is not to be had: alive all the while, not ready; then let it have it."""
    started = pod.start("cache")
    hold = pod.volume("cache-tmp") / "hold"
    if not hold.exists():
        hold.touch()
    wait_until(lambda: pod.probe("cache", "startupProbe"), started.text)
    gates = pod.container("cache")["readinessProbe"]["httpGet"]["path"] == "/readyz"
    for _ in range(5):
        assert pod.probe("cache", "livenessProbe")
        assert pod.probe("cache", "readinessProbe") is not gates
        assert reason(pod) == {"status": 503, "body": "the server is starting\n"}
        time.sleep(0.1)
    hold.unlink()
    wait_until(lambda: reason(pod)["status"] == 200, started.text)
    assert pod.probe("cache", "livenessProbe") and pod.probe("cache", "readinessProbe")


def drain(pod: Pod, half_sent: socket.socket) -> float:
    """The hook and SIGTERM while a client is in the middle of a command: alive, not ready, and it may finish. Returns
    the seconds that it took until the process was gone."""
    began = time.monotonic()
    gates = pod.container("cache")["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert pod.probe("cache", "readinessProbe")
    pod.run_hook("cache")
    pod.kill("cache", signal.SIGTERM)
    said: list[dict[str, Any]] = []

    def not_ready() -> bool:
        said.append(reason(pod))
        return bool(said[-1]["status"] == 503)

    wait_until(not_ready, lambda: f"after SIGTERM: {said[-1]}, {pod.running['cache'].text()[-2000:]}")
    assert "shutting down" in said[-1]["body"]
    assert pod.probe("cache", "livenessProbe") and pod.probe("cache", "readinessProbe") is not gates
    half_sent.sendall(b"value\r\n")
    assert half_sent.recv(100) == b"+OK\r\n", "a command under way is finished"
    assert pod.wait("cache", pod.grace_s) == 0, pod.running["cache"].text()
    took_s = time.monotonic() - began
    assert took_s < pod.grace_s, "the kubelet would have killed it"
    return took_s


def prepare(pod: Pod) -> None:
    """The init container that gives the node's directories away; without privileges there is nobody to give them to."""
    if pod.namespaces.as_root:
        pod.run_to_end("prepare")


def client(pod: Pod) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(PATIENCE_S)
    folder = os.open(pod.volume("socket"), os.O_PATH)
    try:  # by way of its folder: the name of a socket has 107 bytes at most
        connection.connect(f"/proc/self/fd/{folder}/cache.sock")
    finally:
        os.close(folder)
    return connection


def half_a_set(pod: Pod) -> socket.socket:
    connection = client(pod)
    connection.sendall(b"*1\r\n$4\r\nPING\r\n")
    assert connection.recv(100) == b"+PONG\r\n"
    connection.sendall(b"*3\r\n$3\r\nSET\r\n$4\r\nlast\r\n$10\r\nlast ")
    wait_until(lambda: unread(connection) == 0, "the server does not read the command")
    return connection


def unread(connection: socket.socket) -> int:
    """Bytes that the other side has not taken yet."""
    return int.from_bytes(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def looks_like_the_container(pod: Pod) -> None:
    """The user, the capabilities and the root file system are the rendered ones."""
    code = (
        "import os\nprint(os.getuid(), os.getgid(), os.getpid() != 1)\n"
        "print([l.split()[1] for l in open('/proc/self/status') if l.startswith(('CapEff', 'NoNewPrivs'))])\n"
        "for at in ('/x', '/etc/kvtier/x', '/usr/x', '/run/secrets/kvtier/x', '/tmp/x', '/run/kvtier/x'):\n"
        "    try:\n        open(at, 'w').close(); os.unlink(at); print(at, 'written')\n"
        "    except OSError as e: print(at, e.strerror)\n"
        "token = open('/run/secrets/kvtier/http-token').read()\n"
        "print(token, sorted(os.listdir('/var/lib/kvtier')))\n"
    )
    done = pod.execute("cache", ["python", "-S", "-c", code])
    user = pod.rendered["securityContext"]
    disks = [m["name"] for m in pod.container("cache")["volumeMounts"] if m["name"].startswith("nvme")]
    assert done["output"].splitlines() == [
        f"{user['runAsUser']} {user['runAsGroup']} True",
        "['0000000000000000', '1']",
        *(f"{at} Read-only file system" for at in ("/x", "/etc/kvtier/x", "/usr/x", "/run/secrets/kvtier/x")),
        "/tmp/x written", "/run/kvtier/x written",
        f"s3cret {disks}",
    ], done  # fmt: skip


def test_a_sidecar_is_killed_and_drained_while_its_engine_works(folder: Path, helm: Helm) -> None:
    pod = Pod(
        folder / "pod",
        folder / "node",
        rendered(helm, "sidecar"),
        "StatefulSet",
        SECRETS,
        {"engine": engine_command()},
        SLOW,
    )
    with opened(pod):
        start_slowly(pod)
        looks_like_the_container(pod)
        engine = Engine(pod)
        engine.wait_for("finds everything", found_all)
        wait_until(
            lambda: metrics(pod).get('kvtier_tier_resident_pages{tier="nvme"}') == PAGES,
            lambda: f"not all pages came to NVMe: {metrics(pod)}",
        )
        assert metrics(pod)['kvtier_hits_total{tier="nvme"}'] > 0

        seen = engine.last()
        pod.kill("cache", signal.SIGKILL)
        assert pod.wait("cache") == 128 + signal.SIGKILL
        down = engine.wait_for("misses the cache server", lambda row: row["misses"].get("tier_down"), seen)
        assert set(down["misses"]) <= {"tier_down", "deadline", "after_gap", "absent", "evicted", "no_room"}
        start_slowly(pod)  # the kubelet starts it again, with its volumes
        back = engine.wait_for("finds everything again", found_all, engine.last())
        after = metrics(pod)
        assert after['kvtier_tier_recovered_pages_total{tier="nvme"}'] == PAGES
        assert after['kvtier_hits_total{tier="nvme"}'] > 0, "what is in memory after a restart came from NVMe"
        assert after['kvtier_tier_quarantined_pages_total{tier="nvme"}'] == 0
        assert back["round"] > down["round"] and down["spills"]["stored"] <= back["spills"]["stored"] <= 2 * PAGES

        half = half_a_set(pod)
        rows = engine.stop()
        assert any(row["misses"].get("tier_down") for row in rows)
        drain(pod, half)
        half.close()
        assert not (pod.volume("socket") / "cache.sock").exists()
        start_slowly(pod)
        with client(pod) as again:
            again.sendall(b"*2\r\n$3\r\nGET\r\n$4\r\nlast\r\n")
            assert again.recv(100) == b"$10\r\nlast value\r\n", "what was stored while it drained is on NVMe"
        assert pod.terminate("cache")[0] == 0


def test_a_nodes_server_is_replaced_while_two_engines_work(folder: Path, helm: Helm) -> None:
    """An upgrade: the old pod is drained, a new one starts on the node's directories; both engines keep running."""
    objects = rendered(
        helm, "daemonset", nvme={"capacity": "128MiB", "volume": {"type": "hostPath", "hostPaths": ["/d0", "/d1"]}}
    )
    node = folder / "node"

    def node_server(name: str) -> Pod:
        return Pod(folder / name, node, objects, "DaemonSet", SECRETS, {}, SLOW)

    def engine_pod(name: str) -> Pod:
        return Pod(folder / name, node, objects, "StatefulSet", SECRETS, {"engine": engine_command()})

    with opened(engine_pod("engine-0")) as first, opened(engine_pod("engine-1")) as second:
        with opened(node_server("old")) as old:
            prepare(old)
            start_slowly(old)
            looks_like_the_container(old)
            engines = [Engine(first), Engine(second)]
            for engine in engines:
                engine.wait_for("finds everything", found_all)
            wait_until(
                lambda: metrics(old).get('kvtier_tier_resident_pages{tier="nvme"}') == PAGES,
                lambda: f"not all pages came to NVMe, once each: {metrics(old)}",
            )
            half, seen = half_a_set(old), [engine.last() for engine in engines]
            drain(old, half)
            half.close()
            for engine, number in zip(engines, seen, strict=True):
                engine.wait_for("misses the cache server", lambda row: row["misses"].get("tier_down"), number)
        with opened(node_server("new")) as new:
            prepare(new)
            start_slowly(new)
            for engine in engines:
                engine.wait_for("finds everything again", found_all, engine.last())
            after = metrics(new)
            assert after['kvtier_tier_recovered_pages_total{tier="nvme"}'] == PAGES + 1, "the pages, and the last value"
            assert after['kvtier_hits_total{tier="nvme"}'] > 0
            assert after['kvtier_tier_quarantined_pages_total{tier="nvme"}'] == 0
            for engine in engines:
                engine.stop()
            assert new.terminate("cache")[0] == 0
    assert (node / "d0" / "kvtier-kvtier" / "server").is_dir() and (node / "d1" / "kvtier-kvtier" / "server").is_dir()


@pytest.mark.parametrize("name", ALL_VALUES)
def test_rendered_configurations_are_valid(name: str, helm: Helm, tmp_path: Path) -> None:
    """As ``kvtier config validate`` sees them, on a machine that has neither their secrets nor their sizes."""
    seen = 0
    for found in helm.render(ALL_VALUES[name]):
        for file, text in found.get("data", {}).items() if found["kind"] == "ConfigMap" else ():
            if file in ("server.yaml", "engine.yaml"):
                (tmp_path / file).write_text(text)
                said = [*examine(str(tmp_path / file))]
                assert not [one for one in said if one.finding.state is State.BAD], said
                assert (load_config(tmp_path / file).server is not None) is (file == "server.yaml")
                seen += 1
    assert seen


@pytest.mark.parametrize("file", ["compose/server.yaml", "compose/engine.yaml", "systemd/server.yaml"])
def test_configurations_for_people_without_kubernetes_are_valid(file: str) -> None:
    said = [*examine(str(DEPLOY / file))]
    assert not [one for one in said if one.finding.state is State.BAD], said


def test_programs_are_named_once() -> None:
    named = [Path(p) for p in programs()]
    assert not [a for a in named for b in named if a != b and a.is_relative_to(b)]
