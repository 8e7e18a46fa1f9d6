"""``kvtier bench lmcache``: kvtier behind LMCache beside LMCache's own adapters, on one disk and one Redis, in one run.

Every system gets the same BF16 chunks through the interface that LMCache's controllers use: submit, wait for the
descriptor, take the result. Bytes are hot bytes, of the chunks as LMCache has them. CPU is told apart: of this process,
so of the adapter with its threads, and of the Redis server, which spends more the more bytes it is sent.

- ``store``: until everything is on the disk or in Redis. ``store, answered``: until LMCache was told that its memory
  is free again, which with kvtier is earlier: chunks are on their way from its host memory then.
- ``load``: lookup, then load, of all chunks.
- ``store one``, ``load one``: chunk by chunk, each waited for.
- ``restart``: from opening the adapter on what a closed one left behind until all chunks are loaded.

Before anything is loaded the adapter is opened anew, so that nothing is in its memory, and files are dropped from the
page cache: chunks come from the disk, or from Redis. A system called "again" is one that runs twice: what its two
figures differ by is noise.
"""

from __future__ import annotations

import importlib.util
import os
import select
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.cli import shaped_link
from kvtier.cli.bench_lmcache_chunks import Chunks, keys_named
from kvtier.cli.bench_lmcache_systems import System, open_adapter, systems
from kvtier.errors import KVTierError, MissingExtraError
from kvtier.testing.processes import cpu_of
from kvtier.testing.redis_servers import RedisServer, find_server

CHUNK_BYTES = (1 << 20, 4 << 20)
ROUNDS = 7
ROUND_BYTES = 64 << 20
TASK_BYTES = 16 << 20
_DEADLINE_S = 120.0

Row = dict[str, str | int | float]


@dataclass(slots=True)
class _Samples:
    """Of one system and operation. hot_bytes: of one sample."""

    hot_bytes: int
    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    server_cpu_s: list[float] = field(default_factory=list)


class _Cost(NamedTuple):
    """Seconds: wall, CPU of this process, CPU of the server where the system has one."""

    seconds: float
    cpu_s: float
    server_cpu_s: float


@dataclass(slots=True)
class _Measured:
    """Of one system. at_rest: bytes on the disk or in Redis for one hot byte. error: relative, of what was loaded."""

    ops: dict[str, _Samples] = field(default_factory=dict)
    at_rest: float = 0.0
    error: float = 0.0


def run(
    *,
    directory: Path | None = None,
    chunk_bytes: Sequence[int] = CHUNK_BYTES,
    rounds: int = ROUNDS,
    round_bytes: int = ROUND_BYTES,
    kv: Path | None = None,
    names: Sequence[str] | None = None,
    link_bits_per_s: float | None = None,
    told: Callable[[int, int], object] = lambda done, of: None,
) -> list[Row]:
    """``{"system", "op", "chunk_bytes", "hot_mb_per_s", "cpu_s_per_gb", "server_cpu_s_per_gb", "p50_ms", "p99_ms",
    "samples", "at_rest", "relative_error"}`` for each; medians of `rounds`, in which the systems take turns, so that
    what else runs on the machine hits all alike.

    kv: a model's K and V, which are stored in the place of random values: ``[2, layers, tokens, heads, dim]``, the bits
    of BF16 values as uint16, in numpy's format. names: of the systems, instead of all. link_bits_per_s: of the way
    to Redis, both directions together, for which this process leaves the machine's network for good. told: progress,
    in turns.

    Raises KVTierError where LMCache or a Redis server is missing, or a chunk is lost or comes back wrong."""
    _check_installed()
    if link_bits_per_s is not None:
        shaped_link.enter(link_bits_per_s)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=directory) as name, ExitStack() as stack:
        folder = Path(name)
        redis = RedisServer(folder / "redis")
        stack.callback(redis.stop)
        sources = [Chunks.of(kv)] if kv is not None else [Chunks.random(n, round_bytes) for n in chunk_bytes]
        for number, chunks in enumerate(sources):
            with chunks:
                compared = systems(folder / str(number), ("127.0.0.1", redis.port))
                if names is not None:
                    compared = [system for system in compared if system.name in names]
                rows += _compare(compared, chunks, rounds, redis.pid, told)
    return rows


def _check_installed() -> None:
    if importlib.util.find_spec("lmcache") is None:
        raise MissingExtraError(
            "this compares with LMCache, which is not installed here: pip install lmcache==0.5.6, or in a clone of "
            "kvtier: $(tools/env-engine.sh lmcache | tail -n 1)/bin/kvtier bench lmcache"
        )
    if find_server() is None:
        raise KVTierError("there is no redis-server to measure on: apt-get install redis-server")
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")


def _compare(
    compared: Sequence[System], chunks: Chunks, rounds: int, server: int, told: Callable[[int, int], object]
) -> list[Row]:
    measured: dict[str, _Measured] = defaultdict(_Measured)
    turns = (rounds + 1) * len(compared)
    for n in range(rounds + 1):
        for at, system in enumerate(compared):
            into = measured[system.name] if n else _Measured()  # before the first round, nothing had been touched
            _Turn(system, chunks, n, into, server).run()
            told(n * len(compared) + at + 1, turns)
    return [
        _row(name, op, chunks.nbytes, samples, system)
        for name, system in measured.items()
        for op, samples in system.ops.items()
    ]


def _row(name: str, op: str, chunk_bytes: int, samples: _Samples, system: _Measured) -> Row:
    gb, seconds = samples.hot_bytes / 1e9, sorted(samples.seconds)
    return {
        "system": name,
        "op": op,
        "chunk_bytes": chunk_bytes,
        "hot_mb_per_s": round(1e3 * gb / statistics.median(seconds), 1),
        "cpu_s_per_gb": round(sum(samples.cpu_s) / len(seconds) / gb, 4),
        "server_cpu_s_per_gb": round(sum(samples.server_cpu_s) / len(seconds) / gb, 4),
        "p50_ms": round(1e3 * statistics.median(seconds), 3),
        "p99_ms": round(1e3 * seconds[ceil(0.99 * len(seconds)) - 1], 3),
        "samples": len(seconds),
        "at_rest": round(system.at_rest, 4),
        "relative_error": round(system.error, 5),
    }


class _Turn:
    """One system's turn in round `n`. server: process id of the Redis server."""

    def __init__(self, system: System, chunks: Chunks, n: int, into: _Measured, server: int) -> None:
        self._system, self._chunks, self._into = system, chunks, into
        self._server = server if system.folder is None else None
        self._keys = keys_named(f"round {n}", chunks.count)
        self._driver: _Driver | None = None

    def run(self) -> None:
        chunks, keys = self._chunks, self._keys
        try:
            self._together(keys, chunks)
            driver = self._opened()
            for key, item in zip(keys, chunks.source, strict=True):
                with self._clock("store one", chunks.nbytes):
                    driver.store([key], [item])
                    driver.flush()
            driver = self._opened()
            for key, item in zip(keys, chunks.target, strict=True):
                with self._clock("load one", chunks.nbytes):
                    driver.load([key], [item])
            driver.delete(keys)
        finally:
            self._close()

    def _together(self, keys: list[Any], chunks: Chunks) -> None:
        driver, nbytes = self._opened(), chunks.nbytes * chunks.count
        with self._clock("store", nbytes) as cost:
            driver.store(keys, chunks.source)
            answered = cost()
            driver.flush()
        if self._system.keeps:
            self._take("store, answered", nbytes, answered)
        self._into.at_rest = self._system.bytes_at_rest(driver.adapter) / nbytes
        self._close()
        chunks.clear()
        with self._clock("restart", nbytes):
            self._open().load(keys, chunks.target)
        self._check()
        driver = self._opened()
        chunks.clear()
        with self._clock("load", nbytes):
            driver.load(keys, chunks.target)
        self._check()
        driver.delete(keys)

    def _opened(self) -> _Driver:
        """As a process does that has served others before: of these chunks nothing is in memory."""
        driver = self._open()
        driver.warm_up()
        return driver

    def _open(self) -> _Driver:
        self._close()
        self._driver = _Driver(self._system, self._chunks)
        return self._driver

    def _close(self) -> None:
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.close()
            self._system.drop_page_cache()

    def _check(self) -> None:
        """Raise KVTierError unless what was loaded is what was stored, as exactly as the system promises."""
        error = self._chunks.error(exact=not self._system.error)
        self._into.error = max(self._into.error, error)
        if error > self._system.error:
            raise KVTierError(f"{self._system.name}: a chunk came back with other values")

    @contextmanager
    def _clock(self, op: str, hot_bytes: int) -> Iterator[Callable[[], _Cost]]:
        start = self._read_clocks()

        def cost() -> _Cost:
            return _Cost(*(now - then for now, then in zip(self._read_clocks(), start, strict=True)))

        yield cost
        self._take(op, hot_bytes, cost())

    def _read_clocks(self) -> _Cost:
        server_cpu_s = 0.0 if self._server is None else cpu_of(self._server)
        return _Cost(time.perf_counter(), time.process_time(), server_cpu_s)

    def _take(self, op: str, hot_bytes: int, cost: _Cost) -> None:
        samples = self._into.ops.setdefault(op, _Samples(hot_bytes))
        samples.seconds.append(cost.seconds)
        samples.cpu_s.append(cost.cpu_s)
        samples.server_cpu_s.append(cost.server_cpu_s)


class _Driver:
    """Uses one adapter as LMCache's controllers do: stores in tasks of some chunks, all in flight; one lookup and one
    load for a whole prefix."""

    def __init__(self, system: System, chunks: Chunks) -> None:
        self._system, self._chunks = system, chunks
        self.adapter = open_adapter(system, chunks.l1)

    def store(self, keys: list[Any], items: list[Any]) -> None:
        at_once = max(1, TASK_BYTES // items[0].get_size())
        left = {
            self.adapter.submit_store_task(keys[at : at + at_once], items[at : at + at_once])
            for at in range(0, len(keys), at_once)
        }
        give_up = time.monotonic() + _DEADLINE_S
        while left:
            self._wait(self.adapter.get_store_event_fd(), give_up)
            for task, result in self.adapter.pop_completed_store_tasks().items():
                if not result.is_successful():
                    raise KVTierError(f"{self._system.name}: chunks were not stored")
                left.discard(task)

    def load(self, keys: list[Any], items: list[Any]) -> None:
        adapter = self.adapter
        task = adapter.submit_lookup_and_lock_task(keys, {0: self._chunks.layout})
        found = self._result(adapter.query_lookup_and_lock_result, task, adapter.get_lookup_and_lock_event_fd())
        task = adapter.submit_load_task(keys, items)
        loaded = self._result(adapter.query_load_result, task, adapter.get_load_event_fd())
        adapter.submit_unlock(keys)
        there, came = found.popcount(), loaded.popcount()
        if there != len(keys) or came != len(keys):
            raise KVTierError(f"{self._system.name}: of {len(keys)} chunks {there} were found and {came} loaded")

    def _result(self, query: Callable[[int], Any], task: int, fd: int) -> Any:
        give_up = time.monotonic() + _DEADLINE_S
        while (result := query(task)) is None:
            self._wait(fd, give_up)
        return result

    def _wait(self, fd: int, give_up: float) -> None:
        from lmcache.v1.platform import consume_fd

        poller = select.poll()
        poller.register(fd, select.POLLIN)
        if not poller.poll(1e3 * max(0.0, give_up - time.monotonic())):
            raise KVTierError(f"{self._system.name}: nothing was heard of a task for {_DEADLINE_S:.0f} s")
        consume_fd(fd)

    def flush(self) -> None:
        """Wait until the lower tier has everything, where there is one."""
        if self._system.keeps and not self.adapter.flush(_DEADLINE_S):
            raise KVTierError(f"{self._system.name}: chunks were not written within {_DEADLINE_S:.0f} s")

    def warm_up(self) -> None:
        """Start threads, and touch what is touched by the first chunks only."""
        count = min(2, self._chunks.count)
        keys = keys_named("first", count)
        self.store(keys, self._chunks.source[:count])
        self.flush()
        self.load(keys, self._chunks.target[:count])
        self.delete(keys)

    def delete(self, keys: list[Any]) -> None:
        self.adapter.delete(keys)

    def close(self) -> None:
        self.adapter.close()
