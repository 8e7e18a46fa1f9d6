"""What the store costs its caller, and the whole way out of a page: encode, checksum and commit into the host tier.

Every figure stands beside its bound, or beside a baseline measured in the same run. Medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.abc.codec import Form
from kvtier.abc.tier import FINGERPRINT_BYTES, SLOT_ALIGN, PageMeta, Slot
from kvtier.codecs import registry
from kvtier.hot import HotLayout, HotPool
from kvtier.keys import Namespace
from kvtier.mover import PageMover, policy_of
from kvtier.spec import DType, PageSpec
from kvtier.storage_backends.host.tier import HostTier
from kvtier.store import TieredStore
from kvtier.tickets import Ticket

PAGES = 64
INDEX_PAGES = 1_000_000
PREFIX_PAGES = 1_000
ROUNDS = 9
HOST_ROUNDS = 16
"""The host tier holds the pages of so many rounds; it is filled before anything is measured: every round evicts."""

Row = dict[str, Any]


def run(index_pages: int = INDEX_PAGES) -> list[Row]:
    """Rows of ``{"measure", "value", "best", "unit", "bound", "baseline", "over_baseline"}``, values being medians.

    index_pages: fewer for a shorter run. Takes about 4 KiB of address space per indexed page, of which almost nothing
    is touched."""
    bench = _Offload()
    try:
        rows = [bench.whole_path(), bench.call_time(), bench.beside()]
    finally:
        bench.close()
    return [*rows, _lookup(index_pages)]


class _Offload:
    """64 pages of 1 MiB BF16, and a store to put them into; one worker, so one core."""

    def __init__(self) -> None:
        spec = PageSpec.mha(layers=8, kv_heads=8, head_dim=128, page_tokens=32, dtype=DType.BF16)
        rng = np.random.default_rng(0)
        values = rng.standard_normal((PAGES * 32, 8, 128), dtype=np.float32).view(np.uint32)
        one: npt.NDArray[np.uint16] = (values >> np.uint32(16)).astype(np.uint16)
        arrays = [one.copy() for _ in spec.buffers]
        self._pool = HotPool.of(spec, arrays, HotLayout.NHD)
        self._bytes = sum(a.nbytes for a in arrays)
        codec = registry.codec("nvfp4")
        namespace = Namespace.of(spec, policy_of(codec), model="bench", weights="", dtype="bf16")
        cold = codec.layout(spec).cold_page_bytes
        self._store = TieredStore(HostTier(HOST_ROUNDS * PAGES * -(-cold // SLOT_ALIGN) * SLOT_ALIGN))
        self._mover = PageMover(self._store, spec, namespace, codec, workers=1)
        self._round = 0
        self._source = np.ones(self._bytes, np.uint8)
        self._sink = np.ones(self._bytes, np.uint8)

    def offload(self) -> Any:
        """Offload the pages under new hashes, so that they are encoded again and the last ones evicted."""
        self._round += 1
        hashes = [b"%d/%d" % (self._round, page) for page in range(PAGES)]
        return self._mover.offload(self._pool, hashes, range(PAGES))

    def whole_path(self) -> Row:
        for _ in range(HOST_ROUNDS):
            self.offload().result()
        ours, memcpy = [], []
        for _ in range(ROUNDS):
            memcpy.append(_timed(lambda: np.copyto(self._sink, self._source)))
            start = time.perf_counter()
            outcome = self.offload().result()
            ours.append(time.perf_counter() - start)
            if not outcome.ok:
                raise RuntimeError(f"the bench could not store its pages: {outcome.outcomes}")
        rate, base = self._bytes / median(ours) / 1e9, self._bytes / median(memcpy) / 1e9
        best = self._bytes / min(ours) / 1e9
        return _row("offload path, one worker", rate, "GB/s of BF16", best, bound=">= 0.5 x", baseline=base)

    def call_time(self) -> Row:
        calls = []
        for _ in range(ROUNDS * 3):
            start = time.perf_counter()
            ticket = self.offload()
            calls.append(time.perf_counter() - start)
            ticket.result()
        return _row(f"offload call, {PAGES} pages", median(calls) * 1e6, "us", min(calls) * 1e6, bound="< 200")

    def beside(self) -> Row:
        """Rate of a Python loop while pages are being offloaded, over its rate alone."""
        alone, beside = [], []
        for _ in range(ROUNDS):
            alone.append(_loop_rate(Ticket().done))
            tickets = [self.offload() for _ in range(4)]
            beside.append(_loop_rate(tickets[-1].done))
            for ticket in tickets:
                ticket.result()
        rate, base = median(beside) / 1e6, median(alone) / 1e6
        return _row(
            "Python thread beside offloads", rate, "M loops/s", max(beside) / 1e6, bound=">= 0.5 x", baseline=base
        )

    def close(self) -> None:
        self._mover.close()
        self._store.close()


def _lookup(index_pages: int) -> Row:
    """Keys of a long prefix derived and looked up, among many pages."""
    spec = PageSpec.mha(layers=1, kv_heads=1, head_dim=16, page_tokens=16, dtype=DType.BF16)
    namespace = Namespace.of(spec, policy_of(registry.codec("nvfp4")), model="bench", weights="", dtype="bf16")
    host = HostTier(index_pages * SLOT_ALIGN, pretouch=False)
    store = TieredStore(host, promote_threads=1)
    try:
        hashes = [i.to_bytes(32, "little") for i in range(index_pages)]
        meta = PageMeta(SLOT_ALIGN, Form.RAW, 16, bytes(16), bytes(FINGERPRINT_BYTES))
        for at in range(0, index_pages, 4096):
            keys = namespace.page_keys(hashes[at : at + 4096])
            slots = [s for s in host.reserve_many(keys, [SLOT_ALIGN] * len(keys)) if isinstance(s, Slot)]
            host.commit_many(keys, slots, [meta] * len(keys))
            host.unpin_many([slot.id for slot in slots])
        times = []
        step = max(1, index_pages // (ROUNDS + 1))
        for number in range(ROUNDS):
            prefix = hashes[number * step : number * step + PREFIX_PAGES]
            start = time.perf_counter()
            lookup = store.lookup(f"r{number}", namespace.page_keys(prefix))
            ready = lookup.ready_pages
            times.append(time.perf_counter() - start)
            if ready != len(prefix):
                raise RuntimeError(f"the bench found {ready} of {len(prefix)} pages")
            store.settle(f"r{number}")
        name = f"lookup of {PREFIX_PAGES:,} pages among {index_pages:,}, keys derived"
        return _row(name, median(times) * 1e3, "ms", min(times) * 1e3, bound="< 2")
    finally:
        store.close()


def _loop_rate(done: Callable[[], bool], seconds: float = 0.05) -> float:
    """Turns per second of a loop of Python code, until `done` or for `seconds`."""
    turns, start = 0, time.perf_counter()
    end = start + seconds
    while time.perf_counter() < end and not done():
        turns += 1
    return turns / (time.perf_counter() - start)


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _row(measure: str, value: float, unit: str, best: float, *, bound: str, baseline: float | None = None) -> Row:
    over = None if baseline is None else round(value / baseline, 3)
    return {
        "measure": measure,
        "value": round(value, 3),
        "best": round(best, 3),
        "unit": unit,
        "bound": bound,
        "baseline": None if baseline is None else round(baseline, 3),
        "over_baseline": over,
    }
