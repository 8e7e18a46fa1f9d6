"""A random Llama, small enough that an engine starts in seconds and its cache fits in a test."""

from __future__ import annotations

import json
from pathlib import Path

LAYERS, HEADS, KV_HEADS, DIM, HIDDEN, INNER, VOCAB = 4, 4, 2, 16, 64, 128, 512


def write_model(folder: Path, *, seed: int, dim: int = DIM) -> Path:
    """Write config.json and model.safetensors into `folder`. Weights are BF16, scaled so that greedy tokens vary.
    dim: of a head."""
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 0.2) -> torch.Tensor:
        return (torch.randn(*shape, generator=draw) * scale).to(torch.bfloat16)

    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    weights = {
        "model.embed_tokens.weight": normal(VOCAB, HIDDEN, scale=1.0),
        "lm_head.weight": normal(VOCAB, HIDDEN, scale=0.5),
        "model.norm.weight": ones.clone(),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        weights |= {
            at + "self_attn.q_proj.weight": normal(HEADS * dim, HIDDEN),
            at + "self_attn.k_proj.weight": normal(KV_HEADS * dim, HIDDEN),
            at + "self_attn.v_proj.weight": normal(KV_HEADS * dim, HIDDEN),
            at + "self_attn.o_proj.weight": normal(HIDDEN, HEADS * dim),
            at + "mlp.gate_proj.weight": normal(INNER, HIDDEN),
            at + "mlp.up_proj.weight": normal(INNER, HIDDEN),
            at + "mlp.down_proj.weight": normal(HIDDEN, INNER),
            at + "input_layernorm.weight": ones.clone(),
            at + "post_attention_layernorm.weight": ones.clone(),
        }
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": dim,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "max_position_embeddings": 8192,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder
