"""Which keys of a block stay, for Attention Matching (arXiv 2602.16284): the highest attention (HAK), or orthogonal
matching pursuit on the attention mass (OMP)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvtier.compression.compaction.attention_block import MassRows, MassSystem, correlations, mass_system
from kvtier.compression.compaction.mass import Box, GrowingFit, solve_box
from kvtier.errors import ConfigError

HELD_BYTES = 1 << 30
"""Gram matrices of all keys are kept up to this size; beyond it, every step reads the queries again."""


@dataclass(frozen=True, slots=True)
class Pursuit:
    """How OMP goes on: keys_per_step keys are added by one residual, all weights are refitted every refit_every
    steps. Between refits the new keys alone get weights."""

    keys_per_step: int
    refit_every: int

    def __post_init__(self) -> None:
        for name in ("keys_per_step", "refit_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: give 1 or more")


def pursuit_for(budget: int) -> Pursuit:
    """What is exact enough and quick enough for `budget` kept keys."""
    if budget < 300:
        return Pursuit(1, 1)
    return Pursuit(2, 2) if budget < 1500 else Pursuit(4, 2)


def highest_attention(source: MassRows, budget: int, protected: torch.Tensor | None = None) -> torch.Tensor:
    """int64 ``[budget]`` ascending: the `protected` keys, then those of the largest root mean square of attention.
    Of equal ones the earlier."""
    scores = source.scores().clone()
    if protected is not None:
        scores[protected] = torch.inf
    return torch.argsort(scores, descending=True, stable=True)[:budget].sort().values


def matching_pursuit(
    source: MassRows,
    budget: int,
    box: Box,
    pursuit: Pursuit | None = None,
    protected: torch.Tensor | None = None,
    *,
    held_bytes: int = HELD_BYTES,
    on_keys: Callable[[int], None] | None = None,
) -> torch.Tensor:
    """int64 ``[budget]`` ascending: keys added greedily, each the one that the residual mass of all heads
    correlates with most, after the `protected` ones. on_keys: told how many are chosen."""
    pursuit = pursuit or pursuit_for(budget)
    size = source.heads * source.tokens**2 * 8
    system: _System = _HeldSystem(source) if size <= held_bytes else _StreamedSystem(source, budget)
    chosen = _Chosen(source.heads, budget, system, box)
    if protected is not None and len(protected):
        chosen.add(protected[:budget])
        chosen.refit()
    step = 0
    while chosen.count < budget:
        gain = chosen.gain()
        gain[chosen.keys()] = -torch.inf
        chosen.add(gain.topk(min(pursuit.keys_per_step, budget - chosen.count)).indices)
        step += 1
        if step % pursuit.refit_every == 0:
            chosen.refit()
        else:
            chosen.fit_new()
        if on_keys is not None:
            on_keys(chosen.count)
    return chosen.keys().sort().values


class _System:
    """Columns of the normal equations, for keys that are added one after the other."""

    norm: torch.Tensor

    def add(self, before: torch.Tensor, new: torch.Tensor) -> None:
        raise NotImplementedError

    def chosen(self, keys: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the keys from the ordinal `first` on: rows of the gram ``[H, keys - first, keys]`` and rhs ``[H, keys -
        first]``, in the order of addition."""
        raise NotImplementedError

    def gain(self, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """``[T]``, see `correlations`."""
        raise NotImplementedError


class _HeldSystem(_System):
    """With the Gram matrices of all T keys at hand."""

    def __init__(self, source: MassRows) -> None:
        self._all: MassSystem = mass_system(source)
        self.norm = self._all.norm
        self._rhs_sum = self._all.rhs.sum(0)

    def add(self, before: torch.Tensor, new: torch.Tensor) -> None:
        pass

    def chosen(self, keys: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._all.gram[:, keys[first:, None], keys], self._all.rhs[:, keys[first:]]

    def gain(self, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        # Rows, not columns: the matrix is symmetric, and rows lie in one piece.
        total = self._rhs_sum.clone()
        for head, w in enumerate(weights):
            total -= w @ self._all.gram[head].index_select(0, keys)
        return total


class _StreamedSystem(_System):
    """With the Gram matrices of the chosen keys only; every gain is a pass over the queries."""

    def __init__(self, source: MassRows, budget: int) -> None:
        self._source = source
        device = source.device
        self._gram = torch.zeros(source.heads, budget, budget, dtype=torch.float64, device=device)
        self._rhs = torch.zeros(source.heads, budget, dtype=torch.float64, device=device)
        self.norm = torch.zeros(source.heads, dtype=torch.float64, device=device)
        for head, _, m in source.rows(torch.empty(0, dtype=torch.int64, device=device)):
            self.norm[head] += m @ m

    def add(self, before: torch.Tensor, new: torch.Tensor) -> None:
        old, end = len(before), len(before) + len(new)
        for head, e, m in self._source.rows(torch.cat([before, new])):
            part = e[:, old:].T @ e
            self._gram[head, old:end, :end] += part
            self._gram[head, :old, old:end] += part[:, :old].T
            self._rhs[head, old:end] += e[:, old:].T @ m

    def chosen(self, keys: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._gram[:, first : len(keys), : len(keys)], self._rhs[:, first : len(keys)]

    def gain(self, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return correlations(self._source, keys, weights)


class _Chosen:
    """Keys in the order in which they were added, and their weights."""

    def __init__(self, heads: int, budget: int, system: _System, box: Box) -> None:
        device = system.norm.device
        self._keys = torch.empty(budget, dtype=torch.int64, device=device)
        self._weights = torch.zeros(heads, budget, dtype=torch.float64, device=device)
        self._system, self._box = system, box
        self._fits = [GrowingFit(box, budget) for _ in range(heads)]
        self.count = 0
        self._refitted = 0
        self._weighted = 0

    def keys(self) -> torch.Tensor:
        return self._keys[: self.count]

    def add(self, new: torch.Tensor) -> None:
        self._system.add(self.keys(), new)
        self._keys[self.count : self.count + len(new)] = new
        self.count += len(new)

    def gain(self) -> torch.Tensor:
        return self._system.gain(self.keys(), self._weights[:, : self.count])

    def refit(self) -> None:
        """All weights, from those at hand; new ones start at the bottom."""
        old, end = self._refitted, self.count
        gram, rhs = self._system.chosen(self.keys(), old)
        for head, fit in enumerate(self._fits):
            fit.extend(gram[head], rhs[head], self._weights[head, old:end])
            self._weights[head, :end] = fit.solve(float(self._system.norm[head]))
        self._refitted = self._weighted = end

    def fit_new(self) -> None:
        """The new keys' weights alone, to what the others leave."""
        old, end = self._weighted, self.count
        gram, rhs = self._system.chosen(self.keys(), old)
        left = rhs - torch.einsum("hij,hj->hi", gram[:, :, :old], self._weights[:, :old])
        fit = solve_box(gram[:, :, old:], left, self._system.norm, self._box, self._weights[:, old:end])
        self._weights[:, old:end] = fit.weights
        self._weighted = end
