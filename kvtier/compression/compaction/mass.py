"""Weights that let a few keys carry the attention mass of many: least squares within a box, on Gram matrices.

``min |E w - m|^2`` for ``lower <= w <= upper`` is solved on ``G = E^T E`` and ``c = E^T m``, which are collected row by
row, so that E (queries x keys) never exists. The solver is an active set (Lawson and Hanson 1974, with upper bounds) in
the native core, fp64: its problem grows by columns and goes on from the weights and the factor at hand, which is what
greedy selection needs and scipy's solvers do not offer. Each of its answers carries a duality gap; one whose residual
might be more than 1 % above the smallest is handed to scipy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvtier.errors import FitError, missing_extra
from kvtier.kernels import _native

try:
    from scipy.optimize import lsq_linear
except ImportError as e:
    raise missing_extra("scipy", "compaction") from e

RESIDUAL_FACTOR = 1.01
"""Largest accepted ratio of a residual's norm to the smallest that exists."""
_GAP_SHARE = 1.0 - RESIDUAL_FACTOR**-2
"""The same as a share of the squared residual that may be above the optimum."""
_NEGLIGIBLE = 1e-12
"""Squared residuals below this share of |m|^2 are zero for every purpose here, and near fp64's end on a Gram matrix."""


@dataclass(frozen=True, slots=True)
class Box:
    """Bounds of every weight, 0 <= lower < upper."""

    lower: float
    upper: float


@dataclass(frozen=True, slots=True)
class MassFit:
    """weights: fp64 ``[heads, B]``. residual: fp64 ``[heads]``, ``|E w - m| / |m|`` (0 where m is 0).
    excess: fp64 ``[heads]``, upper bound of the squared residual's share above the optimum."""

    weights: torch.Tensor
    residual: torch.Tensor
    excess: torch.Tensor

    @property
    def certified(self) -> torch.Tensor:
        """bool ``[heads]``: the residual is within RESIDUAL_FACTOR of the smallest."""
        return self.excess <= _GAP_SHARE


def fit_mass(
    gram: torch.Tensor,
    rhs: torch.Tensor,
    norm: torch.Tensor,
    box: Box,
    start: torch.Tensor | None = None,
    *,
    label: str,
) -> MassFit:
    """The weights of every head, each within 1.01 of the smallest residual.

    gram: fp64 ``[heads, B, B]``; rhs: ``[heads, B]``; norm: ``[heads]``, ``m^T m``. start: weights to begin from.
    FitError, naming `label` and the head, for numbers that are not finite."""
    for name, tensor in (("E^T E", gram), ("E^T m", rhs), ("m", norm)):
        finite = torch.isfinite(tensor).flatten(1).all(1) if tensor.dim() > 1 else torch.isfinite(tensor)
        if not bool(finite.all()):
            raise FitError(f"{label}, head {int((~finite).nonzero()[0])}: {name} of the mass fit is not finite")
    fit = solve_box(gram, rhs, norm, box, start)
    for head in (~fit.certified).nonzero().flatten().tolist():
        other = _by_scipy(gram[head], rhs[head], box)
        again = _judge(gram[head, None], rhs[head, None], norm[head, None], other[None], box)
        if float(again.residual[0]) < float(fit.residual[head]):
            fit.weights[head] = again.weights[0]
            fit.residual[head] = again.residual[0]
            fit.excess[head] = again.excess[0]
    return fit


def solve_box(
    gram: torch.Tensor, rhs: torch.Tensor, norm: torch.Tensor, box: Box, start: torch.Tensor | None = None
) -> MassFit:
    """The native solver for all heads. Arguments as in `fit_mass`; `certified` tells where it is known to be right."""
    heads, size = rhs.shape
    weights = torch.empty(heads, size, dtype=torch.float64)
    begin = torch.ones_like(rhs) if start is None else start
    for head in range(heads):
        growing = GrowingFit(box, size)
        growing.extend(gram[head], rhs[head], begin[head])
        weights[head] = growing.solve(float(norm[head]))
    return _judge(gram, rhs, norm, weights.to(gram.device), box)


class GrowingFit:
    """One head's problem, to which columns are added."""

    def __init__(self, box: Box, capacity: int) -> None:
        self._native = _native.BoxFit(box.lower, box.upper, capacity)

    def extend(self, rows: torch.Tensor, rhs: torch.Tensor, start: torch.Tensor) -> None:
        """k more columns. rows: fp64 ``[k, columns + k]``, their products with all columns, the new ones last; rhs,
        start: ``[k]``."""
        self._native.extend(_array(rows), _array(rhs), _array(start))

    def solve(self, norm: float) -> torch.Tensor:
        """fp64 ``[columns]`` on the CPU, going on from the last solution. norm: ``m^T m``. What it gives up on is where
        it got to; `MassFit.certified` tells."""
        self._native.solve(max(norm, 0.0) ** 0.5)
        weights = np.empty(len(self._native))
        self._native.weights(weights)
        return torch.from_numpy(weights)


def _array(tensor: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.ascontiguousarray(tensor.detach().cpu().numpy(), dtype=np.float64)


def _gap(gradient: torch.Tensor, w: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    """How far half the squared residual may be above its minimum over the box, at most (Frank-Wolfe)."""
    gap: torch.Tensor = gradient.clamp(min=0) * (w - lower) + (-gradient).clamp(min=0) * (upper - w)
    return gap.sum(1)


def _judge(gram: torch.Tensor, rhs: torch.Tensor, norm: torch.Tensor, w: torch.Tensor, box: Box) -> MassFit:
    w = w.clamp(box.lower, box.upper)
    gradient = torch.einsum("hij,hj->hi", gram, w) - rhs
    squared = ((w * (gradient - rhs)).sum(1) + norm).clamp(min=0)
    gap = 2 * _gap(gradient, w, torch.full_like(w, box.lower), torch.full_like(w, box.upper))
    floor = (_NEGLIGIBLE * norm).clamp(min=torch.finfo(norm.dtype).tiny)
    excess = gap / torch.maximum(squared, floor)
    residual = (squared / norm.clamp(min=torch.finfo(norm.dtype).tiny)).sqrt()
    return MassFit(w, residual, excess)


def _by_scipy(gram: torch.Tensor, rhs: torch.Tensor, box: Box) -> torch.Tensor:
    """The same problem on a square root of the Gram matrix, by scipy's bounded least squares."""
    values, vectors = np.linalg.eigh(gram.cpu().numpy())
    root = np.sqrt(np.maximum(values, values[-1] * 1e-15))
    matrix = root[:, None] * vectors.T
    target = (vectors.T @ rhs.cpu().numpy()) / root
    solution = lsq_linear(matrix, target, bounds=(box.lower, box.upper), method="bvls", tol=1e-12)
    weights: torch.Tensor = torch.as_tensor(solution.x, device=gram.device)
    return weights
