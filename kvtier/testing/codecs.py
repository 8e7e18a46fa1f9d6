"""The suite that every codec passes. Subclass it in a test module and name the codec:

    class TestMyCodec(CodecContract):
        max_error = 0.0
        def make_codec(self) -> Codec: return MyCodec()

The oracle reads hot memory by plain indexing and hashes with the `xxhash` package; it shares no code with codecs.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from kvtier.abc.codec import Codec, EncodeResult
from kvtier.errors import CodecError
from kvtier.hot import HotLayout, HotPool
from kvtier.kernels.nvfp4.page_reference import Part
from kvtier.spec import ColdLayout, DType, PageSpec

GUARD = 64
"""Bytes around every slot that no codec may touch."""

POISON = {DType.BF16: 0x7FC1, DType.FP16: 0x7E01}
LAYOUTS = tuple(HotLayout)
DTYPES = (DType.BF16, DType.FP16, DType.FP32)
SPEC_SHAPE = {"layers": 2, "kv_heads": 3, "head_dim": 48}

Array = npt.NDArray[Any]


def spec_of(dtype: DType, page_tokens: int = 5) -> PageSpec:
    return PageSpec.mha(dtype=dtype, page_tokens=page_tokens, **SPEC_SHAPE)


def reference_parts(layout: ColdLayout, values: Sequence[Array]) -> list[Part]:
    """The parts of one page for the numpy reference; `values`: per buffer ``[heads, tokens, dim]``."""
    parts = []
    for n, at in enumerate(layout.parts):
        b = layout.spec.buffers[at.buffer]
        columns = values[at.buffer][:, :, at.column : at.column + at.columns]
        offsets = (at.data_offset, at.scale_offset, at.side_offset)
        global_scale = layout.global_scales[n] if layout.global_scales else 0.0
        parts.append(Part(columns, b.dtype.value, at.coding.value, *offsets, b.fp8_scale, global_scale))
    return parts


def values_of(bits: Array, dtype: DType) -> npt.NDArray[np.float64]:
    """Element values of an array as it lies in memory."""
    if dtype is DType.BF16:
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return (bits.view(np.float16) if dtype is DType.FP16 else bits).astype(np.float64)


def random_elements(rng: np.random.Generator, shape: Sequence[int], dtype: DType) -> Array:
    x = (rng.standard_normal(shape) * np.exp2(rng.integers(-3, 4, (*shape[:-1], 1)))).astype(np.float32)
    if dtype is DType.BF16:
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    return x.astype(np.float16).view(np.uint16) if dtype is DType.FP16 else x


class Hot:
    """Arrays of one hot layout, filled from pages ``[page, head, token, dim]``, and read back the same way."""

    def __init__(self, spec: PageSpec, layout: HotLayout, tokens: int) -> None:
        self.spec, self.layout, self.tokens = spec, layout, tokens
        self.arrays: list[Array] = []
        for b in spec.buffers:
            kind = np.float32 if b.dtype is DType.FP32 else np.uint16
            shape = {
                HotLayout.NHD: (tokens, b.heads, b.dim),
                HotLayout.HND: (-(-tokens // spec.page_tokens), b.heads, spec.page_tokens, b.dim),
                HotLayout.SEQ: (b.heads, tokens, b.dim),
            }[layout]
            self.arrays.append(np.zeros(shape, kind))
        self.pool = HotPool.of(spec, self.arrays, layout)

    def rows(self, buffer: int, token: int) -> Array:
        """``[heads, dim]`` of one token of the pool: a view."""
        array, page_tokens = self.arrays[buffer], self.spec.page_tokens
        index: tuple[int | slice, ...] = {
            HotLayout.NHD: (token,),
            HotLayout.HND: (token // page_tokens, slice(None), token % page_tokens),
            HotLayout.SEQ: (slice(None), token),
        }[self.layout]
        rows: Array = array[index]
        return rows

    def fill(self, sequence: Sequence[Array]) -> Hot:
        """`sequence`: per buffer ``[tokens, heads, dim]``."""
        for i, values in enumerate(sequence):
            for t in range(self.tokens):
                self.rows(i, t)[...] = values[t]
        return self

    def sequence(self) -> list[Array]:
        return [np.stack([self.rows(i, t) for t in range(self.tokens)]) for i in range(len(self.arrays))]


class Slots:
    """An arena with guard bytes around every slot, in reverse order so that offsets are not just multiples."""

    def __init__(self, layout: ColdLayout, pages: int, fill: int) -> None:
        self.layout, self.fill = layout, fill
        step = layout.cold_page_bytes + GUARD
        self.arena = np.full(GUARD + pages * step, fill, np.uint8)
        self.offsets = np.array([GUARD + (pages - 1 - i) * step for i in range(pages)], np.int64)

    def page(self, i: int) -> npt.NDArray[np.uint8]:
        return self.arena[self.offsets[i] : self.offsets[i] + self.layout.cold_page_bytes]

    def pages(self) -> list[bytes]:
        return [self.page(i).tobytes() for i in range(len(self.offsets))]

    def guards_intact(self) -> bool:
        outside = np.ones(self.arena.size, bool)
        for at in self.offsets:
            outside[at : at + self.layout.cold_page_bytes] = False
        return bool((self.arena[outside] == self.fill).all())


class CodecContract(ABC):
    max_error: ClassVar[float]
    """Largest error of a decoded value, as a share of the largest magnitude among its 16 neighbours. 0: exact."""
    refuses_nonfinite: ClassVar[bool] = False
    page_tokens: ClassVar[int] = 5
    stable: ClassVar[bool] = True
    """Whether decoded pages encode to the same bytes again."""

    @abstractmethod
    def make_codec(self) -> Codec: ...

    def spec_of(self, dtype: DType) -> PageSpec:
        return spec_of(dtype, self.page_tokens)

    def bound(self, expected: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Largest error of each value of `expected` ``[tokens, heads, dim]``."""
        groups = expected.reshape(*expected.shape[:-1], -1, 16)
        return np.repeat(self.max_error * np.abs(groups).max(axis=-1), 16, axis=-1)

    def encoded(self, hot: Hot, pages: int, valid: Sequence[int], fill: int = 0xA5) -> tuple[Slots, EncodeResult]:
        codec = self.make_codec()
        layout = codec.layout(hot.spec)
        slots = Slots(layout, pages, fill)
        seeds = np.arange(pages, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        ids = np.arange(pages, dtype=np.int64)
        lengths = np.asarray(valid, np.int32)
        result = codec.encode(layout, hot.pool, ids, lengths, slots.arena, slots.offsets, seeds)
        assert codec.varies == (result.nbytes is not None)
        for i, used in enumerate(() if result.nbytes is None else result.nbytes):
            slots.page(i)[used:] = 0  # has no meaning
        return slots, result

    def decoded(self, slots: Slots, into: Hot, valid: Sequence[int], buffers: range | None = None) -> Hot:
        ids = np.arange(len(slots.offsets), dtype=np.int64)
        lengths = np.asarray(valid, np.int32)
        self.make_codec().decode(slots.layout, into.pool, ids, lengths, slots.arena, slots.offsets, buffers)
        return into

    def sequence(self, dtype: DType, tokens: int, seed: int = 0) -> list[Array]:
        rng = np.random.default_rng(seed)
        return [random_elements(rng, (tokens, b.heads, b.dim), dtype) for b in self.spec_of(dtype).buffers]

    def assert_close(self, got: Array, expected: Array, dtype: DType) -> None:
        if self.max_error == 0:
            assert got.tobytes() == expected.tobytes()
            return
        a, b = values_of(got, dtype), values_of(expected, dtype)
        assert (np.abs(a - b) <= self.bound(b)).all()

    def test_identity_is_json(self) -> None:
        codec = self.make_codec()
        assert codec.id and codec.version >= 1
        assert json.loads(json.dumps(dict(codec.config))) == dict(codec.config)
        assert codec.form == self.make_codec().form

    @pytest.mark.parametrize("hot_layout", LAYOUTS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_pages_come_back(self, dtype: DType, hot_layout: HotLayout) -> None:
        spec, pages = self.spec_of(dtype), 4
        source = self.sequence(dtype, pages * spec.page_tokens)
        hot = Hot(spec, hot_layout, pages * spec.page_tokens).fill(source)
        valid = [spec.page_tokens] * pages
        slots, result = self.encoded(hot, pages, valid)
        assert not result.refused.any()
        assert slots.guards_intact()
        for got, expected in zip(hot.sequence(), source, strict=True):
            assert got.tobytes() == expected.tobytes(), "encoding changed its source"
        back = self.decoded(slots, Hot(spec, hot_layout, hot.tokens).fill(self.sequence(dtype, hot.tokens, 1)), valid)
        for got, expected in zip(back.sequence(), source, strict=True):
            self.assert_close(got, expected, dtype)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_decoded_page_encodes_to_the_same_bytes(self, dtype: DType) -> None:
        spec, pages = self.spec_of(dtype), 3
        tokens = pages * spec.page_tokens
        valid = [spec.page_tokens] * pages
        first, _ = self.encoded(Hot(spec, HotLayout.NHD, tokens).fill(self.sequence(dtype, tokens)), pages, valid)
        once = self.decoded(first, Hot(spec, HotLayout.NHD, tokens), valid)
        second, _ = self.encoded(once, pages, valid)
        if self.stable:
            assert first.pages() == second.pages()
            return
        twice = self.decoded(second, Hot(spec, HotLayout.NHD, tokens), valid)
        for got, expected in zip(twice.sequence(), once.sequence(), strict=True):
            self.assert_close(got, expected, dtype)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_cold_bytes_know_neither_hot_layout_nor_garbage(self, dtype: DType) -> None:
        spec, pages = self.spec_of(dtype), 3
        tokens = pages * spec.page_tokens
        source, valid = self.sequence(dtype, tokens), [spec.page_tokens, 2, 1]
        results = [
            self.encoded(Hot(spec, layout, tokens).fill(source), pages, valid, fill)[0].pages()
            for layout in LAYOUTS
            for fill in (0x00, 0xFF)
        ]
        assert all(r == results[0] for r in results)
        assert len(set(results[0])) == pages

    @pytest.mark.parametrize("hot_layout", LAYOUTS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_rows_past_the_valid_tokens_are_zeros(self, dtype: DType, hot_layout: HotLayout) -> None:
        spec = self.spec_of(dtype)
        tokens, valid = 2 * spec.page_tokens, [spec.page_tokens, 3]
        clean, poisoned = self.sequence(dtype, tokens), self.sequence(dtype, tokens)
        for buffer in clean:
            buffer[spec.page_tokens + 3 :] = 0
        for buffer in poisoned:
            buffer[spec.page_tokens + 3 :] = POISON.get(dtype, np.nan)
        expected, _ = self.encoded(Hot(spec, hot_layout, tokens).fill(clean), 2, valid)
        slots, result = self.encoded(Hot(spec, hot_layout, tokens).fill(poisoned), 2, valid)
        assert not result.refused.any()
        assert slots.pages() == expected.pages()
        back = self.decoded(slots, Hot(spec, hot_layout, tokens).fill(poisoned), valid)
        for got, source in zip(back.sequence(), clean, strict=True):
            assert not got[spec.page_tokens + 3 :].any()
            self.assert_close(got, source, dtype)

    @pytest.mark.parametrize("hot_layout", [HotLayout.NHD, HotLayout.SEQ])
    def test_the_last_page_may_end_with_the_buffer(self, hot_layout: HotLayout) -> None:
        spec = self.spec_of(DType.BF16)
        tokens, valid = spec.page_tokens + 2, [spec.page_tokens, 2]
        source = self.sequence(DType.BF16, tokens)
        slots, result = self.encoded(Hot(spec, hot_layout, tokens).fill(source), 2, valid)
        assert not result.refused.any()
        # The same memory in a longer buffer: what lies behind the pool's end stays as it is.
        longer = Hot(spec, hot_layout, tokens + 4).fill(self.sequence(DType.BF16, tokens + 4, 7))
        before = longer.sequence()
        axis = 0 if hot_layout is HotLayout.NHD else 1
        ending = HotPool.of(spec, [_first(a, tokens, axis) for a in longer.arrays], hot_layout)
        ids, lengths = np.arange(2, dtype=np.int64), np.asarray(valid, np.int32)
        self.make_codec().decode(slots.layout, ending, ids, lengths, slots.arena, slots.offsets)
        for got, old, expected in zip(longer.sequence(), before, source, strict=True):
            self.assert_close(got[:tokens], expected, DType.BF16)
            assert got[tokens:].tobytes() == old[tokens:].tobytes()

    def test_some_buffers_only(self) -> None:
        spec = self.spec_of(DType.FP16)
        valid = [spec.page_tokens] * 2
        tokens = 2 * spec.page_tokens
        source, other = self.sequence(DType.FP16, tokens), self.sequence(DType.FP16, tokens, 1)
        slots, _ = self.encoded(Hot(spec, HotLayout.HND, tokens).fill(source), 2, valid)
        back = self.decoded(slots, Hot(spec, HotLayout.HND, tokens).fill(other), valid, range(1, 3)).sequence()
        for i, got in enumerate(back):
            if i in (1, 2):
                self.assert_close(got, source[i], DType.FP16)
            else:
                assert got.tobytes() == other[i].tobytes()

    def test_checksums_cover_the_cold_page_under_its_seed(self) -> None:
        spec = self.spec_of(DType.BF16)
        tokens = 3 * spec.page_tokens
        hot = Hot(spec, HotLayout.NHD, tokens).fill(self.sequence(DType.BF16, tokens))
        slots, result = self.encoded(hot, 3, [spec.page_tokens] * 3)
        for i, page in enumerate(slots.pages()):
            seed = (i * 0x9E3779B97F4A7C15) % 2**64
            used = page if result.nbytes is None else page[: result.nbytes[i]]
            assert result.checksums[i].tobytes() == xxhash.xxh3_128_digest(used, seed)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_a_page_with_nan_or_infinity_is_exact_or_refused(self, bad: float, dtype: DType) -> None:
        spec = self.spec_of(dtype)
        tokens = 3 * spec.page_tokens
        source = self.sequence(dtype, tokens)
        bits = {
            DType.BF16: np.array(bad, np.float32).view(np.uint32) >> 16,
            DType.FP16: np.float16(bad).view(np.uint16),
        }
        source[2][spec.page_tokens, 1, 7] = bits.get(dtype, bad)
        hot = Hot(spec, HotLayout.NHD, tokens).fill(source)
        valid = [spec.page_tokens] * 3
        slots, result = self.encoded(hot, 3, valid)
        assert slots.guards_intact()
        assert list(result.refused) == [False, self.refuses_nonfinite, False]
        if not self.refuses_nonfinite:
            back = self.decoded(slots, Hot(spec, HotLayout.NHD, tokens), valid)
            assert [a.tobytes() for a in back.sequence()] == [a.tobytes() for a in source]

    def test_no_pages_is_a_no_op(self) -> None:
        spec = self.spec_of(DType.BF16)
        hot = Hot(spec, HotLayout.NHD, spec.page_tokens)
        slots, result = self.encoded(hot, 0, [])
        assert result.checksums.shape == (0, 16)
        assert slots.guards_intact()
        self.decoded(slots, hot, [])

    @pytest.mark.parametrize(
        ("page", "extra", "shift"),
        [(3, 0, 0), (-1, 0, 0), (2, 0, 0), (0, 1, 0), (0, None, 0), (0, 0, 10**9), (0, 0, -(10**9))],
        ids=[
            "page past the end",
            "negative page",
            "rows past the end",
            "too many tokens",
            "negative tokens",
            "slot past the end",
            "slot before the start",
        ],
    )
    def test_out_of_range_is_refused_before_anything_is_written(self, page: int, extra: int | None, shift: int) -> None:
        spec, codec = self.spec_of(DType.BF16), self.make_codec()
        hot = Hot(spec, HotLayout.SEQ, 2 * spec.page_tokens + 1).fill(
            self.sequence(DType.BF16, 2 * spec.page_tokens + 1)
        )
        before = [a.tobytes() for a in hot.sequence()]
        layout = codec.layout(spec)
        slots = Slots(layout, 2, 0x5A)
        full = spec.page_tokens
        valid = -1 if extra is None else full + extra
        ids, lengths = np.array([1, page], np.int64), np.array([full, valid], np.int32)
        offsets = slots.offsets + np.array([0, shift])
        with pytest.raises(CodecError):
            codec.encode(layout, hot.pool, ids, lengths, slots.arena, offsets, np.zeros(2, np.uint64))
        assert (slots.arena == 0x5A).all()
        with pytest.raises(CodecError):
            codec.decode(layout, hot.pool, ids, lengths, slots.arena, offsets)
        assert [a.tobytes() for a in hot.sequence()] == before

    def test_a_pool_of_another_page_is_refused(self) -> None:
        codec, hot = self.make_codec(), Hot(self.spec_of(DType.BF16), HotLayout.NHD, self.page_tokens)
        layout = codec.layout(self.spec_of(DType.FP16))
        slots = Slots(layout, 1, 0)
        with pytest.raises(CodecError, match="PageSpec"):
            codec.encode(
                layout,
                hot.pool,
                np.zeros(1, np.int64),
                np.full(1, self.page_tokens, np.int32),
                slots.arena,
                slots.offsets,
                np.zeros(1, np.uint64),
            )

    def test_threads_do_not_disturb_each_other(self) -> None:
        spec, pages = self.spec_of(DType.BF16), 16
        tokens, valid = pages * spec.page_tokens, [spec.page_tokens] * pages
        hot = Hot(spec, HotLayout.NHD, tokens).fill(self.sequence(DType.BF16, tokens))
        expected = self.encoded(hot, pages, valid)[0].pages()
        with ThreadPoolExecutor(4) as threads:
            results = list(threads.map(lambda _: self.encoded(hot, pages, valid)[0].pages(), range(16)))
        assert all(r == expected for r in results)


def _first(array: Array, tokens: int, axis: int) -> Array:
    """The first `tokens` along `axis`, as a view of the same memory."""
    return array[:tokens] if axis == 0 else array[:, :tokens]


__all__ = ["CodecContract", "Hot", "Slots", "random_elements", "reference_parts", "spec_of", "values_of"]
