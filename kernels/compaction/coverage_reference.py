"""Greedy choice by log coverage, in plain Python: what `kernels/csrc/coverage.cpp` must choose, ties included.

Row r (a layer's head) gives position t a share p[t, r]; the shares of a chosen set S sum to its coverage of the row.
The next position is the one for which ``sum over r of log(cov_r + p[t, r] + eps) - log(cov_r + eps)`` is largest, the
lowest of equal ones. The difference is written ``log1p(p / (cov_r + eps))``, which is the same number and keeps small
shares that would vanish in the first logarithm.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

EPSILON = 1e-6


def gain(shares: npt.NDArray[np.float64], covered: npt.NDArray[np.float64], epsilon: float = EPSILON) -> float:
    """What one position with `shares` ``[rows]`` adds to the objective; summed in the order of the rows."""
    total = 0.0
    for share, cov in zip(shares.tolist(), covered.tolist(), strict=True):
        total += math.log1p(share / (cov + epsilon))
    return total


def choose(
    shares: npt.NDArray[np.float64],
    count: int,
    *,
    chosen: npt.NDArray[np.int64] | None = None,
    epsilon: float = EPSILON,
) -> npt.NDArray[np.int64]:
    """`count` positions in the order of choice, from `shares` float64 ``[positions, rows]``. chosen: positions that
    are covered already and not among the answer. Looks at every position in every step."""
    taken = set() if chosen is None else set(chosen.tolist())
    covered = np.zeros(shares.shape[1])
    for position in sorted(taken):
        covered += shares[position]
    order = []
    for _ in range(count):
        gains = {t: gain(shares[t], covered, epsilon) for t in range(len(shares)) if t not in taken}
        best = max(gains, key=lambda t: (gains[t], -t))
        covered += shares[best]
        taken.add(best)
        order.append(best)
    return np.array(order, np.int64)
