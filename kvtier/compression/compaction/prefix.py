"""What a compaction method returns, and what the artefact and serving are made from: which rows of a context stay.

Pure data on torch tensors; nothing here knows a model. Words: a *physical head* is one set of rows in the cache: a KV
head of a dense model (MHA, MQA, GQA), or the one latent row per token of MLA, whatever the number of query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from kvtier.compression.compaction.recipe import Recipe, budget_tokens
from kvtier.errors import ConfigError

__all__ = ["Compaction", "LayerSelection", "Progress", "Recipe", "budget_tokens"]

Progress = Callable[[int, int, str], None]
"""``(done, total, label)``, called on the thread of the work; must be quick."""


@dataclass(frozen=True, slots=True)
class LayerSelection:
    """One layer of a compacted context of T tokens.

    kept: per physical head, the positions that stay: int64 ``[B]``, strictly ascending, in ``[0, T)``. B may differ
    between heads and layers; it is at least 1. A layer that keeps everything (a sliding window, say) names every
    position that its cache holds.
    bias: per *query* head, fp32 ``[B]`` over the rows of the physical head that it reads (query head h of a dense
    layer reads KV head ``h // (query_heads // kv_heads)``), added to the scaled scores before the softmax; None: zeros.
    values: per physical head, ``[B, dim]`` fitted values (MLA: ``[B, latent_dim]`` fitted latents, used as values
    only: keys stay the original rows), float32; None: the original rows.
    """

    kept: tuple[torch.Tensor, ...]
    bias: tuple[torch.Tensor, ...] | None = None
    values: tuple[torch.Tensor, ...] | None = None

    @property
    def rows(self) -> int:
        """Physical rows of this layer, all heads together."""
        return sum(int(k.shape[0]) for k in self.kept)

    @property
    def one_set(self) -> bool:
        """Every physical head keeps the same positions."""
        return all(torch.equal(k, self.kept[0]) for k in self.kept[1:])


@dataclass(frozen=True, slots=True)
class Compaction:
    """What a method returns for one context of `tokens` tokens, layer by layer.

    figures: what the method measured, by name (``mean_coverage``, ``min_coverage``, ``mass_error``, ``output_error``,
    ``select_s``, ``score_s``, ``fit_s`` ...); times in seconds, errors relative. layer_figures: the same per layer,
    each a tuple of `layers` numbers; NaN where a layer has none.
    """

    recipe: Recipe
    tokens: int
    layers: tuple[LayerSelection, ...]
    figures: Mapping[str, float] = field(default_factory=dict)
    layer_figures: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return sum(layer.rows for layer in self.layers)

    @property
    def tokens_removed(self) -> float:
        """Share of (layer, physical head, token) rows that are gone. Layers whose cache never held every token count
        what is missing as gone."""
        heads = sum(len(layer.kept) for layer in self.layers)
        return 1.0 - self.rows / (heads * self.tokens)

    def check(self) -> None:
        """Raise ConfigError, naming layer and head, for sets that are no ascending positions of this context or biases
        and values that do not fit them."""
        for n, layer in enumerate(self.layers):
            if not layer.kept:
                raise ConfigError(f"layer {n}: no physical head")
            for h, kept in enumerate(layer.kept):
                where = f"layer {n}, head {h}"
                if kept.dtype != torch.int64 or kept.dim() != 1 or not kept.shape[0]:
                    raise ConfigError(f"{where}: positions are {kept.dtype} {tuple(kept.shape)}, not int64 [1 or more]")
                if int(kept[0]) < 0 or int(kept[-1]) >= self.tokens or bool((kept[1:] <= kept[:-1]).any()):
                    raise ConfigError(f"{where}: positions must ascend within 0 to {self.tokens - 1}")
            _check_bias(n, layer)
            _check_values(n, layer)


def _check_bias(n: int, layer: LayerSelection) -> None:
    if layer.bias is None:
        return
    if len(layer.bias) % len(layer.kept):
        raise ConfigError(f"layer {n}: {len(layer.bias)} biases for {len(layer.kept)} physical heads")
    group = len(layer.bias) // len(layer.kept)
    for h, bias in enumerate(layer.bias):
        if bias.dtype != torch.float32 or bias.shape != layer.kept[h // group].shape:
            raise ConfigError(
                f"layer {n}, query head {h}: bias is {bias.dtype} {tuple(bias.shape)}, not float32 [kept]"
            )
        if not bool(torch.isfinite(bias).all()):
            raise ConfigError(f"layer {n}, query head {h}: a bias is not finite")


def _check_values(n: int, layer: LayerSelection) -> None:
    if layer.values is None:
        return
    if len(layer.values) != len(layer.kept):
        raise ConfigError(f"layer {n}: values for {len(layer.values)} of {len(layer.kept)} physical heads")
    for h, (values, kept) in enumerate(zip(layer.values, layer.kept, strict=True)):
        if values.dtype != torch.float32 or values.dim() != 2 or values.shape[0] != kept.shape[0]:
            raise ConfigError(
                f"layer {n}, head {h}: values are {values.dtype} {tuple(values.shape)}, not float32 [kept, dim]"
            )
        if not bool(torch.isfinite(values).all()):
            raise ConfigError(f"layer {n}, head {h}: a fitted value is not finite")
