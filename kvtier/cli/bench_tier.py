"""The local tiers against the machine: host memory against memcpy, NVMe against fio, interleaved, medians.

A figure over its baseline is a ratio of two medians of one run. Both sides of the NVMe comparison bypass the page
cache, with the same block size and number of transfers in flight, in the same directory. The tier's side includes
checksums and the index log. Processor seconds are of this process.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvtier.abc.tier import GetStatus, PageMeta, PutItem, PutStatus, Tier
from kvtier.cli.bench_left_out import left_out
from kvtier.errors import KVTierError
from kvtier.keys import checksum
from kvtier.storage_backends.host.tier import HostTier
from kvtier.storage_backends.nvme.tier import NvmeTier

Row = dict[str, Any]

CONCURRENCY = 8
BLOCK_BYTES = 1327104
"""An identity-scaled NVFP4 page of Qwen3-8B, 32 tokens: 324 x 4 KiB."""
ROUNDS = 5
_BATCH_BYTES = 256 << 20


def run(
    directory: Path | None = None,
    *,
    block_bytes: Sequence[int] = (BLOCK_BYTES,),
    concurrency: int = CONCURRENCY,
    rounds: int = ROUNDS,
    batch_bytes: int = _BATCH_BYTES,
    fio_s: int = 2,
    tiers: Sequence[str] = ("host", "nvme"),
) -> list[Row]:
    """One row per tier, operation and block size. `directory`: on the device to measure, default the temporary one.
    `batch_bytes` are moved per round, fio runs for `fio_s` seconds; baseline in MB/s, memcpy or fio, null where fio
    is not installed."""
    rows: list[Row] = []
    for size in block_bytes:
        pages = _Pages(size, max(concurrency, batch_bytes // size))
        if "host" in tiers:
            rows += _host(pages, rounds)
        if "nvme" in tiers:
            with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=directory) as made:
                rows += _nvme(Path(made), pages, concurrency, rounds, fio_s)
    return rows


class _Pages:
    """`count` pages of random bytes in aligned memory, and as many aligned buffers to read them into."""

    def __init__(self, nbytes: int, count: int) -> None:
        self.nbytes, self.count = nbytes, count
        slot = -(-nbytes // 4096) * 4096
        self.source = _aligned(slot * count)
        self.target = _aligned(slot * count)
        rng = np.random.default_rng(0)
        self.source[:] = np.frombuffer(rng.bytes(len(self.source)), np.uint8)
        self.target[:] = 0
        self.items: list[PutItem] = []
        self.outs: list[memoryview] = []
        for i in range(count):
            key = rng.bytes(32)
            data = self.source[i * slot : i * slot + nbytes].data
            meta = PageMeta(nbytes, 2, 32, checksum(data, key), bytes(16))
            self.items.append(PutItem(key, meta, data, True))
            self.outs.append(self.target[i * slot : (i + 1) * slot].data)
        self.keys = [item.key for item in self.items]

    @property
    def total_bytes(self) -> int:
        return self.nbytes * self.count


def _host(pages: _Pages, rounds: int) -> list[Row]:
    tier = HostTier(len(pages.source))
    try:
        timings = _Timings()
        for _ in range(rounds):
            timings.time("memcpy", pages.total_bytes, lambda: np.copyto(pages.target, pages.source))
            timings.time("put", pages.total_bytes, lambda: _put(tier, pages))
            timings.time("get", pages.total_bytes, lambda: _get(tier, pages))
            tier.delete_many(pages.keys)
    finally:
        tier.close()
    return [_row("host", op, pages, 1, timings, timings.mb_per_s("memcpy")) for op in ("put", "get")]


def _nvme(directory: Path, pages: _Pages, concurrency: int, rounds: int, fio_s: int) -> list[Row]:
    fio = shutil.which("fio")
    if fio is None:
        left_out("fio beside NVMe", "it is not installed here: apt-get install fio")
    tier = NvmeTier(directory / "tier", len(pages.source), io_threads=concurrency)
    try:
        timings = _Timings()
        _put(tier, pages)  # once over every block: the first write to a preallocated one costs more
        tier.delete_many(pages.keys)
        baseline: dict[str, list[float]] = {"put": [], "get": []}
        for _ in range(rounds):
            if fio is not None:
                baseline["put"].append(_fio(fio, directory, "write", pages, concurrency, fio_s))
            timings.time("put", pages.total_bytes, lambda: _put(tier, pages))
            if fio is not None:
                baseline["get"].append(_fio(fio, directory, "read", pages, concurrency, fio_s))
            timings.time("get", pages.total_bytes, lambda: _get(tier, pages))
            tier.delete_many(pages.keys)
    finally:
        tier.close()
    return [
        _row("nvme", op, pages, concurrency, timings, median(found) if found else None)
        for op, found in baseline.items()
    ]


def _put(tier: Tier, pages: _Pages) -> None:
    answers = set(tier.put_many(pages.items))
    if answers != {PutStatus.STORED}:
        raise KVTierError(f"the benchmark's puts were answered with {sorted(a.value for a in answers)}")


def _get(tier: Tier, pages: _Pages) -> None:
    answers = {result.status for result in tier.get_many_into(pages.keys, pages.outs)}
    if answers != {GetStatus.HIT}:
        raise KVTierError(f"the benchmark's gets were answered with {sorted(a.value for a in answers)}")


def _fio(fio: str, directory: Path, pattern: str, pages: _Pages, concurrency: int, seconds: int) -> float:
    """MB/s of fio over a file as large as one round moves, front to back as the tier's own pages lie."""
    size = max(pages.total_bytes, pages.nbytes * concurrency)
    block = -(-pages.nbytes // 4096) * 4096
    command = [
        fio, "--name=kvtier", f"--filename={directory / 'fio'}", f"--size={size // block * block}", f"--bs={block}",
        f"--rw={pattern}", "--direct=1", "--ioengine=io_uring", f"--iodepth={concurrency}", f"--runtime={seconds}",
        "--time_based", "--overwrite=1", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KVTierError(f"fio failed: {done.stderr.strip()[-500:]}")
    text = done.stdout
    job = json.loads(text[text.index("{") :])["jobs"][0]
    return float(job["write" if pattern == "write" else "read"]["bw_bytes"]) / 1e6


class _Timings:
    """Wall and processor seconds per name, over rounds."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}
        self._wall_s: dict[str, list[float]] = {}
        self._cpu_s: dict[str, list[float]] = {}

    def time(self, name: str, moved_bytes: int, action: Callable[[], object]) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        action()
        self._wall_s.setdefault(name, []).append(time.perf_counter() - wall)
        self._cpu_s.setdefault(name, []).append(time.process_time() - cpu)
        self._bytes[name] = moved_bytes

    def mb_per_s(self, name: str) -> float:
        return self._bytes[name] / median(self._wall_s[name]) / 1e6

    def cpu_s_per_gb(self, name: str) -> float:
        return median(self._cpu_s[name]) / (self._bytes[name] / 1e9)


def _row(
    tier: str, op: str, pages: _Pages, concurrency: int, timings: _Timings, baseline_mb_per_s: float | None
) -> Row:
    speed = timings.mb_per_s(op)
    return {
        "tier": tier,
        "op": op,
        "block_bytes": pages.nbytes,
        "concurrency": concurrency,
        "mb_per_s": round(speed, 1),
        "cpu_s_per_gb": round(timings.cpu_s_per_gb(op), 4),
        "baseline": None if baseline_mb_per_s is None else round(baseline_mb_per_s, 1),
        "over_baseline": None if baseline_mb_per_s is None else round(speed / baseline_mb_per_s, 3),
    }


def _aligned(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    memory = np.empty(nbytes + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    return memory[start : start + nbytes]
