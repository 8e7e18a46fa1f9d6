"""The Triton page codec in Triton's interpreter against the native one, byte for byte, on small pages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from kvtier.abc.codec import Codec, EncodeResult
from kvtier.codecs import device, native
from kvtier.codecs.checkpoint_scales import CheckpointScales
from kvtier.codecs.registry import codec
from kvtier.errors import CodecError, SpecError
from kvtier.hot import HotLayout, HotPool
from kvtier.kernels.nvfp4 import page_reference
from kvtier.spec import BufferSpec, ColdLayout, DType, PageSpec, Role
from kvtier.testing.codecs import reference_parts
from tests import hot_pages
from tests.hot_pages import ROPES, Named, pool_of

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvtier[torch]'")
pytest.importorskip("triton", reason="triton is not installed: pip install 'kvtier[triton]'")
with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
    from kvtier.kernels.nvfp4 import triton as kernels
    from kvtier.kernels.nvfp4 import triton_pages

# numpy, which interprets, warns of overflow where a GPU is silent.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

Array = npt.NDArray[Any]
GUARD = 48
values_for = partial(hot_pages.values_for, offset=20.0)
FORMS: list[Named] = [("raw", {}), *hot_pages.FORMS]
POISON = {DType.BF16: 0x7FC1, DType.FP16: 0xFE01, DType.FP32: np.nan, DType.FP8_E4M3: 0x7F}


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    assert type(triton_pages.encode_kernel).__name__ == "InterpretedFunction"
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        yield


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_MOST_SPLITS", 2)


@dataclass
class Case:
    """Pages of one spec with the slots of both sides, guard bytes around them, in reverse order."""

    which: Codec
    layout: ColdLayout
    pool: HotPool
    arrays: list[Array]
    ids: Array
    valid: Array
    offsets: Array
    arena: Array

    @staticmethod
    def of(which: Codec, spec: PageSpec, values: list[Array], valid: list[int], hot: HotLayout = HotLayout.NHD) -> Case:
        pool, arrays = pool_of(spec, values, hot)
        layout, pages = which.layout(spec), len(valid)
        step = layout.cold_page_bytes + GUARD
        offsets = GUARD + np.arange(pages, dtype=np.int64)[::-1] * step
        arena = np.full(2 * GUARD + pages * step, 0xA5, np.uint8)
        ids = np.arange(pages, dtype=np.int64)
        return Case(which, layout, pool, arrays, ids, np.array(valid, np.int32), offsets, arena)

    def encode(self) -> EncodeResult:
        seeds = np.arange(len(self.ids), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return self.which.encode(self.layout, self.pool, self.ids, self.valid, self.arena, self.offsets, seeds)

    def decode(self, pages: Array, buffers: range | None = None) -> list[bytes]:
        """What the pool holds after these pages came back over a pattern."""
        for a in self.arrays:
            a.view(np.uint8)[...] = 0x3B
        self.which.decode(
            self.layout, self.pool, self.ids[pages], self.valid[pages], self.arena, self.offsets[pages], buffers
        )
        return [a.tobytes() for a in self.arrays]


def on_device(patch: pytest.MonkeyPatch) -> None:
    """Codecs take the device's way, in the interpreter, for pools in memory."""
    patch.setattr(native, "encode", device.encode)
    patch.setattr(native, "decode", device.decode)


def assert_same(case: Case, monkeypatch: pytest.MonkeyPatch, buffers: range | None = None) -> EncodeResult:
    """Encode and decode both ways; the native result."""
    twin = replace(case, arena=case.arena.copy())
    result = twin.encode()
    before = [a.tobytes() for a in case.arrays]
    good = np.flatnonzero(~result.refused)
    with monkeypatch.context() as patch:
        on_device(patch)
        got = case.encode()
    assert [a.tobytes() for a in case.arrays] == before, "encoding changed its source"
    np.testing.assert_array_equal(got.refused, result.refused)
    for i in np.flatnonzero(result.refused):  # garbage in both
        for arena in (case.arena, twin.arena):
            arena[case.offsets[i] : case.offsets[i] + case.layout.cold_page_bytes] = 0
    np.testing.assert_array_equal(case.arena, twin.arena)
    np.testing.assert_array_equal(got.checksums[good], result.checksums[good])
    expected = twin.decode(good, buffers)
    with monkeypatch.context() as patch:
        on_device(patch)
        assert case.decode(good, buffers) == expected
    return result


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16, DType.FP32, DType.FP8_E4M3])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_of_every_type(
    form: tuple[str, dict[str, str]], dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = 0.7 if dtype is DType.FP8_E4M3 else 1.0
    spec = PageSpec.mha(layers=1, kv_heads=2, head_dim=48, page_tokens=16, dtype=dtype, fp8_scale=scale)
    values = values_for(spec, 2, 5)
    for v in values:
        v[1, :, 11:] = POISON[dtype]
    result = assert_same(Case.of(codec(form[0], **form[1]), spec, values, [16, 11]), monkeypatch)
    assert not result.refused.any()


SHAPES = {
    "MLA": PageSpec.mla(layers=1, page_tokens=16, dtype=DType.BF16),
    "MLA with index": PageSpec.mla(
        layers=1, page_tokens=16, dtype=DType.FP8_E4M3, index_layers=[0], index_page_bytes=2112
    ),
    "odd": PageSpec(
        24,
        (
            BufferSpec(Role.K, 0, 3, 24, 80, DType.BF16, rotary=(0, 32)),
            BufferSpec(Role.V, 0, 3, 24, 40, DType.BF16),
            BufferSpec(Role.STATE, 0, 1, 1, 999, DType.UINT8),
        ),
    ),
}


@pytest.mark.parametrize("form", ROPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_rotary_parts_and_what_is_copied(
    shape: str, form: tuple[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SHAPES[shape]
    case = Case.of(codec(form[0], **form[1]), spec, values_for(spec, 1, 8), [spec.page_tokens - 3], HotLayout.HND)
    assert not assert_same(case, monkeypatch).refused.any()


@pytest.mark.parametrize("hot_layout", list(HotLayout))
@pytest.mark.parametrize("form", ["nvfp4", "k8v4", "nvfp4_offset"])
def test_every_hot_layout(form: str, hot_layout: HotLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    # 20 tokens: two heads share a byte of flags; 3 heads of 5 groups fill no tile.
    spec = PageSpec.mha(layers=1, kv_heads=3, head_dim=80, page_tokens=20, dtype=DType.BF16)
    case = Case.of(codec(form), spec, values_for(spec, 2, 3), [20, 0], hot_layout)
    assert not assert_same(case, monkeypatch).refused.any()


def test_a_page_is_as_the_reference_says(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = PageSpec.mha(layers=2, kv_heads=2, head_dim=32, page_tokens=16, dtype=DType.BF16)
    values = values_for(spec, 1, 2)
    case = Case.of(codec("k8v4"), spec, values, [13])
    on_device(monkeypatch)
    result = case.encode()
    sizes = (16, case.layout.cold_page_bytes, case.layout.scale_table_offset)
    expected, refused = page_reference.encode_page(reference_parts(case.layout, [v[0] for v in values]), 13, *sizes)
    page = case.arena[case.offsets[0] : case.offsets[0] + case.layout.cold_page_bytes]
    assert not refused and not result.refused[0]
    np.testing.assert_array_equal(page, expected)
    assert result.checksums[0].tobytes() == xxhash.xxh3_128_digest(expected, 0)


def test_scales_of_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = PageSpec.mha(layers=2, kv_heads=1, head_dim=32, page_tokens=4, dtype=DType.BF16)
    scales = CheckpointScales(key={0: 1.7, 1: 0.3}, value={0: 5.25, 1: 11.0})
    case = Case.of(codec("nvfp4", global_scale="checkpoint", scales=scales), spec, values_for(spec, 1, 6), [4])
    assert not assert_same(case, monkeypatch).refused.any()


def test_levels_end_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = PageSpec.mha(layers=2, kv_heads=1, head_dim=32, page_tokens=4, dtype=DType.BF16)
    which = codec("nvfp4")
    case = Case.of(which, spec, values_for(spec, 1, 6), [4])
    layout = which.finer_layout(spec, (0, 1, 2, 0))
    case = replace(case, layout=layout, arena=np.full(2 * GUARD + layout.cold_page_bytes, 0xA5, np.uint8))
    assert not assert_same(case, monkeypatch).refused.any()


def test_an_error_budget_measures_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = PageSpec.mha(layers=1, kv_heads=2, head_dim=32, page_tokens=16, dtype=DType.BF16)
    case = Case.of(codec("nvfp4", max_relative_error=0.07), spec, values_for(spec, 3, 4), [16, 3, 0])
    twin = replace(case, arena=case.arena.copy())
    expected = twin.encode()
    pages = native.Pages(case.ids, case.valid, case.arena, case.offsets)
    on_device(monkeypatch)
    assert len(set(expected.refused.tolist())) == 2, "the budget should part these pages"
    case.encode()
    sums = device.errors(case.layout, case.pool, pages)
    np.testing.assert_array_equal(
        sums, native.errors(twin.layout, twin.pool, native.Pages(twin.ids, twin.valid, twin.arena, twin.offsets))
    )
    assert sums[:2].all() and not sums[2].any()


@pytest.mark.parametrize("form", [*FORMS[1:], ("nvfp4", {"rope": "fp8"})], ids=str)
def test_refusals(form: tuple[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = DType.FP16 if form[0] in ("nvfp4", "nvfp4_token") else DType.BF16
    spec = PageSpec.mha(layers=1, kv_heads=1, head_dim=32, page_tokens=16, dtype=dtype, rotary_dim=16)
    values = values_for(spec, 4, 9, offset=1.0)
    infinity, large = ({DType.BF16: 0xFF80, DType.FP16: 0xFC00}[dtype], {DType.BF16: 0x7F7F, DType.FP16: 0x7BFF}[dtype])
    values[0][0, 0, 3, 7] = POISON[dtype]
    values[1][1, 0, 2, 9] = infinity
    values[0][2, 0, 5, 3] = large
    result = assert_same(Case.of(codec(form[0], **form[1]), spec, values, [16, 16, 9, 16]), monkeypatch)
    assert result.refused[0] and result.refused[1] and not result.refused[3]


@pytest.mark.parametrize("shift", [0, 3], ids=["aligned", "odd addresses"])
def test_hot_rows_need_no_alignment(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = PageSpec.mha(layers=1, kv_heads=2, head_dim=32, page_tokens=4, dtype=DType.FP16)
    values = values_for(spec, 1, 1)
    room = [np.zeros(v.size + 8, np.uint16) for v in values]
    arrays = [r[shift : shift + v.size].reshape(4, 2, 32) for r, v in zip(room, values, strict=True)]
    for a, v in zip(arrays, values, strict=True):
        a[...] = v[0].transpose(1, 0, 2)
    case = replace(
        Case.of(codec("nvfp4"), spec, values, [4]), pool=HotPool.of(spec, arrays, HotLayout.NHD), arrays=arrays
    )
    assert not assert_same(case, monkeypatch).refused.any()


def test_some_buffers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = PageSpec.mha(layers=3, kv_heads=1, head_dim=16, page_tokens=4, dtype=DType.BF16)
    for buffers in (range(2, 4), range(0)):
        assert_same(Case.of(codec("nvfp4"), spec, values_for(spec, 1, 7), [2]), monkeypatch, buffers)


def test_the_last_page_may_end_with_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = PageSpec.mha(layers=1, kv_heads=2, head_dim=16, page_tokens=8, dtype=DType.BF16)
    case = Case.of(codec("nvfp4"), spec, values_for(spec, 2, 7), [8, 3])
    ending = [a[:13] for a in case.arrays]
    case = replace(case, pool=HotPool.of(spec, ending, HotLayout.NHD))
    assert_same(case, monkeypatch)
    assert all((a[13:].view(np.uint8) == 0x3B).all() for a in case.arrays)


def test_what_lies_out_of_bounds_is_refused_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = PageSpec.mha(layers=1, kv_heads=1, head_dim=16, page_tokens=4, dtype=DType.FP16)
    case = Case.of(codec("nvfp4"), spec, values_for(spec, 2, 7), [4, 4])
    on_device(monkeypatch)
    for broken in (
        replace(case, ids=np.array([0, 2])),
        replace(case, ids=np.array([-1, 0])),
        replace(case, valid=np.array([5, 4], np.int32)),
        replace(case, offsets=np.array([0, 10**9])),
        replace(case, offsets=np.array([-16, 0])),
    ):
        with pytest.raises(CodecError):
            broken.encode()
        with pytest.raises(CodecError):
            broken.decode(np.arange(2))
    assert (case.arena == 0xA5).all()
    with pytest.raises(CodecError, match="k = -91"):
        case.decode(np.arange(2))  # the slots hold no pages
    with pytest.raises(CodecError, match="multiple of 16"):
        replace(case, offsets=case.offsets + 8).encode()


def test_no_pages_is_a_no_op(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = PageSpec.mha(layers=1, kv_heads=1, head_dim=16, page_tokens=4, dtype=DType.BF16)
    case = Case.of(codec("nvfp4"), spec, values_for(spec, 1, 7), [])
    on_device(monkeypatch)
    result = case.encode()
    assert result.checksums.shape == (0, 16) and result.refused.shape == (0,)
    case.decode(np.arange(0))


def test_parts_that_were_not_written_fail_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the launch had been lost: the slots' old bytes get no checksum."""
    spec = PageSpec.mha(layers=1, kv_heads=1, head_dim=16, page_tokens=4, dtype=DType.BF16)
    case = Case.of(codec("nvfp4"), spec, values_for(spec, 1, 7), [4])
    monkeypatch.setattr(kernels, "enqueue_encode", lambda *_: None)
    on_device(monkeypatch)
    with pytest.raises(CodecError, match="did not write all parts"):
        case.encode()


@pytest.mark.parametrize("pages", [1, 257, 4096])
@pytest.mark.parametrize("parts", [1, 2, 72, 202])
def test_grids(pages: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part of every page has programs, and the arithmetic of the kernel finds each once."""
    monkeypatch.undo()
    splits, programs = kernels.splits_for(pages, parts), kernels.grid_of(pages, parts)
    assert programs == pages * parts * splits < 2**31
    assert splits == 1 or programs <= 2048
    program = np.arange(programs, dtype=np.int64)
    found = (program // splits // parts) * (parts * splits) + (program // splits % parts) * splits + program % splits
    np.testing.assert_array_equal(found, program)
    with pytest.raises(ValueError, match="fewer pages"):
        kernels.grid_of(2**30, 72)


@pytest.mark.parametrize("pages", [1, 5])
def test_batches_of_any_size_in_one_launch(pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = PageSpec.mha(layers=1, kv_heads=1, head_dim=16, page_tokens=2, dtype=DType.BF16)
    launches = []

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            launches.append(grid)
            return real[grid]

    real = triton_pages.encode_kernel
    monkeypatch.setattr(triton_pages, "encode_kernel", Counted())
    assert_same(Case.of(codec("nvfp4"), spec, values_for(spec, pages, 7), [2] * pages), monkeypatch)
    assert launches == [(kernels.grid_of(pages, 2),)]


def test_keys_that_are_too_wide_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = PageSpec.mha(layers=1, kv_heads=1, head_dim=528, page_tokens=16, dtype=DType.BF16)
    on_device(monkeypatch)
    with pytest.raises(CodecError, match="528 columns: on a device k8v4 takes at most 512"):
        Case.of(codec("k8v4"), spec, values_for(spec, 1, 7), [16]).encode()


def test_pools_on_a_device_take_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the pool alone: such addresses must never be read by native code."""
    spec = PageSpec.mha(layers=1, kv_heads=1, head_dim=16, page_tokens=4, dtype=DType.BF16)
    case = Case.of(codec("nvfp4"), spec, values_for(spec, 1, 7), [4])
    case = replace(case, pool=replace(case.pool, device="cuda:0"))
    asked: list[str] = []

    def encode(layout: ColdLayout, pool: HotPool, pages: native.Pages, seeds: Array) -> EncodeResult:
        asked.append(f"encode on {pool.device}")
        return EncodeResult(np.zeros((1, 16), np.uint8), np.zeros(1, bool))

    monkeypatch.setattr(device, "encode", encode)
    monkeypatch.setattr(device, "decode", lambda _, pool, *__: asked.append(f"decode on {pool.device}"))
    monkeypatch.setattr(device, "errors", lambda _, pool, *__: asked.append(f"errors on {pool.device}"))
    case.encode()
    case.decode(np.arange(1))
    case.which.errors(case.layout, case.pool, case.ids, case.valid, case.arena, case.offsets)
    assert asked == ["encode on cuda:0", "decode on cuda:0", "errors on cuda:0"]


def test_tensors_of_other_devices_are_refused() -> None:
    spec = PageSpec.mha(layers=1, kv_heads=1, head_dim=16, page_tokens=4, dtype=DType.BF16)
    here = torch.zeros(4, 1, 16, dtype=torch.bfloat16)
    with pytest.raises(SpecError, match="on cpu or cuda, got Tensor on meta"):
        HotPool.of(spec, [here.to("meta")] * 2, HotLayout.NHD)
    with pytest.raises(SpecError, match="hot buffers on cpu and meta: all must be on one device"):
        HotPool.of(spec, [here, here.to("meta")], HotLayout.NHD)
