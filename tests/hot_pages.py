"""Values of hot pages, and the pools that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.hot import HotLayout, HotPool
from kvtier.kernels.nvfp4 import reference
from kvtier.spec import DType, PageSpec

Array = npt.NDArray[Any]
Named = tuple[str, dict[str, str]]
"""A codec's name and its options."""
FORMS: list[Named] = [
    ("nvfp4", {"global_scale": "page"}),
    ("nvfp4", {"global_scale": "identity"}),
    ("nvfp4_offset", {}),
    ("nvfp4_token", {}),
    ("k8v4", {}),
    ("2fp4", {}),
]
"""Those that are computed, of whole rows."""
ROPES: list[Named] = [("nvfp4", {"rope": rope}) for rope in ("2fp4", "fp8", "keep")]
"""Those that store rotary columns apart."""


def values_for(spec: PageSpec, pages: int, seed: int, offset: float = 0.0) -> list[Array]:
    """Per buffer ``[pages, heads, tokens, dim]``: normal values, some channels `offset` away from 0, and every kind of
    zero; or bytes."""
    rng = np.random.default_rng(seed)
    out: list[Array] = []
    for b in spec.buffers:
        shape = (pages, b.heads, b.tokens, b.dim)
        if b.dtype is DType.UINT8:
            out.append(rng.integers(0, 256, shape, dtype=np.uint8))
            continue
        x = rng.standard_normal(shape) * np.exp2(rng.integers(-4, 3, (*shape[:-1], 1)))
        x = (x + offset * (np.arange(b.dim) % 13 == 5)).astype(np.float32)
        x[:, :, 0, :1], x[:, :, 1:2, : min(16, b.dim)] = -0.0, 0.0
        if b.dtype is DType.FP8_E4M3:
            out.append(reference.e4m3_codes(x / np.float32(b.fp8_scale)))
        else:
            out.append(reference.from_float32(x, b.dtype.value))
    return out


def pool_of(spec: PageSpec, values: Sequence[Array], hot_layout: HotLayout) -> tuple[HotPool, list[Array]]:
    """A pool with these pages, and its arrays."""
    arrays: list[Array] = []
    for b, v in zip(spec.buffers, values, strict=True):
        if b.tokens != spec.page_tokens:
            arrays.append(v[:, :, 0].copy())
        elif hot_layout is HotLayout.HND:
            arrays.append(v.copy())
        else:
            sequence = v.transpose(1, 0, 2, 3).reshape(b.heads, -1, b.dim)
            arrays.append((sequence if hot_layout is HotLayout.SEQ else sequence.transpose(1, 0, 2)).copy())
    return HotPool.of(spec, arrays, hot_layout), arrays
