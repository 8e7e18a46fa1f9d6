"""``kvtier bench lmcache``: kvtier behind LMCache beside LMCache's own adapters, on one disk and one Redis, in one run.

Every system gets the same BF16 chunks through the interface that LMCache's controllers use: submit, wait for the
descriptor, take the result. Bytes are hot bytes, of the chunks as LMCache has them. CPU is that of this process, so
that of the adapter with its threads, not that of Redis.

- ``store``: until everything is on the disk or in Redis. ``store, answered``: until LMCache was told that its memory
  is free again, which with kvtier is earlier: chunks are on their way from its host memory then.
- ``load``: lookup, then load. Adapters that keep chunks in memory of their own are opened anew before, so that they
  come from the disk or Redis.
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
from pathlib import Path
from typing import Any

from kvtier.cli.bench_lmcache_systems import System, open_adapter, systems
from kvtier.errors import KVTierError, MissingExtraError
from kvtier.testing.redis_servers import RedisServer, find_server

CHUNK_BYTES = (1 << 20, 4 << 20)
ROUNDS = 7
ROUND_BYTES = 64 << 20
TASK_BYTES = 16 << 20
_DEADLINE_S = 120.0
_DIM, _TOKENS = 128, 256  # of one KV head, as a tensor-parallel shard of many models has it; LMCache's default

Row = dict[str, str | int | float]


def run(
    *,
    directory: Path | None = None,
    chunk_bytes: Sequence[int] = CHUNK_BYTES,
    rounds: int = ROUNDS,
    round_bytes: int = ROUND_BYTES,
) -> list[Row]:
    """``{"system", "op", "chunk_bytes", "hot_mb_per_s", "cpu_s_per_gb"}`` for each; medians of `rounds`, in which the
    systems take turns, so that what else runs on the machine hits all alike.
    Raises KVTierError where LMCache or a Redis server is missing, or a chunk is lost or comes back wrong."""
    _check_installed()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=directory) as name, ExitStack() as stack:
        folder = Path(name)
        redis = RedisServer(folder / "redis")
        stack.callback(redis.stop)
        for nbytes in chunk_bytes:
            where = folder / str(nbytes)
            rows += _compare(systems(where, ("127.0.0.1", redis.port)), nbytes, max(1, round_bytes // nbytes), rounds)
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


def _compare(compared: Sequence[System], nbytes: int, count: int, rounds: int) -> list[Row]:
    samples: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    with _Memory(nbytes, count) as memory:
        running = {system.name: _Driver(system, memory) for system in compared}
        try:
            for n in range(rounds + 1):
                for system in compared:
                    for op, cost in _round(system, running[system.name], memory, n).items():
                        if n:  # before the first round, nothing had been touched
                            samples[system.name, op].append(cost)
        finally:
            for driver in running.values():
                driver.close()
    gb = nbytes * count / 1e9
    return [
        {
            "system": name,
            "op": op,
            "chunk_bytes": nbytes,
            "hot_mb_per_s": round(1e3 * gb / statistics.median(seconds for seconds, _ in costs), 1),
            "cpu_s_per_gb": round(statistics.median(cpu for _, cpu in costs) / gb, 4),
        }
        for (name, op), costs in samples.items()
    ]


def _round(system: System, driver: _Driver, memory: _Memory, n: int) -> dict[str, tuple[float, float]]:
    """Seconds, and seconds of CPU, by what was done."""
    keys = memory.keys(n)
    costs = {}
    with _clock() as cost:
        driver.store(keys, memory.source)
        answered = cost()
        driver.flush()
        costs["store"] = cost()
    if system.keeps:
        costs["store, answered"] = answered
        driver.open_anew()
    for item in memory.target:
        item.raw_data.zero_()
    with _clock() as cost:
        driver.load(keys, memory.target)
        costs["load"] = cost()
    memory.check(system)
    driver.delete(keys)
    return costs


@contextmanager
def _clock() -> Iterator[Callable[[], tuple[float, float]]]:
    cpu, start = time.process_time(), time.perf_counter()
    yield lambda: (time.perf_counter() - start, time.process_time() - cpu)


class _Memory:
    """Chunks to be stored, and memory to load them into, in LMCache's own L1: ``(2, layers, 256, 128)``, BF16."""

    def __init__(self, nbytes: int, count: int) -> None:
        import torch
        from lmcache.v1.distributed.api import MemoryLayoutDesc
        from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
        from lmcache.v1.distributed.l1_manager import L1Manager

        layers = max(1, nbytes // (2 * _TOKENS * _DIM * 2))
        self._torch, self._count = torch, count
        self.layout = MemoryLayoutDesc([torch.Size((2, layers, _TOKENS, _DIM))], [torch.bfloat16])
        room = 4 * nbytes * count + (64 << 20)  # a serde needs as much again
        config = L1MemoryManagerConfig(size_in_bytes=room, use_lazy=False, shm_name="")
        self.l1 = L1Manager(L1ManagerConfig(memory_config=config))
        self.source, self.target = (self._reserve(name) for name in ("source", "target"))
        draw = torch.Generator().manual_seed(0)
        for item in self.source:
            item.tensor.copy_(torch.randn(item.tensor.shape, generator=draw))

    def __enter__(self) -> _Memory:
        return self

    def __exit__(self, *_: object) -> None:
        self.l1.clear(force=True)
        self.l1.close()

    def _reserve(self, name: str) -> list[Any]:
        keys = _keys(name, self._count)
        found = self.l1.reserve_write(keys, [True] * len(keys), self.layout)
        items = [found[key][1] for key in keys]
        if None in items:
            raise KVTierError(f"LMCache gave no memory for {len(keys)} chunks: {found[keys[-1]][0]}")
        return items

    def keys(self, n: int) -> list[Any]:
        """Of round `n`."""
        return _keys(f"round {n}", self._count)

    def check(self, system: System) -> None:
        """Raise KVTierError unless what was loaded is what was stored, as exactly as `system` promises."""
        for got, want in zip(self.target, self.source, strict=True):
            if system.error:
                a, b = got.tensor.float(), want.tensor.float()
                good = float((a - b).norm() / b.norm()) <= system.error
            else:
                good = bool(self._torch.equal(got.tensor, want.tensor))
            if not good:
                raise KVTierError(f"{system.name}: a chunk came back with other values")


def _keys(name: str, count: int) -> list[Any]:
    from lmcache.v1.distributed.api import ObjectKey

    return [ObjectKey(i.to_bytes(16, "big"), f"bench {name}".replace(" ", "-"), 0, 0, "") for i in range(count)]


class _Driver:
    """Uses one adapter as LMCache's controllers do: stores in tasks of some chunks, all in flight; one lookup and one
    load for a whole prefix."""

    def __init__(self, system: System, memory: _Memory) -> None:
        self._system, self._memory = system, memory
        self._adapter = open_adapter(system, memory.l1)

    def store(self, keys: list[Any], items: list[Any]) -> None:
        at_once = max(1, TASK_BYTES // items[0].get_size())
        left = {
            self._adapter.submit_store_task(keys[at : at + at_once], items[at : at + at_once])
            for at in range(0, len(keys), at_once)
        }
        give_up = time.monotonic() + _DEADLINE_S
        while left:
            self._wait(self._adapter.get_store_event_fd(), give_up)
            for task, result in self._adapter.pop_completed_store_tasks().items():
                if not result.is_successful():
                    raise KVTierError(f"{self._system.name}: chunks were not stored")
                left.discard(task)

    def load(self, keys: list[Any], items: list[Any]) -> None:
        adapter = self._adapter
        task = adapter.submit_lookup_and_lock_task(keys, {0: self._memory.layout})
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
        if self._system.keeps and not self._adapter.flush(_DEADLINE_S):
            raise KVTierError(f"{self._system.name}: chunks were not written within {_DEADLINE_S:.0f} s")

    def open_anew(self) -> None:
        """As a process does that has served others before: of these chunks nothing is in memory."""
        self._adapter.close()
        self._adapter = open_adapter(self._system, self._memory.l1)
        self.warm_up()

    def warm_up(self) -> None:
        """Start threads, and touch what is touched by the first chunks only."""
        keys = _keys("first", 4)
        self.store(keys, self._memory.source[:4])
        self.flush()
        self.load(keys, self._memory.target[:4])
        self.delete(keys)

    def delete(self, keys: list[Any]) -> None:
        self._adapter.delete(keys)

    def close(self) -> None:
        self._adapter.close()
