"""The cold page in plain numpy: the oracle of the native page codecs. The byte layout is in `docs/formats.md`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import forms_reference as forms
from .reference import F32, GROUP, U8, dequantize, e4m3_codes, e4m3_values, from_float32, quantize, select_k, to_float32

_WITH_K = ("nvfp4", "2fp4", "nvfp4_offset", "nvfp4_token")
_CENTRED = ("nvfp4_offset", "nvfp4_token")


class Part(NamedTuple):
    """A range of columns of one buffer of a page. `values`: ``[heads, tokens, columns]``, uint16 bits for bf16 and
    fp16, float32, uint8 bits for fp8_e4m3, or uint8. Offsets are -1 for what the coding does not have."""

    values: npt.NDArray[Any]
    dtype: str
    coding: str
    data_offset: int
    scale_offset: int = -1
    side_offset: int = -1
    fp8_scale: float = 1.0
    global_scale: float = 0.0
    """Of a checkpoint; 0: a power of two, chosen for the page, or 1."""


def coded_type(dtype: str) -> str:
    """The 16-bit type that a buffer is encoded from."""
    return "fp16" if dtype in ("fp16", "fp8_e4m3") else "bf16"


def coded_values(values: npt.NDArray[Any], dtype: str, fp8_scale: float) -> F32:
    """Hot elements as values of `coded_type`: float32 is rounded to BF16, FP8 times its scale to FP16."""
    t = coded_type(dtype)
    if dtype == "fp8_e4m3":
        with np.errstate(over="ignore"):
            return to_float32(from_float32(e4m3_values(values) * np.float32(fp8_scale), t), t)
    return to_float32(from_float32(values, t) if dtype == "fp32" else values, t)


def hot_values(x: F32, dtype: str, fp8_scale: float) -> npt.NDArray[Any]:
    """Decoded float32 values as hot elements."""
    if dtype == "fp8_e4m3":
        with np.errstate(over="ignore"):
            return e4m3_codes(x * (np.float32(1) / np.float32(fp8_scale)))
    if dtype == "fp32":
        return to_float32(from_float32(x, "bf16"), "bf16")
    return from_float32(x, dtype)


def encode_page(
    parts: Sequence[Part], valid_tokens: int, page_tokens: int, cold_bytes: int, table_offset: int
) -> tuple[U8, bool]:
    """(cold page uint8 ``[cold_bytes]``, refused). `table_offset` is -1 where the global scale is 1.

    Refused: NaN or infinity in a valid row of a compressed part, or a value that its form cannot hold.
    """
    cold = np.zeros(cold_bytes, np.uint8)
    refused, table_at = False, table_offset
    for part in parts:
        kept, valid = part.values.copy(), part.values.shape[1]
        if valid == page_tokens:
            valid = valid_tokens
            kept[:, valid:] = 0
        if part.coding == "raw":
            _put(cold, part.data_offset, kept)
            continue
        x = coded_values(kept, part.dtype, part.fp8_scale)
        amax = float(np.abs(x).max()) if np.isfinite(x).all() else np.inf
        if part.coding in _CENTRED:
            amax *= 2  # the distance from a mean is at most that
        k, global_scale = 0, None
        if part.global_scale:
            global_scale = part.global_scale
            table_at = _put(cold, table_at, np.array([global_scale], "<f4"))
        elif table_offset >= 0 and part.coding in _WITH_K:
            k = select_k(amax, part.dtype)
            cold[table_at] = np.int8(k).view(np.uint8)
            table_at += 1
            refused |= amax > 2784 * 2.0**k
        if not np.isfinite(amax):
            refused = True
            continue
        refused |= _encode_part(cold, part, x, valid, k, global_scale)
    return cold, refused


def _encode_part(cold: U8, part: Part, x: F32, valid: int, k: int, global_scale: float | None) -> bool:
    """Writes one part; True if it clipped."""
    t, clipped = coded_type(part.dtype), False
    scales: npt.NDArray[Any] = np.zeros(0, np.uint8)
    sides: tuple[npt.NDArray[Any], ...] = ()
    if part.coding == "nvfp4":
        data, scales = quantize(x, k, global_scale)
    elif part.coding == "2fp4":
        data, scales = forms.encode_2fp4(x, k, global_scale)
    elif part.coding == "nvfp4_offset":
        data, scales, *sides_ = forms.encode_offset(x, valid, k, t)
        sides = tuple(sides_)
    elif part.coding == "nvfp4_token":
        data, scales, *sides_ = forms.encode_token(x, valid, k, t)
        sides = tuple(sides_)
    elif part.coding == "fp8":
        data, clipped = forms.encode_fp8(x)
    elif part.coding == "fp8_mean":
        data, means, flags, clipped = forms.encode_fp8_mean(x, valid, t)
        sides = (means, flags)
    else:
        raise ValueError(f"coding {part.coding!r} is unknown")
    _put(cold, part.data_offset, data)
    _put(cold, part.scale_offset, scales)
    at = part.side_offset
    for side in sides:
        at = _put(cold, at, side)
    return clipped


def _put(cold: U8, offset: int, values: npt.NDArray[Any]) -> int:
    """Writes `values` at `offset`; the offset behind them."""
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    cold[offset : offset + raw.size] = raw
    return offset + raw.size


def decode_page(
    cold: U8, like: Sequence[Part], valid_tokens: int, page_tokens: int, table_offset: int
) -> list[npt.NDArray[Any]]:
    """The page's parts again, shaped and typed as `like` (whose values are not read); invalid rows are zeros."""
    out: list[npt.NDArray[Any]] = []
    table_at = table_offset
    for part in like:
        if part.coding == "raw":
            raw: npt.NDArray[Any] = _take(cold, part.data_offset, part.values.nbytes).copy()
            decoded: npt.NDArray[Any] = raw.view(part.values.dtype).reshape(part.values.shape)
        else:
            k, global_scale = 0, None
            if part.global_scale:
                global_scale = float(_take(cold, table_at, 4).copy().view("<f4")[0])
                table_at += 4
            elif table_offset >= 0 and part.coding in _WITH_K:
                k = int(cold[table_at : table_at + 1].view(np.int8)[0])
                table_at += 1
            decoded = hot_values(_decode_part(cold, part, k, global_scale), part.dtype, part.fp8_scale)
        if decoded.shape[1] == page_tokens:
            decoded[:, valid_tokens:] = 0
        out.append(decoded)
    return out


def _decode_part(cold: U8, part: Part, k: int, global_scale: float | None) -> F32:
    shape: tuple[int, ...] = part.values.shape
    heads, tokens, dim = shape
    t = coded_type(part.dtype)
    values = heads * tokens * dim
    if part.coding in ("fp8", "fp8_mean"):
        data = _take(cold, part.data_offset, values)
        if part.coding == "fp8":
            return e4m3_values(data).reshape(shape)
        means = _take(cold, part.side_offset, heads * dim * 2).copy().view(np.uint16)
        flags = _take(cold, part.side_offset + heads * dim * 2, -(-heads * tokens // 8))
        return forms.decode_fp8_mean(data, means, flags, shape, t)
    twice = 2 if part.coding == "2fp4" else 1
    data = _take(cold, part.data_offset, values // 2 * twice)
    scales = _take(cold, part.scale_offset, values // GROUP * twice)
    if part.coding == "nvfp4":
        return dequantize(data.reshape(heads, tokens, -1), scales.reshape(heads, tokens, -1), k, global_scale)
    if part.coding == "2fp4":
        return forms.decode_2fp4(data, scales, shape, k, global_scale)
    blocks = tokens // GROUP if part.coding == "nvfp4_token" else 1
    side = _take(cold, part.side_offset, heads * dim * 2 * blocks).copy().view(np.uint16)
    decode = forms.decode_token if part.coding == "nvfp4_token" else forms.decode_offset
    return decode(data, scales, side, shape, k, t)


def _take(cold: U8, offset: int, count: int) -> U8:
    return cold[offset : offset + count]
