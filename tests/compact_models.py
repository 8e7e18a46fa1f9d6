"""Tiny random models of the attention families, and contexts for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 128
_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 2,
}
_DSA = {"index_topk": 1024, "index_n_heads": 4, "index_head_dim": 32}


def tiny(name: str, *, seed: int = 0, attention: str = "sdpa", **changes: Any) -> Any:
    """A model of 4 layers with random weights, float32, by its family's name."""
    torch.manual_seed(seed)
    config: Any
    if name == "llama":
        config = transformers.LlamaConfig(**{**_COMMON, **changes})
    elif name == "qwen3":
        config = transformers.Qwen3Config(**{**_COMMON, "head_dim": 32, **changes})
    elif name == "gemma3":
        sliding = {"sliding_window": 24, "sliding_window_pattern": 2, "head_dim": 32, "query_pre_attn_scalar": 32}
        config = transformers.Gemma3TextConfig(**{**_COMMON, **sliding, **changes})
    elif name == "gpt_oss":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24, "head_dim": 32}
        config = transformers.GptOssConfig(**{**_COMMON, **experts, **changes})
    elif name == "deepseek_v3":
        config = transformers.DeepseekV3Config(**{**_COMMON, **_MLA, **changes})
    elif name == "glm_moe_dsa":
        shares = {
            "indexer_types": ["full", "full", "shared", "shared"],
            "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2,
        }
        config = transformers.GlmMoeDsaConfig(**{**_COMMON, **_MLA, **_DSA, **shares, **changes})
    else:
        raise ValueError(name)
    config._attn_implementation = attention
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # the usual initialisation makes attention nearly uniform, which hides errors
        for n, p in model.named_parameters():
            if p.dim() > 1 and "embed" not in n:
                p.mul_(4.0)
    return model.eval()


def context(tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(t) for t in torch.randint(2, VOCABULARY, (tokens,), generator=generator)]
