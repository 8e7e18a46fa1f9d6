"""Which positions stay, from how much attention each of them got (KVzip, arXiv 2505.23416, and its form for one set per
group of heads).

Ties go to the lowest position (layer, head). Protected positions are the first ones of the context; they always stay
and count inside the budget.

Per head, from scores ``[layers, heads, tokens]``: `pair` ranks all of them together, `uniform` each head by itself,
`head` ranks heads. For one set per group of (layer, head) rows, from the largest probabilities ``s [rows, tokens]``
that queries gave: `raw_max`, `normalized_max`, `log_coverage`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvtier.compression.compaction.recipe import budget_tokens
from kvtier.errors import ConfigError
from kvtier.kernels.compaction import coverage

HEAD_SELECTORS = ("pair", "uniform", "head")
GROUP_SELECTORS = ("raw_max", "normalized_max", "log_coverage")

RECENT_TOKENS = 256
"""Latest positions that a head which may not keep everything keeps, with the selector `head`."""

Kept = tuple[tuple[torch.Tensor, ...], ...]
"""Per layer and head, ascending int64 positions."""


def pair(scores: torch.Tensor, ratio: float, protected: int = 0) -> Kept:
    """The best (layer, head, position) triples of all. Every head keeps one position at least."""
    layers, heads, tokens = scores.shape
    ranked = scores.to(torch.float64, copy=True).reshape(layers * heads, tokens)
    ranked[:, :protected] = torch.inf
    if not protected:
        ranked.scatter_(1, ranked.argmax(dim=1, keepdim=True), torch.inf)
    budget = max(budget_tokens(ranked.numel(), ratio), layers * heads * max(1, protected))
    best = torch.sort(ranked.flatten(), descending=True, stable=True).indices[:budget]
    keep = torch.zeros(layers * heads * tokens, dtype=torch.bool)
    keep[best] = True
    return _sets(keep.view(layers, heads, tokens))


def uniform(scores: torch.Tensor, ratio: float, protected: int = 0) -> Kept:
    """The best positions of each head, the same number everywhere."""
    layers, heads, tokens = scores.shape
    rows = scores.reshape(layers * heads, tokens)
    budget = max(budget_tokens(tokens, ratio), protected, 1)
    keep = torch.zeros(layers * heads, tokens, dtype=torch.bool)
    keep.scatter_(1, _best(rows, budget, protected), True)
    return _sets(keep.view(layers, heads, tokens))


def head(head_scores: torch.Tensor, tokens: int, ratio: float, protected: int = 0, recent: int = RECENT_TOKENS) -> Kept:
    """Heads with the highest of `head_scores` ``[layers, heads]`` keep everything; the others the protected positions
    and the `recent` latest; what is left of the budget goes to the next head, as more of its latest. The context has no
    say: `head_scores` are measured once per model (`head_scores_of`)."""
    layers, heads = head_scores.shape
    total = max(budget_tokens(layers * heads * tokens, ratio), layers * heads * max(1, protected))
    protected = min(protected, tokens)
    least = min(tokens, protected + recent, total // (layers * heads))
    counts = torch.full((layers * heads,), least)
    spare = total - least * layers * heads
    for n in torch.sort(head_scores.flatten().double(), descending=True, stable=True).indices.tolist():
        more = min(spare, tokens - least)
        counts[n] += more
        spare -= more
    positions = torch.arange(tokens)
    keep = (positions < protected) | (positions >= tokens + protected - counts[:, None])
    return _sets(keep.view(layers, heads, tokens))


def head_scores_of(scores: torch.Tensor, protected: int = 0) -> torch.Tensor:
    """``[layers, heads]`` of one context's ``[layers, heads, tokens]``, for `head`: the largest of each head's
    scores behind the protected positions."""
    return scores[..., protected:].amax(dim=-1)


def shares_of(s: torch.Tensor) -> torch.Tensor:
    """float64 ``p [rows, tokens]``: each row of `s` as shares of its sum; zeros for a row whose sum is 0."""
    total = s.sum(dim=-1, keepdim=True, dtype=torch.float64)
    return s.double().div_(total).masked_fill_(total <= 0, 0.0)


def largest_shares(s: torch.Tensor) -> torch.Tensor:
    """float64 ``[tokens]``: the maximum of `shares_of` over the rows. Row by row, which stays in a core's cache."""
    best = torch.zeros(s.shape[1], dtype=torch.float64)
    for row, total in zip(s, s.sum(dim=-1, dtype=torch.float64).tolist(), strict=True):
        if total > 0:
            torch.maximum(best, row.double().div_(total), out=best)
    return best


@dataclass(frozen=True, slots=True)
class Coverage:
    """Shares of the attention that fall on what stays: the mean over all rows, and the smallest row."""

    mean: float
    least: float

    @staticmethod
    def of(rows: torch.Tensor) -> Coverage:
        """rows: ``[rows]``, from `covered`."""
        return Coverage(float(rows.mean()), float(rows.min()))


def covered(p: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """float64 ``[rows]``: how much of each row's shares `kept` holds."""
    return p[:, kept].sum(dim=-1)


def group(
    selector: str,
    s: torch.Tensor,
    budget: int,
    protected: int = 0,
    progress: Callable[[int], None] | None = None,
) -> torch.Tensor:
    """One set for all rows of `s` ``[rows, tokens]``: ascending int64 ``[budget]`` (more where more are protected).
    `progress` is told how many positions `log_coverage` has chosen. Raises ConfigError for an unknown selector."""
    if selector not in GROUP_SELECTORS:
        raise ConfigError(f"selector = {selector!r}: for one set per group use one of {', '.join(GROUP_SELECTORS)}")
    tokens = s.shape[1]
    protected = min(protected, tokens)
    budget = min(tokens, max(budget, protected, 1))
    if selector == "raw_max":
        return _best(s.amax(dim=0)[None], budget, protected)[0].sort().values
    if selector == "normalized_max":
        return _best(largest_shares(s)[None], budget, protected)[0].sort().values
    p = shares_of(s)
    first = torch.arange(protected)
    more = coverage.choose(p.T.contiguous().numpy(), budget - protected, chosen=first.numpy(), progress=progress)
    return torch.cat([first, torch.from_numpy(more)]).sort().values


def _best(rows: torch.Tensor, budget: int, protected: int) -> torch.Tensor:
    """The `budget` best positions of each row, protected ones first; not in order."""
    ranked = rows.to(torch.float64, copy=True)
    ranked[:, :protected] = torch.inf
    return torch.sort(ranked, dim=1, descending=True, stable=True).indices[:, :budget]


def _sets(keep: torch.Tensor) -> Kept:
    return tuple(tuple(row.nonzero()[:, 0] for row in layer) for layer in keep)
