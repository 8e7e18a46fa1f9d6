"""Rows chosen without looking at them: what every method has to beat."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier.compression.compaction.prefix import Compaction, LayerSelection
from kvtier.compression.compaction.recipe import Recipe, budget_tokens

METHODS = ("random", "recent")
SINK_TOKENS = 4


def choose(recipe: Recipe, tokens: int, heads: Sequence[int], *, protected: int = SINK_TOKENS) -> Compaction:
    """One set for all layers and heads: the first `protected` positions (within the budget), and beside them the latest
    ones (``recent``) or some drawn by the seed (``random``). heads: physical heads per layer."""
    budget = budget_tokens(tokens, recipe.ratio)
    first = min(protected, budget, tokens)
    rest = budget - first
    if recipe.method == "recent":
        chosen = torch.arange(tokens - rest, tokens)
    else:
        generator = torch.Generator().manual_seed(recipe.seed)
        chosen = torch.randperm(tokens - first, generator=generator)[:rest].sort().values + first
    kept = torch.cat([torch.arange(first), chosen])
    return Compaction(recipe, tokens, tuple(LayerSelection((kept,) * n) for n in heads))
