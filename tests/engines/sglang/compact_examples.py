"""Compacted prefixes of tiny models, and what an engine is told of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvtier.compression.compaction.artefact import CompactPrefix
from kvtier.compression.compaction.prefix import Compaction, LayerSelection, Recipe

TOKENS = 200
CONTEXT = [(37 + i * 4) % 500 + 5 for i in range(TOKENS)]


def model_of(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def drawn(seed: int, rows: int, heads: int = 1) -> LayerSelection:
    """As many rows for each head, each another set."""
    draw = torch.Generator().manual_seed(seed)
    return LayerSelection(tuple(torch.randperm(TOKENS, generator=draw)[:rows].sort().values for _ in range(heads)))


def compact(folder: Path, path: Path, layers: Sequence[LayerSelection], model: Any = None) -> CompactPrefix:
    """A prefix of `folder`'s model that keeps `layers` of the context, written to `path`."""
    from kvtier.connectors.transformers.compaction import compacted, identity_of, prefill

    model = model_of(folder) if model is None else model
    recipe = Recipe("random", 1.0 - len(layers[0].kept[0]) / TOKENS, seed=3)
    prefix = compacted(
        identity_of(model, "tiny", folder=folder),
        CONTEXT,
        prefill(model, CONTEXT),
        Compaction(recipe, TOKENS, tuple(layers)),
    )
    prefix.save(path)
    return prefix


def latent_model(folder: Path, *, latent: int = 32, rotary: int = 16, indexer_types: Sequence[str] = ()) -> Path:
    """A GLM with sparse attention, 4 layers, or without `indexer_types` a DeepSeek-V3; random weights, float32."""
    import transformers

    shape = {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 4096,
        "initializer_range": 0.2, "tie_word_embeddings": False, "q_lora_rank": 24, "kv_lora_rank": latent,
        "qk_rope_head_dim": rotary, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
        "first_k_dense_replace": 4,
    }  # fmt: skip
    config: Any
    rope: dict[str, Any] = {
        "rope_theta": 10000.0, "rope_type": "yarn", "type": "deepseek_yarn", "factor": 4.0,
        "original_max_position_embeddings": 1024, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
        "mscale_all_dim": 0.707,
    }  # fmt: skip
    if indexer_types:
        config = transformers.GlmMoeDsaConfig(
            **shape,
            head_dim=rotary,
            index_topk=2048,
            index_n_heads=4,
            index_head_dim=128,
            indexer_types=list(indexer_types),
            mlp_layer_types=["dense"] * 4,
            indexer_rope_interleave=True,
        )
    else:
        config = transformers.DeepseekV3Config(**shape, rope_parameters=rope, moe_layer_freq=1)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.get_input_embeddings().weight.data.mul_(4)
    model.save_pretrained(folder)
    if not indexer_types:  # where SGLang looks for it
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "rope_scaling": rope}))
    return folder
