"""Which transformers models have pages, and what tells two models apart. Tiny random models of every cache shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvtier.connectors.transformers import check_model_name, page_spec_of, weights_fingerprint_of
from kvtier.errors import ConfigError, SpecError
from kvtier.spec import DType, PageSpec

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def llama(seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, **changes})).eval()


@pytest.mark.parametrize(
    ("config", "heads", "dim"),
    [
        (transformers.LlamaConfig(**SMALL), 2, 16),
        (transformers.LlamaConfig(**{**SMALL, "num_key_value_heads": 1, "head_dim": 32}), 1, 32),
        (transformers.Qwen3Config(**SMALL, head_dim=128), 2, 128),
    ],
)
def test_geometry_of_plain_decoders(config: Any, heads: int, dim: int) -> None:
    spec = page_spec_of(config, page_tokens=64, dtype=DType.BF16)
    assert spec == PageSpec.mha(layers=2, kv_heads=heads, head_dim=dim, page_tokens=64, dtype=DType.BF16)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (transformers.DeepseekV3Config(num_hidden_layers=2), "MLA"),
        (transformers.Gemma3TextConfig(num_hidden_layers=6), "DynamicSlidingWindowLayer"),
        (transformers.GptOssConfig(num_hidden_layers=2), "DynamicSlidingWindowLayer"),
        (transformers.Qwen3NextConfig(num_hidden_layers=4), "Linear"),
        (transformers.T5Config(), "encoder-decoder"),
        (
            transformers.LlamaConfig(
                **SMALL, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
            ),
            "dynamic",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value.model_type,
)
def test_other_caches_are_refused_by_name(config: Any, named: str) -> None:
    with pytest.raises(SpecError, match=named) as refused:
        page_spec_of(config, page_tokens=64, dtype=DType.BF16)
    assert config.model_type in str(refused.value)


def test_a_local_path_is_no_name(tmp_path: Path) -> None:
    assert check_model_name("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    for name in ("", "  ", "/models/x", "./x", "~/x", str(tmp_path)):
        with pytest.raises(ConfigError, match="model_name"):
            check_model_name(name)


def test_the_fingerprint_follows_the_weights_not_the_place(tmp_path: Path) -> None:
    model = llama()
    fingerprint = weights_fingerprint_of(model)
    for folder in ("a", "b"):
        model.save_pretrained(tmp_path / folder)
        loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / folder)
        assert weights_fingerprint_of(loaded) == fingerprint
    assert weights_fingerprint_of(llama(seed=1)) != fingerprint
    assert weights_fingerprint_of(llama().to(torch.bfloat16)) != fingerprint
    assert weights_fingerprint_of(llama(rms_norm_eps=1e-5)) != fingerprint
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 3] += 1.0
    assert weights_fingerprint_of(model) != fingerprint


def test_weights_that_are_not_loaded_are_named() -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    with pytest.raises(ConfigError, match=r"embed_tokens.* is not loaded"):
        weights_fingerprint_of(model)
