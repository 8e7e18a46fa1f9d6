"""How long the selectors for one set per group take at the size of a real model's group, and what they keep of it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from kvtier.compression.compaction import selection
from kvtier.compression.compaction.kvzip import SINK_TOKENS
from kvtier.compression.compaction.prefix import Progress, budget_tokens

ROWS, POSITIONS = 256, 29_807
"""Four layers of 64 heads that share one set, and a prefix of 314 tools."""

RATIO = 0.3


@dataclass(frozen=True, slots=True)
class SelectorFigures:
    """One selector: mean and smallest coverage over all rows, and the time of its choice, in seconds."""

    selector: str
    mean_coverage: float
    min_coverage: float
    seconds: float


def measure_selection(
    rows: int = ROWS,
    positions: int = POSITIONS,
    *,
    ratio: float = RATIO,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[SelectorFigures]:
    """The selectors on one group of `rows` made-up rows: largest probabilities that scatter over some powers of ten, as
    those of models do, a part of that in common to all rows."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(positions, generator=generator)
    own = torch.randn(rows, positions, generator=generator)
    scores = torch.sigmoid(common + 1.5 * own - 5)
    p = selection.shares_of(scores)
    budget, found = budget_tokens(positions, ratio), []
    for selector in selection.GROUP_SELECTORS:

        def chosen(count: int) -> None:
            if progress is not None:
                progress(count, budget - SINK_TOKENS, "choosing positions")

        started = time.perf_counter()
        kept = selection.group(selector, scores, budget, SINK_TOKENS, chosen)
        seconds = time.perf_counter() - started
        total = selection.Coverage.of(selection.covered(p, kept))
        found.append(SelectorFigures(selector, total.mean, total.least, seconds))
    return found
