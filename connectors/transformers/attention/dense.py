"""Families that keep keys and values per KV head: MHA, MQA and GQA."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

import torch
from transformers import DynamicCache

from kvtier.connectors.transformers.attention.family import (
    AttentionGeometry,
    Consumer,
    Family,
    FamilyKind,
    LayerQueries,
    LayerRows,
    filled,
    require,
    single,
)
from kvtier.connectors.transformers.attention.hooks import LayerCall, watch

ARCHITECTURES = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
)
"""Model types whose attention is built as below; each has its test."""


class DenseFamily(Family):
    """Queries are projected, normed per head where the model does so, and rotated by the model's own function. Layers
    with a sliding window are read and computed like the others; `visible` knows their window."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        config, architecture = self.config, str(self.config.model_type)
        for attn in self.layers:
            require(attn, architecture, "q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "scaling")
        heads, head_dim = int(config.num_attention_heads), int(self.layers[0].head_dim)
        # The cache's layers say which keep a window only: some configurations name a window that nothing uses.
        sliding = [bool(layer.is_sliding) for layer in self.new_cache().layers] or [False] * len(self.layers)
        self._rotate = sys.modules[type(self.layers[0]).__module__].apply_rotary_pos_emb
        self.geometry = AttentionGeometry(
            kind=FamilyKind.DENSE,
            architecture=architecture,
            layers=len(self.layers),
            query_heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            key_dim=head_dim,
            rotary_dim=head_dim,
            scales=tuple(float(attn.scaling) for attn in self.layers),
            windows=tuple(int(config.sliding_window) if slides else None for slides in sliding),
            index_groups=tuple((layer,) for layer in range(len(self.layers))),
            softcap=getattr(config, "attn_logit_softcapping", None),
        )

    def read(self, cache: DynamicCache, layer: int) -> LayerRows:
        held = filled(cache, layer)
        keys, values = single(held.keys), single(held.values)
        end, rows = int(held.get_seq_length()), keys.shape[1]
        return LayerRows(keys, values, torch.arange(end - rows, end, device=keys.device))

    def write(self, cache: DynamicCache, layer: int, rows: LayerRows) -> None:
        held = cache.layers[layer]
        keys, values = rows.keys[None], rows.values[None]
        if not held.is_initialized:
            held.lazy_initialization(keys, values)
        held.keys, held.values = keys, values
        if held.is_sliding:
            held.cumulative_length = int(rows.positions[-1]) + 1 if rows.rows else 0

    def sinks(self, layer: int) -> torch.Tensor | None:
        sinks = getattr(self.layers[layer], "sinks", None)
        return None if sinks is None else sinks.detach()

    def _hook(self, layer: int, consume: Consumer, hooks: ExitStack) -> None:
        attn = self.layers[layer]

        def done(call: LayerCall) -> None:
            projected = call.outputs["q_proj"]
            n = projected.shape[1]
            queries = projected.view(-1, n, self.geometry.query_heads, self.geometry.key_dim)
            if getattr(attn, "q_norm", None) is not None:
                with torch.no_grad():
                    queries = attn.q_norm(queries)
            queries = queries.transpose(1, 2)
            cos, sin = call.rotation()
            rotated, _ = self._rotate(queries, queries[:, :1], cos, sin)
            consume(layer, LayerQueries(single(rotated), call.positions(n).to(rotated.device), call.first_row))

        watch(attn, layer, {"q_proj": attn.q_proj}, done, hooks)
