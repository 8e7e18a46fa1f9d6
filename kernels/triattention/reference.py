"""TriAttention in numpy and fp64, term by term as the method is written down: the oracle of the fast version.

T: keys of one sequence. F: rotary frequencies, half of head_dim. A head's vector x becomes F complex numbers
``x[real] + i x[imag]``, where `real` and `imag` are the index arrays of the model's rotary layout.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
C128 = npt.NDArray[np.complex128]
I64 = npt.NDArray[np.int64]

OFFSETS = tuple(1 << n for n in range(17))
"""Distances, in tokens, of the future queries that a key is scored for."""

STD_FLOOR = 1e-6

MODES = ("union", "per_head", "per_layer_perhead")


def score(
    keys: npt.NDArray[Any],
    real: I64,
    imag: I64,
    q_mean: npt.NDArray[Any],
    q_abs: npt.NDArray[Any],
    omega: F64,
    gain: F64,
    t: int,
    offsets: tuple[int, ...] = OFFSETS,
) -> F64:
    """fp64 ``[T]``: the score of one query head for the keys of its KV head.

    keys: ``[T, head_dim]``, rotated as they lie in the cache. q_mean: complex ``[F]``, mean query before rotation;
    q_abs: ``[F]``, mean absolute value. gain: ``[F]``, the square of the rotary embedding's scaling. t: current
    position."""
    x: F64 = keys.astype(np.float64)
    k: C128 = x[:, real] + 1j * x[:, imag]
    mean = q_mean.astype(np.complex128)
    total = np.zeros(len(k))
    for d in offsets:
        phase = np.exp(1j * omega.astype(np.float64) * float(t + d))
        total += (gain * (mean * np.conj(k) * phase).real).sum(axis=1)
    spread = gain * (q_abs.astype(np.float64) - np.abs(mean))
    total += len(offsets) * (spread * np.abs(k)).sum(axis=1)
    return total / len(offsets)


def normalize(rows: F64) -> F64:
    """z-scores along the last axis: population deviation, floored."""
    centred = rows - rows.mean(axis=-1, keepdims=True)
    return np.asarray(centred / np.maximum(rows.std(axis=-1, keepdims=True), STD_FLOOR), dtype=np.float64)


def reduce(scores: F64, kv_heads: int, mode: str, *, normalized: bool = True) -> F64:
    """Scores ``[layers, query_heads, T]`` of the evictable tokens -> ``[layers or 1, kv_heads or 1, T]``."""
    layers, heads, tokens = scores.shape
    rows = normalize(scores) if normalized or mode == "union" else scores
    if mode == "union":
        return np.asarray(rows.max(axis=(0, 1)), dtype=np.float64)[None, None]
    grouped = rows.reshape(layers, kv_heads, heads // kv_heads, tokens).max(axis=2)
    if mode == "per_head":
        return np.asarray(grouped.mean(axis=0), dtype=np.float64)[None]
    if mode == "per_layer_perhead":
        return np.asarray(grouped, dtype=np.float64)
    raise ValueError(f"eviction mode {mode!r}: give one of {', '.join(MODES)}")


def select(scores: npt.NDArray[Any], budget: int) -> I64:
    """int64 ``[..., budget]``, ascending: the best `budget` of the last axis, ties filled by lowest index. NaN is
    worst."""
    ranked = np.where(np.isnan(scores), -np.inf, scores)
    order = np.argsort(-ranked, axis=-1, kind="stable")[..., :budget]
    return np.sort(order, axis=-1).astype(np.int64)
