"""``kvtier bench server``: what a byte costs the cache server beside redis-server, and our client beside redis-py.

All over unix sockets, in one run. Unlike in the other benches, ``baseline`` is the peer's CPU seconds per GB, and
``over_baseline`` ours over the peer's: 0.5 is half of the peer's work.
"""

from __future__ import annotations

import importlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvtier.abc.tier import PageMeta, PutItem
from kvtier.errors import KVTierError, missing_extra
from kvtier.keys import checksum

BLOCK_BYTES = 1 << 20
ROUNDS = 5
BATCH_BYTES = 256 << 20
_KEYS = 32
_START_S = 20.0

Row = dict[str, str | int | float | None]


def run(
    *, block_bytes: Sequence[int] = (BLOCK_BYTES,), rounds: int = ROUNDS, batch_bytes: int = BATCH_BYTES
) -> list[Row]:
    """Rows for the server, for the bare client and for the Redis tier, which checks every byte. Medians of `rounds`.
    Raises KVTierError where there is no redis-server or no redis-py."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        capacity = max(256 << 20, 4 * _KEYS * max(block_bytes))
        ours = stack.enter_context(_process(folder / "k.sock", _serve_command(folder / "k.sock", capacity)))
        theirs = stack.enter_context(_process(folder / "r.sock", _redis_command(folder, folder / "r.sock")))
        for nbytes in block_bytes:
            count = max(1, batch_bytes // nbytes)
            rows += _server_rows(folder, ours, theirs, nbytes, count, rounds)
            rows += _client_rows(folder / "r.sock", nbytes, count, rounds)
    return rows


# ---- the server


def _server_rows(folder: Path, ours: int, theirs: int, nbytes: int, count: int, rounds: int) -> list[Row]:
    rows: list[Row] = []
    value = os.urandom(nbytes)
    out = bytearray(nbytes)
    with _connected(folder / "k.sock") as one, _connected(folder / "r.sock") as two:
        for op, do in (("set", lambda s: _set(s, value, count)), ("get", lambda s: _get(s, memoryview(out), count))):
            samples: list[tuple[float, float, float]] = []
            for _ in range(rounds):  # in turns, so that what else runs on the machine hits both
                cpu, seconds = _cost(one, do, lambda: _cpu_of(ours))
                peer_cpu, _ = _cost(two, do, lambda: _cpu_of(theirs))
                samples.append((cpu, peer_cpu, seconds))
            rows.append(_row("server", op, nbytes, count, samples))
    return rows


def _set(connection: socket.socket, value: bytes, count: int) -> None:
    for n in range(count):
        key = b"key%d" % (n % _KEYS)
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(value))
        connection.sendall(head)
        connection.sendall(value)
        connection.sendall(b"\r\n")
        _expect(connection, b"+OK\r\n")


def _get(connection: socket.socket, out: memoryview, count: int) -> None:
    head = b"$%d\r\n" % len(out)
    for n in range(count):
        key = b"key%d" % (n % _KEYS)
        connection.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key))
        _expect(connection, head)
        at = 0
        while at < len(out):
            got = connection.recv_into(out[at:], 0, socket.MSG_WAITALL)
            if not got:
                raise KVTierError("the server closed the connection during the bench")
            at += got
        _expect(connection, b"\r\n")


def _expect(connection: socket.socket, what: bytes) -> None:
    got = connection.recv(len(what), socket.MSG_WAITALL)
    if got != what:
        raise KVTierError(f"a server answered {got!r} in the bench")


# ---- the client


def _client_rows(path: Path, nbytes: int, count: int, rounds: int) -> list[Row]:
    from kvtier.storage_backends.redis.connection import Connection
    from kvtier.storage_backends.redis.options import Address, RedisOptions
    from kvtier.storage_backends.redis.tier import RedisTier

    try:
        redis = importlib.import_module("redis")
    except ImportError as e:
        raise missing_extra("redis", "redis") from e
    options = RedisOptions.of(f"unix://{path}", timeout_s=60.0)
    value, out = os.urandom(nbytes), memoryview(bytearray(nbytes))
    keys = [bytes([n]) * 32 for n in range(_KEYS)]
    metas = [PageMeta(nbytes, 1, 0, checksum(value, key), bytes(16)) for key in keys]
    outs = [memoryview(bytearray(nbytes)) for _ in range(8)]
    connection = Connection(Address(path=str(path)), options, time.monotonic() + 3600, database=0)
    tier = RedisTier(options)
    peer: Any = redis.Redis(unix_socket_path=str(path), protocol=2)

    def bare_set() -> None:
        for n in range(count):
            key = b"key%d" % (n % _KEYS)
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, nbytes)
            connection.send([head, value, b"\r\n"])
            connection.read_reply()

    def bare_get() -> None:
        for n in range(count):
            key = b"key%d" % (n % _KEYS)
            connection.send([b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key)])
            connection.read_bulk_length()
            connection.read_into(out)
            connection.end_bulk()

    def tier_put() -> None:
        for at in range(0, count, 8):
            batch = [(at + i) % _KEYS for i in range(min(8, count - at))]
            if at % _KEYS == 0:
                tier.delete_many(keys)
            tier.put_many([PutItem(keys[n], metas[n], memoryview(value)) for n in batch])

    def tier_get() -> None:
        for at in range(0, count, 8):
            batch = [(at + i) % _KEYS for i in range(min(8, count - at))]
            tier.get_many_into([keys[n] for n in batch], outs[: len(batch)])

    def peer_set() -> None:
        for n in range(count):
            peer.set(b"key%d" % (n % _KEYS), value)

    def peer_get() -> None:
        for n in range(count):
            peer.get(b"key%d" % (n % _KEYS))

    rows = []
    try:
        for name, op, own, other in (
            ("client", "set", bare_set, peer_set),
            ("client", "get", bare_get, peer_get),
            ("redis", "put", tier_put, peer_set),
            ("redis", "get", tier_get, peer_get),
        ):
            samples = []
            for _ in range(rounds):
                cpu, seconds = _cost(own, _call, time.process_time)
                peer_cpu, _ = _cost(other, _call, time.process_time)
                samples.append((cpu, peer_cpu, seconds))
            rows.append(_row(name, op, nbytes, count, samples))
    finally:
        tier.close()
        connection.close()
        peer.close()
    return rows


def _call(work: Callable[[], None]) -> None:
    work()


# ---- measuring


def _cost(subject: Any, do: Callable[[Any], None], cpu: Callable[[], float]) -> tuple[float, float]:
    """CPU seconds by the clock `cpu`, and seconds, of ``do(subject)``."""
    cpu_before, before = cpu(), time.perf_counter()
    do(subject)
    seconds = time.perf_counter() - before
    return cpu() - cpu_before, seconds


def _row(tier: str, op: str, nbytes: int, count: int, samples: Sequence[tuple[float, float, float]]) -> Row:
    moved_gb = nbytes * count / 1e9
    ratios = [own / peer for own, peer, _ in samples if peer > 0]
    return {
        "tier": tier,
        "op": op,
        "block_bytes": nbytes,
        "concurrency": 1,
        "mb_per_s": round(moved_gb * 1000 / statistics.median(s for _, _, s in samples), 1),
        "cpu_s_per_gb": round(statistics.median(own for own, _, _ in samples) / moved_gb, 4),
        "baseline": round(statistics.median(peer for _, peer, _ in samples) / moved_gb, 4),
        "over_baseline": round(statistics.median(ratios), 3) if ratios else None,
    }


def _cpu_of(pid: int) -> float:
    """CPU seconds of a process, all its threads, from the scheduler's own nanoseconds."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


# ---- the processes


def _serve_command(path: Path, capacity: int) -> list[str]:
    return [
        sys.executable, "-m", "kvtier.cli", "serve", "--listen", f"unix:{path}", "--host-capacity", f"{capacity}B",
    ]  # fmt: skip


def _redis_command(folder: Path, path: Path) -> list[str]:
    return [
        "redis-server", "--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no",
        "--dir", str(folder),
    ]  # fmt: skip


@contextmanager
def _process(path: Path, command: list[str]) -> Iterator[int]:
    """The id of a running server that takes connections at `path`; it is stopped at the end."""
    try:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except FileNotFoundError:
        raise KVTierError(f"{command[0]} is not installed: apt-get install redis-server") from None
    try:
        give_up = time.monotonic() + _START_S
        while not path.exists():
            if process.poll() is not None or time.monotonic() > give_up:
                raise KVTierError(f"{' '.join(command)} does not start")
            time.sleep(0.02)
        yield process.pid
    finally:
        process.terminate()
        process.wait()


@contextmanager
def _connected(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(path))
        yield connection
