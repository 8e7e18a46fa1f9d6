"""The three ways to attend to compact rows with biases agree, with each other and with the definition."""

from __future__ import annotations

import warnings

import pytest
import torch

from kvtier.compression.compaction import serving_attention

SCALE = 0.17


def inputs(dtype: torch.dtype, queries: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """4 query heads over 2 KV heads: 13 compact rows with biases, one head padded; then live rows, causal."""
    generator = torch.Generator().manual_seed(queries)
    compact, live = 13, queries + 3
    q = torch.randn(2, 4, queries, 32, generator=generator, dtype=dtype)
    k, v = (torch.randn(2, 2, compact + live, 32, generator=generator, dtype=dtype) for _ in range(2))
    mask = torch.zeros(1, 4, queries, compact + live, dtype=dtype)
    mask[..., :compact] = 2.0 * torch.randn(1, 4, 1, compact, generator=generator, dtype=dtype)
    mask[:, :2, :, 9:compact] = float("-inf")
    behind = torch.arange(live)[None] > torch.arange(queries)[:, None] + 3
    mask[..., compact:] = mask[..., compact:].masked_fill(behind, float("-inf"))
    return q, k, v, mask, compact


def by_definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(*q.shape, dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for n in range(q.shape[2]):
                z = (k[b, h // 2].double() @ q[b, h, n].double()) * SCALE + mask[0, h, n].double()
                out[b, h, n] = torch.softmax(z, dim=0) @ v[b, h // 2].double()
    return out


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_all_agree(dtype: torch.dtype, tolerance: float, queries: int) -> None:
    q, k, v, mask, compact = inputs(dtype, queries)
    expected = by_definition(q, k, v, mask)
    default = serving_attention.masked(q, k, v, mask, scale=SCALE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is slow without torch.compile
        flexible = serving_attention.flexible(q, k, v, mask, scale=SCALE)
    for rows in (0, compact, k.shape[2]):
        split = serving_attention.split(q, k, v, mask, scale=SCALE, compact_rows=rows)
        torch.testing.assert_close(split, default, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(flexible, default, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(default.double(), expected, rtol=tolerance, atol=tolerance)


def test_a_part_that_sees_nothing_weighs_nothing() -> None:
    q, k, v, mask, compact = inputs(torch.float64, 1)
    mask[..., :compact] = float("-inf")
    out = serving_attention.split(q, k, v, mask, scale=SCALE, compact_rows=compact)
    alone = serving_attention.masked(q, k[:, :, compact:], v[:, :, compact:], mask[..., compact:], scale=SCALE)
    torch.testing.assert_close(out, alone, rtol=0, atol=1e-14)
