"""Page codecs against memcpy, plain nvfp4 and other people's code: encode (checksum included) and decode of 64 MiB of
pages that lie in DRAM.

GB are 10**9 bytes of input at 16 bits a value, whatever the dtype; memcpy is `numpy.copyto` of as many bytes on one
thread. What is compared is timed in turns, in the same rounds. All memory is touched before. Medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvtier.abc.codec import Codec
from kvtier.cli import bench_codec_others as others
from kvtier.cli.bench_left_out import left_out
from kvtier.codecs.registry import codec
from kvtier.errors import ConfigError
from kvtier.hot import HotLayout, HotPool
from kvtier.kernels import _native
from kvtier.kernels.nvfp4 import page_reference, reference
from kvtier.spec import DType, PageSpec

KEY_FORMS = ("nvfp4_offset", "nvfp4_token", "k8v4", "2fp4")
ROTARY_FORMS = ("nvfp4 rope=2fp4", "nvfp4 rope=fp8", "nvfp4 rope=keep")
CODECS = ("nvfp4", *KEY_FORMS, *ROTARY_FORMS, "lossless", "raw")
DTYPES = ("bf16", "fp16", "fp32", "fp8_e4m3")
SHAPES = ("mha", "mla")
INPUT_BYTES = 64 << 20
ROUNDS = 9
_LAYERS, _HEADS, _DIM, _PAGE_TOKENS = 8, 8, 128, 32
_KINDS = 4
"""Pages that differ; the others repeat them."""

Row = dict[str, Any]
Work = Callable[[], None]
Array = npt.NDArray[Any]
_T = TypeVar("_T", bound=np.generic)
_Key = tuple[str, str, int]


def run(
    codecs: tuple[str, ...] = CODECS,
    dtypes: tuple[str, ...] = ("bf16", "fp16", "fp8_e4m3"),
    impls: tuple[str, ...] | None = None,
    threads: tuple[int, ...] = (1,),
    shapes: tuple[str, ...] = SHAPES,
    hot_layout: str = "nhd",
    rounds: int = ROUNDS,
    input_bytes: int = INPUT_BYTES,
) -> list[Row]:
    """Rows of ``{"codec", "shape", "op", "dtype", "impl", "threads", "gb_per_s", "memcpy_gb_per_s", "over_memcpy",
    "over_nvfp4", "over_torchao", "over_lmcache_fp8"}``; None where there is nothing to compare with.

    `impls`: names of instruction sets, and ``reference``, which is measured on one page; by default the fastest set
    and the reference. torchao's and LMCache's own rows are there where these are installed; where they are not, a line
    on stderr says so."""
    wanted = (_native.isas()[0], "reference") if impls is None else impls
    if others.DTYPE in dtypes and "mha" in shapes and "nvfp4" in codecs and set(wanted) != {"reference"}:
        for name, why in others.missing().items():
            left_out(name, why)
    rows: list[Row] = []
    for shape in shapes:
        for dtype in dtypes:
            pages = _Pages(shape, DType(dtype), HotLayout(hot_layout), input_bytes)
            benches = {name: _Bench(name, pages) for name in codecs if _has(shape, name)}
            for impl in wanted:
                if impl == "reference":
                    rows += _reference_rows(benches["nvfp4"]) if "nvfp4" in benches else []
                    continue
                with _using(impl):
                    rows += _native_rows(benches, pages, impl, threads, rounds if impl != "scalar" else min(rounds, 3))
    return rows


def _has(shape: str, name: str) -> bool:
    """The forms for K have nothing to do in a page of latents."""
    return shape == "mha" or name not in KEY_FORMS


def _spec(shape: str, dtype: DType) -> PageSpec:
    if shape == "mha":
        return PageSpec.mha(
            layers=_LAYERS, kv_heads=_HEADS, head_dim=_DIM, page_tokens=_PAGE_TOKENS, dtype=dtype, rotary_dim=64
        )
    if shape == "mla":
        return PageSpec.mla(layers=_LAYERS, page_tokens=64, dtype=dtype)
    raise ConfigError(f"shape = {shape!r}: use one of {', '.join(SHAPES)}")


class _Pages:
    """Pages of one shape and dtype, and a second pool to decode into."""

    def __init__(self, shape: str, dtype: DType, hot_layout: HotLayout, input_bytes: int) -> None:
        self.shape, self.dtype, self.hot_layout = shape, dtype, hot_layout
        self.spec = _spec(shape, dtype)
        self.page_bytes = 2 * sum(b.heads * b.tokens * b.dim for b in self.spec.buffers)
        self.count = max(1, input_bytes // self.page_bytes)
        self.arrays = [_values(n, self.spec, hot_layout, self.count) for n in range(len(self.spec.buffers))]
        self.hot = HotPool.of(self.spec, self.arrays, hot_layout)
        self.back = HotPool.of(self.spec, [aligned(np.ones_like(a)) for a in self.arrays], hot_layout)


class _Bench:
    """One codec on pages, and their cold slots."""

    def __init__(self, name: str, pages: _Pages) -> None:
        self.pages, self.codec = pages, _codec(name)
        self.layout = self.codec.layout(pages.spec)
        self.arena = np.ones(pages.count * self.layout.cold_page_bytes, np.uint8)

    def encode(self, ids: npt.NDArray[np.int64]) -> None:
        result = self.codec.encode(self.layout, self.pages.hot, *self._slots(ids), ids.astype(np.uint64))
        if result.refused.any():
            raise RuntimeError("the bench's own pages were refused")

    def decode(self, ids: npt.NDArray[np.int64]) -> None:
        self.codec.decode(self.layout, self.pages.back, *self._slots(ids))

    def _slots(
        self, ids: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        valid = np.full(len(ids), self.pages.spec.page_tokens, np.int32)
        return ids, valid, self.arena, ids * self.layout.cold_page_bytes


def _codec(name: str) -> Codec:
    """Of a name as in `CODECS`: a codec and an option."""
    plain, *options = name.split()
    return codec(plain, **dict(option.split("=") for option in options))


def _native_rows(
    benches: dict[str, _Bench], pages: _Pages, impl: str, threads: tuple[int, ...], rounds: int
) -> list[Row]:
    source = np.ones(pages.count * pages.page_bytes, np.uint8)
    sink = np.ones_like(source)
    theirs = others.work(pages.arrays, pages.dtype.value) if pages.shape == "mha" and "nvfp4" in benches else {}
    with ThreadPoolExecutor(max(threads)) as workers:
        work: dict[_Key, Work] = {("memcpy", "copy", 1): lambda: np.copyto(sink, source)}
        work |= {(codec_name, op, 1): other.call for (codec_name, op), other in theirs.items()}
        for count in threads:
            shares = np.array_split(np.arange(pages.count, dtype=np.int64), count)
            for name, bench in benches.items():
                for op, call in (("encode", bench.encode), ("decode", bench.decode)):
                    work[name, op, count] = _spread(workers, call, shares)
        seconds = _medians(work, rounds)
    speed = {key: source.nbytes / s / 1e9 for key, s in seconds.items()}
    for (codec_name, op), other in theirs.items():
        speed[codec_name, op, 1] *= other.input_bytes / source.nbytes
    rows = [
        _row(name, op, count, pages, impl, speed)
        for name in benches
        for op in ("encode", "decode")
        for count in threads
    ]
    return rows + [_row(name, op, 1, pages, name, speed) for name, op in theirs]


def _spread(workers: ThreadPoolExecutor, call: Callable[[Any], None], shares: list[Any]) -> Work:
    if len(shares) == 1:
        return lambda: call(shares[0])

    def work() -> None:
        for _ in workers.map(call, shares):
            pass

    return work


def _medians(work: dict[_Key, Work], rounds: int) -> dict[_Key, float]:
    """Median seconds of each piece of work, taken in turns so that all see the same machine."""
    seconds: dict[_Key, list[float]] = {key: [] for key in work}
    for turn in range(rounds + 1):
        for key, call in work.items():
            start = time.perf_counter()
            call()
            if turn:
                seconds[key].append(time.perf_counter() - start)
    return {key: median(values) for key, values in seconds.items()}


def _reference_rows(bench: _Bench) -> list[Row]:
    """The numpy reference on the first page."""
    layout, pages = bench.layout, bench.pages
    tokens = pages.spec.page_tokens
    page = [
        page_reference.Part(
            _first_page(a, pages.hot_layout, tokens),
            pages.dtype.value,
            at.coding.value,
            at.data_offset,
            at.scale_offset,
        )
        for a, at in zip(pages.arrays, layout.parts, strict=True)
    ]
    sizes = (tokens, tokens, layout.cold_page_bytes, layout.scale_table_offset)
    cold, _ = page_reference.encode_page(page, *sizes)
    source, sink = np.ones(pages.page_bytes, np.uint8), np.ones(pages.page_bytes, np.uint8)

    def encode() -> None:
        page_reference.encode_page(page, *sizes)

    def decode() -> None:
        page_reference.decode_page(cold, page, tokens, tokens, layout.scale_table_offset)

    work: dict[_Key, Work] = {("memcpy", "copy", 1): lambda: np.copyto(sink, source)}
    work |= {("nvfp4", "encode", 1): encode, ("nvfp4", "decode", 1): decode}
    speed = {key: pages.page_bytes / s / 1e9 for key, s in _medians(work, 3).items()}
    return [_row("nvfp4", op, 1, pages, "reference", speed) for op in ("encode", "decode")]


def _first_page(array: Array, hot_layout: HotLayout, tokens: int) -> Array:
    """``[heads, tokens, dim]`` of page 0."""
    page: Array = array[0] if hot_layout is HotLayout.HND else array[:, :tokens]
    return array[:tokens].transpose(1, 0, 2) if hot_layout is HotLayout.NHD else page


def _row(name: str, op: str, threads: int, pages: _Pages, impl: str, speed: dict[_Key, float]) -> Row:
    gb_per_s = speed[name, op, threads]

    def over(codec_name: str, its_op: str, its_threads: int = 1) -> float | None:
        theirs = speed.get((codec_name, its_op, its_threads))
        return None if theirs is None or codec_name == name else round(gb_per_s / theirs, 3)

    return {
        "codec": name,
        "shape": pages.shape,
        "op": op,
        "dtype": pages.dtype.value,
        "impl": impl,
        "threads": threads,
        "gb_per_s": round(gb_per_s, 3),
        "memcpy_gb_per_s": round(speed["memcpy", "copy", 1], 3),
        "over_memcpy": over("memcpy", "copy"),
        "over_nvfp4": over("nvfp4", op, threads),
        "over_torchao": over(others.TORCHAO, op),
        "over_lmcache_fp8": over(others.LMCACHE, op),
    }


def _values(seed: int, spec: PageSpec, hot_layout: HotLayout, pages: int) -> Array:
    """Normal values of one buffer of all pages, in the shape of `hot_layout`."""
    b = spec.buffers[seed]
    x = np.random.default_rng(seed).standard_normal((_KINDS, b.heads, b.tokens, b.dim), dtype=np.float32)
    bits = reference.e4m3_codes(x) if b.dtype is DType.FP8_E4M3 else reference.from_float32(x, b.dtype.value)
    every: Array = bits[np.arange(pages) % _KINDS]
    if hot_layout is HotLayout.HND:
        return aligned(every)
    sequence = every.transpose(1, 0, 2, 3).reshape(b.heads, pages * b.tokens, b.dim)
    return aligned(sequence if hot_layout is HotLayout.SEQ else sequence.transpose(1, 0, 2))


def aligned(values: npt.NDArray[_T]) -> npt.NDArray[_T]:
    """A copy that begins with a line of the cache, as engines' pools do; numpy's arrays begin anywhere in one."""
    room = np.empty(values.nbytes + 64, np.uint8)
    begin = -room.ctypes.data % 64
    out = room[begin : begin + values.nbytes].view(values.dtype).reshape(values.shape)
    out[...] = values
    return out


@contextmanager
def _using(impl: str) -> Iterator[None]:
    before = _native.isa()
    _native.use_isa(impl)
    try:
        yield
    finally:
        _native.use_isa(before)
