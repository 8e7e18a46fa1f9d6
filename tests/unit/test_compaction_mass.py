"""The mass fit against scipy: residuals on easy, random and nearly singular problems, and what it refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import optimize

from kvtier.compression.compaction import mass
from kvtier.compression.compaction.mass import RESIDUAL_FACTOR, Box, MassFit, fit_mass, solve_box
from kvtier.compression.compaction.matching import HAK_BOX, OMP_BOX
from kvtier.errors import FitError

NEGLIGIBLE = 1e-6
"""Of |m|: below it a residual is zero for attention, and a ratio of two such says nothing."""
KINDS = ("uniform", "heavy", "low_rank", "duplicates", "scales", "attention", "zeros")


def problem(kind: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """E ``[n, B]`` and m ``[n]``, fp64."""
    g = torch.Generator().manual_seed(seed)
    n, size = (int(torch.randint(*bounds, (1,), generator=g)) for bounds in ((20, 300), (2, 60)))

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    if kind == "uniform":
        e = uniform(n, size)
    elif kind == "heavy":
        e = torch.exp(3 * normal(n, size))
    elif kind == "low_rank":
        e = uniform(n, 3) @ uniform(3, size) + 1e-6 * uniform(n, size)
    elif kind == "duplicates":
        e = uniform(n, size)
        half = size // 2
        e[:, size - half :] = e[:, :half] * (1 + 1e-9 * uniform(half))
    elif kind == "scales":
        e = uniform(n, size) * 10.0 ** (-12 * uniform(size))
    elif kind == "attention":
        z = normal(n, 16) @ normal(16, size) / 2
        e = torch.exp(z - z.amax(dim=1, keepdim=True))
    else:
        e = uniform(n, size)
        e[:, ::2] = 0
    noise = uniform(n) * (0.3 if seed % 2 else 1.0) * e.sum(dim=1)
    return e, e @ (3 * uniform(size)) + noise


def normal_equations(e: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (e.T @ e)[None], (e.T @ m)[None], (m @ m)[None]


def residual(e: torch.Tensor, m: torch.Tensor, w: torch.Tensor) -> float:
    return float((e @ w - m).norm())


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", KINDS)
def test_residual_is_that_of_nnls(kind: str, seed: int) -> None:
    e, m = problem(kind, seed)
    _, best = optimize.nnls(e.numpy(), m.numpy())
    # A box in which the unbounded solution lies: nnls knows no upper bound.
    fit = fit_mass(*normal_equations(e, m), Box(0.0, 1e15), label="test")
    found = residual(e, m, fit.weights[0])
    assert found <= RESIDUAL_FACTOR * best + NEGLIGIBLE * float(m.norm())
    assert found == pytest.approx(float(fit.residual[0]) * float(m.norm()), rel=1e-3, abs=NEGLIGIBLE * float(m.norm()))


@pytest.mark.parametrize("box", [HAK_BOX, OMP_BOX], ids=["hak", "omp"])
@pytest.mark.parametrize("kind", KINDS)
def test_residual_within_the_box_is_that_of_bounded_least_squares(kind: str, box: Box) -> None:
    for seed in range(100, 106):
        e, m = problem(kind, seed)
        fit = fit_mass(*normal_equations(e, m), box, label="test")
        assert bool((fit.weights >= box.lower).all() and (fit.weights <= box.upper).all())
        best = min(
            math.sqrt(2 * optimize.lsq_linear(e.numpy(), m.numpy(), (box.lower, box.upper), method=method).cost)
            for method in ("bvls", "trf")
        )
        assert residual(e, m, fit.weights[0]) <= RESIDUAL_FACTOR * best + NEGLIGIBLE * float(m.norm())
        clamped, _ = optimize.nnls(e.numpy(), m.numpy())
        at_corner = residual(e, m, torch.from_numpy(clamped).clamp(box.lower, box.upper))
        assert residual(e, m, fit.weights[0]) <= at_corner + NEGLIGIBLE * float(m.norm())


def test_heads_are_solved_apart() -> None:
    problems = [problem("attention", seed) for seed in range(200, 205)]
    size = min(e.shape[1] for e, _ in problems)
    systems = [normal_equations(e[:, :size], m) for e, m in problems]
    together = fit_mass(
        torch.cat([s[0] for s in systems]),
        torch.cat([s[1] for s in systems]),
        torch.cat([s[2] for s in systems]),
        OMP_BOX,
        label="test",
    )
    for head, system in enumerate(systems):
        alone = fit_mass(*system, OMP_BOX, label="test")
        assert float(together.residual[head]) == pytest.approx(float(alone.residual[0]), rel=1e-4)


def test_certificate_bounds_the_excess() -> None:
    for seed in range(20):
        e, m = problem("attention", seed)
        for fit in (
            solve_box(*normal_equations(e, m), OMP_BOX),
            mass._judge(*normal_equations(e, m), torch.ones(1, e.shape[1], dtype=torch.float64), OMP_BOX),
        ):
            best = 2 * optimize.lsq_linear(e.numpy(), m.numpy(), (OMP_BOX.lower, OMP_BOX.upper), method="bvls").cost
            above = residual(e, m, fit.weights[0]) ** 2 - best
            assert above <= float(fit.excess[0]) * residual(e, m, fit.weights[0]) ** 2 + 1e-10 * float(m @ m)


def test_a_start_near_the_solution_is_used() -> None:
    e, m = problem("attention", 3)
    system = normal_equations(e, m)
    cold = solve_box(*system, OMP_BOX)
    warm = solve_box(*system, OMP_BOX, cold.weights)
    assert torch.allclose(warm.weights, cold.weights, rtol=1e-9, atol=1e-12)


def test_what_is_not_certified_goes_to_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver that gives up at once must not decide the answer."""

    def lazy(gram: torch.Tensor, rhs: torch.Tensor, norm: torch.Tensor, box: Box, start: object = None) -> MassFit:
        return mass._judge(gram, rhs, norm, torch.full_like(rhs, box.lower), box)

    monkeypatch.setattr(mass, "solve_box", lazy)
    e, m = problem("attention", 5)
    fit = fit_mass(*normal_equations(e, m), OMP_BOX, label="test")
    best = math.sqrt(2 * optimize.lsq_linear(e.numpy(), m.numpy(), (OMP_BOX.lower, OMP_BOX.upper)).cost)
    assert residual(e, m, fit.weights[0]) <= RESIDUAL_FACTOR * best + NEGLIGIBLE * float(m.norm())


def test_a_key_that_no_query_sees_has_no_bias() -> None:
    e, m = problem("zeros", 1)
    fit = fit_mass(*normal_equations(e, m), OMP_BOX, label="test")
    assert bool((fit.weights[0, ::2] == 1).all())


@pytest.mark.parametrize("which", ["gram", "rhs", "norm"])
def test_nan_names_layer_and_head(which: str) -> None:
    e, m = problem("uniform", 0)
    gram, rhs, norm = (torch.cat([t, t]) for t in normal_equations(e, m))
    {"gram": gram[1], "rhs": rhs[1], "norm": norm[1:]}[which].fill_(np.nan)
    with pytest.raises(FitError, match=r"layer 3, head 1: .* is not finite"):
        fit_mass(gram, rhs, norm, OMP_BOX, label="layer 3")
