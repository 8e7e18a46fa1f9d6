"""Greedy choice by log coverage in the native core: the choice of `coverage_reference`, without looking at every
position in every step. Arrays are numpy's; calls release the GIL."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvtier.kernels import _native
from kvtier.kernels.compaction.coverage_reference import EPSILON

_STEPS_PER_CALL = 512
"""Choices between two reports; each call also builds its heap anew."""


def choose(
    shares: npt.NDArray[np.float64],
    count: int,
    *,
    chosen: npt.NDArray[np.int64] | None = None,
    epsilon: float = EPSILON,
    progress: Callable[[int], None] | None = None,
) -> npt.NDArray[np.int64]:
    """As `coverage_reference.choose`. shares: float64 ``[positions, rows]``, C-contiguous, finite and not negative.
    `progress` is told how many have been chosen. Raises ValueError for other shares, or where fewer than `count`
    positions are left."""
    if not np.isfinite(shares).all() or (shares < 0).any():
        raise ValueError("shares must be finite and not negative")
    bounds = np.full(len(shares), np.inf)
    covered = np.zeros(shares.shape[1])
    for position in [] if chosen is None else np.sort(chosen).tolist():
        covered += shares[position]
        bounds[position] = -np.inf
    order = np.empty(count, np.int64)
    for start in range(0, count, _STEPS_PER_CALL):
        part = order[start : start + _STEPS_PER_CALL]
        _native.choose_by_coverage(shares, covered, bounds, epsilon, part)
        if progress is not None:
            progress(start + len(part))
    return order
