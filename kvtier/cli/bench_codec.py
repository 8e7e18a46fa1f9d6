"""Page codecs against memcpy: encode (checksum included) and decode of 64 MiB of pages that lie in DRAM.

GB are 10**9 bytes of input at 16 bits a value, whatever the dtype; memcpy is `numpy.copyto` of as many bytes on one
thread, timed in the same rounds. All memory is touched before. Medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.abc.codec import Codec
from kvtier.codecs.registry import codec
from kvtier.hot import HotLayout, HotPool
from kvtier.kernels import _native
from kvtier.kernels.nvfp4 import page_reference, reference
from kvtier.spec import DType, PageSpec

INPUT_BYTES = 64 << 20
ROUNDS = 9
_LAYERS, _HEADS, _DIM, _PAGE_TOKENS = 8, 8, 128, 32
_PAGE_BYTES = 2 * _LAYERS * _HEADS * _DIM * _PAGE_TOKENS * 2

Row = dict[str, Any]
Work = Callable[[], None]


def run(
    codecs: tuple[str, ...] = ("nvfp4", "raw"),
    dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32"),
    impls: tuple[str, ...] | None = None,
    threads: tuple[int, ...] = (1, 2),
    hot_layout: str = "nhd",
    rounds: int = ROUNDS,
    input_bytes: int = INPUT_BYTES,
) -> list[Row]:
    """Rows of ``{"codec", "op", "dtype", "impl", "threads", "gb_per_s", "memcpy_gb_per_s", "over_memcpy"}``.

    `impls`: names of instruction sets, and ``reference``, which is measured on one page; all of them by default."""
    wanted = (*_native.isas(), "reference") if impls is None else impls
    rows: list[Row] = []
    for dtype in dtypes:
        for name in codecs:
            bench = _Bench(codec(name), DType(dtype), HotLayout(hot_layout), input_bytes // _PAGE_BYTES)
            for impl in wanted:
                if impl == "reference":
                    rows += _reference_rows(bench, name) if name == "nvfp4" else []
                    continue
                with _using(impl):
                    rows += bench.rows(name, impl, threads, rounds if impl != "scalar" else min(rounds, 3))
    return rows


class _Bench:
    """Pages of one dtype, their cold slots, and a second pool to decode into."""

    def __init__(self, which: Codec, dtype: DType, hot_layout: HotLayout, pages: int) -> None:
        self.codec, self.dtype, self.hot_layout, self.pages = which, dtype, hot_layout, pages
        self.spec = PageSpec.mha(layers=_LAYERS, kv_heads=_HEADS, head_dim=_DIM, page_tokens=_PAGE_TOKENS, dtype=dtype)
        self.layout = which.layout(self.spec)
        self.arrays = [_values(n, dtype, hot_layout, pages) for n in range(len(self.spec.buffers))]
        self.hot = HotPool.of(self.spec, self.arrays, hot_layout)
        self.back = HotPool.of(self.spec, [np.ones_like(a) for a in self.arrays], hot_layout)
        self.arena = np.ones(pages * self.layout.cold_page_bytes, np.uint8)

    def encode(self, ids: npt.NDArray[np.int64]) -> None:
        result = self.codec.encode(self.layout, self.hot, *self._slots(ids), ids.astype(np.uint64))
        if result.refused.any():
            raise RuntimeError("the bench's own pages were refused")

    def decode(self, ids: npt.NDArray[np.int64]) -> None:
        self.codec.decode(self.layout, self.back, *self._slots(ids))

    def _slots(
        self, ids: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        return ids, np.full(len(ids), _PAGE_TOKENS, np.int32), self.arena, ids * self.layout.cold_page_bytes

    def rows(self, name: str, impl: str, threads: tuple[int, ...], rounds: int) -> list[Row]:
        source = np.ones(self.pages * _PAGE_BYTES, np.uint8)
        sink = np.ones_like(source)
        with ThreadPoolExecutor(max(threads)) as workers:
            work: dict[tuple[str, int], Work] = {("memcpy", 1): lambda: np.copyto(sink, source)}
            for count in threads:
                shares = np.array_split(np.arange(self.pages, dtype=np.int64), count)
                for op, call in (("encode", self.encode), ("decode", self.decode)):
                    work[op, count] = _spread(workers, call, shares)
            seconds = _medians(work, rounds)
        memcpy = source.nbytes / seconds["memcpy", 1] / 1e9
        return [
            _row(name, op, self.dtype, impl, count, source.nbytes / seconds[op, count] / 1e9, memcpy)
            for op in ("encode", "decode")
            for count in threads
        ]


def _spread(workers: ThreadPoolExecutor, call: Callable[[Any], None], shares: list[Any]) -> Work:
    if len(shares) == 1:
        return lambda: call(shares[0])

    def work() -> None:
        for _ in workers.map(call, shares):
            pass

    return work


def _medians(work: dict[tuple[str, int], Work], rounds: int) -> dict[tuple[str, int], float]:
    """Median seconds of each piece of work, taken in turns so that all see the same machine."""
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in work}
    for turn in range(rounds + 1):
        for key, call in work.items():
            start = time.perf_counter()
            call()
            if turn:
                seconds[key].append(time.perf_counter() - start)
    return {key: median(values) for key, values in seconds.items()}


def _reference_rows(bench: _Bench, name: str) -> list[Row]:
    """The numpy reference on the first page."""
    layout = bench.layout
    page = [
        page_reference.Part(
            _first_page(a, bench.hot_layout), bench.dtype.value, at.coding.value, at.data_offset, at.scale_offset
        )
        for a, at in zip(bench.arrays, layout.parts, strict=True)
    ]
    sizes = (_PAGE_TOKENS, _PAGE_TOKENS, layout.cold_page_bytes, layout.scale_table_offset)
    cold, _ = page_reference.encode_page(page, *sizes)
    source, sink = np.ones(_PAGE_BYTES, np.uint8), np.ones(_PAGE_BYTES, np.uint8)

    def encode() -> None:
        page_reference.encode_page(page, *sizes)

    def decode() -> None:
        page_reference.decode_page(cold, page, _PAGE_TOKENS, _PAGE_TOKENS, layout.scale_table_offset)

    work = {("memcpy", 1): lambda: np.copyto(sink, source), ("encode", 1): encode, ("decode", 1): decode}
    seconds = _medians(work, 3)
    memcpy = _PAGE_BYTES / seconds["memcpy", 1] / 1e9
    return [
        _row(name, op, bench.dtype, "reference", 1, _PAGE_BYTES / seconds[op, 1] / 1e9, memcpy)
        for op in ("encode", "decode")
    ]


def _first_page(array: npt.NDArray[Any], hot_layout: HotLayout) -> npt.NDArray[Any]:
    """``[heads, tokens, dim]`` of page 0."""
    page: npt.NDArray[Any] = array[0] if hot_layout is HotLayout.HND else array[:, :_PAGE_TOKENS]
    return array[:_PAGE_TOKENS].transpose(1, 0, 2) if hot_layout is HotLayout.NHD else page


def _row(name: str, op: str, dtype: DType, impl: str, threads: int, gb_per_s: float, memcpy: float) -> Row:
    return {
        "codec": name,
        "op": op,
        "dtype": dtype.value,
        "impl": impl,
        "threads": threads,
        "gb_per_s": round(gb_per_s, 3),
        "memcpy_gb_per_s": round(memcpy, 3),
        "over_memcpy": round(gb_per_s / memcpy, 3),
    }


def _values(seed: int, dtype: DType, hot_layout: HotLayout, pages: int) -> npt.NDArray[Any]:
    """Normal values of one buffer of all pages, in the shape of `hot_layout`."""
    shape = {
        HotLayout.NHD: (pages * _PAGE_TOKENS, _HEADS, _DIM),
        HotLayout.HND: (pages, _HEADS, _PAGE_TOKENS, _DIM),
        HotLayout.SEQ: (_HEADS, pages * _PAGE_TOKENS, _DIM),
    }[hot_layout]
    x = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return x if dtype is DType.FP32 else reference.from_float32(x, dtype.value)


@contextmanager
def _using(impl: str) -> Iterator[None]:
    before = _native.isa()
    _native.use_isa(impl)
    try:
        yield
    finally:
        _native.use_isa(before)
