"""The lossless codec beyond the suite that every codec passes: golden bytes, sizes, and bytes that are not a page."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.codecs.registry import codec
from kvtier.errors import CodecError
from kvtier.hot import HotLayout, HotPool
from kvtier.kernels import _native
from kvtier.spec import DType, PageSpec

pytest.importorskip("zstandard", reason="zstandard is not installed: pip install 'kvtier[lossless]'")

FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN = bytes.fromhex(json.loads((FOLDER / "codec_lossless-v1.json").read_text())["hex"])


def load_inputs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lossless_regenerate", FOLDER / "lossless_regenerate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


INPUTS = load_inputs()
ZERO = np.zeros(1, np.int64)
VALID = np.array([INPUTS.VALID_TOKENS], np.int32)


def decode(page: npt.NDArray[np.uint8]) -> list[npt.NDArray[np.generic]]:
    which = codec("lossless")
    out = [np.ones_like(a) for a in INPUTS.arrays()]
    pool = HotPool.of(INPUTS.SPEC, out, HotLayout.HND)
    which.decode(which.layout(INPUTS.SPEC), pool, ZERO, VALID, page, ZERO)
    return out


def test_golden_page() -> None:
    for got, exact in zip(decode(np.frombuffer(GOLDEN, np.uint8).copy()), INPUTS.arrays(), strict=True):
        if exact.ndim == 4:
            exact[:, :, INPUTS.VALID_TOKENS :] = 0
        assert got.tobytes() == exact.tobytes()


def test_planes_that_do_not_shrink_are_stored_as_they_are() -> None:
    spec, which = INPUTS.SPEC, codec("lossless")
    layout = which.layout(spec)
    noise = np.random.default_rng(0)
    arrays = [noise.integers(0, 256, a.nbytes, dtype=np.uint8).view(a.dtype).reshape(a.shape) for a in INPUTS.arrays()]
    arena = np.zeros(layout.cold_page_bytes, np.uint8)
    pool = HotPool.of(spec, arrays, HotLayout.HND)
    full = np.array([spec.page_tokens], np.int32)
    result = which.encode(layout, pool, ZERO, full, arena, ZERO, np.zeros(1, np.uint64))
    assert result.nbytes is not None
    assert result.nbytes[0] == layout.cold_page_bytes


@pytest.mark.parametrize("at", [0, 4, 20, 60, 80, len(GOLDEN) - 40])
def test_other_bytes_are_refused_or_decode_to_something(at: int) -> None:
    """Checksums stand before this; here nothing may crash or reach outside."""
    for value in (0x00, 0x7F, 0xFF):
        page = np.frombuffer(GOLDEN, np.uint8).copy()
        page[at : at + 4] = value
        try:
            decode(page)
        except CodecError as e:
            assert str(e)


def test_a_page_cut_short_is_refused() -> None:
    for size in (0, 10, 40, len(GOLDEN) // 2):
        with pytest.raises(CodecError):
            decode(np.frombuffer(GOLDEN, np.uint8)[:size].copy())


@pytest.mark.parametrize("planes", [1, 2, 4])
@pytest.mark.parametrize("elements", [0, 1, 15, 4097])
def test_native_planes_are_numpy_s(planes: int, elements: int) -> None:
    values = np.random.default_rng(elements).integers(0, 256, planes * elements, dtype=np.uint8)
    split, joined = np.zeros((planes, elements), np.uint8), np.zeros_like(values)
    _native.split_planes(values, split)
    assert (split == values.reshape(elements, planes).T).all()
    _native.join_planes(split, joined)
    assert (joined == values).all()


def test_planes_of_another_size_are_refused() -> None:
    values = np.zeros(12, np.uint8)
    for shape in [(3, 4), (2, 5), (8, 1)]:
        with pytest.raises(ValueError, match="planes"):
            _native.split_planes(values, np.zeros(shape, np.uint8))
        with pytest.raises(ValueError, match="planes"):
            _native.join_planes(np.zeros(shape, np.uint8), values)
    unaligned = np.zeros(13, np.uint8)[1:]
    _native.split_planes(unaligned, np.ones((2, 6), np.uint8))


def test_a_plane_that_shrinks_only_behind_its_sample_is_still_right() -> None:
    """What the first bytes of a plane say is a guess about its size, never about its bytes."""
    spec, which = PageSpec.mha(layers=1, kv_heads=4, head_dim=64, page_tokens=64, dtype=DType.BF16), codec("lossless")
    layout, noise = which.layout(spec), np.random.default_rng(0)
    arrays = [noise.integers(0, 1 << 16, (1, b.heads, b.tokens, b.dim), dtype=np.uint16) for b in spec.buffers]
    for array in arrays:
        array[:, 2:] = 0
    arena = np.zeros(layout.cold_page_bytes, np.uint8)
    pool = HotPool.of(spec, arrays, HotLayout.HND)
    full = np.array([64], np.int32)
    which.encode(layout, pool, ZERO, full, arena, ZERO, np.zeros(1, np.uint64))
    back = [np.ones_like(a) for a in arrays]
    which.decode(layout, HotPool.of(spec, back, HotLayout.HND), ZERO, full, arena, ZERO)
    assert all((a == b).all() for a, b in zip(arrays, back, strict=True))
