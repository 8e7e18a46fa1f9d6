"""KVzip (arXiv 2505.23416): a context is worth what a model looks at while it repeats the context.

The context is cut into chunks. For each, the model is fed a request to repeat, the end of the user's turn, and the
chunk itself, with the whole context in the cache; a cached position's score is the largest probability that any fed
token gives it, where the softmax runs over the context's beginning, this chunk and what was fed so far. What was fed is
dropped from the cache before the next chunk.

Pure functions; the driver that runs a model is in the connectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvtier.errors import ConfigError
from kvtier.kernels.compaction.attention import query_slices

CHUNK_TOKENS = 2000
SINK_TOKENS = 4
OVERLAP_TOKENS = 8
CHUNK_TOKENS_MIN = 256
"""Of a context that leaves little room behind it: shorter chunks would be compared with too little."""

LOGITS_BYTES = 32 << 20
"""Of one slice of queries; much less makes more calls than it saves memory."""

FIRST_PROMPT = "\n\nRepeat the previous context exactly."
LATER_PROMPT = "\n\nRepeat the part of the previous context exactly, starting with"


@dataclass(frozen=True, slots=True)
class RepeatPrompts:
    """Token ids of what is fed before a chunk. first: asks for the whole context; later: for the part that begins with
    the tokens that follow. suffix: ends the user's turn and begins the model's."""

    first: tuple[int, ...]
    later: tuple[int, ...]
    suffix: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions ``[start, end)`` of the context, and the token ids to feed for them."""

    start: int
    end: int
    fed: tuple[int, ...]


def plan(
    token_ids: Sequence[int],
    prompts: RepeatPrompts,
    *,
    start: int = 0,
    chunk_tokens: int = CHUNK_TOKENS,
    overlap_tokens: int = OVERLAP_TOKENS,
) -> list[Chunk]:
    """Chunks of `token_ids` from position `start` on (what is before is the system prompt, and gets no score). Each
    later one is asked for by the last `overlap_tokens` tokens of the chunk before. Raises ConfigError where nothing is
    left."""
    if chunk_tokens < 1 or not 0 <= start < len(token_ids):
        raise ConfigError(
            f"a context of {len(token_ids)} tokens, {start} of them protected, in chunks of {chunk_tokens}: leave at "
            "least one token to be scored, and give chunks of 1 token or more"
        )
    chunks = []
    for begin in range(start, len(token_ids), chunk_tokens):
        end = min(begin + chunk_tokens, len(token_ids))
        asked = (
            prompts.first
            if begin == start
            else (*prompts.later, *token_ids[max(start, begin - overlap_tokens) : begin])
        )
        chunks.append(Chunk(begin, end, (*asked, *prompts.suffix, *token_ids[begin:end])))
    return chunks


def fitting_chunk(tokens: int, positions: int | None, prompts: RepeatPrompts) -> int:
    """How long chunks may be, `CHUNK_TOKENS` at most, so that each can be repeated behind a context of `tokens` tokens
    by a model of `positions` positions (None: no end is known). Raises ConfigError where there is no room."""
    if positions is None:
        return CHUNK_TOKENS
    asked = max(len(prompts.first), len(prompts.later) + OVERLAP_TOKENS) + len(prompts.suffix)
    room = positions - tokens - asked
    if room < min(tokens, CHUNK_TOKENS_MIN):
        raise ConfigError(
            f"a context of {tokens} tokens: the model has {positions} positions, and repeating part of the context "
            f"behind it takes {asked + CHUNK_TOKENS_MIN} more: give a context of "
            f"{max(1, positions - asked - CHUNK_TOKENS_MIN)} tokens at most, or another method"
        )
    return min(CHUNK_TOKENS, room)


def largest_probabilities(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    queries: torch.Tensor,
    rows: int,
    columns: slice,
    *,
    last_rows: int,
    sinks: torch.Tensor | None = None,
    limit_bytes: int = LOGITS_BYTES,
) -> torch.Tensor:
    """``[query_heads, columns]``: the largest probability that any query gives each of the rows `columns`.

    logits_of: queries ``[query_heads, m, dim]`` to logits ``[query_heads, m, rows]``, which are written over. The last
    `last_rows` rows end with those of the queries themselves, one each in order; they are seen causally, all others by
    everyone. sinks: logits ``[query_heads]`` that take a share. Streamed: about `limit_bytes` of logits at once."""
    heads, n, _ = queries.shape
    best: torch.Tensor | None = None
    row_numbers = torch.arange(rows - last_rows, rows, device=queries.device)
    for part in query_slices(n, q_heads=heads, rows=rows, limit_bytes=limit_bytes):
        weights = logits_of(queries[:, part])
        own_rows = torch.arange(rows - n + part.start, rows - n + part.stop, device=queries.device)
        hidden = row_numbers[None, :] > own_rows[:, None]
        weights[..., rows - last_rows :].masked_fill_(hidden, float("-inf"))
        # In place: fresh memory of this size costs more than the arithmetic.
        highest = weights.amax(dim=-1, keepdim=True)
        total = weights.sub_(highest).exp_().sum(dim=-1)
        if sinks is not None:
            total += (sinks.to(weights.dtype)[:, None] - highest[..., 0]).exp()
        given = weights[..., columns].mul_(total.reciprocal_()[..., None]).amax(dim=1)
        best = given if best is None else torch.maximum(best, given)
    if best is None:
        raise ConfigError("no queries were captured: feed at least one token")
    return best


def over_groups(per_query_head: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """``[kv_heads, ...]``: the largest over the query heads that share a KV head."""
    return per_query_head.view(kv_heads, -1, *per_query_head.shape[1:]).amax(dim=1)
