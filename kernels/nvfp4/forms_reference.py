"""How keys are stored that plain NVFP4 does not suit, in plain numpy: the oracle of the native forms.

Models with a bias in the key projection have channels with a large constant: its step swallows everything else that
shares a scale with it. Every form here takes the constant out, or spends more bits. `x` is float32
``[heads, tokens, dim]``, values of a 16-bit type `t` (``"bf16"`` or ``"fp16"``), zeros past the `valid` tokens.
All arithmetic is float32, rounded to nearest even. Bytes are described in `docs/formats.md`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .reference import (
    E2M1_MAGNITUDES,
    F32,
    GROUP,
    U8,
    dequantize,
    e4m3_codes,
    e4m3_values,
    from_float32,
    quantize,
    to_float32,
)

LARGEST_E4M3 = 464.0
"""The largest magnitude that e4m3 holds without clipping: the tie above 448."""

U16 = npt.NDArray[np.uint16]
Bool = npt.NDArray[np.bool_]


def sum_of_16(x: F32) -> F32:
    """Sum over the last axis of 16, halves first: the order in which vector units add."""
    for half in (8, 4, 2, 1):
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def page_mean(x: F32, valid: int, t: str) -> U16:
    """Mean over the valid tokens, ``[heads, dim]`` as bits of `t`: added token by token, divided, rounded to `t`."""
    total = np.zeros((x.shape[0], x.shape[2]), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for token in range(valid):
            total += x[:, token]
        bits: U16 = from_float32(total / np.float32(max(valid, 1)), t)
    return bits


def _unpack(data: U8) -> U8:
    return np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], -1)


def _pack(codes: npt.NDArray[np.integer]) -> U8:
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def _positive_zeros(data: U8) -> U8:
    codes = _unpack(data)
    return _pack(np.where(codes == 8, 0, codes))


def encode_2fp4(x: F32, k: int, global_scale: float | None = None) -> tuple[U8, U8]:
    """Nibbles ``[heads, tokens, dim / 16, 2, 8]`` and scales ``[heads, tokens, dim / 16, 2]``: the value, then what it
    left."""
    main, main_scales = quantize(x, k, global_scale)
    rest, rest_scales = quantize(x - dequantize(main, main_scales, k, global_scale), k, global_scale)
    groups = (*x.shape[:2], -1, GROUP // 2)
    return np.stack([main.reshape(groups), rest.reshape(groups)], axis=3), np.stack([main_scales, rest_scales], axis=3)


def decode_2fp4(data: U8, scales: U8, shape: tuple[int, ...], k: int, global_scale: float | None = None) -> F32:
    data, scales = data.reshape(*shape[:2], -1, 2, 8), scales.reshape(*shape[:2], -1, 2)
    main, rest = (
        dequantize(data[..., n, :].reshape(*shape[:2], -1), scales[..., n].reshape(*shape[:2], -1), k, global_scale)
        for n in (0, 1)
    )
    out: F32 = main + rest
    return out


def encode_offset(x: F32, valid: int, k: int, t: str) -> tuple[U8, U8, U16]:
    """Nibbles, scales, means. A group is the distance from the mean, which the scale's sign bit says, where that has
    the smaller squared error."""
    means = page_mean(x, valid, t)
    d = x - to_float32(means, t)[:, None]
    data, scales = quantize(x, k)
    off_data, off_scales = quantize(d, k)
    groups = (*x.shape[:2], -1, GROUP)
    with np.errstate(over="ignore"):
        error = sum_of_16(np.square((x - dequantize(data, scales, k)).reshape(groups)))
        off_error = sum_of_16(np.square((d - dequantize(off_data, off_scales, k)).reshape(groups)))
    take = off_error < error
    take[:, valid:] = False
    wide = np.repeat(take, GROUP // 2, axis=-1)
    return np.where(wide, _positive_zeros(off_data), data), np.where(take, off_scales | 0x80, scales), means


def decode_offset(data: U8, scales: U8, means: U16, shape: tuple[int, ...], k: int, t: str) -> F32:
    data, scales = data.reshape(*shape[:2], -1), scales.reshape(*shape[:2], -1)
    values = dequantize(data, scales & np.uint8(0x7F), k)
    flags = np.repeat(scales >= 0x80, GROUP, axis=-1)
    return np.where(flags, values + to_float32(means, t).reshape(shape[0], 1, shape[2]), values)


def encode_token(x: F32, valid: int, k: int, t: str) -> tuple[U8, U8, U16]:
    """Nibbles ``[heads, tokens, dim / 2]``, scales and middles ``[heads, tokens / 16, dim]``."""
    heads, tokens, dim = x.shape
    blocks = x.reshape(heads, tokens // GROUP, GROUP, dim)
    inside = (np.arange(tokens) < valid).reshape(1, -1, GROUP, 1)
    low = np.where(inside, blocks, np.inf).min(axis=2)
    high = np.where(inside, blocks, -np.inf).max(axis=2)
    empty = ~inside.any(axis=2)
    low, high = (np.where(empty, 0, edge).astype(np.float32) for edge in (low, high))
    half = np.float32(0.5)
    middle: F32 = low * half + high * half + np.float32(0)
    middles: U16 = from_float32(middle, t)
    d = np.where(inside, blocks - to_float32(middles, t)[:, :, None], np.float32(0)).astype(np.float32)
    data, scales = quantize(d.transpose(0, 1, 3, 2), k)
    codes = _unpack(_positive_zeros(data)).transpose(0, 1, 3, 2).reshape(x.shape)
    return _pack(codes), scales[..., 0], middles


def decode_token(data: U8, scales: U8, middles: U16, shape: tuple[int, ...], k: int, t: str) -> F32:
    heads, tokens, dim = shape
    codes = _unpack(data.reshape(heads, tokens, -1)).reshape(heads, tokens // GROUP, GROUP, dim)
    values = np.where(codes & 8, -E2M1_MAGNITUDES[codes & 7], E2M1_MAGNITUDES[codes & 7]).astype(np.float32)
    blocks = (heads, tokens // GROUP, 1, dim)
    step = e4m3_values(scales).reshape(blocks) * np.float32(2.0**k)
    out: F32 = (values * step + to_float32(middles, t).reshape(blocks)).reshape(shape)
    return out


def encode_fp8(x: F32) -> tuple[U8, bool]:
    """e4m3 bytes, and whether a value clipped."""
    return e4m3_codes(x), bool((np.abs(x) > LARGEST_E4M3).any())


def encode_fp8_mean(x: F32, valid: int, t: str) -> tuple[U8, U16, U8, bool]:
    """e4m3 bytes, means, one flag per row, and whether a value clipped.

    A row is the distance from the mean, which its flag says, where that has the smaller squared error: the first keys
    of a sequence are far from all others, and the mean would only blur them."""
    means = page_mean(x, valid, t)
    d = x - to_float32(means, t)[:, None]
    codes, off_codes = e4m3_codes(x), e4m3_codes(d)
    take = _row_error(d, off_codes) < _row_error(x, codes)
    take[:, valid:] = False
    wide = take[..., None]
    stored = np.where(wide, np.where(off_codes == 0x80, 0, off_codes), codes).astype(np.uint8)
    clipped = bool((np.abs(np.where(wide, d, x)) > LARGEST_E4M3).any())
    return stored, means, np.packbits(take.reshape(-1), bitorder="little"), clipped


def _row_error(x: F32, codes: U8) -> F32:
    with np.errstate(over="ignore"):
        squares = np.square(x - e4m3_values(codes)).reshape(*x.shape[:2], -1, GROUP)
    sums = sum_of_16(squares)
    total = np.zeros(x.shape[:2], np.float32)
    with np.errstate(over="ignore"):
        for g in range(sums.shape[2]):
            total += sums[:, :, g]
    return total


def decode_fp8_mean(data: U8, means: U16, flags: U8, shape: tuple[int, ...], t: str) -> F32:
    values = e4m3_values(data.reshape(shape))
    rows: Bool = np.unpackbits(flags, bitorder="little")[: shape[0] * shape[1]].astype(bool).reshape(*shape[:2], 1)
    return np.where(rows, values + to_float32(means, t).reshape(shape[0], 1, shape[2]), values)
