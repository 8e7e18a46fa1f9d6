"""Rotary columns and FP8 scales from a model's configuration, through the connectors into the pages' spec."""

from __future__ import annotations

import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier.build import open_codec
from kvtier.config import Config, parse_config
from kvtier.errors import SpecError
from kvtier.model_config import rotary_dim_of
from kvtier.spec import Coding, DType, Role


@pytest.mark.parametrize(
    ("config", "head_dim", "columns"),
    [
        ({}, 128, 0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 128, 0),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, 256, 64),
        ({"rope_scaling": None, "partial_rotary_factor": 0.5}, 64, 32),
        ({"rotary_pct": 0.25}, 64, 16),
        ({"rotary_dim": 64}, 256, 64),
        ({"partial_rotary_factor": 1.0}, 64, 0),
        ({"rotary_dim": 64}, 64, 0),
        ({"partial_rotary_factor": 0.75}, 96, 0),  # 72 columns, no multiple of 16
        ({"rope_parameters": {"a": {"partial_rotary_factor": 0.25}, "b": {"partial_rotary_factor": 0.5}}}, 64, 0),
        ({"rope_parameters": {"a": {"partial_rotary_factor": 0.25}, "b": {"partial_rotary_factor": 0.25}}}, 64, 16),
    ],
)
def test_rotary_columns(config: dict[str, Any], head_dim: int, columns: int) -> None:
    assert rotary_dim_of(SimpleNamespace(**config), head_dim) == columns


def block(**options: Any) -> Config:
    methods = [{"algorithm": "quantization_for_cold_page", **options}]
    return parse_config({"kv_cache_compression_config": methods, "tiers": [{"type": "host", "capacity": "1MiB"}]})


def test_a_transformers_model_that_rotates_a_part_of_its_keys() -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install 'kvtier[transformers]'"
    )
    from kvtier.connectors.transformers import page_spec_of

    config = transformers.GPTNeoXConfig(
        num_hidden_layers=2, hidden_size=128, num_attention_heads=2, intermediate_size=64, vocab_size=64
    )
    spec = page_spec_of(config, page_tokens=16, dtype=DType.BF16)
    assert [b.rotary for b in spec.buffers] == [(0, 16), (0, 0)] * 2
    kept = [
        p for p in open_codec(block(skip_rope_quantization=True), spec).layout(spec).parts if p.coding is Coding.RAW
    ]
    assert [(p.buffer, p.column, p.columns) for p in kept] == [(0, 0, 16), (2, 0, 16)]
    whole = page_spec_of(
        transformers.LlamaConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=1, num_key_value_heads=1),
        page_tokens=16,
        dtype=DType.BF16,
    )
    with pytest.raises(SpecError, match="skip_rope_quantization"):
        open_codec(block(skip_rope_quantization=True), whole).layout(whole)


def fp8_pool(torch: Any, **change: Any) -> Any:
    fields = {
        "kv_cache_layout": "nhd",
        "page_size": 16,
        "dtype": torch.float8_e4m3fn,
        "store_dtype": torch.uint8,
        "k_buffer": [torch.zeros(32, 2, 64, dtype=torch.uint8) for _ in range(2)],
        "v_buffer": [torch.zeros(32, 2, 64, dtype=torch.uint8) for _ in range(2)],
    }
    return type("MHATokenToKVPool", (SimpleNamespace,), {})(**{**fields, **change})


def test_an_sglang_pool_in_fp8_has_the_checkpoints_scales_and_the_models_rotary_columns(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvtier[torch]'")
    from kvtier.connectors.sglang.identity import cache_values
    from kvtier.connectors.sglang.pools import DevicePool
    from kvtier.errors import EngineError

    raw = struct.pack("<4f", 0.5, 2.0, 0.25, 3.0)
    names = [f"model.layers.{n}.self_attn.{x}_proj.{x}_scale" for n in (4, 5) for x in "kv"]
    tensors = ",".join(
        f'"{name}":{{"dtype":"F32","shape":[],"data_offsets":[{4 * i},{4 * i + 4}]}}' for i, name in enumerate(names)
    )
    head = f"{{{tensors}}}".encode()
    (tmp_path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + raw)
    model = SimpleNamespace(
        model_path=str(tmp_path), head_dim=64, hf_text_config=SimpleNamespace(partial_rotary_factor=0.25)
    )
    args = SimpleNamespace(kv_cache_dtype="auto", load_format="auto")
    pool = fp8_pool(torch, start_layer=4)  # as on the second of two pipeline stages
    spec = DevicePool.of(pool, 16, **cache_values(model, args, pool)).spec
    assert [b.dtype for b in spec.buffers] == [DType.FP8_E4M3] * 4
    assert [b.fp8_scale for b in spec.buffers] == [0.5, 2.0, 0.25, 3.0]
    assert [b.rotary for b in spec.buffers] == [(0, 16) if b.role is Role.K else (0, 0) for b in spec.buffers]

    dummy = SimpleNamespace(kv_cache_dtype="fp8_e4m3", load_format="dummy")
    unscaled = DevicePool.of(pool, 16, **cache_values(model, dummy, pool)).spec
    assert {b.fp8_scale for b in unscaled.buffers} == {1.0}
    wide = fp8_pool(torch, dtype=torch.bfloat16, store_dtype=torch.bfloat16)
    assert "fp8_scales" not in cache_values(model, args, wide)
    with pytest.raises(EngineError, match="dtype float8_e5m2"):
        DevicePool.of(fp8_pool(torch, dtype=torch.float8_e5m2), 16)
    with pytest.raises(EngineError, match="quantized as 'nvfp4'"):
        DevicePool.of(fp8_pool(torch, is_quantized_kv_cache=True, quant_method=SimpleNamespace(name="nvfp4")), 16)


def test_fp8_pages_of_an_sglang_pool_come_back() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvtier[torch]'")
    from kvtier.connectors.sglang.pools import DevicePool

    pool = fp8_pool(torch)
    generator = torch.Generator().manual_seed(0)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.copy_(torch.randn(buffer.shape, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8))
    exact = [b.clone() for b in (*pool.k_buffer, *pool.v_buffer)]
    device = DevicePool.of(pool, 16, fp8_scales={Role.K: {0: 3.3}})
    codec = open_codec(block(), device.spec)
    layout, ids, valid = codec.layout(device.spec), np.arange(2, dtype=np.int64), np.full(2, 16, np.int32)
    arena, offsets = np.zeros(2 * layout.cold_page_bytes, np.uint8), ids * layout.cold_page_bytes
    assert not codec.encode(layout, device.hot, ids, valid, arena, offsets, np.zeros(2, np.uint64)).refused.any()
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.zero_()
    codec.decode(layout, device.hot, ids, valid, arena, offsets)
    for got, expected in zip((*pool.k_buffer, *pool.v_buffer), exact, strict=True):
        x, y = (t.view(torch.float8_e4m3fn).float() for t in (got, expected))
        assert 0.01 < float((x - y).norm() / y.norm()) < 0.12
