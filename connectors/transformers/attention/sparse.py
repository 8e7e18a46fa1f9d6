"""Families of DeepSeek Sparse Attention: MLA whose queries attend to the rows that an indexer chooses.

A row's index score is ``sum over heads of w[q, h] * relu(q_h . k_t * dim^-0.5)``; weights may be negative. Layers
without an indexer of their own (IndexShare) reuse the choice of the layer before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from kvtier.connectors.transformers.attention.family import FamilyKind, LayerQueries, require, single
from kvtier.connectors.transformers.attention.hooks import LayerCall
from kvtier.connectors.transformers.attention.latent import LatentFamily
from kvtier.errors import ConfigError

HALF_ROTATION = ("deepseek_v32",)
"""Model types whose indexer rotates halves; the others rotate interleaved pairs, like their attention."""

ARCHITECTURES = ("deepseek_v32", "glm_moe_dsa")
"""Model types whose attention is built as below; each has its test."""

_EVERYTHING = 1 << 30


class SparseFamily(LatentFamily):
    """The cache's layers hold `indexer_keys` ``[1, rows, index_dim]`` besides, where the layer runs an indexer."""

    kind = FamilyKind.SPARSE

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        if self.config._attn_implementation not in ("eager", "sdpa"):
            raise ConfigError(
                f"attn_implementation = {self.config._attn_implementation!r}: sparse attention is read with 'eager' or "
                "'sdpa'; load the model with one of them"
            )
        module = sys.modules[type(self.layers[0]).__module__]
        halves = self.geometry.architecture in HALF_ROTATION
        self._rotate_index = module.apply_rotary_pos_emb if halves else module.apply_rotary_pos_emb_interleave
        for group in self.geometry.index_groups:
            require(self._indexer(group[0]), self.geometry.architecture, "wq_b", "wk", "weights_proj")

    def index_scores(self, layer: int, queries: LayerQueries, index_keys: torch.Tensor) -> torch.Tensor:
        """fp32 ``[n, rows]`` as the indexer computes them, not masked. Raises ConfigError for a layer that reuses
        another's choice."""
        if queries.index_queries is None or queries.index_weights is None:
            leader = self.leader_of(layer)
            raise ConfigError(f"layer {layer} runs no indexer: take the queries and index keys of layer {leader}")
        scale = float(self._indexer(layer).softmax_scale)
        scores = torch.einsum("nhd,td->nht", queries.index_queries.float(), index_keys.float()).mul_(scale).relu_()
        return torch.einsum("nht,nh->nt", scores, queries.index_weights)

    def leader_of(self, layer: int) -> int:
        """The layer whose indexer chooses for `layer`."""
        return next(group[0] for group in self.geometry.index_groups if layer in group)

    @contextmanager
    def dense_attention(self) -> Iterator[None]:
        indexers = [self._indexer(group[0]) for group in self.geometry.index_groups]
        before = [indexer.index_topk for indexer in indexers]
        for indexer in indexers:
            indexer.index_topk = _EVERYTHING
        try:
            yield
        finally:
            for indexer, topk in zip(indexers, before, strict=True):
                indexer.index_topk = topk

    @contextmanager
    def evicted(self, rows: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Within the block, rows of a cache that still holds everything count as evicted: their index score is minus
        infinity before the top-k, and the attention does not see them where fewer than top-k rows are left.

        rows: layer -> int64 ``[evicted]``. Layers of one index group must name the same rows. Raises ConfigError
        where they do not."""
        for group in self.geometry.index_groups:
            sets = {tuple(rows[layer].tolist()) if layer in rows else () for layer in group}
            if len(sets) != 1:
                raise ConfigError(f"layers {list(group)} share one choice of rows: evict the same rows in all of them")
        with ExitStack() as hooks:
            for layer, evicted in rows.items():
                hooks.callback(self._hide(layer, evicted).remove)
            yield

    def _hide(self, layer: int, evicted: torch.Tensor) -> Any:
        def before(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            mask = kwargs["attention_mask"]
            # The indexer is given this very mask, so that one change covers its top-k and the attention.
            hidden = False if mask.dtype == torch.bool else float("-inf")
            return args, {**kwargs, "attention_mask": mask.index_fill(-1, evicted.to(mask.device), hidden)}

        return self.layers[layer].register_forward_pre_hook(before, with_kwargs=True)

    def _index_groups(self) -> tuple[tuple[int, ...], ...]:
        groups: list[list[int]] = []
        for layer, attn in enumerate(self.layers):
            if getattr(attn, "indexer", None) is not None:
                groups.append([layer])
            elif groups:
                groups[-1].append(layer)
            else:
                raise ConfigError(f"{self.config.model_type}: layer 0 has no indexer, so nothing chooses its rows")
        return tuple(tuple(group) for group in groups)

    def _index_topk(self) -> int | None:
        return int(self.config.index_topk)

    def _indexer(self, layer: int) -> Any:
        return self.layers[layer].indexer

    def _index_projections(self, layer: int) -> dict[str, Any]:
        indexer = self._indexer(layer)
        if indexer is None:
            return {}
        return {"index_query": indexer.wq_b, "index_weights": indexer.weights_proj, "chosen": indexer}

    def _queries_of(self, layer: int, call: LayerCall) -> LayerQueries:
        queries = super()._queries_of(layer, call)
        indexer = self._indexer(layer)
        chosen = call.arguments["prev_topk_indices"] if indexer is None else call.outputs["chosen"]
        queries = replace(queries, selected=single(chosen).long())
        if indexer is None:
            return queries
        projected = call.outputs["index_query"]
        heads = projected.view(1, projected.shape[1], indexer.n_heads, indexer.head_dim)
        rotary, plain = heads.split([indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim], dim=-1)
        cos, sin = call.rotation()
        rotary, _ = self._rotate_index(rotary, rotary[:, :, :1], cos, sin, unsqueeze_dim=2)
        weights = call.outputs["index_weights"].float() * indexer.n_heads**-0.5
        return replace(queries, index_queries=single(torch.cat([rotary, plain], dim=-1)), index_weights=single(weights))
