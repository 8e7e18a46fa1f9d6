"""Methods by their name in a recipe, on one context."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache

from kvtier.compression.compaction import baselines
from kvtier.compression.compaction.kvzip import RepeatPrompts, fitting_chunk
from kvtier.compression.compaction.matching import SELECTORS, MatchingOptions
from kvtier.compression.compaction.prefix import Compaction, Progress
from kvtier.compression.compaction.recipe import Recipe
from kvtier.connectors.transformers.attention import Family, FamilyKind, family_of
from kvtier.connectors.transformers.compaction import heads_of, keep_windows, prefill, whole
from kvtier.connectors.transformers.fitting_queries import (
    SOURCES,
    STUDY_REQUESTS,
    FittingSequence,
    given_sequences,
    repeat_sequences,
    study_sequences,
)
from kvtier.connectors.transformers.kvzip import (
    check_selector,
    compact_kvzip,
    positions_of,
    protected_positions,
    repeat_prompts,
)
from kvtier.connectors.transformers.matching import MatchingPlan, match_context
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


def complete(recipe: Recipe, family: Family, plan: MatchingPlan | None = None) -> Recipe:
    """`recipe` with what its method takes where nothing is named: selector, queries, and the options of `plan` (None:
    the usual ones). Raises ConfigError for what the method does not have."""
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
    if selector not in SELECTORS:
        raise ConfigError(f"--selector {selector}: Attention Matching knows {', '.join(SELECTORS)}")
    queries = queries or "repeat"
    if queries not in SOURCES:
        raise ConfigError(f"--queries {queries}: unknown; use one of {', '.join(SOURCES)}")
    plan = plan or MatchingPlan(MatchingOptions(selector), context=queries == "context")
    return Recipe("am", recipe.ratio, selector, recipe.seed, queries, {**plan.described(), **recipe.options})


def told_apart(
    recipe: Recipe,
    *,
    system_tokens: int = 0,
    given: Sequence[Sequence[int]] = (),
    head_scores: torch.Tensor | None = None,
) -> Recipe:
    """`recipe` with whatever else changes what comes out of it, so that no two results have one recipe: how many first
    tokens were kept, and hashes of the texts and of the scores per head that it was given, where it uses them."""
    options = dict(recipe.options)
    if system_tokens:
        options["system_tokens"] = str(system_tokens)
    if recipe.queries == "given":
        options["given"] = _sha256(json.dumps([list(map(int, text)) for text in given]).encode())
    if recipe.selector == "head" and head_scores is not None:
        options["head_scores"] = _sha256(head_scores.detach().cpu().float().contiguous().numpy().tobytes())
    return replace(recipe, options=options)


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def compact(
    context: Context,
    recipe: Recipe,
    *,
    given: Sequence[Sequence[int]] = (),
    held_out: Sequence[FittingSequence] = (),
    plan: MatchingPlan | None = None,
    head_scores: torch.Tensor | None = None,
    progress: Progress | None = None,
    state: State | None = None,
    checkpoint: Checkpoint | None = None,
) -> Compaction:
    """The sets of a complete `recipe` for `context`, which is unchanged afterwards. given: texts that follow the
    context, for the queries of that name; held_out: texts that errors are measured on, and nothing is fitted to. plan:
    of Attention Matching. state, checkpoint: as the method's driver has them, to go on later. With ratio 0 everything
    stays, whatever the method. The answer's recipe is that of `told_apart`."""
    recipe = told_apart(recipe, system_tokens=context.system_tokens, given=given, head_scores=head_scores)
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
    plan = plan or MatchingPlan(MatchingOptions(recipe.selector))
    plan = replace(plan, system_tokens=context.system_tokens, context=recipe.queries == "context")
    return match_context(
        context.family,
        context.cache,
        context.token_ids,
        recipe,
        fitting_sequences(context, recipe, given, progress),
        plan=plan,
        held_out=held_out,
        state=state,
        checkpoint=checkpoint,
        progress=progress,
    )


def fitting_sequences(
    context: Context, recipe: Recipe, given: Sequence[Sequence[int]], progress: Progress | None = None
) -> list[FittingSequence]:
    """Texts behind the context whose queries the recipe is fitted to; none for those of the context itself."""
    if recipe.queries == "repeat":
        return repeat_sequences(
            context.token_ids,
            context.prompts,
            system_tokens=context.system_tokens,
            chunk_tokens=fitting_chunk(context.tokens, positions_of(context.family), context.prompts),
        )
    if recipe.queries == "self_study":
        requests = {
            name: context.tokenizer.encode(text, add_special_tokens=False) for name, text in STUDY_REQUESTS.items()
        }
        suffix = context.prompts.suffix
        return study_sequences(
            context.family,
            context.cache,
            context.token_ids,
            requests,
            suffix=suffix,
            seed=recipe.seed,
            progress=progress,
        )
    if recipe.queries == "given":
        if not given:
            raise ConfigError("--queries given: give the texts that will follow the context (--given FILE)")
        return given_sequences(given)
    return []
