"""Methods by their name in a recipe, on one context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from kvtier.compression.compaction import baselines
from kvtier.compression.compaction.kvzip import RepeatPrompts
from kvtier.compression.compaction.prefix import Compaction, Progress
from kvtier.compression.compaction.recipe import Recipe
from kvtier.connectors.transformers.attention import Family, FamilyKind, family_of
from kvtier.connectors.transformers.compaction import heads_of, keep_windows, prefill, whole
from kvtier.connectors.transformers.kvzip import (
    check_selector,
    compact_kvzip,
    protected_positions,
    repeat_prompts,
)
from kvtier.errors import ConfigError

METHODS = ("kvzip", "am", *baselines.METHODS)
DEFAULT_SELECTORS = {
    "kvzip": {FamilyKind.DENSE: "pair", FamilyKind.LATENT: "normalized_max", FamilyKind.SPARSE: "normalized_max"},
    "am": dict.fromkeys(FamilyKind, "omp"),
}
"""By method and the model's attention; other methods have none."""

State = Mapping[str, torch.Tensor]
Checkpoint = Callable[[dict[str, torch.Tensor]], None]


@dataclass(frozen=True, slots=True)
class Context:
    """A context that was read: `cache` holds `token_ids`, plainly. system_tokens: first ones that always stay."""

    family: Family
    prompts: RepeatPrompts
    token_ids: tuple[int, ...]
    cache: DynamicCache
    tokenizer: Any
    system_tokens: int = 0

    @staticmethod
    def read(
        model: Any,
        tokenizer: Any,
        token_ids: Sequence[int],
        *,
        system_tokens: int = 0,
        progress: Progress | None = None,
    ) -> Context:
        """Run `token_ids` through `model`. Raises ConfigError for a model whose attention is not known."""
        family = family_of(model)
        cache = prefill(model, token_ids, progress=progress)
        return Context(family, repeat_prompts(tokenizer), tuple(token_ids), cache, tokenizer, system_tokens)

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


def complete(recipe: Recipe, family: Family) -> Recipe:
    """`recipe` with the selector and the queries that its method takes where none are named. Raises ConfigError for
    what the method does not have."""
    if recipe.method not in METHODS:
        raise ConfigError(f"--method {recipe.method}: unknown; use one of {', '.join(METHODS)}")
    selector, queries = recipe.selector, recipe.queries
    if recipe.method in baselines.METHODS:
        if selector or queries:
            raise ConfigError(f"--method {recipe.method} has no selector and no queries: leave both out")
        return recipe
    selector = selector or DEFAULT_SELECTORS[recipe.method][family.geometry.kind]
    if recipe.method == "kvzip":
        if queries:
            raise ConfigError("--method kvzip has its own queries, those of repeating the context: leave --queries out")
        check_selector(family, selector)
        return Recipe("kvzip", recipe.ratio, selector, recipe.seed, "", recipe.options)
    return Recipe("am", recipe.ratio, selector, recipe.seed, queries or "repeat", recipe.options)


def compact(
    context: Context,
    recipe: Recipe,
    *,
    given: Sequence[Sequence[int]] = (),
    head_scores: torch.Tensor | None = None,
    progress: Progress | None = None,
    state: State | None = None,
    checkpoint: Checkpoint | None = None,
) -> Compaction:
    """The sets of a complete `recipe` for `context`, which is unchanged afterwards. given: texts that follow the
    context, for the queries of that name. state, checkpoint: as the method's driver has them, to go on later. With
    ratio 0 everything stays, whatever the method."""
    if recipe.ratio == 0.0:
        return whole(recipe, context.cache, context.tokens)
    if recipe.method in baselines.METHODS:
        protected = protected_positions(context.tokens, context.system_tokens)
        chosen = baselines.choose(recipe, context.tokens, heads_of(context.cache), protected=protected)
        return keep_windows(chosen, context.cache)
    if recipe.method == "kvzip":
        return compact_kvzip(
            context.family,
            context.cache,
            context.token_ids,
            recipe,
            context.prompts,
            system_tokens=context.system_tokens,
            head_scores=head_scores,
            progress=progress,
            state=state,
            checkpoint=checkpoint,
        )
    raise ConfigError(f"--method {recipe.method}: not available")
