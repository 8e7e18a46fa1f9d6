"""Pages with buffers stored finer than their form says: bytes as the reference has them, for every form and shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash

from kvtier.codecs.registry import codec, codec_for_form
from kvtier.errors import CodecError, SpecError
from kvtier.hot import HotLayout, HotPool
from kvtier.kernels.nvfp4 import page_reference, reference
from kvtier.spec import BufferSpec, Coding, DType, PageSpec, Role, levels_bytes
from kvtier.testing.codecs import reference_parts
from tests.hot_pages import FORMS

SHAPES: dict[str, PageSpec] = {
    "GQA": PageSpec.mha(layers=2, kv_heads=2, head_dim=32, page_tokens=16, dtype=DType.BF16, rotary_dim=16),
    "FP8": PageSpec.mha(layers=2, kv_heads=2, head_dim=32, page_tokens=16, dtype=DType.FP8_E4M3, fp8_scale=0.75),
    "MLA and index": PageSpec.mla(
        layers=2, page_tokens=16, dtype=DType.FP16, latent_dim=32, rope_dim=16, index_layers=[1], index_page_bytes=99
    ),
    "odd widths and state": PageSpec(
        16, (BufferSpec(Role.K, 0, 2, 16, 48, DType.FP32), BufferSpec(Role.V, 0, 2, 16, 40, DType.FP32))
    ).with_buffers([BufferSpec(Role.STATE, 0, 1, 1, 50, DType.UINT8)]),
}


def hot_values(spec: PageSpec) -> list[Any]:
    rng = np.random.default_rng(5)
    out: list[Any] = []
    for b in spec.buffers:
        shape = (b.heads, b.tokens, b.dim)
        x = (rng.standard_normal(shape) + 9 * (np.arange(b.dim) % 7 == 3)).astype(np.float32)
        if b.dtype is DType.UINT8:
            out.append(rng.integers(0, 256, shape, dtype=np.uint8))
        elif b.dtype is DType.FP8_E4M3:
            out.append(reference.e4m3_codes(x))
        else:
            out.append(reference.from_float32(x, b.dtype.value))
    return out


def pool_of(spec: PageSpec, values: list[Any]) -> tuple[HotPool, list[Any]]:
    arrays = [
        v[None].copy() if b.tokens == 16 else v[None, :, 0].copy() for v, b in zip(values, spec.buffers, strict=True)
    ]
    return HotPool.of(spec, arrays, HotLayout.HND), arrays


@pytest.mark.parametrize("rotation", range(3))
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_are_those_of_the_reference(shape: str, form: tuple[str, dict[str, Any]], rotation: int) -> None:
    spec, values, valid = SHAPES[shape], hot_values(SHAPES[shape]), 13
    levels = tuple((n + rotation) % 3 for n in range(len(spec.buffers)))
    which = codec(form[0], **form[1])
    layout = which.finer_layout(spec, levels)
    pool, _ = pool_of(spec, values)
    arena, zero, lengths = (
        np.full(layout.cold_page_bytes, 0xA5, np.uint8),
        np.zeros(1, np.int64),
        np.array([valid], np.int32),
    )
    result = which.encode(layout, pool, zero, lengths, arena, zero, np.array([77], np.uint64))
    cold, refused = page_reference.encode_page(
        reference_parts(layout, values), valid, 16, layout.cold_page_bytes, layout.scale_table_offset
    )
    assert not refused and not result.refused[0]
    cold[layout.levels_offset : layout.levels_offset + len(levels)] = levels
    np.testing.assert_array_equal(arena, cold)
    assert result.checksums[0].tobytes() == xxhash.xxh3_128_digest(cold.tobytes(), 77)
    for part in layout.parts:
        level, b = levels[part.buffer], spec.buffers[part.buffer]
        if b.compressible and level:
            assert (part.coding, part.columns) == (Coding.TWO_FP4 if level == 1 else Coding.RAW, b.dim)

    # What a reader has: the form, the spec and the page's last bytes.
    end = layout.cold_page_bytes - levels_bytes(spec)
    found = tuple(arena[end : end + len(spec.buffers)].tolist())
    reader = codec_for_form(which.form | 0x100)
    back_pool, back = pool_of(spec, [np.ones_like(v) for v in values])
    reader.decode(reader.finer_layout(spec, found), back_pool, zero, lengths, arena, zero)
    expected = page_reference.decode_page(cold, reference_parts(layout, values), valid, 16, layout.scale_table_offset)
    for at, decoded in zip(layout.parts, expected, strict=True):
        got = back[at.buffer][0].reshape(values[at.buffer].shape)
        assert got[:, :, at.column : at.column + at.columns].tobytes() == decoded.tobytes()
        if levels[at.buffer] == 2 and spec.buffers[at.buffer].role.attention:
            np.testing.assert_array_equal(got[:, :valid], values[at.buffer][:, :valid])


def test_no_levels_is_the_form_itself() -> None:
    spec = SHAPES["GQA"]
    assert codec("nvfp4").finer_layout(spec, ()) == codec("nvfp4").layout(spec)
    with pytest.raises(SpecError, match="3 levels for a page of 4 buffers"):
        codec("nvfp4").finer_layout(spec, (0, 1, 2))
    pytest.importorskip("zstandard", reason="zstandard is not installed: pip install 'kvtier[lossless]'")
    with pytest.raises(CodecError, match="'lossless' are not stored finer"):
        codec("lossless").finer_layout(spec, (0, 1, 2, 0))
