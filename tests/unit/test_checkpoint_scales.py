"""Global scales of a checkpoint: read from safetensors files, stored in every page, part of the identity."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.build import open_codec
from kvtier.codecs.checkpoint_scales import CheckpointScales
from kvtier.codecs.registry import codec, codec_for_form
from kvtier.config import parse_config
from kvtier.errors import CodecError, ConfigError
from kvtier.hot import HotLayout, HotPool
from kvtier.kernels.nvfp4 import page_reference, reference
from kvtier.mover import policy_of
from kvtier.spec import DType, PageSpec
from kvtier.testing.codecs import reference_parts

SCALES = CheckpointScales({0: 1 / 0.0123, 1: 1 / 0.04}, {0: 1 / 0.0007, 1: 1 / 0.01})


def write(path: Path, tensors: Mapping[str, tuple[str, list[int], bytes]]) -> Path:
    """A safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(raw for _, _, raw in tensors.values()))
    return path


def scales(layers: int, prefix: str = "model.", **numbers: float) -> dict[str, tuple[str, list[int], bytes]]:
    out: dict[str, tuple[str, list[int], bytes]] = {}
    for n in range(layers):
        for role in ("k", "v"):
            value = numbers.get(f"{role}{n}", 0.01 * (n + 1))
            name = f"{prefix}layers.{n}.self_attn.{role}_proj.{role}_scale"
            out[name] = ("F32", [1], struct.pack("<f", value))
    return out


def spec(dtype: DType = DType.BF16, layers: int = 2, rotary: int = 0, fp8_scale: float = 1.0) -> PageSpec:
    return PageSpec.mha(
        layers=layers, kv_heads=2, head_dim=48, page_tokens=16, dtype=dtype, rotary_dim=rotary, fp8_scale=fp8_scale
    )


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_scales_are_read_from_every_file_of_a_folder(tmp_path: Path, prefix: str) -> None:
    both = scales(2, prefix)
    names = list(both)
    other = {f"{prefix}layers.0.self_attn.k_proj.weight": ("BF16", [4, 4], bytes(32))}
    # A name that only looks like one: no scale of the cache.
    other[f"{prefix}layers.0.self_attn.k_proj.v_scale"] = ("F32", [], struct.pack("<f", 9))
    write(tmp_path / "model-00001.safetensors", {**other, **{n: both[n] for n in names[:3]}})
    write(tmp_path / "model-00002.safetensors", {n: both[n] for n in names[3:]})
    got = CheckpointScales.load(tmp_path)
    for mine in (got.key, got.value):
        assert mine == {n: float(np.float32(1) / np.float32(0.01 * (n + 1))) for n in range(2)}


@pytest.mark.parametrize(
    ("dtype", "raw", "value"),
    [
        ("F32", struct.pack("<f", 0.25), 0.25),
        ("F16", struct.pack("<e", 0.5), 0.5),
        ("BF16", struct.pack("<f", 0.125)[2:], 0.125),
        ("F64", struct.pack("<d", 2.0), 2.0),
    ],
)
def test_scales_come_in_every_float_type(tmp_path: Path, dtype: str, raw: bytes, value: float) -> None:
    path = write(tmp_path / "s.safetensors", {"model.layers.7.self_attn.k_proj.k_scale": (dtype, [], raw)})
    assert CheckpointScales.load(path).key == {7: 1 / value}


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda p: None, "there is no safetensors file; give"),
        (lambda p: write(p / "a.safetensors", {}), "holds no scales .* use global_scale: page"),
        (lambda p: write(p / "a.safetensors", scales(1, k0=0.0)), "k_scale is 0.0; a scale must be a positive number"),
        (lambda p: write(p / "a.safetensors", scales(1, v0=-1.0)), "v_scale is -1.0"),
        (lambda p: write(p / "a.safetensors", scales(1, v0=float("nan"))), "v_scale is nan"),
        (lambda p: write(p / "a.safetensors", scales(1, v0=float("inf"))), "v_scale is inf"),
        (
            lambda p: write(p / "a.safetensors", {"layers.0.self_attn.k_proj.k_scale": ("F32", [2], bytes(8))}),
            r"is F32 of shape \[2\]; a scale is one number",
        ),
        (
            lambda p: (write(p / "a.safetensors", scales(1)), write(p / "b.safetensors", scales(1, k0=3.0))),
            "there twice, with different values",
        ),
        (lambda p: (p / "a.safetensors").write_bytes(b"\xff" * 64), "not a safetensors file"),
        (lambda p: (p / "a.safetensors").write_bytes(b"\x04" + bytes(7) + b"{]{]"), "not a safetensors file"),
    ],
)
def test_what_is_no_set_of_scales_is_named(tmp_path: Path, made: Any, message: str) -> None:
    made(tmp_path)
    with pytest.raises(ConfigError, match=message):
        CheckpointScales.load(tmp_path)


def test_a_layer_without_a_scale_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no scale for K of layer 2 .* use global_scale: page"):
        SCALES.of(spec(layers=3))
    with pytest.raises(ConfigError, match="no scale for K or V of layer 0"):
        SCALES.of(PageSpec.mla(layers=1, page_tokens=4, dtype=DType.BF16))
    large = CheckpointScales({0: 1 / 17}, {0: 1.0})
    assert large.of(spec(layers=1)) == {0: 1 / 17, 1: 1.0}
    with pytest.raises(ConfigError, match="scale of k of layer 0 is 17, above 16: a fp16 cache could not hold"):
        large.of(spec(DType.FP16, layers=1))


@pytest.mark.parametrize("rope", ["nvfp4", "2fp4", "fp8", "keep"])
@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16, DType.FP32, DType.FP8_E4M3])
def test_pages_are_those_of_the_reference_and_come_back_without_the_checkpoint(
    isa: str, dtype: DType, rope: str
) -> None:
    page = spec(dtype, rotary=16, fp8_scale=3.3 if dtype is DType.FP8_E4M3 else 1.0)
    which = codec("nvfp4", global_scale="checkpoint", rope=rope, scales=SCALES)
    layout = which.layout(page)
    rng = np.random.default_rng(3)
    values = []
    for b in page.buffers:
        x = (rng.standard_normal((b.heads, b.tokens, b.dim)) * np.exp2(rng.integers(-5, 6, (2, 16, 1)))).astype(
            np.float32
        )
        fp8 = dtype is DType.FP8_E4M3
        values.append(reference.e4m3_codes(x) if fp8 else reference.from_float32(x, dtype.value))
    pool = HotPool.of(page, [v[None] for v in values], HotLayout.HND)
    arena, zero, valid = np.zeros(layout.cold_page_bytes, np.uint8), np.zeros(1, np.int64), np.array([13], np.int32)
    assert not which.encode(layout, pool, zero, valid, arena, zero, np.zeros(1, np.uint64)).refused.any()
    cold, refused = page_reference.encode_page(
        reference_parts(layout, values), 13, 16, layout.cold_page_bytes, layout.scale_table_offset
    )
    assert not refused
    np.testing.assert_array_equal(arena, cold)
    stored = arena[layout.scale_table_offset :][:16].view("<f4")
    assert stored[0] == np.float32(SCALES.key[0])

    reader = codec_for_form(which.form)
    back = [np.ones_like(v)[None] for v in values]
    reader.decode(reader.layout(page), HotPool.of(page, back, HotLayout.HND), zero, valid, arena, zero)
    expected = page_reference.decode_page(cold, reference_parts(layout, values), 13, 16, layout.scale_table_offset)
    for at, part in zip(layout.parts, expected, strict=True):
        assert back[at.buffer][0][:, :, at.column : at.column + at.columns].tobytes() == part.tobytes()
    # The stored scale is used again, so that a second trip changes nothing (two components are the exception).
    again = np.zeros_like(arena)
    which.encode(layout, HotPool.of(page, back, HotLayout.HND), zero, valid, again, zero, np.zeros(1, np.uint64))
    if rope != "2fp4" and dtype is not DType.FP8_E4M3:
        np.testing.assert_array_equal(arena, again)


def test_pages_of_other_scales_are_never_met() -> None:
    other = CheckpointScales({**SCALES.key, 1: 1.0}, SCALES.value)
    encoded = {policy_of(codec("nvfp4", global_scale="checkpoint", scales=s)).encoded() for s in (SCALES, other)}
    encoded |= {policy_of(codec("nvfp4", global_scale="checkpoint")).encoded(), policy_of(codec("nvfp4")).encoded()}
    assert len(encoded) == 4
    assert CheckpointScales(SCALES.value, SCALES.key).digest != SCALES.digest
    assert CheckpointScales(dict(SCALES.key), dict(SCALES.value)).digest == SCALES.digest


def test_a_codec_without_scales_only_reads() -> None:
    which = codec("nvfp4", global_scale="checkpoint")
    layout = which.layout(spec())
    pool = HotPool.of(spec(), [np.zeros((1, 2, 16, 48), np.uint16)] * 4, HotLayout.HND)
    arena, zero = np.zeros(layout.cold_page_bytes, np.uint8), np.zeros(1, np.int64)
    with pytest.raises(CodecError, match="without scales"):
        which.encode(layout, pool, zero, np.array([16], np.int32), arena, zero, np.zeros(1, np.uint64))
    with pytest.raises(CodecError, match="the global scale of buffer 0 is out of range"):
        which.decode(layout, pool, zero, np.array([16], np.int32), arena, zero)
    with pytest.raises(ConfigError, match="scales belong to global_scale = 'checkpoint', not to 'page'"):
        codec("nvfp4", scales=SCALES)


def test_the_configuration_names_the_checkpoint(tmp_path: Path) -> None:
    def block(**options: Any) -> Any:
        methods = [{"algorithm": "quantization_for_cold_page", **options}]
        return parse_config({"kv_cache_compression_config": methods, "tiers": [{"type": "host", "capacity": "1MiB"}]})

    write(tmp_path / "model.safetensors", scales(2))
    config = block(global_scale="checkpoint", scale_checkpoint_path=str(tmp_path))
    which = open_codec(config, spec())
    assert which.config["scales"] == CheckpointScales.load(tmp_path).digest
    for options in ({"global_scale": "checkpoint"}, {"scale_checkpoint_path": str(tmp_path)}):
        with pytest.raises(ConfigError, match="belong together"):
            block(**options)
    with pytest.raises(ConfigError, match="global_scale belongs to quant = 'nvfp4', not to 'k8v4'"):
        block(quant="k8v4", global_scale="checkpoint", scale_checkpoint_path=str(tmp_path))
