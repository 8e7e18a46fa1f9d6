"""Attention Matching as it is written down, in fp64 and with everything in memory: the oracle of the streamed form.

Heads H, queries n, keys T. E, a: ``[H, n, T]``. Solvers are numpy's and scipy's, on the matrices themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.errors import missing_extra

try:
    from scipy.optimize import lsq_linear
except ImportError as e:
    raise missing_extra("scipy", "compaction") from e

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Original:
    """What the original attention gives. z, e, a: ``[H, n, T]``; m: ``[H, n]``; y: ``[H, n, value_dim]``."""

    z: F64
    e: F64
    a: F64
    m: F64
    y: F64


def original(queries: F64, keys: F64, values: F64, visible: npt.NDArray[np.bool_] | None = None) -> Original:
    """queries ``[H, n, dim]`` (scaled), keys ``[T, dim]``, values ``[T, value_dim]``, visible ``[n, T]``."""
    z = np.einsum("hqd,td->hqt", queries, keys)
    e = np.exp(z - z.max(axis=2, keepdims=True))
    seen = e if visible is None else e * visible
    m = seen.sum(axis=2)
    a = np.divide(seen, m[..., None], out=np.zeros_like(seen), where=m[..., None] > 0)
    return Original(z, e, a, m, np.einsum("hqt,tv->hqv", a, values))


def hak(a: F64, budget: int, protected: tuple[int, ...] = ()) -> I64:
    """The keys of the largest root mean square attention, the first of equal ones."""
    score = np.sqrt((a**2).mean(axis=(0, 1)))
    rest = [t for t in np.argsort(-score, kind="stable").tolist() if t not in protected]
    return np.array(sorted([*protected, *rest][:budget]), np.int64)


def weights(e: F64, m: F64, keys: I64, lower: float, upper: float) -> F64:
    """``[H, B]``: each head's ``argmin |E_S w - m|^2`` within the box."""
    return np.stack(
        [lsq_linear(e[h][:, keys], m[h], bounds=(lower, upper), method="bvls", tol=1e-13).x for h in range(len(e))]
    )


def omp(e: F64, m: F64, budget: int, lower: float, upper: float, *, keys_per_step: int = 1) -> I64:
    """Keys in the order of choice, all weights refitted after every step."""
    chosen: list[int] = []
    left = m
    while len(chosen) < budget:
        gain = np.einsum("hqt,hq->t", e, left)
        gain[chosen] = -np.inf
        chosen += np.argsort(-gain, kind="stable")[: min(keys_per_step, budget - len(chosen))].tolist()
        keys = np.array(chosen, np.int64)
        left = m - np.einsum("hqt,ht->hq", e[:, :, keys], weights(e, m, keys, lower, upper))
    return np.array(chosen, np.int64)


def compact_attention(z: F64, keys: I64, bias: F64) -> F64:
    """X ``[H, n, B]``: attention over the kept keys with biases ``[H, B]``."""
    logits = z[:, :, keys] + bias[:, None, :]
    e = np.exp(logits - logits.max(axis=2, keepdims=True))
    x: F64 = e / e.sum(axis=2, keepdims=True)
    return x


def values(x: F64, y: F64, start: F64, ridge: float) -> F64:
    """``argmin sum over heads of |X C - Y|^2 + ridge |C - start|^2``, by least squares on the stacked rows."""
    rows = np.concatenate([*x, np.sqrt(ridge) * np.eye(x.shape[2])])
    target = np.concatenate([*(y - x @ start), np.zeros_like(start)])
    change: F64 = np.linalg.lstsq(rows, target, rcond=None)[0]
    return start + change


def relative(found: F64, wanted: F64) -> float:
    """``|found - wanted| / |wanted|``, Frobenius norms."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
