"""What is particular to the native page codecs, beyond the suite that every codec passes."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.abc.codec import Codec, EncodeResult, Form
from kvtier.codecs import native
from kvtier.codecs.registry import codec, codec_for_form, codec_names
from kvtier.errors import CodecError, ConfigError
from kvtier.hot import HotLayout, HotPool
from kvtier.kernels.nvfp4 import page_reference, reference
from kvtier.spec import BufferSpec, ColdLayout, DType, PageSpec, Role
from kvtier.testing.codecs import reference_parts

U8 = npt.NDArray[np.uint8]


def encode(which: Codec, pool: HotPool, valid: list[int]) -> tuple[U8, EncodeResult, ColdLayout]:
    """Pages 0.. of the pool, one row of bytes each."""
    layout = which.layout(pool.spec)
    arena = np.full((len(valid), layout.cold_page_bytes), 0xC3, np.uint8)
    ids = np.arange(len(valid), dtype=np.int64)
    result = which.encode(
        layout,
        pool,
        ids,
        np.array(valid, np.int32),
        arena.reshape(-1),
        ids * layout.cold_page_bytes,
        np.zeros(len(valid), np.uint64),
    )
    return arena, result, layout


@pytest.mark.parametrize("hot_layout", list(HotLayout))
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("options", [{"global_scale": "page"}, {"global_scale": "identity"}], ids=["page", "identity"])
@pytest.mark.parametrize(("heads", "tokens", "dim"), [(1, 3, 16), (5, 32, 128), (2, 8, 576), (3, 4, 1040)])
def test_pages_equal_the_reference(
    isa: str, hot_layout: HotLayout, dtype: str, options: dict[str, str], heads: int, tokens: int, dim: int
) -> None:
    rng = np.random.default_rng(heads * dim)
    spec = PageSpec.mha(layers=2, kv_heads=heads, head_dim=dim, page_tokens=tokens, dtype=DType(dtype))
    sequence = [
        reference.from_float32(
            (rng.standard_normal((heads, 2 * tokens, dim)) * 10.0 ** (n - 2)).astype(np.float32), dtype
        )
        for n in range(4)
    ]
    arrays = {
        HotLayout.SEQ: sequence,
        HotLayout.NHD: [s.transpose(1, 0, 2).copy() for s in sequence],
        HotLayout.HND: [s.reshape(heads, 2, tokens, dim).transpose(1, 0, 2, 3).copy() for s in sequence],
    }[hot_layout]
    valid = [tokens, tokens - 1]
    pages, result, layout = encode(codec("nvfp4", **options), HotPool.of(spec, arrays, hot_layout), valid)
    assert not result.refused.any()
    for p in range(2):
        parts = reference_parts(layout, [s[:, p * tokens : (p + 1) * tokens] for s in sequence])
        expected, _ = page_reference.encode_page(
            parts, valid[p], tokens, layout.cold_page_bytes, layout.scale_table_offset
        )
        np.testing.assert_array_equal(pages[p], expected)


def one_group_pages(values: npt.NDArray[np.uint16], dtype: DType) -> HotPool:
    """Every row of `values` ``[n, 16]`` as the K of a page of its own."""
    spec = PageSpec(1, (BufferSpec(Role.K, 0, 1, 1, 16, dtype),))
    return HotPool.of(spec, [values.reshape(-1, 1, 16)], HotLayout.NHD)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
def test_every_amax_chooses_the_k_of_the_reference_and_keeps_it(isa: str, dtype: DType) -> None:
    last = 0x7F7F if dtype is DType.BF16 else 0x7BFF
    values = np.zeros((last + 1, 16), np.uint16)
    values[:, 3] = np.arange(last + 1)
    pool, page = one_group_pages(values, dtype), codec("nvfp4")
    pages, result, layout = encode(page, pool, [1] * len(values))
    k = pages[:, layout.scale_table_offset].view(np.int8).astype(np.float64)
    amax = reference.to_float32(values[:, 3], dtype.value).astype(np.float64)
    low, high = reference.K_LIMITS[dtype.value]
    np.testing.assert_array_equal(result.refused, amax > 2784 * 2.0**high)
    fits = ~result.refused
    assert (amax[fits] <= 2784 * np.exp2(k[fits])).all()
    assert ((k[fits] == low) | (amax[fits] > 1392 * np.exp2(k[fits]))).all()

    back = np.zeros_like(values)
    ids = np.flatnonzero(fits)
    page.decode(
        layout,
        one_group_pages(back, dtype),
        ids,
        np.ones(len(ids), np.int32),
        pages.reshape(-1),
        ids * layout.cold_page_bytes,
    )
    again, result, _ = encode(page, one_group_pages(back, dtype), [1] * len(values))
    assert not result.refused.any()
    np.testing.assert_array_equal(again[fits], pages[fits])


def test_fp16_beyond_the_largest_global_scale_is_refused_only_where_it_would_clip() -> None:
    values = np.full((2, 16), np.float16(44544.0)).view(np.uint16)
    values[1, 5] = np.float16(-44576.0).view(np.uint16)
    _, result, _ = encode(codec("nvfp4"), one_group_pages(values, DType.FP16), [1, 1])
    assert list(result.refused) == [False, True]
    # With scale 1 for everything, clipping is what was asked for.
    _, result, _ = encode(codec("nvfp4", global_scale="identity"), one_group_pages(values, DType.FP16), [1, 1])
    assert not result.refused.any()


def test_fp32_pages_are_bf16_pages_rounded_to_nearest_even(isa: str) -> None:
    rng = np.random.default_rng(3)
    wide = rng.standard_normal((2, 10, 64)).astype(np.float32)
    wide.view(np.uint32)[0, 0, :4] = [0x3F808000, 0x3F818000, 0x3F808001, 0xBF817FFF]
    rounded = reference.from_float32(wide, "bf16")
    assert rounded[0, 0, :4].tolist() == [0x3F80, 0x3F82, 0x3F81, 0xBF81]
    pages = [
        encode(
            codec("nvfp4"),
            HotPool.of(
                PageSpec.mha(layers=1, kv_heads=2, head_dim=64, page_tokens=5, dtype=dtype), [a, a], HotLayout.SEQ
            ),
            [5, 5],
        )[0]
        for dtype, a in ((DType.FP32, wide), (DType.BF16, rounded))
    ]
    np.testing.assert_array_equal(pages[0], pages[1])


def test_lossless_buffers_lie_behind_the_scales() -> None:
    spec = PageSpec(4, (BufferSpec(Role.K, 0, 1, 4, 16, DType.BF16), BufferSpec(Role.V, 0, 1, 4, 24, DType.BF16)))
    k, v = np.full((4, 1, 16), 0x3F80, np.uint16), np.arange(96, dtype=np.uint16).reshape(4, 1, 24)
    pages, _, layout = encode(codec("nvfp4"), HotPool.of(spec, [k, v], HotLayout.NHD), [4])
    at = layout.parts[1]
    assert not at.compressed
    assert pages[0, at.data_offset : at.data_offset + at.data_bytes].tobytes() == v.tobytes()
    gap = pages[0, at.data_offset + at.data_bytes : layout.scale_table_offset]
    assert len(gap) > 0 and not gap.any()


def test_bytes_of_another_kind_of_page_are_refused_before_the_pool_is_written() -> None:
    values = np.full((1, 16), 0x3C00, np.uint16)
    pool = one_group_pages(values, DType.FP16)
    pages, _, layout = encode(codec("nvfp4"), pool, [1])
    pages[0, layout.scale_table_offset] = 100
    with pytest.raises(CodecError, match=r"k = 100 for buffer 0 is outside \[-14, 4\]"):
        codec("nvfp4").decode(
            layout, pool, np.zeros(1, np.int64), np.ones(1, np.int32), pages.reshape(-1), np.zeros(1, np.int64)
        )
    assert (values == 0x3C00).all()


def test_an_arena_that_cannot_be_written_is_named() -> None:
    pool = one_group_pages(np.zeros((1, 16), np.uint16), DType.BF16)
    layout = codec("raw").layout(pool.spec)
    arena = np.zeros(layout.cold_page_bytes, np.uint8)
    arena.flags.writeable = False
    args = (layout, pool, np.zeros(1, np.int64), np.ones(1, np.int32))
    with pytest.raises(CodecError, match="arena must be a contiguous, writable numpy array"):
        codec("raw").encode(*args, arena, np.zeros(1, np.int64), np.zeros(1, np.uint64))
    codec("raw").decode(*args, arena, np.zeros(1, np.int64))


def test_registry() -> None:
    assert codec_names() == ("raw", "nvfp4", "nvfp4_offset", "nvfp4_token", "k8v4", "2fp4", "lossless")
    for form in Form:
        assert codec_for_form(form).form is form
    assert codec("nvfp4").config == {"global_scale": "page"}
    with pytest.raises(ConfigError, match="codec = 'zip': use one of raw, nvfp4"):
        codec("zip")
    with pytest.raises(ConfigError, match=r"'nvfp4' has no option 'scale' \(= 2\); it takes global_scale"):
        codec("nvfp4", scale=2)
    with pytest.raises(ConfigError, match="global_scale = 'row': use one of page, identity"):
        codec("nvfp4", global_scale="row")
    with pytest.raises(ConfigError, match="form = 99"):
        codec_for_form(99)


def test_a_plan_is_made_once_for_a_layout_and_the_buffers_of_a_pool() -> None:
    spec = PageSpec.mha(layers=2, kv_heads=2, head_dim=64, page_tokens=16, dtype=DType.BF16)
    pool, other = (
        HotPool.of(spec, [np.zeros((32, 2, 64), np.uint16) for _ in spec.buffers], HotLayout.NHD) for _ in "ab"
    )
    layouts = [codec(name).layout(spec) for name in ("nvfp4", "raw", "nvfp4")]
    plans = [native.plan_of(layout, pool) for layout in layouts]
    assert [native.plan_of(layout, pool) is plan for layout, plan in zip(layouts, plans, strict=True)] == [True] * 3
    assert native.plan_of(layouts[0], replace(pool, owner="somebody")) is plans[0], "the memory is the same"
    moved = native.plan_of(layouts[0], replace(pool, buffers=other.buffers))
    assert moved.tolist() == native.plan_of(layouts[0], other).tolist() != plans[0].tolist()
    for _ in range(200):
        native.plan_of(codec("nvfp4").layout(spec), pool)
    assert len(pool.plans) <= 64


def test_a_new_pool_costs_little() -> None:
    """Connectors describe a request's tensors anew each time: 60 buffers within 200 us, here with room for noise."""
    spec = PageSpec.mha(layers=30, kv_heads=3, head_dim=64, page_tokens=16, dtype=DType.BF16)
    pool = HotPool.of(spec, [np.zeros((3, 16, 64), np.uint16) for _ in spec.buffers], HotLayout.SEQ)
    layout = codec("nvfp4").layout(spec)
    times: list[float] = []
    while min(times, default=1.0) >= 400e-6 and len(times) < 2000:  # a busy machine makes it longer and never shorter
        start = time.thread_time()
        native.plan_of(layout, replace(pool, plans={}))
        times.append(time.thread_time() - start)
    assert min(times) < 400e-6
