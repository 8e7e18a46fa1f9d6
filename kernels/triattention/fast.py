"""TriAttention in torch, any device: the mean phase folds into one weight row per query head, so that the score is two
matrix products over the cached keys."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvtier.kernels.triattention.reference import F64, I64, MODES, OFFSETS, STD_FLOOR


@dataclass(frozen=True, slots=True)
class LayerTable:
    """Statistics of one layer, ready to score: made once.

    omega: fp64 numpy ``[F]``. mean: complex128 ``[query_heads, F]``, the gain folded in. spread: fp32 ``[kv_heads, F,
    query_heads per KV head]``. real, imag: dimensions of the pairs, int64 ``[F]``, or a slice where they are evenly
    spaced, which needs no gather."""

    omega: F64
    mean: torch.Tensor
    spread: torch.Tensor
    real: torch.Tensor | slice
    imag: torch.Tensor | slice
    kv_heads: int


def layer_table(
    q_mean: np.ndarray[tuple[int, ...], np.dtype[np.complex64]],
    q_abs: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
    omega: F64,
    gain: F64,
    real: I64,
    imag: I64,
    kv_heads: int,
    device: torch.device,
) -> LayerTable:
    """q_mean, q_abs: ``[query_heads, F]``; the others as in ``reference.score``."""
    mean = q_mean.astype(np.complex128)
    spread = gain * (q_abs.astype(np.float64) - np.abs(mean))
    grouped = spread.reshape(kv_heads, -1, spread.shape[-1]).transpose(0, 2, 1)
    return LayerTable(
        omega=np.asarray(omega, dtype=np.float64),
        mean=torch.from_numpy(mean * gain),
        spread=torch.from_numpy(np.ascontiguousarray(grouped)).to(device, torch.float32),
        real=_index(real, device),
        imag=_index(imag, device),
        kv_heads=kv_heads,
    )


def _index(dims: I64, device: torch.device) -> torch.Tensor | slice:
    steps = np.unique(np.diff(dims))
    if len(steps) == 1 and steps[0] > 0:
        return slice(int(dims[0]), int(dims[-1]) + 1, int(steps[0]))
    return torch.from_numpy(np.asarray(dims, dtype=np.int64)).to(device)


def mean_phase(omega: F64, t: int, offsets: tuple[int, ...] = OFFSETS) -> torch.Tensor:
    """complex128 ``[F]`` on the CPU: the mean of ``exp(i omega (t + d))`` over the offsets. In fp64, because an fp32
    phase near position 95 000 is off by more than a thousandth."""
    angles = np.asarray([t + d for d in offsets], dtype=np.float64)[:, None] * omega
    return torch.from_numpy(np.exp(1j * angles).mean(axis=0))


def score(keys: torch.Tensor, table: LayerTable, phase: torch.Tensor) -> torch.Tensor:
    """fp32 ``[query_heads, T]``. keys: ``[kv_heads, T, head_dim]`` as they lie in the cache. phase: of `mean_phase`."""
    weights = table.mean * phase
    folded = torch.zeros(len(weights), keys.shape[-1], dtype=torch.float32, device=keys.device)
    folded[:, table.real] = weights.real.to(keys.device, torch.float32)
    folded[:, table.imag] = weights.imag.to(keys.device, torch.float32)
    x = keys.float()
    scores = torch.bmm(x, folded.view(table.kv_heads, -1, keys.shape[-1]).transpose(1, 2))
    # Not hypot, which is several times slower; keys are far from the range where a square overflows.
    squares = x.square()
    absolute = (squares[..., table.real] + squares[..., table.imag]).sqrt()
    scores = torch.baddbmm(scores, absolute, table.spread)
    return scores.transpose(1, 2).reshape(len(weights), keys.shape[1])


def normalize(rows: torch.Tensor) -> torch.Tensor:
    """z-scores along the last axis, computed in fp64: rows far from 0 would lose their differences in fp32."""
    wide = rows.double()
    centred = wide - wide.mean(dim=-1, keepdim=True)
    deviation = centred.square().mean(dim=-1, keepdim=True).sqrt().clamp_min(STD_FLOOR)
    return (centred / deviation).float()


class Reduction:
    """Takes the scores of one layer after the other and keeps what the mode needs: for `union` one row."""

    def __init__(self, mode: str, kv_heads: int, *, normalized: bool = True) -> None:
        if mode not in MODES:
            raise ValueError(f"eviction mode {mode!r}: give one of {', '.join(MODES)}")
        self._mode = mode
        self._kv_heads = kv_heads
        self._normalized = normalized or mode == "union"
        self._layers: list[torch.Tensor] = []
        self._count = 0

    def add(self, scores: torch.Tensor) -> None:
        """fp32 ``[query_heads, T]`` of one layer's evictable tokens."""
        rows = normalize(scores) if self._normalized else scores
        self._count += 1
        if self._mode == "union":
            best = rows.amax(dim=0)
            self._layers = [torch.maximum(self._layers[0], best) if self._layers else best]
            return
        grouped = rows.view(self._kv_heads, -1, rows.shape[-1]).amax(dim=1)
        if self._mode == "per_head" and self._layers:
            self._layers[0] += grouped
        else:
            self._layers.append(grouped)

    def result(self) -> torch.Tensor:
        """fp32 ``[layers or 1, kv_heads or 1, T]``."""
        if self._mode == "union":
            return self._layers[0][None, None]
        if self._mode == "per_head":
            return self._layers[0][None] / self._count
        return torch.stack(self._layers)


def select(scores: torch.Tensor, budget: int) -> torch.Tensor:
    """As ``reference.select``, with the same result for the same scores."""
    if budget >= scores.shape[-1]:
        return torch.arange(scores.shape[-1], device=scores.device).expand(*scores.shape[:-1], -1).clone()
    ranked = torch.where(scores.isnan(), -torch.inf, scores)
    lowest = ranked.topk(budget, dim=-1).values[..., -1:]
    above = ranked > lowest
    ties = ranked == lowest
    room = budget - above.sum(dim=-1, keepdim=True)
    chosen = above | (ties & (ties.cumsum(dim=-1) <= room))
    return chosen.nonzero()[:, -1].reshape(*scores.shape[:-1], budget)
