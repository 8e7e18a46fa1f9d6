"""Random models whose caches are not plain: latent rows (MLA), and a sliding window in every other layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
WINDOW = 33  # tokens


def write_latent(folder: Path) -> Path:
    """A DeepSeek-V2 without experts, of 3 layers; rows of 32 + 16 values."""
    from transformers import DeepseekV2Config

    config = DeepseekV2Config(
        **COMMON,
        num_hidden_layers=3,
        num_key_value_heads=4,
        first_k_dense_replace=3,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        kv_lora_rank=32,
        q_lora_rank=None,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
    )
    rope = {
        "rope_theta": 10000.0,
        "rope_type": "yarn",
        "type": "deepseek_yarn",  # the only rotary embedding of such models that SGLang has for CPUs
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    }
    return _write(folder, config, rope_parameters=rope, rope_scaling=rope, moe_layer_freq=1)


def write_windowed(folder: Path) -> Path:
    """An OLMo 3 of 4 layers, told to keep its windows in a pool of their own."""
    from transformers import Olmo3Config

    config = Olmo3Config(
        **COMMON,
        num_hidden_layers=4,
        num_key_value_heads=2,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    rope = {"rope_theta": 10000.0, "rope_type": "default"}
    return _write(folder, config, rope_parameters=rope, is_hybrid_swa=True, hybrid_layer_pattern=[1, 0, 1, 0])


def _write(folder: Path, config: Any, **change: Any) -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.get_input_embeddings().weight.data.mul_(4)
    model.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}, indent=1))
    return folder
