"""NVFP4 and the cold page, in plain numpy: the oracle of every faster kernel. Slow, and meant to be read.

Numbers: a value is e2m1 (magnitudes 0 .5 1 1.5 2 3 4 6), 16 consecutive values share one e4m3 scale, and a whole
buffer shares one power of two ``2**k``. A value is worth ``e2m1 * e4m3 * 2**k``. Bit patterns of BF16 and FP16 are
passed as uint16, because numpy has no BF16. The byte layout is described in `docs/formats.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

GROUP = 16
E2M1_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SCALE_MIN_CODE = 0x08
SCALE_MAX_CODE = 0x7E
K_LIMITS = {"bf16": (-100, 100), "fp16": (-14, 4), "fp32": (-100, 100)}
"""Smallest and largest k, by the type that decoded values have."""

_AMAX_AT_K0 = 2784.0
"""6 * 464: the largest amax whose scale still rounds to 448, the largest e4m3."""

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


class Buffer(NamedTuple):
    """One buffer of a page. `values`: ``[heads, tokens, dim]``, uint16 bits for bf16 and fp16, float32, or uint8.
    `scale_offset` is -1 for a buffer that is copied byte for byte."""

    values: npt.NDArray[Any]
    dtype: str
    data_offset: int
    scale_offset: int


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


def quantize(x: F32, k: int = 0) -> tuple[U8, U8]:
    """Float32 ``[..., d]`` with d a multiple of 16 -> nibbles uint8 ``[..., d / 2]``, scales uint8 ``[..., d / 16]``.

    The even element of a pair is in the low nibble. The scale never falls below 2**-6, the smallest normal e4m3,
    which is what makes encoding a decoded page give the same bytes again.
    """
    groups = x.astype(np.float32).reshape(*x.shape[:-1], -1, GROUP)
    amax = np.abs(groups).max(axis=-1)
    with np.errstate(over="ignore", under="ignore"):
        wanted = np.float32(2.0**-k) * (amax * np.float32(1 / 6))
    scales = nearest_even(_SCALE_GRID, np.clip(wanted, np.float32(2.0**-6), np.float32(448)))
    inverse = np.float32(1) / (e4m3_values(scales) * np.float32(2.0**k))
    with np.errstate(under="ignore"):
        scaled = np.abs(groups * inverse[..., None])
    codes = nearest_even(E2M1_MAGNITUDES, scaled) + 8 * np.signbit(groups)
    flat = codes.reshape(x.shape)
    return (flat[..., 0::2] | flat[..., 1::2] << 4).astype(np.uint8), scales.astype(np.uint8)


def dequantize(data: U8, scales: U8, k: int = 0) -> F32:
    """The inverse: float32 ``[..., d]``. Every product is exact in float32."""
    codes = np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], -1, GROUP)
    values = np.where(codes & 8, -E2M1_MAGNITUDES[codes & 7], E2M1_MAGNITUDES[codes & 7]).astype(np.float32)
    step = e4m3_values(scales) * np.float32(2.0**k)
    scaled: F32 = values * step[..., None]
    return scaled.reshape(*data.shape[:-1], -1)


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


def encode_page(
    buffers: Sequence[Buffer], valid_tokens: int, page_tokens: int, cold_bytes: int, table_offset: int
) -> tuple[U8, bool]:
    """(cold page uint8 ``[cold_bytes]``, refused). `table_offset` is -1 where the global scale is 1.

    Float32 buffers that are compressed are rounded to BF16 first. Refused: NaN or infinity in a valid row of a
    compressed buffer, or a value that clips even at the largest k.
    """
    cold = np.zeros(cold_bytes, np.uint8)
    refused, table_at = False, table_offset
    for values, dtype, data_offset, scale_offset in buffers:
        kept = values.copy()
        if values.shape[1] == page_tokens:
            kept[:, valid_tokens:] = 0
        if scale_offset < 0:
            raw = np.ascontiguousarray(kept).reshape(-1).view(np.uint8)
            cold[data_offset : data_offset + raw.size] = raw
            continue
        stored = "bf16" if dtype == "fp32" else dtype
        x = to_float32(from_float32(kept, "bf16") if dtype == "fp32" else kept, stored)
        amax = float(np.abs(x).max()) if np.isfinite(x).all() else np.inf
        k = 0
        if table_offset >= 0:
            k = select_k(amax, stored)
            cold[table_at] = np.int8(k).view(np.uint8)
            table_at += 1
        if not np.isfinite(amax) or (table_offset >= 0 and amax > _AMAX_AT_K0 * 2.0**k):
            refused = True
            continue
        data, scales = quantize(x, k)
        cold[data_offset : data_offset + data.size] = data.reshape(-1)
        cold[scale_offset : scale_offset + scales.size] = scales.reshape(-1)
    return cold, refused


def decode_page(
    cold: U8, like: Sequence[Buffer], valid_tokens: int, page_tokens: int, table_offset: int
) -> list[npt.NDArray[Any]]:
    """The page's buffers again, shaped and typed as `like` (whose values are not read); invalid rows are zeros."""
    out: list[npt.NDArray[Any]] = []
    table_at = table_offset
    for values, dtype, data_offset, scale_offset in like:
        shape = values.shape
        if scale_offset < 0:
            decoded: npt.NDArray[Any] = cold[data_offset : data_offset + values.nbytes].copy().view(values.dtype)
            decoded = decoded.reshape(shape)
        else:
            k = 0
            if table_offset >= 0:
                k = int(cold[table_at : table_at + 1].view(np.int8)[0])
                table_at += 1
            data = cold[data_offset : data_offset + values.size // 2].reshape(*shape[:2], -1)
            scales = cold[scale_offset : scale_offset + values.size // GROUP].reshape(*shape[:2], -1)
            decoded = from_float32(dequantize(data, scales, k), dtype)
        if shape[1] == page_tokens:
            decoded[:, valid_tokens:] = 0
        out.append(decoded)
    return out
