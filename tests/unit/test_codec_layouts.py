"""Golden layouts: sizes and offsets of cold pages, fixed by the format."""

from __future__ import annotations

import pytest

from kvtier.spec import BufferSpec, ColdLayout, DType, GlobalScale, PageSpec, Role, _tell_lossless


def mha(layers: int, heads: int, dim: int, tokens: int, dtype: DType = DType.BF16) -> PageSpec:
    return PageSpec.mha(layers=layers, kv_heads=heads, head_dim=dim, page_tokens=tokens, dtype=dtype)


def mla(tokens: int, dims: dict[int, list[BufferSpec]], dtype: DType, width: int = 576) -> PageSpec:
    """One latent buffer per layer, followed by the layer's other buffers."""
    buffers = []
    for layer, others in dims.items():
        buffers += [BufferSpec(Role.LATENT, layer, 1, tokens, width, dtype), *others]
    return PageSpec(tokens, tuple(buffers))


def stored(role: Role, layer: int, size: int) -> BufferSpec:
    return BufferSpec(role, layer, 1, 1, size, DType.UINT8)


def identity(spec: PageSpec) -> ColdLayout:
    return ColdLayout.of(spec, quantize=True, global_scale=GlobalScale.IDENTITY)


def glm(layers: int, index_layers: int) -> PageSpec:
    index = {n: [stored(Role.INDEX_KEY, n, 8448)] if n < index_layers else [] for n in range(layers)}
    return mla(64, index, DType.FP8_E4M3)


@pytest.mark.parametrize(
    ("spec", "hot_bytes", "cold_bytes"),
    [
        (mha(1, 1, 32, 5), 640, 192),
        (mha(1, 4, 128, 5), 10_240, 2_880),
        (mha(1, 1, 16, 64), 4_096, 1_152),
        (mla(64, {0: [stored(Role.INDEX_KEY, 0, 8448)]}, DType.FP8_E4M3), 45_312, 29_184),
        (mla(5, {0: [stored(Role.STATE, 0, 68), stored(Role.OPAQUE, 0, 7)]}, DType.BF16, 32), 395, 176),
        (mha(36, 8, 128, 32), 4_718_592, 1_327_104),
        (mha(36, 8, 128, 32, DType.FP8_E4M3), 2_359_296, 1_327_104),
        (mha(16, 2, 256, 64, DType.FP8_E4M3), 1_048_576, 589_824),
        (glm(79, 22), 3_098_112, 1_824_000),
        (glm(61, 61), 61 * 45_312, 1_780_224),
    ],
    ids=[
        "1x5x32",
        "4x5x128",
        "1x64x16",
        "MLA + index",
        "MLA + lossless",
        "Qwen3-8B",
        "Qwen3-8B FP8",
        "Qwen3.5-397B",
        "GLM-5.2",
        "DeepSeek-V3.2",
    ],
)
def test_sizes(spec: PageSpec, hot_bytes: int, cold_bytes: int) -> None:
    assert spec.hot_page_bytes == hot_bytes
    assert identity(spec).cold_page_bytes == cold_bytes


def offsets(layout: ColdLayout) -> tuple[list[int], list[int]]:
    return [b.data_offset for b in layout.parts], [b.scale_offset for b in layout.parts]


def test_offsets() -> None:
    assert offsets(identity(mha(1, 1, 32, 5))) == ([0, 80], [160, 170])
    assert offsets(identity(mha(1, 4, 128, 5))) == ([0, 1280], [2560, 2720])
    assert offsets(identity(mla(64, {0: [stored(Role.INDEX_KEY, 0, 8448)]}, DType.FP8_E4M3))) == (
        [0, 20_736],
        [18_432, -1],
    )
    lossless = mla(5, {0: [stored(Role.STATE, 0, 68), stored(Role.OPAQUE, 0, 7)]}, DType.BF16, 32)
    assert offsets(identity(lossless)) == ([0, 90, 158], [80, -1, -1])


def test_the_table_of_global_scales_follows_the_last_record() -> None:
    layout = ColdLayout.of(mha(36, 8, 128, 32), quantize=True, global_scale=GlobalScale.PAGE)
    assert (layout.scale_table_offset, layout.scale_table_bytes) == (1_327_104, 72)
    assert layout.cold_page_bytes == 1_327_184


def test_a_head_dim_that_does_not_fit_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    _tell_lossless.cache_clear()
    for _ in range(2):
        mha(3, 2, 40, 4)
    mha(1, 2, 32, 4)
    (told,) = caplog.records
    assert told.message.startswith("dim = 40:") and "losslessly" in told.message and "multiples of 16" in told.message


def test_a_head_dim_that_does_not_fit_is_stored_whole() -> None:
    layout = ColdLayout.of(mha(1, 2, 40, 4), quantize=True)
    assert [b.compressed for b in layout.parts] == [False, False]
    assert layout.scale_table_offset == -1
    assert layout.cold_page_bytes == 2 * 2 * 4 * 40 * 2
