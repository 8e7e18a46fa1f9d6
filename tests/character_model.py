"""Tiny models of random weights whose tokens are characters, for tests of commands that take a model's folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers


def write_character_model(folder: Path, *, hidden: int, heads: int, kv_heads: int, head_dim: int) -> Path:
    """Two Llama layers and a tokenizer of one token per byte, in `folder`, which is returned."""
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=hidden, intermediate_size=32, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, max_position_embeddings=4096, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    words = {chr(n): n for n in range(256)} | {"?": 299}
    (folder / "tokenizer.json").write_text(
        json.dumps({
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(?m)."}, "behavior": "Isolated", "invert": False},
            "post_processor": None, "decoder": None, "model": {"type": "WordLevel", "vocab": words, "unk_token": "?"},
        })
    )  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder
