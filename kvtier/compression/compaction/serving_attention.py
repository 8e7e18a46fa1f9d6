"""Attention over compact rows with biases and live rows behind them: three ways to the same numbers.

`masked` is what serving in transformers uses: any kernel that takes a mask of numbers. `split` computes the compact
part and the live part apart and merges them by their log-sum-exp, for engines whose own kernel takes no bias but tells
its LSE: only the small compact part needs a kernel that adds one. `flexible` is FlexAttention with the bias as its
score. All exact. queries ``[batch, query_heads, n, dim]``, keys and values ``[batch, kv_heads, rows, dim]``; mask: what
is added to the scores, broadcast to ``[batch, query_heads, n, rows]``, -inf for what is not attended to (biases are in
it).
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def masked(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """One call of SDPA. The mask is rounded to the queries' dtype, as SDPA asks."""
    keys, values = _per_query_head(queries, keys), _per_query_head(queries, values)
    return scaled_dot_product_attention(queries, keys, values, attn_mask=mask.to(queries.dtype), scale=scale)


def with_lse(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs, and the log-sum-exp ``[batch, query_heads, n]`` of each query's scores, in fp32 or better."""
    keys, values = _per_query_head(queries, keys), _per_query_head(queries, values)
    dtype = torch.promote_types(queries.dtype, torch.float32)
    scores = torch.matmul(queries.to(dtype), keys.to(dtype).transpose(2, 3)) * scale
    if mask is not None:
        scores = scores + mask
    lse = torch.logsumexp(scores, dim=-1)
    # A part with nothing to attend to weighs nothing: its own softmax would be 0 / 0.
    weights = torch.exp(scores - torch.where(lse == float("-inf"), torch.zeros_like(lse), lse)[..., None])
    return torch.matmul(weights, values.to(dtype)), lse


def merge(
    first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the rows of both, from the outputs and LSE of each."""
    lse = torch.logaddexp(first[1], second[1])
    out = first[0] * torch.exp(first[1] - lse)[..., None] + second[0] * torch.exp(second[1] - lse)[..., None]
    return out, lse


def split(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    scale: float,
    compact_rows: int,
) -> torch.Tensor:
    """The first `compact_rows` rows and those behind them apart, merged."""
    parts = [
        with_lse(queries, keys[:, :, rows], values[:, :, rows], mask[..., rows], scale=scale)
        for rows in (slice(0, compact_rows), slice(compact_rows, keys.shape[2]))
        if rows.start < rows.stop
    ]
    out = parts[0][0] if len(parts) == 1 else merge(parts[0], parts[1])[0]
    return out.to(queries.dtype)


def flexible(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """FlexAttention, with the mask as what is added to a score. Compile it for speed."""
    from torch.nn.attention.flex_attention import flex_attention

    whole = mask.expand(queries.shape[0], queries.shape[1], queries.shape[2], keys.shape[2])

    def biased(
        score: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, row: torch.Tensor
    ) -> torch.Tensor:
        return score + whole[batch, head, query, row]

    grouped = queries.shape[1] != keys.shape[1]
    out: torch.Tensor = flex_attention(queries, keys, values, score_mod=biased, scale=scale, enable_gqa=grouped)
    return out


def _per_query_head(queries: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return rows.repeat_interleave(queries.shape[1] // rows.shape[1], dim=1)
