"""The codings of `docs/formats.md` as Triton functions, each on a share of one part of one page: hot to cold.

Cold bytes are written once each, eight bytes a group: they go over the bus to host memory, and nothing is read back
from there. `gs` is the global scale and `unit` its reciprocal. Tiles: `triton_tiles.py`.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from kvtier.kernels.nvfp4.triton_numbers import (
    coded_bits,
    coded_value,
    e4m3_code,
    e4m3_value,
    load_hot,
    pack,
    positive_zeros,
    quantize,
    sum_of_16,
)
from kvtier.kernels.nvfp4.triton_tiles import (
    BLOCKS,
    GROUPS,
    ROWS,
    UNITS,
    WALKERS,
    bytes_at,
    flat_groups,
    hot_groups,
    mean_items,
    mean_rows,
    put_groups,
    put_halves,
    token_blocks,
    unit_groups,
    words_at,
)


@triton.jit
def largest_bits(
    base, head_stride, token_stride, heads, tokens, dim, valid, fp8_scale, DTYPE: tl.constexpr, HOT_ALIGN: tl.constexpr
):
    """Largest magnitude of the valid rows as bits of a float32; above those of infinity for NaN."""
    most = tl.zeros([GROUPS], tl.int32)
    for item in range(0, tl.cdiv(heads * tokens * (dim // 16), GROUPS)):
        _, head, token, column, exists = flat_groups(item, heads, tokens, dim)
        offsets = hot_groups(head, token, column, head_stride, token_stride, HOT_ALIGN)
        x = load_hot(base, offsets, (exists & (token < valid))[:, None], fp8_scale, DTYPE, HOT_ALIGN)
        most = tl.maximum(most, tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1))
    return tl.max(most, 0)


@triton.jit
def encode_plain(
    base, head_stride, token_stride, heads, tokens, dim, valid, fp8_scale, gs, unit, data, scales, split, splits,
    TWO: tl.constexpr, DTYPE: tl.constexpr, HOT_ALIGN: tl.constexpr,
):  # fmt: skip
    """`nvfp4`, and with TWO `2fp4`."""
    for item in range(split, tl.cdiv(heads * tokens * (dim // 16), GROUPS), splits):
        group, head, token, column, exists = flat_groups(item, heads, tokens, dim)
        offsets = hot_groups(head, token, column, head_stride, token_stride, HOT_ALIGN)
        x = load_hot(base, offsets, (exists & (token < valid))[:, None], fp8_scale, DTYPE, HOT_ALIGN)
        codes, scale, value = quantize(x, gs, unit, 1)
        if TWO:
            rest_codes, rest_scale, _ = quantize(x - value, gs, unit, 1)
            both = tl.join(pack(codes, GROUPS), pack(rest_codes, GROUPS))
            words = tl.reshape(tl.permute(both, (0, 2, 1)), (GROUPS, 4))
            at = tl.multiple_of(group * 4, 4)[:, None] + tl.arange(0, 4)[None, :]
            tl.store(words_at(data) + at, words, mask=exists[:, None])
            at = group[:, None] * 2 + tl.arange(0, 2)[None, :]
            tl.store(bytes_at(scales) + at, tl.join(scale, rest_scale).to(tl.uint8), mask=exists[:, None])
        else:
            put_groups(data, group, codes, exists, GROUPS)
            tl.store(bytes_at(scales) + group, scale.to(tl.uint8), mask=exists)


@triton.jit
def encode_fp8(
    base, head_stride, token_stride, heads, tokens, dim, valid, fp8_scale, data, split, splits,
    DTYPE: tl.constexpr, HOT_ALIGN: tl.constexpr, COLD_ALIGN: tl.constexpr,
):  # fmt: skip
    """`fp8`. Returns whether a value clipped."""
    clipped = tl.zeros([GROUPS], tl.int32)
    for item in range(split, tl.cdiv(heads * tokens * (dim // 16), GROUPS), splits):
        group, head, token, column, exists = flat_groups(item, heads, tokens, dim)
        offsets = hot_groups(head, token, column, head_stride, token_stride, HOT_ALIGN)
        x = load_hot(base, offsets, (exists & (token < valid))[:, None], fp8_scale, DTYPE, HOT_ALIGN)
        at = tl.multiple_of(group * 16, 16)[:, None] + tl.arange(0, 16)[None, :]
        out = tl.multiple_of(bytes_at(data), COLD_ALIGN) + at
        tl.store(out, e4m3_code(x).to(tl.uint8), mask=exists[:, None])
        clipped = tl.maximum(clipped, (tl.max(tl.abs(x), 1) > 464.0).to(tl.int32))
    return tl.max(clipped, 0)


@triton.jit
def encode_offset(
    base, head_stride, token_stride, heads, tokens, dim, valid, fp8_scale, gs, unit, data, scales, side, split, splits,
    DTYPE: tl.constexpr, HOT_ALIGN: tl.constexpr,
):  # fmt: skip
    """`nvfp4_offset`."""
    STEP: tl.constexpr = WALKERS // UNITS
    for item in range(split, tl.cdiv(heads * (dim // 16), UNITS), splits):
        head, column, lane, exists = unit_groups(item, heads, dim)
        total = tl.zeros([WALKERS, 16], tl.float32)
        for t in range(0, valid):
            offsets = hot_groups(head, t + lane * 0, column, head_stride, token_stride, HOT_ALIGN)
            total += load_hot(base, offsets, exists[:, None], fp8_scale, DTYPE, HOT_ALIGN)
        count = tl.maximum(valid, 1).to(tl.float32)
        bits = coded_bits(tl.div_rn(total, tl.zeros([WALKERS, 16], tl.float32) + count), DTYPE)
        mean = coded_value(bits, DTYPE)
        at = (head * dim + column)[:, None] + tl.arange(0, 16)[None, :]
        put_halves(side, at, bits, (exists & (lane == 0))[:, None])
        for start in range(0, tokens, STEP):
            token = start + lane
            mask = exists & (token < tokens)
            inside = mask & (token < valid)
            offsets = hot_groups(head, token, column, head_stride, token_stride, HOT_ALIGN)
            x = load_hot(base, offsets, inside[:, None], fp8_scale, DTYPE, HOT_ALIGN)
            d = x - mean
            codes, scale, value = quantize(x, gs, unit, 1)
            off_codes, off_scale, off_value = quantize(d, gs, unit, 1)
            error, off_error = x - value, d - off_value
            take = inside & (sum_of_16(off_error * off_error, WALKERS) < sum_of_16(error * error, WALKERS))
            codes = tl.where(take[:, None], positive_zeros(off_codes), codes)
            scale = tl.where(take, off_scale | 0x80, scale)
            group = (head * tokens + token) * (dim // 16) + column // 16
            put_groups(data, group, codes, mask, WALKERS)
            tl.store(bytes_at(scales) + group, scale.to(tl.uint8), mask=mask)


@triton.jit
def encode_token(
    base, head_stride, token_stride, heads, tokens, dim, valid, fp8_scale, gs, unit, data, scales, side, split, splits,
    DTYPE: tl.constexpr, HOT_ALIGN: tl.constexpr,
):  # fmt: skip
    """`nvfp4_token`."""
    N: tl.constexpr = BLOCKS * 16
    lane = tl.arange(0, N) % 16
    for item in range(split, tl.cdiv(heads * (tokens // 16) * (dim // 16), BLOCKS), splits):
        block, head, first, column, exists = token_blocks(item, heads, tokens, dim)
        row_head = tl.reshape(tl.broadcast_to(head[:, None], (BLOCKS, 16)), (N,))
        token = tl.reshape(tl.broadcast_to(first[:, None], (BLOCKS, 16)), (N,)) + lane
        row_column = tl.reshape(tl.broadcast_to(column[:, None], (BLOCKS, 16)), (N,))
        row_exists = tl.reshape(tl.broadcast_to(exists[:, None], (BLOCKS, 16)), (N,))
        offsets = hot_groups(row_head, token, row_column, head_stride, token_stride, HOT_ALIGN)
        inside = tl.reshape(row_exists & (token < valid), (BLOCKS, 16, 1))
        x = load_hot(base, offsets, (row_exists & (token < valid))[:, None], fp8_scale, DTYPE, HOT_ALIGN)
        x = tl.reshape(x, (BLOCKS, 16, 16))
        low = tl.min(tl.where(inside, x, float("inf")), 1)
        high = tl.max(tl.where(inside, x, float("-inf")), 1)
        some = (exists & (first < valid))[:, None]
        low, high = tl.where(some, low, 0.0), tl.where(some, high, 0.0)
        bits = coded_bits(low * 0.5 + high * 0.5 + 0.0, DTYPE)
        d = tl.where(inside, x - coded_value(bits, DTYPE)[:, None, :], 0.0)
        codes, scale, _ = quantize(d, gs, unit, 1)
        group = (row_head * tokens + token) * (dim // 16) + row_column // 16
        put_groups(data, group, positive_zeros(tl.reshape(codes, (N, 16))), row_exists, N)
        at = block[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(bytes_at(scales) + at, scale.to(tl.uint8), mask=exists[:, None])
        put_halves(side, at, bits, exists[:, None])


@triton.jit
def row_error(error, per_row, COLUMNS: tl.constexpr):
    """Sums of squares of rows ``[ROWS, COLUMNS]``: groups of 16, then added in order."""
    groups = tl.reshape(sum_of_16(tl.reshape(error * error, (ROWS * COLUMNS // 16, 16)), ROWS * COLUMNS // 16),
                        (ROWS, COLUMNS // 16))  # fmt: skip
    at = tl.arange(0, COLUMNS // 16)[None, :]
    total = tl.zeros([ROWS], tl.float32)
    for g in range(0, per_row):
        total += tl.sum(tl.where(at == g, groups, 0.0), 1)  # one of them, and zeros
    return total


@triton.jit
def encode_fp8_mean(
    base, head_stride, token_stride, heads, tokens, dim, valid, fp8_scale, data, side, split, splits,
    DTYPE: tl.constexpr, HOT_ALIGN: tl.constexpr, COLD_ALIGN: tl.constexpr, COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """`fp8_mean`, COLUMNS >= dim. EVEN: the number of tokens is a multiple of 8, so that no two heads share a byte of
    flags. Returns whether a value clipped."""
    MEANS: tl.constexpr = 1 if EVEN else ROWS
    clipped = tl.zeros([ROWS], tl.int32)
    column = tl.arange(0, COLUMNS)
    fits = (column < dim)[None, :]
    for item in range(split, mean_items(heads, tokens, EVEN), splits):
        _, head, token, exists = mean_rows(item, 0, heads, tokens, EVEN)
        lead = item + tl.zeros([1], tl.int32) if EVEN else tl.minimum(head, heads - 1)
        lead_offset = tl.multiple_of(lead.to(tl.int64) * head_stride, HOT_ALIGN)[:, None] + column[None, :]
        total = tl.zeros([MEANS, COLUMNS], tl.float32)
        for t in range(0, valid):
            total += load_hot(base, lead_offset + t * token_stride, fits, fp8_scale, DTYPE, HOT_ALIGN)
        count = tl.maximum(valid, 1).to(tl.float32)
        bits = coded_bits(tl.div_rn(total, tl.zeros([MEANS, COLUMNS], tl.float32) + count), DTYPE)
        mean = coded_value(bits, DTYPE)
        # Where a tile has rows of several heads, the first row of a head writes its mean.
        owner = lead >= 0 if EVEN else exists & (token == 0)
        put_halves(side, (lead * dim)[:, None] + column[None, :], bits, owner[:, None] & fits)
        for step in range(0, tl.cdiv(tokens, ROWS) if EVEN else 1):
            row, head, token, exists = mean_rows(item, step, heads, tokens, EVEN)
            inside = exists & (token < valid)
            offsets = head.to(tl.int64) * head_stride + token.to(tl.int64) * token_stride
            offsets = tl.multiple_of(offsets, HOT_ALIGN)[:, None] + column[None, :]
            x = load_hot(base, offsets, inside[:, None] & fits, fp8_scale, DTYPE, HOT_ALIGN)
            d = tl.where(fits, x - mean, 0.0)
            codes, off_codes = e4m3_code(x), e4m3_code(d)
            error = row_error(x - e4m3_value(codes), dim // 16, COLUMNS)
            off_error = row_error(d - e4m3_value(off_codes), dim // 16, COLUMNS)
            take = inside & (off_error < error)
            codes = tl.where(take[:, None], tl.where(off_codes == 0x80, 0, off_codes), codes)
            most = tl.max(tl.abs(tl.where(take[:, None], d, x)), 1)
            clipped = tl.maximum(clipped, (most > 464.0).to(tl.int32))
            at = tl.multiple_of(row * dim, 16)[:, None] + column[None, :]
            out = tl.multiple_of(bytes_at(data), COLD_ALIGN) + at
            tl.store(out, codes.to(tl.uint8), mask=exists[:, None] & fits)
            byte = bytes_at(side) + heads * dim * 2 + tl.min(row, 0) // ROWS
            tl.store(byte, tl.sum(take.to(tl.int32) << tl.arange(0, ROWS), 0).to(tl.uint8))
    return tl.max(clipped, 0)
