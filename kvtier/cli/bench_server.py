"""``kvtier bench server``: what a byte costs the cache server beside redis-server, and our client beside redis-py.

In one run: the server over unix sockets, the clients over these, over TCP, and over TLS where there are openssl and a
redis-server that speaks it (Python can neither gather nor scatter there). Unlike in the other benches, ``baseline`` is
the peer's CPU seconds per GB, and ``over_baseline`` ours over the peer's: 0.5 is half of the peer's work. p99_ms and
peer_p99_ms are of one value; of the Redis tier, which takes several at once, of a call. "get among sets" is the 99th
percentile of a GET while two writers keep setting values (``mb_per_s``), over that of an idle server.

Without a redis-server the cache server is measured alone. Clients need both it and redis-py.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.abc.tier import PageMeta, PutItem
from kvtier.cli.bench_flood import WRITERS, get_value, measure, median_over_idle, set_value
from kvtier.cli.bench_left_out import left_out
from kvtier.errors import KVTierError
from kvtier.keys import checksum
from kvtier.storage_backends.redis.options import Address, RedisOptions, TlsOptions
from kvtier.testing.processes import cpu_of
from kvtier.testing.redis_servers import find_server, kept_port

BLOCK_BYTES = 1 << 20
ROUNDS = 25
BATCH_BYTES = 32 << 20
_FLOOD_RUNS = 5
_KEYS = 32
_TIER_BATCH = 8
"""Pages in one call of the Redis tier."""

_START_S = 60.0

Row = dict[str, str | int | float | None]


@dataclass(slots=True)
class _Side:
    """Rounds of one of the two: CPU seconds and seconds of each, and seconds of every call."""

    cpu_s: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    calls_s: list[float] = field(default_factory=list)

    def take(self, calls: Iterable[Callable[[], object]], cpu: Callable[[], float]) -> None:
        """One round, by the clock `cpu`."""
        cpu_before, before = cpu(), time.perf_counter()
        at = before
        for call in calls:
            call()
            now = time.perf_counter()
            self.calls_s.append(now - at)
            at = now
        self.seconds.append(at - before)
        self.cpu_s.append(cpu() - cpu_before)

    @property
    def p99_s(self) -> float:
        return sorted(self.calls_s)[ceil(0.99 * len(self.calls_s)) - 1]


def run(
    *, block_bytes: Sequence[int] = (BLOCK_BYTES,), rounds: int = ROUNDS, batch_bytes: int = BATCH_BYTES
) -> list[Row]:
    """Rows for the server, for the bare client and for the Redis tier, which checks every byte. Medians of `rounds`,
    which are short, so that what else runs on the machine hits both sides alike. What is missing for a part of it is
    told on stderr; of a peer that is not there rows say None."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        capacity = max(256 << 20, 4 * _KEYS * max(block_bytes))
        ours = stack.enter_context(_process(folder / "k.sock", _serve_command(folder / "k.sock", capacity)))
        theirs = _start_redis(folder, stack)
        if theirs is not None and importlib.util.find_spec("redis") is None:
            left_out("the clients", "redis-py is not installed here: pip install 'kvtier[redis]'")
            theirs = theirs._replace(clients=())
        for nbytes in block_bytes:
            count = max(1, batch_bytes // nbytes)
            rows += _server_rows(folder, ours, theirs and theirs.pid, nbytes, count, rounds)
            rows.append(_flood_row(folder / "k.sock", nbytes, min(rounds, _FLOOD_RUNS), max(20, 12 * count)))
            for where, ca in theirs.clients if theirs else ():
                rows += _client_rows(where, nbytes, count, rounds, ca=ca)
    return rows


# ---- the server


def _server_rows(folder: Path, ours: int, theirs: int | None, nbytes: int, count: int, rounds: int) -> list[Row]:
    rows: list[Row] = []
    value = os.urandom(nbytes)
    out = bytearray(nbytes)
    with ExitStack() as stack:
        one = stack.enter_context(_connected(folder / "k.sock"))
        two = None if theirs is None else stack.enter_context(_connected(folder / "r.sock"))
        for op, do in (
            ("set", lambda s, n: set_value(s, b"key%d" % (n % _KEYS), value)),
            ("get", lambda s, n: get_value(s, b"key%d" % (n % _KEYS), memoryview(out))),
        ):
            own, peer = _Side(), _Side()
            for _ in range(rounds):  # in turns, so that what else runs on the machine hits both
                own.take((partial(do, one, n) for n in range(count)), lambda: cpu_of(ours))
                if theirs is not None:
                    peer.take((partial(do, two, n) for n in range(count)), partial(cpu_of, theirs))
            rows.append(_row("server", op, nbytes, count, own, peer))
    return rows


def _flood_row(path: Path, nbytes: int, rounds: int, gets: int) -> Row:
    runs = [measure(path, nbytes, gets) for _ in range(rounds)]
    return {
        "tier": "server",
        "op": "get among sets",
        "block_bytes": nbytes,
        "concurrency": 1 + WRITERS,
        "mb_per_s": round(statistics.median(run.written_bytes_per_s for run in runs) / 1e6, 1),
        "idle_p99_ms": round(1e3 * statistics.median(run.idle_p99_s for run in runs), 3),
        "p99_ms": round(1e3 * statistics.median(run.flood_p99_s for run in runs), 3),
        "over_idle": round(median_over_idle(runs), 2),
    }


# ---- the client


def _client_rows(where: Address, nbytes: int, count: int, rounds: int, *, ca: Path | None = None) -> list[Row]:
    """ca: the server's certificate, where it speaks TLS."""
    from kvtier.storage_backends.redis.connection import Connection
    from kvtier.storage_backends.redis.tier import RedisTier

    transport = "unix" if where.path else "tcp" if ca is None else "tls"
    url = f"unix://{where.path}" if where.path else f"{'redis' if ca is None else 'rediss'}://{where}"
    options = RedisOptions.of(url, timeout_s=60.0, tls=None if ca is None else TlsOptions(ca=ca))
    value, out = os.urandom(nbytes), memoryview(bytearray(nbytes))
    keys = [bytes([n]) * 32 for n in range(_KEYS)]
    metas = [PageMeta(nbytes, 1, 0, checksum(value, key), bytes(16)) for key in keys]
    outs = [memoryview(bytearray(nbytes)) for _ in range(_TIER_BATCH)]
    connection = Connection(where, options, time.monotonic() + 3600, database=0)
    tier = RedisTier(options)
    target: dict[str, Any] = (
        {"unix_socket_path": where.path} if where.path else {"host": where.host, "port": where.port}
    )
    if ca is not None:
        target |= {"ssl": True, "ssl_ca_certs": str(ca)}
    peer: Any = importlib.import_module("redis").Redis(**target, protocol=2)

    def bare_set(n: int) -> None:
        key = b"key%d" % (n % _KEYS)
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, nbytes)
        connection.send([head, value, b"\r\n"])
        connection.read_reply()

    def bare_get(n: int) -> None:
        key = b"key%d" % (n % _KEYS)
        connection.send([b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key)])
        connection.read_bulk_length()
        connection.read_into(out)
        connection.end_bulk()

    def tier_put(at: int) -> None:
        batch = [(at + i) % _KEYS for i in range(min(_TIER_BATCH, count - at))]
        if at % _KEYS == 0:
            tier.delete_many(keys)
        tier.put_many([PutItem(keys[n], metas[n], memoryview(value)) for n in batch])

    def tier_get(at: int) -> None:
        batch = [(at + i) % _KEYS for i in range(min(_TIER_BATCH, count - at))]
        tier.get_many_into([keys[n] for n in batch], outs[: len(batch)])

    def peer_set(n: int) -> None:
        peer.set(b"key%d" % (n % _KEYS), value)

    def peer_get(n: int) -> None:
        peer.get(b"key%d" % (n % _KEYS))

    def connect_anew() -> None:
        """Some connections cost twice what others do for as long as they live: rounds must not all be of one."""
        nonlocal connection
        connection.close()
        connection = Connection(where, options, time.monotonic() + 3600, database=0)
        peer.connection_pool.disconnect()
        bare_set(0)
        peer_set(0)

    rows = []
    try:
        for name, op, do, step, its in (
            (f"client-{transport}", "set", bare_set, 1, peer_set),
            (f"client-{transport}", "get", bare_get, 1, peer_get),
            (f"redis-{transport}", "put", tier_put, _TIER_BATCH, peer_set),
            (f"redis-{transport}", "get", tier_get, _TIER_BATCH, peer_get),
        ):
            own, other = _Side(), _Side()
            for _ in range(rounds):
                connect_anew()
                own.take((partial(do, n) for n in range(0, count, step)), time.process_time)
                other.take((partial(its, n) for n in range(count)), time.process_time)
            rows.append(_row(name, op, nbytes, count, own, other))
    finally:
        tier.close()
        connection.close()
        peer.close()
    return rows


# ---- measuring


def _row(tier: str, op: str, nbytes: int, count: int, own: _Side, peer: _Side) -> Row:
    """peer: with no round where there is none."""
    moved_gb = nbytes * count / 1e9
    there = bool(peer.seconds)
    ratios = [a / b for a, b in zip(own.cpu_s, peer.cpu_s, strict=there) if b > 0]
    return {
        "tier": tier,
        "op": op,
        "block_bytes": nbytes,
        "concurrency": 1,
        "mb_per_s": round(moved_gb * 1000 / statistics.median(own.seconds), 1),
        "p99_ms": round(1e3 * own.p99_s, 3),
        "cpu_s_per_gb": round(statistics.median(own.cpu_s) / moved_gb, 4),
        "baseline": round(statistics.median(peer.cpu_s) / moved_gb, 4) if there else None,
        "over_baseline": round(statistics.median(ratios), 3) if ratios else None,
        "peer_mb_per_s": round(moved_gb * 1000 / statistics.median(peer.seconds), 1) if there else None,
        "peer_p99_ms": round(1e3 * peer.p99_s, 3) if there else None,
    }


# ---- the processes


def _serve_command(path: Path, capacity: int) -> list[str]:
    return [
        sys.executable, "-m", "kvtier.cli", "serve", "--listen", f"unix:{path}", "--host-capacity", f"{capacity}B",
    ]  # fmt: skip


class _Redis(NamedTuple):
    """A running redis-server. clients: the addresses to reach it at, beside its unix socket r.sock, each with the
    server's certificate where it speaks TLS."""

    pid: int
    clients: Sequence[tuple[Address, Path | None]]


def _start_redis(folder: Path, stack: ExitStack) -> _Redis | None:
    """Stopped with `stack`; with TLS where that is possible. None where there is no redis-server."""
    binary = find_server("redis")
    if binary is None:
        left_out("redis-server's side, and the clients", "it is not installed here: apt-get install redis-server")
        return None
    path, port, tls_port = folder / "r.sock", kept_port(), kept_port()
    command = [
        binary, "--port", str(port), "--bind", "127.0.0.1", "--unixsocket", str(path),
        "--save", "", "--appendonly", "no", "--dir", str(folder),
    ]  # fmt: skip
    clients: list[tuple[Address, Path | None]] = [(Address(path=str(path)), None), (Address("127.0.0.1", port), None)]
    tls = _tls_options(folder, tls_port)
    if tls:
        try:
            pid = stack.enter_context(_process(path, [*command, *tls]))
        except KVTierError:
            left_out("clients over TLS", f"{binary} does not start with it, as one that was built without")
        else:
            return _Redis(pid, [*clients, (Address("127.0.0.1", tls_port), folder / "cert.pem")])
    return _Redis(stack.enter_context(_process(path, command)), clients)


def _tls_options(folder: Path, port: int) -> list[str]:
    """For redis-server to speak TLS at `port`, with a certificate made in `folder`; empty where none can be made."""
    openssl = shutil.which("openssl")
    if openssl is None:
        left_out("clients over TLS", "openssl is not installed here: apt-get install openssl")
        return []
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=bench"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        left_out("clients over TLS", f"openssl made no certificate: {' '.join(done.stderr.split())[-200:]}")
        return []
    options = ["--tls-port", str(port), "--tls-cert-file", cert, "--tls-key-file", key]
    return [*options, "--tls-ca-cert-file", cert, "--tls-auth-clients", "no"]


@contextmanager
def _process(path: Path, command: list[str]) -> Iterator[int]:
    """The id of a running server that takes connections at `path`; it is stopped at the end."""
    try:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except FileNotFoundError:
        raise KVTierError(f"{command[0]} cannot be started") from None
    try:
        give_up = time.monotonic() + _START_S
        while not _listens(path):
            if process.poll() is not None or time.monotonic() > give_up:
                raise KVTierError(f"{' '.join(command)} does not start")
            time.sleep(0.02)
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def _listens(path: Path) -> bool:
    try:
        with _connected(path):
            return True
    except OSError:
        return False


@contextmanager
def _connected(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(path))
        yield connection
