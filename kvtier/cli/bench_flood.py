"""How long a GET takes while others keep writing: the 99th percentile beside that of an idle server.

The writers are a process of their own, so that what is measured is the server and not the bench's interpreter.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import KVTierError

WRITERS = 2
_KEYS = 8
_WRITTEN_MIN = 20
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class FloodRun:
    """Seconds of a GET's 99th percentile, and what the writers got through meanwhile."""

    idle_p99_s: float
    flood_p99_s: float
    written_bytes_per_s: float

    @property
    def over_idle(self) -> float:
        return self.flood_p99_s / self.idle_p99_s


def measure(path: Path, nbytes: int, gets: int) -> FloodRun:
    """One run against the server at the unix socket `path`: `gets` GETs of `nbytes` alone, then among writers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as reader:
        reader.connect(str(path))
        set_value(reader, b"read", os.urandom(nbytes))
        out = memoryview(bytearray(nbytes))
        for _ in range(gets // 10 + 1):
            get_value(reader, b"read", out)
        idle = [_timed(reader, out) for _ in range(gets)]
        with _writers(path, nbytes) as written:
            before, start = written(), time.monotonic()
            flooded: list[float] = []
            while len(flooded) < gets or written() - before < _WRITTEN_MIN * nbytes:
                flooded.append(_timed(reader, out))
                if time.monotonic() - start > _PATIENCE_S:
                    raise KVTierError(f"{len(flooded)} GETs among {WRITERS} writers took {_PATIENCE_S} s")
            rate = (written() - before) / (time.monotonic() - start)
    return FloodRun(_p99(idle), _p99(flooded), rate)


def median_over_idle(runs: list[FloodRun]) -> float:
    return statistics.median(run.over_idle for run in runs)


def set_value(connection: socket.socket, key: bytes, value: bytes) -> None:
    head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(value))
    connection.sendall(head)
    connection.sendall(value)
    connection.sendall(b"\r\n")
    _expect(connection, b"+OK\r\n")


def get_value(connection: socket.socket, key: bytes, out: memoryview) -> None:
    connection.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key))
    _expect(connection, b"$%d\r\n" % len(out))
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


def _timed(reader: socket.socket, out: memoryview) -> float:
    before = time.perf_counter()
    get_value(reader, b"read", out)
    return time.perf_counter() - before


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(0.99 * (len(seconds) - 1))]


class _Written:
    """Bytes that the writers said they wrote; reads what they print."""

    def __init__(self, process: subprocess.Popen[bytes], nbytes: int) -> None:
        self._process, self._nbytes, self._count = process, nbytes, 0
        self.started = threading.Event()
        self.thread = threading.Thread(target=self._read, name="kvtier-bench-writers", daemon=True)
        self.thread.start()

    def __call__(self) -> int:
        return self._count * self._nbytes

    def _read(self) -> None:
        lines = self._process.stdout
        while lines is not None and lines.readline():
            self._count += 1
            self.started.set()


@contextmanager
def _writers(path: Path, nbytes: int) -> Iterator[_Written]:
    command = [sys.executable, "-m", "kvtier.cli.bench_flood", str(path), str(nbytes)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    written = _Written(process, nbytes)
    try:
        if not written.started.wait(60.0):
            raise KVTierError("the writers of the bench do not start")
        yield written
    finally:
        process.kill()
        process.wait()
        written.thread.join(10.0)
        if process.stdout is not None:
            process.stdout.close()


def _write_on(path: str, nbytes: int, first: int) -> None:
    value = os.urandom(nbytes)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        n = 0
        while True:
            set_value(connection, b"written%d" % (first + n % _KEYS), value)
            os.write(1, b".\n")
            n += 1


def main(path: str, nbytes: int) -> None:
    """Write on and on; a line for every value. Ends by being killed."""
    for i in range(1, WRITERS):
        threading.Thread(target=_write_on, args=(path, nbytes, 1000 * i), daemon=True).start()
    _write_on(path, nbytes, 0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
