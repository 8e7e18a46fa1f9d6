"""NVFP4 in plain numpy: the oracle of every faster kernel. Slow, and meant to be read.

Numbers: a value is e2m1 (magnitudes 0 .5 1 1.5 2 3 4 6), 16 consecutive values share one e4m3 scale, and a whole
buffer shares one power of two ``2**k``. A value is worth ``e2m1 * e4m3 * 2**k``. Bit patterns of BF16 and FP16 are
passed as uint16, because numpy has no BF16, those of e4m3 as uint8. Whole pages are in `page_reference.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

GROUP = 16
E2M1_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SCALE_MAX_CODE = 0x7E
K_LIMITS = {"bf16": (-100, 100), "fp16": (-14, 4), "fp32": (-100, 100), "fp8_e4m3": (-2, 4)}
"""Smallest and largest k, by the type that decoded values have."""

_AMAX_AT_K0 = 2784.0
"""6 * 464: the largest amax whose scale still rounds to 448, the largest e4m3."""

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


def e4m3_values(codes: npt.NDArray[Any]) -> F32:
    """Value of each e4m3 code; 0x7f and 0xff are NaN."""
    codes = codes.astype(np.int64)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10))
    magnitude = np.where((codes & 0x7F) == 0x7F, np.nan, magnitude)
    return np.where(codes & 0x80, -magnitude, magnitude).astype(np.float32)


def nearest_even(grid: npt.NDArray[np.float64], x: F32) -> npt.NDArray[np.int64]:
    """Index of the grid value nearest to each x >= 0, the even index in a tie, the last one beyond the end."""
    wide = x.astype(np.float64)
    above = np.clip(np.searchsorted(grid, wide), 1, len(grid) - 1)
    below = above - 1
    to_below, to_above = wide - grid[below], grid[above] - wide
    take_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    return np.where(take_above, above, below)


_SCALE_GRID = e4m3_values(np.arange(SCALE_MAX_CODE + 1)).astype(np.float64)


def quantize(x: F32, k: int = 0, global_scale: float | None = None) -> tuple[U8, U8]:
    """Float32 ``[..., d]`` with d a multiple of 16 -> nibbles uint8 ``[..., d / 2]``, scales uint8 ``[..., d / 16]``.

    global_scale: in place of 2**-k. The even element of a pair is in the low nibble. The scale never falls below 2**-6,
    the smallest normal e4m3, which is what makes encoding a decoded page give the same bytes again.
    """
    groups = x.astype(np.float32).reshape(*x.shape[:-1], -1, GROUP)
    amax = np.abs(groups).max(axis=-1)
    gs = np.float32(2.0**-k if global_scale is None else global_scale)
    with np.errstate(over="ignore", under="ignore"):
        wanted = gs * (amax * np.float32(1 / 6))
    scales = nearest_even(_SCALE_GRID, np.clip(wanted, np.float32(2.0**-6), np.float32(448)))
    inverse = np.float32(1) / (e4m3_values(scales) * (np.float32(1) / gs))
    with np.errstate(under="ignore"):
        scaled = np.abs(groups * inverse[..., None])
    codes = nearest_even(E2M1_MAGNITUDES, scaled) + 8 * np.signbit(groups)
    flat = codes.reshape(x.shape)
    return (flat[..., 0::2] | flat[..., 1::2] << 4).astype(np.uint8), scales.astype(np.uint8)


def dequantize(data: U8, scales: U8, k: int = 0, global_scale: float | None = None) -> F32:
    """The inverse: float32 ``[..., d]``. Every product is exact in float32 where the scale is a power of two."""
    codes = np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], -1, GROUP)
    values = np.where(codes & 8, -E2M1_MAGNITUDES[codes & 7], E2M1_MAGNITUDES[codes & 7]).astype(np.float32)
    gs = np.float32(2.0**-k if global_scale is None else global_scale)
    step = e4m3_values(scales) * (np.float32(1) / gs)
    scaled: F32 = values * step[..., None]
    return scaled.reshape(*data.shape[:-1], -1)


def e4m3_codes(x: F32) -> U8:
    """Nearest e4m3 code, ties to the even one, saturating at 448; the sign of zero is kept."""
    codes: U8 = (nearest_even(_SCALE_GRID, np.abs(x)) + 128 * np.signbit(x)).astype(np.uint8)
    return codes


def to_float32(bits: npt.NDArray[Any], dtype: str) -> F32:
    """BF16 or FP16 bits (uint16), or float32 as it is, widened exactly."""
    if dtype == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if dtype == "fp16":
        halves: npt.NDArray[np.float16] = bits.view(np.float16)
        return halves.astype(np.float32)
    return bits.astype(np.float32)


def from_float32(x: F32, dtype: str) -> npt.NDArray[Any]:
    """Rounded to nearest even: BF16 and FP16 as uint16 bits, float32 as it is."""
    if dtype == "bf16":
        wide = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
        rounded = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16
        return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)
    if dtype == "fp16":
        with np.errstate(over="ignore", under="ignore"):
            return x.astype(np.float16).view(np.uint16)
    return x.astype(np.float32)


def select_k(amax: float, dtype: str) -> int:
    """The smallest k with ``amax <= 2784 * 2**k`` inside the limits of `dtype`; the lower limit for zero."""
    low, high = K_LIMITS[dtype]
    for k in range(low, high):
        if amax <= _AMAX_AT_K0 * 2.0**k:
            return k
    return high
