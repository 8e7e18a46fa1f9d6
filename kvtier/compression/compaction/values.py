"""Values that make a compacted block's outputs those of the whole block: ridge regression on a Gram matrix."""

from __future__ import annotations

import torch

from kvtier.errors import FitError

RIDGE = 1e-6
"""Of the Gram matrix's mean diagonal. It pulls to the original values, so that directions which no query tells apart
stay what they were."""
_TRIES = 4


def fit_values(
    gram: torch.Tensor, rhs: torch.Tensor, original: torch.Tensor, *, ridge: float = RIDGE, label: str
) -> torch.Tensor:
    """fp32 ``[B, value_dim]``: ``argmin |X C - Y|^2 + ridge |C - original|^2``.

    gram: fp64 ``[B, B]``, ``X^T X``; rhs: ``[B, value_dim]``, ``X^T Y``. By Cholesky; a matrix that has none gets a
    ridge a hundred times as large, and after some of those the pseudo-inverse. FitError, naming `label`, for a result
    that is not finite."""
    if not bool(torch.isfinite(gram).all() and torch.isfinite(rhs).all()):
        raise FitError(f"{label}: attention of the compacted block is not finite; the value fit has no input")
    size = int(gram.shape[0])
    eye = torch.eye(size, dtype=gram.dtype, device=gram.device)
    start = original.to(gram.dtype)
    wanted = rhs - gram @ start
    level = ridge * float(torch.diagonal(gram).mean())
    for _ in range(_TRIES):
        factor, info = torch.linalg.cholesky_ex(gram + level * eye)
        if not int(info):
            change = torch.cholesky_solve(wanted, factor)
            break
        level = max(level * 100, torch.finfo(gram.dtype).tiny)
    else:
        change = torch.linalg.pinv(gram, rtol=1e-10, hermitian=True) @ wanted
    fitted = (start + change).float()
    if not bool(torch.isfinite(fitted).all()):
        raise FitError(f"{label}: fitted values are not finite")
    return fitted
