"""Where Attention Matching gets its queries: texts that follow the context, or the context itself.

``repeat``: the context again, chunk by chunk, asked for (teacher-forced). ``self_study``: the model's own answers to
requests about the context. ``context``: the queries that reading the context made. ``given``: texts of a known task;
with a question's own text they are the oracle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import DynamicCache

from kvtier.compression.compaction.kvzip import CHUNK_TOKENS, RepeatPrompts, plan
from kvtier.compression.compaction.matching import thinned
from kvtier.compression.compaction.prefix import Progress
from kvtier.connectors.transformers.attention import Family, LayerQueries, restore, snapshot
from kvtier.connectors.transformers.compat import cache_argument
from kvtier.errors import ConfigError

SOURCES = ("repeat", "self_study", "context", "given")

STUDY_REQUESTS = {
    "summarise": "\n\nSummarise all of the above in a few sentences.",
    "aggregate": "\n\nList every name, number, date and place that is mentioned above.",
    "structure": "\n\nOutline how the above is organised, part by part, as a nested list.",
    "questions": "\n\nWrite questions that the above answers, each with its answer.",
}
"""What ``self_study`` asks for."""

_READ_TOKENS = 512


@dataclass(frozen=True, slots=True)
class FittingSequence:
    """Token ids that directly follow the context, two or more. Queries of those from `first_query` on count."""

    token_ids: tuple[int, ...]
    first_query: int = 0

    def __post_init__(self) -> None:
        if len(self.token_ids) < 2 or not 0 <= self.first_query < len(self.token_ids):
            raise ConfigError(
                f"a fitting sequence of {len(self.token_ids)} tokens whose queries count from {self.first_query}: "
                "give two tokens or more, and count at least one"
            )


def repeat_sequences(
    token_ids: Sequence[int], prompts: RepeatPrompts, *, system_tokens: int = 0, chunk_tokens: int = CHUNK_TOKENS
) -> list[FittingSequence]:
    """One sequence per chunk of the context: the request to repeat it, and the chunk."""
    return [
        FittingSequence(chunk.fed) for chunk in plan(token_ids, prompts, start=system_tokens, chunk_tokens=chunk_tokens)
    ]


def study_sequences(
    family: Family,
    cache: DynamicCache,
    token_ids: Sequence[int],
    requests: Mapping[str, Sequence[int]],
    *,
    suffix: Sequence[int],
    new_tokens: int = 128,
    answers: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[FittingSequence]:
    """The model's own answers, sampled by `seed`, to `requests` (name -> token ids, see `STUDY_REQUESTS`) about the
    context in `cache`. suffix: ends the user's turn and begins the answer. `answers` of `new_tokens` each per
    request."""
    if new_tokens < 1 or answers < 1 or not requests:
        raise ConfigError(
            f"self_study with {len(requests)} requests, {answers} answers and {new_tokens} new tokens: give 1 or more"
        )
    found = []
    asked = [(request, number) for number in range(answers) for request in requests]
    for done, (request, number) in enumerate(asked):
        turn = (*requests[request], *suffix)
        answer = _sampled(family, cache, [*token_ids, *turn], new_tokens, seed + 1000 * number + done)
        found.append(FittingSequence((*turn, *answer)))
        if progress is not None:
            progress(done + 1, len(asked), f"self-study: {request}")
    return found


def _sampled(family: Family, cache: DynamicCache, ids: list[int], new_tokens: int, seed: int) -> tuple[int, ...]:
    model = family.model
    device = next(model.parameters()).device
    before = snapshot(cache)
    given = torch.tensor([ids], device=device)
    try:
        with torch.random.fork_rng([device] if device.type != "cpu" else []), torch.no_grad():
            torch.manual_seed(seed)
            out = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                do_sample=True,
                top_k=0,
                max_new_tokens=new_tokens,
                min_new_tokens=1,
                pad_token_id=model.config.get_text_config(decoder=True).pad_token_id or 0,
                **{cache_argument(model): cache},
            )
    finally:
        restore(cache, before)
    return tuple(int(t) for t in out[0, len(ids) :])


def given_sequences(texts: Sequence[Sequence[int]]) -> list[FittingSequence]:
    """Texts that are known to follow, in tokens."""
    return [FittingSequence(tuple(int(t) for t in text)) for text in texts]


def context_queries(
    family: Family, token_ids: Sequence[int], *, most: int, progress: Progress | None = None
) -> dict[int, LayerQueries]:
    """Queries that reading the context makes, per layer: an even subset of at most `most` tokens. The rows that an
    indexer selected are left out, since it chose among those before a query only."""
    chosen = thinned(len(token_ids), most)
    parts: dict[int, list[LayerQueries]] = {}

    def keep(layer: int, queries: LayerQueries) -> None:
        first = queries.first_row
        here = chosen[(chosen >= first) & (chosen < first + queries.queries.shape[1])] - first
        if len(here):
            parts.setdefault(layer, []).append(taken(queries, here))

    model, cache = family.model, family.new_cache()
    ids = torch.tensor([list(token_ids)], device=next(model.parameters()).device)
    with torch.no_grad(), family.capture(consume=keep):
        for first in range(0, len(token_ids), _READ_TOKENS):
            part = ids[:, first : first + _READ_TOKENS]
            model(part, use_cache=True, logits_to_keep=1, **{cache_argument(model): cache})
            if progress is not None:
                progress(min(first + _READ_TOKENS, len(token_ids)), len(token_ids), "queries of the context")
    return {layer: _joined(found) for layer, found in parts.items()}


def taken(queries: LayerQueries, rows: torch.Tensor) -> LayerQueries:
    """The queries at `rows`, int64 ordinals."""
    rows = rows.to(queries.queries.device)

    def some(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[rows]

    return replace(
        queries,
        queries=queries.queries[:, rows],
        positions=queries.positions[rows],
        index_queries=some(queries.index_queries),
        index_weights=some(queries.index_weights),
        selected=some(queries.selected),
    )


def _joined(parts: list[LayerQueries]) -> LayerQueries:
    def all_of(name: str) -> torch.Tensor | None:
        tensors = [getattr(part, name) for part in parts]
        return None if any(t is None for t in tensors) else torch.cat(tensors)

    return LayerQueries(
        torch.cat([part.queries for part in parts], dim=1),
        torch.cat([part.positions for part in parts]),
        0,
        all_of("index_queries"),
        all_of("index_weights"),
    )
