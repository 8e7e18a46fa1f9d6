"""Attention of captured queries over chosen rows, as compaction methods see it: the plain form, in torch.

Queries and keys carry their rotation already. Query head h reads KV head ``h // (q_heads // kv_heads)``. Everything is
computed in fp32, or in fp64 where the inputs are. The logits of one call are ``[q_heads, n, rows]``: give as many
queries at once as there is memory for (`query_slices`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

DEFAULT_LOGITS_BYTES = 256 << 20
"""Memory that the logits of one slice of queries may take."""


def compute_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """fp64 where one of `tensors` is, else fp32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def query_slices(
    queries: int, *, q_heads: int, rows: int, limit_bytes: int = DEFAULT_LOGITS_BYTES, item_bytes: int = 4
) -> Iterator[slice]:
    """Cuts `queries` so that the logits of one slice stay within `limit_bytes` (one query at least)."""
    step = max(1, limit_bytes // max(1, q_heads * rows * item_bytes))
    for start in range(0, queries, step):
        yield slice(start, min(start + step, queries))


def logits(queries: torch.Tensor, keys: torch.Tensor, *, scale: float, softcap: float | None = None) -> torch.Tensor:
    """``[q_heads, n, rows]`` from queries ``[q_heads, n, dim]`` and keys ``[kv_heads, rows, dim]``: scaled, and bent by
    ``softcap * tanh(x / softcap)`` where the model does so."""
    dtype = compute_dtype(queries, keys)
    kv_heads = keys.shape[0]
    q_heads, n, dim = queries.shape
    grouped = queries.to(dtype).reshape(kv_heads, q_heads // kv_heads * n, dim)
    z = torch.matmul(grouped, keys.to(dtype).transpose(1, 2)).mul_(scale).view(q_heads, n, keys.shape[1])
    return z if softcap is None else z.div_(softcap).tanh_().mul_(softcap)


def probabilities(
    z: torch.Tensor, visible: torch.Tensor | None = None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Softmax of `z` ``[q_heads, n, rows]`` over the rows that `visible` (bool, ``[n, rows]``; None: all) allows.
    sinks ``[q_heads]``: a logit per head that takes a share and gives no value."""
    if visible is not None:
        z = z.masked_fill(~visible, float("-inf"))
    if sinks is None:
        return torch.softmax(z, dim=-1)
    extra = sinks.to(z.dtype)[:, None, None].expand(-1, z.shape[1], 1)
    return torch.softmax(torch.cat([z, extra], dim=-1), dim=-1)[..., :-1]


def mix(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``[q_heads, n, value_dim]``: rows of `values` ``[kv_heads, rows, value_dim]`` mixed by `weights`
    ``[q_heads, n, rows]``."""
    q_heads, n, rows = weights.shape
    kv_heads = values.shape[0]
    grouped = weights.reshape(kv_heads, q_heads // kv_heads * n, rows)
    return torch.matmul(grouped, values.to(weights.dtype)).view(q_heads, n, values.shape[2])
