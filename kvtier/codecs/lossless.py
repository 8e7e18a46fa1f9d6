"""Lossless: every buffer split into byte planes, each compressed with Zstandard (`docs/formats.md`).

The plane of signs and exponents shrinks; mantissas hardly do, and are stored as they are where that is shorter."""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvtier.abc.codec import Codec, EncodeResult, Form
from kvtier.codecs import native
from kvtier.errors import CodecError, missing_extra
from kvtier.hot import HotPool
from kvtier.kernels import _native
from kvtier.spec import RECORD_ALIGN, BufferSpec, ColdLayout, PageSpec

try:
    import zstandard
except ImportError as e:
    raise missing_extra("zstandard", "lossless") from e

U8 = npt.NDArray[np.uint8]
_LENGTH_BYTES = 4
_SAMPLE_BYTES = 4096
_SAMPLE_SHRINKS = 0.98
"""A plane whose first bytes shrink less than this is stored as it is, without a try at the rest."""


class LosslessCodec(Codec):
    """Never refuses a page. Pages vary in size: `cold_page_bytes` of the layout is the most that one can take."""

    id: ClassVar[str] = "lossless"
    version: ClassVar[int] = 1
    varies: ClassVar[bool] = True

    @property
    def form(self) -> Form:
        return Form.LOSSLESS

    @property
    def config(self) -> dict[str, str | int | float | bool]:
        return {}

    def layout(self, spec: PageSpec) -> ColdLayout:
        raw = _unpacked(spec)
        most = _align(_table_bytes(spec) + spec.hot_page_bytes)
        return ColdLayout(spec, raw.global_scale, raw.parts, -1, 0, most)

    def encode(
        self,
        layout: ColdLayout,
        pool: HotPool,
        page_ids: npt.NDArray[np.int64],
        valid_tokens: npt.NDArray[np.int32],
        arena: npt.NDArray[np.uint8],
        offsets: npt.NDArray[np.int64],
        seeds: npt.NDArray[np.uint64],
    ) -> EncodeResult:
        _check(layout, arena, offsets)
        raw, count = _unpacked(layout.spec), len(page_ids)
        whole = np.empty(raw.cold_page_bytes, np.uint8)
        nbytes, checksums = np.zeros(count, np.int64), np.zeros((count, 16), np.uint8)
        # All pages are checked before the first is written: a decode of no buffers does just that.
        native.decode(raw, pool, native.Pages(page_ids, valid_tokens, whole, np.zeros(count, np.int64)), range(0))
        compressor = _compressor()
        for i in range(count):
            one = native.Pages(page_ids[i : i + 1], valid_tokens[i : i + 1], whole, np.zeros(1, np.int64))
            native.encode(raw, pool, one, np.zeros(1, np.uint64))
            page = arena[offsets[i] : offsets[i] + layout.cold_page_bytes]
            nbytes[i] = _pack(layout, whole, page, compressor)
        _native.checksum_pages(arena, np.ascontiguousarray(offsets, np.int64), nbytes, seeds, checksums)
        return EncodeResult(checksums, np.zeros(count, np.bool_), nbytes=nbytes)

    def decode(
        self,
        layout: ColdLayout,
        pool: HotPool,
        page_ids: npt.NDArray[np.int64],
        valid_tokens: npt.NDArray[np.int32],
        arena: npt.NDArray[np.uint8],
        offsets: npt.NDArray[np.int64],
        buffers: range | None = None,
    ) -> None:
        raw, wanted = _unpacked(layout.spec), range(len(layout.spec.buffers)) if buffers is None else buffers
        table = _table_bytes(layout.spec)
        if len(offsets) and not (offsets.min() >= 0 and offsets.max() <= len(arena) - table):
            raise CodecError(f"a page's table of {table} bytes lies outside an arena of {len(arena)}")
        step = raw.cold_page_bytes
        # Only what is wanted is ever touched, so only that costs memory.
        whole = np.empty(len(page_ids) * step, np.uint8)
        ids = np.arange(len(page_ids), dtype=np.int64)
        decompressor = zstandard.ZstdDecompressor()
        for i in ids.tolist():
            _unpack(layout, arena[offsets[i] :], whole[i * step : (i + 1) * step], wanted, decompressor)
        native.decode(raw, pool, native.Pages(page_ids, valid_tokens, whole, ids * step), wanted)


def _compressor() -> zstandard.ZstdCompressor:
    """Exponents have skewed frequencies and no repetitions worth a search: entropy coding is all that pays, and long
    matches alone (zeros, mostly) are looked for. Twice as fast as level 1, and no larger."""
    parameters = zstandard.ZstdCompressionParameters(
        window_log=17, chain_log=6, hash_log=6, search_log=1, min_match=7, strategy=zstandard.STRATEGY_FAST
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


@lru_cache(maxsize=64)
def _unpacked(spec: PageSpec) -> ColdLayout:
    return ColdLayout.of(spec, quantize=False)


def _table_bytes(spec: PageSpec) -> int:
    return _align(_LENGTH_BYTES * sum(b.dtype.itemsize for b in spec.buffers))


def _pack(layout: ColdLayout, whole: U8, page: U8, compressor: zstandard.ZstdCompressor) -> int:
    """Write the page of the unpacked bytes `whole`; its length."""
    at, lengths = _table_bytes(layout.spec), []
    for part, b in zip(layout.parts, layout.spec.buffers, strict=True):
        planes = np.empty((b.dtype.itemsize, b.values), np.uint8)
        _native.split_planes(whole[part.data_offset : part.data_offset + part.data_bytes], planes)
        for plane in planes:
            stored = _packed(plane, compressor)
            page[at : at + stored.size] = stored
            at += stored.size
            lengths.append(stored.size)
    table = np.array(lengths, "<u4").view(np.uint8)
    page[: table.size] = table
    page[table.size : _table_bytes(layout.spec)] = 0
    end = _align(at)
    page[at:end] = 0
    return end


def _packed(plain: U8, compressor: zstandard.ZstdCompressor) -> U8:
    """A plane as it is stored: compressed where that is shorter."""
    sample = plain[:_SAMPLE_BYTES]
    if plain.size > 2 * sample.size and len(compressor.compress(sample.data)) > _SAMPLE_SHRINKS * sample.size:
        return plain
    packed = compressor.compress(plain.data)
    return np.frombuffer(packed, np.uint8) if len(packed) < plain.size else plain


def _unpack(layout: ColdLayout, page: U8, whole: U8, wanted: range, decompressor: zstandard.ZstdDecompressor) -> None:
    """Write the `wanted` buffers of `page`, which may have more bytes behind it, to `whole`."""
    spec, table = layout.spec, _table_bytes(layout.spec)
    planes = sum(b.dtype.itemsize for b in spec.buffers)
    lengths = page[: planes * _LENGTH_BYTES].copy().view("<u4").astype(np.int64)
    ends = table + np.cumsum(lengths)
    if ends[-1] > page.size:
        raise CodecError(f"a page of {ends[-1]} bytes in {page.size}; the bytes are not those of such a page")
    n = 0
    for i, (part, b) in enumerate(zip(layout.parts, spec.buffers, strict=True)):
        if i in wanted:
            out = np.empty((b.dtype.itemsize, b.values), np.uint8)
            for p, plane in enumerate(out, n):
                plane[:] = _plane(page[ends[p] - lengths[p] : ends[p]], b, decompressor)
            _native.join_planes(out, whole[part.data_offset : part.data_offset + part.data_bytes])
        n += b.dtype.itemsize


def _plane(stored: U8, b: BufferSpec, decompressor: zstandard.ZstdDecompressor) -> U8:
    if stored.size == b.values:
        return stored
    try:
        plain = np.frombuffer(decompressor.decompress(stored.data, max_output_size=b.values), np.uint8)
    except zstandard.ZstdError as e:
        raise CodecError(
            f"{b.role.value} buffer of layer {b.layer}: {e}; the bytes are not those of such a page"
        ) from e
    if plain.size != b.values:
        raise CodecError(f"{b.role.value} buffer of layer {b.layer}: {plain.size} bytes in a plane of {b.values}")
    return plain


def _check(layout: ColdLayout, arena: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> None:
    if len(offsets) and not (offsets.min() >= 0 and offsets.max() <= len(arena) - layout.cold_page_bytes):
        raise CodecError(f"a slot of {layout.cold_page_bytes} bytes lies outside an arena of {len(arena)}")


def _align(n: int) -> int:
    return -(-n // RECORD_ALIGN) * RECORD_ALIGN
