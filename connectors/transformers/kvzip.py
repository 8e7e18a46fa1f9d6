"""KVzip on a transformers model: the scoring passes, dense and sparse, and the sets that stay.

Dense (`score_dense`): chunk by chunk, as in `compression.compaction.kvzip`. Sparse (`score_sparse`): one pass of dense
attention over the context and its repetition; what counts is the full softmax, per query head. Both restore what they
were given; neither keeps more than one layer's queries in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from kvtier.compression.compaction import selection
from kvtier.compression.compaction.kvzip import (
    CHUNK_TOKENS,
    FIRST_PROMPT,
    LATER_PROMPT,
    OVERLAP_TOKENS,
    SINK_TOKENS,
    RepeatPrompts,
    fitting_chunk,
    largest_probabilities,
    over_groups,
    plan,
)
from kvtier.compression.compaction.prefix import Compaction, LayerSelection, Progress, Recipe, budget_tokens
from kvtier.connectors.transformers.attention import Family, FamilyKind, LayerQueries, restore, snapshot
from kvtier.connectors.transformers.compat import cache_argument
from kvtier.errors import ConfigError, FitError

State = Mapping[str, torch.Tensor]
"""What a pass has reached, to go on from after an interruption: ``scores``, and ``done`` (chunks or tokens)."""

Checkpoint = Callable[[dict[str, torch.Tensor]], None]
"""Called with the state after each chunk; the tensors are valid until it returns."""

_FEED_TOKENS = 512
"""Tokens of one forward pass of the sparse scoring."""


@dataclass(frozen=True, slots=True)
class KVzipOptions:
    """chunk_tokens, overlap_tokens: of the repetition, whose chunks are shorter by default where a longer one would
    pass the model's last position. prefix_tokens: first positions of the context that take part in
    every softmax; None: the protected ones, `SINK_TOKENS` at least."""

    chunk_tokens: int = CHUNK_TOKENS
    overlap_tokens: int = OVERLAP_TOKENS
    prefix_tokens: int | None = None


def repeat_prompts(tokenizer: Any) -> RepeatPrompts:
    """The prompts in the tokens of `tokenizer` (a PreTrainedTokenizer), with its chat template's end of a user's turn
    and beginning of an answer where it has one."""
    suffix = "\n"
    if getattr(tokenizer, "chat_template", None):
        marker = "<<the end of the context>>"
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": marker}], add_generation_prompt=True, tokenize=False, enable_thinking=False
        )
        suffix = text.rpartition(marker)[2]
    return RepeatPrompts(
        *(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (FIRST_PROMPT, LATER_PROMPT, suffix))
    )


def protected_positions(tokens: int, system_tokens: int) -> int:
    """First positions that always stay: the system prompt's, `SINK_TOKENS` at least."""
    return min(tokens, max(system_tokens, SINK_TOKENS))


def score_dense(
    family: Family,
    cache: DynamicCache,
    token_ids: Sequence[int],
    prompts: RepeatPrompts,
    *,
    system_tokens: int = 0,
    options: KVzipOptions | None = None,
    progress: Progress | None = None,
    state: State | None = None,
    checkpoint: Checkpoint | None = None,
) -> torch.Tensor:
    """fp32 ``[layers, kv_heads, tokens]``: the scores of all positions of `token_ids`, which `cache` holds plainly. The
    first `system_tokens` and layers with a window have zeros. The cache is unchanged afterwards."""
    geometry, tokens = family.geometry, len(token_ids)
    options = options or KVzipOptions(fitting_chunk(tokens, positions_of(family), prompts))
    chunks = plan(
        token_ids,
        prompts,
        start=system_tokens,
        chunk_tokens=options.chunk_tokens,
        overlap_tokens=options.overlap_tokens,
    )
    scores = torch.zeros(geometry.layers, geometry.kv_heads, tokens)
    done = 0
    if state is not None:
        scores.copy_(state["scores"])
        done = int(state["done"])
    prefix = protected_positions(tokens, system_tokens) if options.prefix_tokens is None else options.prefix_tokens
    before, layers = snapshot(cache), geometry.compactable_layers
    for number, chunk in enumerate(chunks):
        if number < done:
            continue
        first = min(prefix, chunk.start)

        def consume(
            layer: int, queries: LayerQueries, first: int = first, chunk: Any = chunk, at: int = number
        ) -> None:
            keys = family.read(cache, layer).keys
            n = queries.queries.shape[1]
            seen = torch.cat([keys[:, :first], keys[:, chunk.start : chunk.end], keys[:, -n:]], dim=1)
            best = largest_probabilities(
                lambda part: family.logits(layer, part, seen),
                queries.queries,
                seen.shape[1],
                slice(first, first + chunk.end - chunk.start),
                last_rows=n,
                sinks=family.sinks(layer),
            )
            scores[layer, :, chunk.start : chunk.end] = (
                over_groups(_finite(best, layer), geometry.kv_heads).float().cpu()
            )
            if progress is not None:
                progress(at * len(layers) + layers.index(layer) + 1, len(chunks) * len(layers), "repeating the context")

        try:
            with family.capture(layers, consume):
                _feed(family, cache, chunk.fed)
        finally:
            restore(cache, before)
        if checkpoint is not None:
            checkpoint({"scores": scores, "done": torch.tensor(number + 1)})
    return scores


def score_sparse(
    family: Family,
    token_ids: Sequence[int],
    prompts: RepeatPrompts,
    *,
    system_tokens: int = 0,
    progress: Progress | None = None,
    state: State | None = None,
    checkpoint: Checkpoint | None = None,
) -> torch.Tensor:
    """fp32 ``s [layers, query_heads, tokens]``: the largest probability that each position of `token_ids` gets from
    the queries of the context's repetition, with dense attention throughout. Works on a cache of its own. A `state`
    saves the scoring of what was fed, not the forward passes: the cache has to be built again."""
    geometry, tokens = family.geometry, len(token_ids)
    scores = torch.zeros(geometry.layers, geometry.query_heads, tokens)
    done = 0
    if state is not None:
        scores.copy_(state["scores"])
        done = int(state["done"])
    if not 0 <= system_tokens < tokens:
        raise ConfigError(f"system_tokens = {system_tokens} of {tokens}: leave at least one token to be scored")
    cache, repeated = family.new_cache(), list(token_ids[system_tokens:])

    def consume(layer: int, queries: LayerQueries) -> None:
        rows = family.read(cache, layer)
        best = largest_probabilities(
            lambda part: family.logits(layer, part, rows.keys),
            queries.queries,
            rows.rows,
            slice(0, tokens),
            last_rows=queries.queries.shape[1],
            sinks=family.sinks(layer),
        )
        torch.maximum(scores[layer], _finite(best, layer).float().cpu(), out=scores[layer])

    turn = [*token_ids, *prompts.first, *prompts.suffix]
    limit = positions_of(family)
    if limit is not None and len(turn) + len(repeated) > limit:
        raise ConfigError(
            f"a context of {tokens} tokens: scoring reads it twice, {len(turn) + len(repeated)} tokens in all, and the "
            f"model has {limit} positions: give a shorter context, or another method"
        )
    read, fed = 0, 0

    def tell(label: str) -> None:
        if progress is not None:
            progress(read + fed, len(turn) + len(repeated), label)

    with family.dense_attention():
        for part in _parts(turn):
            _feed(family, cache, part)
            read += len(part)
            tell("reading the context")
        for part in _parts(repeated):
            if fed + len(part) <= done:
                _feed(family, cache, part)
            else:
                with family.capture(None, consume):
                    _feed(family, cache, part)
            fed += len(part)
            if checkpoint is not None and fed > done:
                checkpoint({"scores": scores, "done": torch.tensor(fed)})
            tell("repeating the context")
    return scores


def compact_kvzip(
    family: Family,
    cache: DynamicCache,
    token_ids: Sequence[int],
    recipe: Recipe,
    prompts: RepeatPrompts,
    *,
    system_tokens: int = 0,
    head_scores: torch.Tensor | None = None,
    options: KVzipOptions | None = None,
    progress: Progress | None = None,
    state: State | None = None,
    checkpoint: Checkpoint | None = None,
) -> Compaction:
    """The sets of `recipe` (``kvzip`` with one of the selectors of `compression.compaction.selection`) for the context
    `token_ids` that `cache` holds. The system prompt and `SINK_TOKENS` first tokens stay. `head_scores` ``[layers,
    kv_heads]`` are for the selector ``head``, which needs no scoring. Raises ConfigError for a selector that the
    model's cache cannot take."""
    check_selector(family, recipe.selector)
    started = time.perf_counter()
    common = {"system_tokens": system_tokens, "progress": progress, "state": state, "checkpoint": checkpoint}
    if recipe.selector in selection.GROUP_SELECTORS:
        scores = score_sparse(family, token_ids, prompts, **common)  # type: ignore[arg-type]
        return select_groups(family, scores, recipe, system_tokens, time.perf_counter() - started, progress)
    if recipe.selector == "head":
        if head_scores is None:
            raise ConfigError("selector = 'head': give a file of `kvtier compact head-scores` with --head-scores")
        scores = head_scores
    else:
        scores = score_dense(family, cache, token_ids, prompts, options=options, **common)  # type: ignore[arg-type]
    return select_heads(family, scores, recipe, len(token_ids), system_tokens, time.perf_counter() - started)


def check_selector(family: Family, selector: str) -> None:
    """Raises ConfigError, naming what would do, for a selector that does not fit the model's cache."""
    geometry = family.geometry
    known = (*selection.HEAD_SELECTORS, *selection.GROUP_SELECTORS)
    if selector not in known:
        raise ConfigError(f"selector = {selector!r}: unknown; use one of {', '.join(known)}")
    if geometry.kind is FamilyKind.DENSE and selector in selection.GROUP_SELECTORS:
        raise ConfigError(
            f"selector = {selector!r}: it chooses one set for all heads, which {geometry.architecture} does not share; "
            f"use one of {', '.join(selection.HEAD_SELECTORS)}"
        )
    if geometry.kind is FamilyKind.SPARSE and selector in selection.HEAD_SELECTORS:
        raise ConfigError(
            f"selector = {selector!r}: the layers of {geometry.architecture} that share an indexer's choice need one "
            f"set; use one of {', '.join(selection.GROUP_SELECTORS)}"
        )


def select_heads(
    family: Family, scores: torch.Tensor, recipe: Recipe, tokens: int, system_tokens: int, score_s: float = 0.0
) -> Compaction:
    """Sets per KV head from ``[layers, kv_heads, tokens]`` (``head``: ``[layers, kv_heads]``). Layers with a window
    keep what they hold and have no part in the budget."""
    geometry = family.geometry
    if scores.shape[:2] != (geometry.layers, geometry.kv_heads):
        raise ConfigError(
            f"scores for {tuple(scores.shape[:2])} layers and KV heads; the model has {geometry.layers} and "
            f"{geometry.kv_heads}: measure them with this model"
        )
    started = time.perf_counter()
    layers = list(geometry.compactable_layers)
    protected, chosen = protected_positions(tokens, system_tokens), scores[layers]
    if recipe.selector == "head":
        kept = selection.head(chosen, tokens, recipe.ratio, protected)
    else:
        kept = (selection.pair if recipe.selector == "pair" else selection.uniform)(chosen, recipe.ratio, protected)
    found = dict(zip(layers, kept, strict=True))
    sets = []
    for layer, window in enumerate(geometry.windows):
        # A cache with a window holds one row less than it, since the next token brings its own.
        held = torch.arange(tokens if window is None else max(0, tokens - window + 1), tokens)
        sets.append(LayerSelection(found.get(layer, (held,) * geometry.kv_heads)))
    figures = {"score_s": score_s, "select_s": time.perf_counter() - started}
    return Compaction(recipe, tokens, tuple(sets), figures)


def select_groups(
    family: Family,
    scores: torch.Tensor,
    recipe: Recipe,
    system_tokens: int,
    score_s: float = 0.0,
    progress: Progress | None = None,
) -> Compaction:
    """One set per group of layers from ``s [layers, query_heads, tokens]``, with the coverage of every layer."""
    geometry, tokens = family.geometry, scores.shape[-1]
    budget, protected = budget_tokens(tokens, recipe.ratio), protected_positions(tokens, system_tokens)
    groups = geometry.index_groups
    sets: list[torch.Tensor | None] = [None] * geometry.layers
    select_s = 0.0
    for number, layers in enumerate(groups):
        started = time.perf_counter()
        rows = scores[list(layers)].flatten(0, 1)

        def chosen(count: int, number: int = number) -> None:
            if progress is not None:
                progress(number * budget + count, len(groups) * budget, "choosing positions")

        kept = selection.group(recipe.selector, rows, budget, protected, chosen)
        select_s += time.perf_counter() - started
        for layer in layers:
            sets[layer] = kept
    if progress is not None:
        progress(len(groups) * budget, len(groups) * budget, "choosing positions")
    layers_kept = [kept for kept in sets if kept is not None]
    per_layer = [selection.covered(selection.shares_of(scores[layer]), kept) for layer, kept in enumerate(layers_kept)]
    total = selection.Coverage.of(torch.cat(per_layer))
    return Compaction(
        recipe,
        tokens,
        tuple(LayerSelection((kept,)) for kept in layers_kept),
        {"score_s": score_s, "select_s": select_s, "mean_coverage": total.mean, "min_coverage": total.least},
        {
            "mean_coverage": tuple(float(rows.mean()) for rows in per_layer),
            "min_coverage": tuple(float(rows.min()) for rows in per_layer),
        },
    )


def positions_of(family: Family) -> int | None:
    """How many positions the model has, where it says so."""
    limit = getattr(family.config, "max_position_embeddings", None)
    return None if limit is None else int(limit)


def _finite(best: torch.Tensor, layer: int) -> torch.Tensor:
    if not bool(torch.isfinite(best).all()):
        raise FitError(f"layer {layer}: its attention is not finite, in this dtype: load the model in bf16 or fp32")
    return best


def _parts(token_ids: Sequence[int]) -> list[Sequence[int]]:
    return [token_ids[start : start + _FEED_TOKENS] for start in range(0, len(token_ids), _FEED_TOKENS)]


def _feed(family: Family, cache: DynamicCache, token_ids: Sequence[int]) -> None:
    """Append `token_ids` to `cache`; nobody asks what would come next."""
    model = family.model
    ids = torch.tensor([list(token_ids)], device=next(model.parameters()).device)
    with torch.no_grad():
        model.get_decoder()(ids, use_cache=True, **{cache_argument(model.get_decoder()): cache})
