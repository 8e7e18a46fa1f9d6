"""Families of latent attention (MLA), in the absorbed form: every head reads one shared row per token.

A head's score is ``q_nope . (W_UK c) + q_rope . k_rope``, which is ``[q_nope W_UK ; q_rope] . [c ; k_rope]``, and its
output ``W_UV`` times the same mixture of latents ``c``. The absorbed query is made in fp32 or better.
"""

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
from kvtier.errors import ConfigError, SpecError
from kvtier.kernels.compaction.attention import compute_dtype

ARCHITECTURES = ("deepseek_v3",)
"""Model types whose attention is built as below; each has its test."""


class LatentFamily(Family):
    """The cache's `keys` are normed latents ``[1, 1, rows, latent]``, its `values` rotary keys ``[1, 1, rows,
    rotary]``."""

    kind = FamilyKind.LATENT

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        config, architecture = self.config, str(self.config.model_type)
        for attn in self.layers:
            require(attn, architecture, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj", "scaling")
            if not attn.kv_b_proj.weight.is_floating_point():
                raise ConfigError(f"{architecture}: kv_b_proj holds {attn.kv_b_proj.weight.dtype}: load it unquantized")
        module = sys.modules[type(self.layers[0]).__module__]
        interleaved = getattr(config, "rope_interleave", True)
        self._rotate = module.apply_rotary_pos_emb_interleave if interleaved else module.apply_rotary_pos_emb
        self._nope_dim, self._output_dim = int(config.qk_nope_head_dim), int(config.v_head_dim)
        self.latent_dim, rotary_dim = int(config.kv_lora_rank), int(config.qk_rope_head_dim)
        layers = len(self.layers)
        self.geometry = AttentionGeometry(
            kind=self.kind,
            architecture=architecture,
            layers=layers,
            query_heads=int(config.num_attention_heads),
            kv_heads=1,
            key_dim=self.latent_dim + rotary_dim,
            rotary_dim=rotary_dim,
            scales=tuple(float(attn.scaling) for attn in self.layers),
            windows=(None,) * layers,
            index_groups=self._index_groups(),
            index_topk=self._index_topk(),
        )

    def read(self, cache: DynamicCache, layer: int) -> LayerRows:
        held = filled(cache, layer)
        keys = torch.cat([single(held.keys), single(held.values)], dim=-1)
        index_keys = getattr(held, "indexer_keys", None)
        return LayerRows(
            keys,
            keys[..., : self.latent_dim],
            torch.arange(keys.shape[1], device=keys.device),
            None if index_keys is None else single(index_keys),
        )

    def write(self, cache: DynamicCache, layer: int, rows: LayerRows) -> None:
        latent = rows.keys[..., : self.latent_dim]
        if rows.values.data_ptr() != latent.data_ptr() and not torch.equal(rows.values, latent):
            raise SpecError("values differ from the keys' latents: a cache of MLA rows has no place for fitted values")
        held = cache.layers[layer]
        keys, rotary = latent[None], rows.keys[None, ..., self.latent_dim :]
        if not held.is_initialized:
            held.lazy_initialization(keys, rotary)
        held.keys, held.values = keys, rotary
        if rows.index_keys is not None:
            if not held.is_indexer_initialized:
                held.lazy_initialization_indexer(rows.index_keys[None])
            held.indexer_keys = rows.index_keys[None]

    def absorption(self, layer: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """``W_UK [heads, nope, latent]`` and ``W_UV [heads, output_dim, latent]``."""
        weight = self.layers[layer].kv_b_proj.weight.detach()
        dtype = torch.float64 if weight.dtype == torch.float64 else dtype
        split = weight.to(dtype).view(self.geometry.query_heads, self._nope_dim + self._output_dim, self.latent_dim)
        return split[:, : self._nope_dim], split[:, self._nope_dim :]

    def head_outputs(self, layer: int, outputs: torch.Tensor) -> torch.Tensor:
        _, up = self.absorption(layer, outputs.dtype)
        return torch.matmul(outputs.to(up.dtype), up.transpose(1, 2))

    def _index_groups(self) -> tuple[tuple[int, ...], ...]:
        return tuple((layer,) for layer in range(len(self.layers)))

    def _index_topk(self) -> int | None:
        return None

    def _hook(self, layer: int, consume: Consumer, hooks: ExitStack) -> None:
        attn = self.layers[layer]
        last = attn.q_proj if getattr(attn, "q_proj", None) is not None else attn.q_b_proj

        def done(call: LayerCall) -> None:
            consume(layer, self._queries_of(layer, call))

        watch(attn, layer, {"query": last, **self._index_projections(layer)}, done, hooks)

    def _index_projections(self, layer: int) -> dict[str, Any]:
        """Further projections to watch: name -> module."""
        return {}

    def _queries_of(self, layer: int, call: LayerCall) -> LayerQueries:
        projected = call.outputs["query"]
        n = projected.shape[1]
        queries = projected.view(len(projected), n, self.geometry.query_heads, -1).transpose(1, 2)
        nope, rotary = queries.split([self._nope_dim, self.geometry.rotary_dim], dim=-1)
        cos, sin = call.rotation()
        rotary, _ = self._rotate(rotary, rotary[:, :1], cos, sin)
        down, _ = self.absorption(layer, compute_dtype(queries))
        absorbed = torch.cat([torch.matmul(single(nope).to(down.dtype), down), single(rotary).to(down.dtype)], dim=-1)
        return LayerQueries(absorbed, call.positions(n).to(absorbed.device), call.first_row)
