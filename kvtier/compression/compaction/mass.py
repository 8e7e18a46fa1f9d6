"""Weights that let a few keys carry the attention mass of many: least squares within a box, on Gram matrices.

``min |E w - m|^2`` for ``lower <= w <= upper`` is solved on ``G = E^T E`` and ``c = E^T m``, which are collected row by
row, so that E (queries x keys) never exists. The solver is projected Newton (Bertsekas 1982) in fp64: it starts from a
solution at hand, which is what greedy selection needs and scipy's solvers do not offer. Each of its answers carries a
duality gap; one whose residual might be more than 1 % above the smallest is handed to scipy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvtier.errors import FitError, missing_extra

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
_ITERATIONS = 60
_HALVINGS = 40


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
    gram: torch.Tensor,
    rhs: torch.Tensor,
    norm: torch.Tensor,
    box: Box,
    start: torch.Tensor | None = None,
    *,
    share: float = _GAP_SHARE / 100,
) -> MassFit:
    """Projected Newton for all heads at once, until the gap is at most `share` of the squared residual. Arguments as
    in `fit_mass`; `fit.certified` tells where it got there."""
    heads, size = rhs.shape
    # Unit diagonal: weights then have comparable effects, and a jitter is relative.
    diagonal = torch.diagonal(gram, dim1=1, dim2=2)
    live = diagonal > torch.finfo(gram.dtype).tiny
    scale = torch.where(live, diagonal, torch.ones_like(diagonal)).rsqrt()
    g = gram * scale[:, :, None] * scale[:, None, :]
    c = rhs * scale
    lower, upper = box.lower / scale, box.upper / scale
    # A key that no query sees takes any weight: 1, no bias.
    w = (torch.ones_like(rhs) if start is None else start.to(rhs.dtype)) / scale
    w = torch.minimum(torch.maximum(w, lower), upper)
    eye = torch.eye(size, dtype=g.dtype, device=g.device)
    active = torch.ones(heads, dtype=torch.bool, device=g.device)
    for _ in range(_ITERATIONS):
        gradient = torch.einsum("hij,hj->hi", g, w) - c
        squared = (w * (gradient - c)).sum(1) + norm
        gap = _gap(gradient, w, lower, upper)
        active = gap > torch.maximum(share * squared / 2, _NEGLIGIBLE / 2 * norm)
        if not bool(active.any()):
            break
        bound = ((w <= lower) & (gradient > 0)) | ((w >= upper) & (gradient < 0)) | ~live
        free = ~bound
        matrix = torch.where(free[:, :, None] & free[:, None, :], g, eye)
        step = -torch.cholesky_solve((gradient * free)[..., None], _cholesky(matrix, eye))[..., 0] * free
        w = torch.where(active[:, None], _search(g, gradient, w, step, lower, upper), w)
    return _judge(gram, rhs, norm, w * scale, box)


def _search(
    g: torch.Tensor,
    gradient: torch.Tensor,
    w: torch.Tensor,
    step: torch.Tensor,
    lower: torch.Tensor,
    upper: torch.Tensor,
) -> torch.Tensor:
    """The first of the steps 1, 1/2, 1/4 ... along the projected path that lowers the objective, for each head."""
    length = torch.ones(w.shape[0], 1, dtype=w.dtype, device=w.device)
    best = w
    waiting = torch.ones(w.shape[0], dtype=torch.bool, device=w.device)
    for _ in range(_HALVINGS):
        trial = torch.minimum(torch.maximum(w + length * step, lower), upper)
        move = trial - w
        slope = (gradient * move).sum(1)
        change = slope + 0.5 * (move * torch.einsum("hij,hj->hi", g, move)).sum(1)
        good = waiting & (change <= 1e-4 * slope) & (slope <= 0)
        best = torch.where(good[:, None], trial, best)
        waiting = waiting & ~good
        if not bool(waiting.any()):
            break
        length = torch.where(waiting[:, None], length / 2, length)
    return best


def _cholesky(matrix: torch.Tensor, eye: torch.Tensor) -> torch.Tensor:
    """Factors of `matrix` (unit diagonal), with the smallest jitter under which they exist."""
    jitter = 1e-14
    factor: torch.Tensor
    factor, info = torch.linalg.cholesky_ex(matrix + jitter * eye)
    while bool((info != 0).any()):
        jitter *= 100
        failed = info != 0
        again, info_again = torch.linalg.cholesky_ex(matrix + jitter * eye)
        factor = torch.where(failed[:, None, None], again, factor)
        info = torch.where(failed, info_again, info)
        if jitter > 1.0:
            raise FitError("a Gram matrix of the mass fit is not positive semidefinite")
    return factor


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
