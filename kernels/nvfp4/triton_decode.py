"""The codings of `docs/formats.md` as Triton functions, each on a share of one part of one page: cold to hot.

Rows past the valid tokens become zeros, as far as the pool has memory for them. Tiles: `triton_tiles.py`.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from kvtier.kernels.nvfp4.triton_numbers import coded_value, e2m1_value, e4m3_value, scale_step, store_hot, unpack
from kvtier.kernels.nvfp4.triton_tiles import (
    BLOCKS,
    GROUPS,
    ROWS,
    UNITS,
    WALKERS,
    bytes_at,
    flat_groups,
    halves_at,
    hot_groups,
    mean_items,
    mean_rows,
    take_groups,
    token_blocks,
    unit_groups,
    words_at,
)


@triton.jit
def decode_plain(
    base, head_stride, token_stride, heads, tokens, dim, valid, existing, inverse_fp8_scale, unit, data, scales, split,
    splits, TWO: tl.constexpr, DTYPE: tl.constexpr, HOT_ALIGN: tl.constexpr,
):  # fmt: skip
    for item in range(split, tl.cdiv(heads * tokens * (dim // 16), GROUPS), splits):
        group, head, token, column, exists = flat_groups(item, heads, tokens, dim)
        inside = exists & (token < valid)
        if TWO:
            at = group[:, None] * 2 + tl.arange(0, 2)[None, :]
            scale = tl.load(bytes_at(scales) + at, mask=inside[:, None], other=0).to(tl.int32)
            at = tl.multiple_of(group * 4, 4)[:, None] + tl.arange(0, 4)[None, :]
            words = tl.load(words_at(data) + at, mask=inside[:, None], other=0)
            codes = tl.reshape(unpack(tl.reshape(words, (GROUPS * 2, 2)), GROUPS * 2), (GROUPS, 2, 16))
            both = e2m1_value(codes) * scale_step(scale, unit)[:, :, None]
            value, rest = tl.split(tl.permute(both, (0, 2, 1)))
            x = value + rest
        else:
            scale = tl.load(bytes_at(scales) + group, mask=inside, other=0).to(tl.int32)
            x = e2m1_value(take_groups(data, group, inside, GROUPS)) * scale_step(scale, unit)[:, None]
        offsets = hot_groups(head, token, column, head_stride, token_stride, HOT_ALIGN)
        store_hot(base, offsets, x, (exists & (token < existing))[:, None], inverse_fp8_scale, DTYPE, HOT_ALIGN)


@triton.jit
def decode_fp8(
    base, head_stride, token_stride, heads, tokens, dim, valid, existing, inverse_fp8_scale, data, split, splits,
    DTYPE: tl.constexpr, HOT_ALIGN: tl.constexpr, COLD_ALIGN: tl.constexpr,
):  # fmt: skip
    for item in range(split, tl.cdiv(heads * tokens * (dim // 16), GROUPS), splits):
        group, head, token, column, exists = flat_groups(item, heads, tokens, dim)
        at = tl.multiple_of(group * 16, 16)[:, None] + tl.arange(0, 16)[None, :]
        p = tl.multiple_of(bytes_at(data), COLD_ALIGN) + at
        x = e4m3_value(tl.load(p, mask=(exists & (token < valid))[:, None], other=0).to(tl.int32))
        offsets = hot_groups(head, token, column, head_stride, token_stride, HOT_ALIGN)
        store_hot(base, offsets, x, (exists & (token < existing))[:, None], inverse_fp8_scale, DTYPE, HOT_ALIGN)


@triton.jit
def decode_offset(
    base, head_stride, token_stride, heads, tokens, dim, valid, existing, inverse_fp8_scale, unit, data, scales, side,
    split, splits, DTYPE: tl.constexpr, HOT_ALIGN: tl.constexpr,
):  # fmt: skip
    STEP: tl.constexpr = WALKERS // UNITS
    for item in range(split, tl.cdiv(heads * (dim // 16), UNITS), splits):
        head, column, lane, exists = unit_groups(item, heads, dim)
        at = (head * dim + column)[:, None] + tl.arange(0, 16)[None, :]
        mean = coded_value(halves_at(side, at, exists[:, None]), DTYPE)
        for start in range(0, tokens, STEP):
            token = start + lane
            mask = exists & (token < tokens)
            inside = mask & (token < valid)
            group = (head * tokens + token) * (dim // 16) + column // 16
            scale = tl.load(bytes_at(scales) + group, mask=inside, other=0).to(tl.int32)
            x = e2m1_value(take_groups(data, group, inside, WALKERS)) * scale_step(scale, unit)[:, None]
            x = tl.where((inside & (scale >= 0x80))[:, None], x + mean, x)
            offsets = hot_groups(head, token, column, head_stride, token_stride, HOT_ALIGN)
            store_hot(base, offsets, x, (mask & (token < existing))[:, None], inverse_fp8_scale, DTYPE, HOT_ALIGN)


@triton.jit
def decode_token(
    base, head_stride, token_stride, heads, tokens, dim, valid, existing, inverse_fp8_scale, unit, data, scales, side,
    split, splits, DTYPE: tl.constexpr, HOT_ALIGN: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = BLOCKS * 16
    lane = tl.arange(0, N) % 16
    for item in range(split, tl.cdiv(heads * (tokens // 16) * (dim // 16), BLOCKS), splits):
        block, head, first, column, exists = token_blocks(item, heads, tokens, dim)
        at = block[:, None] * 16 + tl.arange(0, 16)[None, :]
        scale = tl.load(bytes_at(scales) + at, mask=exists[:, None], other=0).to(tl.int32)
        middle = coded_value(halves_at(side, at, exists[:, None]), DTYPE)
        row_head = tl.reshape(tl.broadcast_to(head[:, None], (BLOCKS, 16)), (N,))
        token = tl.reshape(tl.broadcast_to(first[:, None], (BLOCKS, 16)), (N,)) + lane
        row_column = tl.reshape(tl.broadcast_to(column[:, None], (BLOCKS, 16)), (N,))
        row_exists = tl.reshape(tl.broadcast_to(exists[:, None], (BLOCKS, 16)), (N,))
        inside = row_exists & (token < valid)
        group = (row_head * tokens + token) * (dim // 16) + row_column // 16
        x = tl.reshape(e2m1_value(take_groups(data, group, inside, N)), (BLOCKS, 16, 16))
        x = x * scale_step(scale, unit)[:, None, :] + middle[:, None, :]
        x = tl.where(inside[:, None], tl.reshape(x, (N, 16)), 0.0)
        offsets = hot_groups(row_head, token, row_column, head_stride, token_stride, HOT_ALIGN)
        store_hot(base, offsets, x, (row_exists & (token < existing))[:, None], inverse_fp8_scale, DTYPE, HOT_ALIGN)


@triton.jit
def decode_fp8_mean(
    base, head_stride, token_stride, heads, tokens, dim, valid, existing, inverse_fp8_scale, data, side, split, splits,
    DTYPE: tl.constexpr, HOT_ALIGN: tl.constexpr, COLD_ALIGN: tl.constexpr, COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)
    fits = (column < dim)[None, :]
    for item in range(split, mean_items(heads, tokens, EVEN), splits):
        _, head, _, _ = mean_rows(item, 0, heads, tokens, EVEN)
        lead = item + tl.zeros([1], tl.int32) if EVEN else tl.minimum(head, heads - 1)
        mean = coded_value(halves_at(side, (lead * dim)[:, None] + column[None, :], fits), DTYPE)
        for step in range(0, tl.cdiv(tokens, ROWS) if EVEN else 1):
            row, head, token, exists = mean_rows(item, step, heads, tokens, EVEN)
            inside = exists & (token < valid)
            flags = bytes_at(side) + heads * dim * 2 + row // 8
            take = (tl.load(flags, mask=inside, other=0).to(tl.int32) >> (row % 8)) & 1
            at = tl.multiple_of(row * dim, 16)[:, None] + column[None, :]
            p = tl.multiple_of(bytes_at(data), COLD_ALIGN) + at
            x = e4m3_value(tl.load(p, mask=inside[:, None] & fits, other=0).to(tl.int32))
            x = tl.where((take > 0)[:, None], x + mean, x)
            offsets = head.to(tl.int64) * head_stride + token.to(tl.int64) * token_stride
            offsets = tl.multiple_of(offsets, HOT_ALIGN)[:, None] + column[None, :]
            mask = (exists & (token < existing))[:, None] & fits
            store_hot(base, offsets, x, mask, inverse_fp8_scale, DTYPE, HOT_ALIGN)
