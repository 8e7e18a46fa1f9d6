"""The codings of `docs/formats.md` as Triton functions, each on a share of one part of one page.

A part's work is cut into items; program `split` of `splits` takes every `splits`-th. Tiles are ``[GROUPS, 16]``, groups
of 16 neighbours (`nvfp4_token`: 16 groups of 16 tokens; `fp8_mean`: rows). Cold bytes are written once each, eight bytes
a group: they go over the bus to host memory, and nothing is read back from there. `base` is the address of the page's
first hot element, `cold` that of the cold page; strides count elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvtier.kernels.nvfp4.triton_numbers import (
    coded_bits,
    coded_value,
    e4m3_code,
    e4m3_value,
    e2m1_value,
    load_hot,
    pack,
    positive_zeros,
    quantize,
    scale_step,
    store_hot,
    sum_of_16,
    unpack,
)

GROUPS = tl.constexpr(128)
"""Groups of a tile."""
UNITS = tl.constexpr(32)
"""Of them side by side, in the codings with a mean; the others are of the next tokens."""
BLOCKS = tl.constexpr(8)
"""Blocks of 16 tokens by 16 columns in a tile of `nvfp4_token`."""


@triton.jit
def bytes_at(address):
    return address.to(tl.pointer_type(tl.uint8))


@triton.jit
def words_at(address):
    return tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 8)


@triton.jit
def halves_at(address, offsets, mask):
    """16-bit numbers that need not be aligned."""
    p = bytes_at(address) + 2 * offsets
    low = tl.load(p, mask=mask, other=0).to(tl.int32)
    return (low | (tl.load(p + 1, mask=mask, other=0).to(tl.int32) << 8)).to(tl.uint16)


@triton.jit
def put_halves(address, offsets, bits, mask):
    p = bytes_at(address) + 2 * offsets
    tl.store(p, (bits & 0xFF).to(tl.uint8), mask=mask)
    tl.store(p + 1, (bits >> 8).to(tl.uint8), mask=mask)


@triton.jit
def put_groups(address, group, codes, mask, EVERY: tl.constexpr, AT: tl.constexpr, N: tl.constexpr):
    """Codes ``[N, 16]`` of groups; EVERY words of a group in memory, from word AT on."""
    offsets = group[:, None] * EVERY + (AT + tl.arange(0, 2))[None, :]
    tl.store(words_at(address) + offsets, pack(codes, N), mask=mask[:, None])


@triton.jit
def take_groups(address, group, mask, EVERY: tl.constexpr, AT: tl.constexpr, N: tl.constexpr):
    offsets = group[:, None] * EVERY + (AT + tl.arange(0, 2))[None, :]
    return unpack(tl.load(words_at(address) + offsets, mask=mask[:, None], other=0), N)


@triton.jit
def hot_groups(head, token, column, head_stride, token_stride, HOT_ALIGN: tl.constexpr):
    """Offsets ``[n, 16]`` of groups in hot memory."""
    offsets = head.to(tl.int64) * head_stride + token.to(tl.int64) * token_stride + column
    return tl.multiple_of(offsets, HOT_ALIGN)[:, None] + tl.arange(0, 16)[None, :]


@triton.jit
def flat_groups(item, heads, tokens, dim):
    """Groups of tile `item` in cold order: number, head, token, column, whether it exists."""
    group = item * GROUPS + tl.arange(0, GROUPS)
    per_row = dim // 16
    row = group // per_row
    head = row // tokens
    return group, head, row - head * tokens, (group - row * per_row) * 16, group < heads * tokens * per_row


@triton.jit
def unit_groups(item, heads, dim):
    """Columns of 16 of tile `item`, for codings that walk along the tokens: head, column, token within a step, whether
    it exists. Groups are UNITS side by side, then the same of the next token."""
    lane = tl.arange(0, GROUPS)
    unit = item * UNITS + lane % UNITS
    per_row = dim // 16
    head = unit // per_row
    return head, (unit - head * per_row) * 16, lane // UNITS, unit < heads * per_row


# -- encode ----------------------------------------------------------------------------------------------------------------


@triton.jit
def largest_bits(
    base, head_stride, token_stride, heads, tokens, dim, valid, fp8_scale, DTYPE: tl.constexpr, HOT_ALIGN: tl.constexpr
):
    """Largest magnitude of the valid rows as bits of a float32; above those of infinity for NaN."""
    most = tl.zeros([GROUPS], tl.int32)
    for item in range(0, tl.cdiv(heads * tokens * (dim // 16), GROUPS)):
        _, head, token, column, exists = flat_groups(item, heads, tokens, dim)
        offsets = hot_groups(head, token, column, head_stride, token_stride, HOT_ALIGN)
        x = load_hot(base, offsets, (exists & (token < valid))[:, None], fp8_scale, DTYPE)
        most = tl.maximum(most, tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1))
    return tl.max(most, 0)


@triton.jit
def encode_plain(
    base, head_stride, token_stride, heads, tokens, dim, valid, fp8_scale, k, data, scales, split, splits,
    TWO: tl.constexpr, DTYPE: tl.constexpr, HOT_ALIGN: tl.constexpr,
):  # fmt: skip
    """`nvfp4`, and with TWO `2fp4`."""
    for item in range(split, tl.cdiv(heads * tokens * (dim // 16), GROUPS), splits):
        group, head, token, column, exists = flat_groups(item, heads, tokens, dim)
        offsets = hot_groups(head, token, column, head_stride, token_stride, HOT_ALIGN)
        x = load_hot(base, offsets, (exists & (token < valid))[:, None], fp8_scale, DTYPE)
        codes, scale, value = quantize(x, k, 1)
        if TWO:
            put_groups(data, group, codes, exists, 4, 0, GROUPS)
            tl.store(bytes_at(scales) + group * 2, scale.to(tl.uint8), mask=exists)
            codes, scale, value = quantize(x - value, k, 1)
            put_groups(data, group, codes, exists, 4, 2, GROUPS)
            tl.store(bytes_at(scales) + group * 2 + 1, scale.to(tl.uint8), mask=exists)
        else:
            put_groups(data, group, codes, exists, 2, 0, GROUPS)
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
        x = load_hot(base, offsets, (exists & (token < valid))[:, None], fp8_scale, DTYPE)
        at = tl.multiple_of(group * 16, 16)[:, None] + tl.arange(0, 16)[None, :]
        out = tl.multiple_of(bytes_at(data), COLD_ALIGN) + at
        tl.store(out, e4m3_code(x).to(tl.uint8), mask=exists[:, None])
        clipped = tl.maximum(clipped, (tl.max(tl.abs(x), 1) > 464.0).to(tl.int32))
    return tl.max(clipped, 0)


@triton.jit
def encode_offset(
    base, head_stride, token_stride, heads, tokens, dim, valid, fp8_scale, k, data, scales, side, split, splits,
    DTYPE: tl.constexpr, HOT_ALIGN: tl.constexpr,
):  # fmt: skip
    """`nvfp4_offset`."""
    STEP: tl.constexpr = GROUPS // UNITS
    for item in range(split, tl.cdiv(heads * (dim // 16), UNITS), splits):
        head, column, lane, exists = unit_groups(item, heads, dim)
        total = tl.zeros([GROUPS, 16], tl.float32)
        for t in range(0, valid):
            offsets = hot_groups(head, t + lane * 0, column, head_stride, token_stride, HOT_ALIGN)
            total += load_hot(base, offsets, exists[:, None], fp8_scale, DTYPE)
        count = tl.maximum(valid, 1).to(tl.float32)
        bits = coded_bits(tl.div_rn(total, tl.zeros([GROUPS, 16], tl.float32) + count), DTYPE)
        mean = coded_value(bits, DTYPE)
        at = (head * dim + column)[:, None] + tl.arange(0, 16)[None, :]
        put_halves(side, at, bits, (exists & (lane == 0))[:, None])
        for start in range(0, tokens, STEP):
            token = start + lane
            mask = exists & (token < tokens)
            inside = mask & (token < valid)
            offsets = hot_groups(head, token, column, head_stride, token_stride, HOT_ALIGN)
            x = load_hot(base, offsets, inside[:, None], fp8_scale, DTYPE)
            d = x - mean
            codes, scale, value = quantize(x, k, 1)
            off_codes, off_scale, off_value = quantize(d, k, 1)
            error, off_error = x - value, d - off_value
            take = inside & (sum_of_16(off_error * off_error, GROUPS) < sum_of_16(error * error, GROUPS))
            codes = tl.where(take[:, None], positive_zeros(off_codes), codes)
            scale = tl.where(take, off_scale | 0x80, scale)
            group = (head * tokens + token) * (dim // 16) + column // 16
            put_groups(data, group, codes, mask, 2, 0, GROUPS)
            tl.store(bytes_at(scales) + group, scale.to(tl.uint8), mask=mask)


@triton.jit
def token_blocks(item, heads, tokens, dim):
    """Blocks of 16 tokens by 16 columns: number, head, first token, first column, whether it exists."""
    block = item * BLOCKS + tl.arange(0, BLOCKS)
    per_row, per_head = dim // 16, (dim // 16) * (tokens // 16)
    head = block // per_head
    down = (block - head * per_head) // per_row
    return block, head, down * 16, (block % per_row) * 16, block < heads * per_head


@triton.jit
def encode_token(
    base, head_stride, token_stride, heads, tokens, dim, valid, fp8_scale, k, data, scales, side, split, splits,
    DTYPE: tl.constexpr, HOT_ALIGN: tl.constexpr,
):  # fmt: skip
    """`nvfp4_token`."""
    ROWS: tl.constexpr = BLOCKS * 16
    lane = tl.arange(0, ROWS) % 16
    for item in range(split, tl.cdiv(heads * (tokens // 16) * (dim // 16), BLOCKS), splits):
        block, head, first, column, exists = token_blocks(item, heads, tokens, dim)
        row_head = tl.reshape(tl.broadcast_to(head[:, None], (BLOCKS, 16)), (ROWS,))
        token = tl.reshape(tl.broadcast_to(first[:, None], (BLOCKS, 16)), (ROWS,)) + lane
        row_column = tl.reshape(tl.broadcast_to(column[:, None], (BLOCKS, 16)), (ROWS,))
        row_exists = tl.reshape(tl.broadcast_to(exists[:, None], (BLOCKS, 16)), (ROWS,))
        offsets = hot_groups(row_head, token, row_column, head_stride, token_stride, HOT_ALIGN)
        inside = tl.reshape(row_exists & (token < valid), (BLOCKS, 16, 1))
        x = load_hot(base, offsets, (row_exists & (token < valid))[:, None], fp8_scale, DTYPE)
        x = tl.reshape(x, (BLOCKS, 16, 16))
        low = tl.min(tl.where(inside, x, float("inf")), 1)
        high = tl.max(tl.where(inside, x, float("-inf")), 1)
        some = (exists & (first < valid))[:, None]
        low, high = tl.where(some, low, 0.0), tl.where(some, high, 0.0)
        bits = coded_bits(low * 0.5 + high * 0.5 + 0.0, DTYPE)
        d = tl.where(inside, x - coded_value(bits, DTYPE)[:, None, :], 0.0)
        codes, scale, _ = quantize(d, k, 1)
        group = (row_head * tokens + token) * (dim // 16) + row_column // 16
        put_groups(data, group, positive_zeros(tl.reshape(codes, (ROWS, 16))), row_exists, 2, 0, ROWS)
        at = block[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(bytes_at(scales) + at, scale.to(tl.uint8), mask=exists[:, None])
        put_halves(side, at, bits, exists[:, None])


@triton.jit
def mean_items(heads, tokens, ROWS: tl.constexpr, EVEN: tl.constexpr):
    """How many items `fp8_mean` has: heads; or, where heads share a byte of flags, tiles of rows."""
    return heads if EVEN else tl.cdiv(heads * tokens, ROWS)


@triton.jit
def mean_rows(item, step, heads, tokens, ROWS: tl.constexpr, EVEN: tl.constexpr):
    """Rows of a tile of `fp8_mean`: number, head, token, whether it exists."""
    lane = tl.arange(0, ROWS)
    row = item * tokens + step * ROWS + lane if EVEN else item * ROWS + lane
    head = row // tokens
    token = step * ROWS + lane if EVEN else row - head * tokens
    exists = token < tokens if EVEN else row < heads * tokens
    return row, head, token, exists


@triton.jit
def row_error(error, per_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
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
    DTYPE: tl.constexpr, HOT_ALIGN: tl.constexpr, COLD_ALIGN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """`fp8_mean`, COLUMNS >= dim. EVEN: the number of tokens is a multiple of 8, so that no two heads share a byte of
    flags. Returns whether a value clipped."""
    MEANS: tl.constexpr = 1 if EVEN else ROWS
    clipped = tl.zeros([ROWS], tl.int32)
    column = tl.arange(0, COLUMNS)
    fits = (column < dim)[None, :]
    for item in range(split, mean_items(heads, tokens, ROWS, EVEN), splits):
        _, head, _, _ = mean_rows(item, 0, heads, tokens, ROWS, EVEN)
        lead = item + tl.zeros([1], tl.int32) if EVEN else tl.minimum(head, heads - 1)
        lead_offset = tl.multiple_of(lead.to(tl.int64) * head_stride, HOT_ALIGN)[:, None] + column[None, :]
        total = tl.zeros([MEANS, COLUMNS], tl.float32)
        for t in range(0, valid):
            total += load_hot(base, lead_offset + t * token_stride, fits, fp8_scale, DTYPE)
        count = tl.maximum(valid, 1).to(tl.float32)
        bits = coded_bits(tl.div_rn(total, tl.zeros([MEANS, COLUMNS], tl.float32) + count), DTYPE)
        mean = coded_value(bits, DTYPE)
        for step in range(0, tl.cdiv(tokens, ROWS) if EVEN else 1):
            row, head, token, exists = mean_rows(item, step, heads, tokens, ROWS, EVEN)
            inside = exists & (token < valid)
            offsets = head.to(tl.int64) * head_stride + token.to(tl.int64) * token_stride
            offsets = tl.multiple_of(offsets, HOT_ALIGN)[:, None] + column[None, :]
            x = load_hot(base, offsets, inside[:, None] & fits, fp8_scale, DTYPE)
            d = tl.where(fits, x - mean, 0.0)
            codes, off_codes = e4m3_code(x), e4m3_code(d)
            error = row_error(x - e4m3_value(codes), dim // 16, ROWS, COLUMNS)
            off_error = row_error(d - e4m3_value(off_codes), dim // 16, ROWS, COLUMNS)
            take = inside & (off_error < error)
            codes = tl.where(take[:, None], tl.where(off_codes == 0x80, 0, off_codes), codes)
            most = tl.max(tl.abs(tl.where(take[:, None], d, x)), 1)
            clipped = tl.maximum(clipped, (most > 464.0).to(tl.int32))
            at = tl.multiple_of(row * dim, 16)[:, None] + column[None, :]
            out = tl.multiple_of(bytes_at(data), COLD_ALIGN) + at
            tl.store(out, codes.to(tl.uint8), mask=exists[:, None] & fits)
            # The head's first row writes its mean.
            at = (head * dim)[:, None] + column[None, :]
            put_halves(side, at, bits, (exists & (token == 0))[:, None] & fits)
            flags = tl.reshape(take.to(tl.int32), (ROWS // 8, 8)) << tl.arange(0, 8)[None, :]
            byte = tl.min(tl.reshape(row, (ROWS // 8, 8)), 1) // 8
            used = tl.max(tl.reshape(exists.to(tl.int32), (ROWS // 8, 8)), 1) > 0
            out = bytes_at(side) + heads * dim * 2 + byte
            tl.store(out, tl.sum(flags, 1).to(tl.uint8), mask=used)
    return tl.max(clipped, 0)


# -- decode ----------------------------------------------------------------------------------------------------------------


@triton.jit
def decode_plain(
    base, head_stride, token_stride, heads, tokens, dim, valid, existing, inverse_fp8_scale, k, data, scales, split,
    splits, TWO: tl.constexpr, DTYPE: tl.constexpr, HOT_ALIGN: tl.constexpr,
):  # fmt: skip
    for item in range(split, tl.cdiv(heads * tokens * (dim // 16), GROUPS), splits):
        group, head, token, column, exists = flat_groups(item, heads, tokens, dim)
        inside = exists & (token < valid)
        if TWO:
            first = tl.load(bytes_at(scales) + group * 2, mask=inside, other=0).to(tl.int32)
            second = tl.load(bytes_at(scales) + group * 2 + 1, mask=inside, other=0).to(tl.int32)
            x = e2m1_value(take_groups(data, group, inside, 4, 0, GROUPS)) * scale_step(first, k)[:, None]
            x += e2m1_value(take_groups(data, group, inside, 4, 2, GROUPS)) * scale_step(second, k)[:, None]
        else:
            scale = tl.load(bytes_at(scales) + group, mask=inside, other=0).to(tl.int32)
            x = e2m1_value(take_groups(data, group, inside, 2, 0, GROUPS)) * scale_step(scale, k)[:, None]
        offsets = hot_groups(head, token, column, head_stride, token_stride, HOT_ALIGN)
        store_hot(base, offsets, x, (exists & (token < existing))[:, None], inverse_fp8_scale, DTYPE)


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
        store_hot(base, offsets, x, (exists & (token < existing))[:, None], inverse_fp8_scale, DTYPE)


@triton.jit
def decode_offset(
    base, head_stride, token_stride, heads, tokens, dim, valid, existing, inverse_fp8_scale, k, data, scales, side,
    split, splits, DTYPE: tl.constexpr, HOT_ALIGN: tl.constexpr,
):  # fmt: skip
    STEP: tl.constexpr = GROUPS // UNITS
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
            x = e2m1_value(take_groups(data, group, inside, 2, 0, GROUPS)) * scale_step(scale, k)[:, None]
            x = tl.where((inside & (scale >= 0x80))[:, None], x + mean, x)
            offsets = hot_groups(head, token, column, head_stride, token_stride, HOT_ALIGN)
            store_hot(base, offsets, x, (mask & (token < existing))[:, None], inverse_fp8_scale, DTYPE)


@triton.jit
def decode_token(
    base, head_stride, token_stride, heads, tokens, dim, valid, existing, inverse_fp8_scale, k, data, scales, side,
    split, splits, DTYPE: tl.constexpr, HOT_ALIGN: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = BLOCKS * 16
    lane = tl.arange(0, ROWS) % 16
    for item in range(split, tl.cdiv(heads * (tokens // 16) * (dim // 16), BLOCKS), splits):
        block, head, first, column, exists = token_blocks(item, heads, tokens, dim)
        at = block[:, None] * 16 + tl.arange(0, 16)[None, :]
        scale = tl.load(bytes_at(scales) + at, mask=exists[:, None], other=0).to(tl.int32)
        middle = coded_value(halves_at(side, at, exists[:, None]), DTYPE)
        row_head = tl.reshape(tl.broadcast_to(head[:, None], (BLOCKS, 16)), (ROWS,))
        token = tl.reshape(tl.broadcast_to(first[:, None], (BLOCKS, 16)), (ROWS,)) + lane
        row_column = tl.reshape(tl.broadcast_to(column[:, None], (BLOCKS, 16)), (ROWS,))
        row_exists = tl.reshape(tl.broadcast_to(exists[:, None], (BLOCKS, 16)), (ROWS,))
        inside = row_exists & (token < valid)
        group = (row_head * tokens + token) * (dim // 16) + row_column // 16
        x = tl.reshape(e2m1_value(take_groups(data, group, inside, 2, 0, ROWS)), (BLOCKS, 16, 16))
        x = x * scale_step(scale, k)[:, None, :] + middle[:, None, :]
        x = tl.where(inside[:, None], tl.reshape(x, (ROWS, 16)), 0.0)
        offsets = hot_groups(row_head, token, row_column, head_stride, token_stride, HOT_ALIGN)
        store_hot(base, offsets, x, (row_exists & (token < existing))[:, None], inverse_fp8_scale, DTYPE)


@triton.jit
def decode_fp8_mean(
    base, head_stride, token_stride, heads, tokens, dim, valid, existing, inverse_fp8_scale, data, side, split, splits,
    DTYPE: tl.constexpr, HOT_ALIGN: tl.constexpr, COLD_ALIGN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)
    fits = (column < dim)[None, :]
    for item in range(split, mean_items(heads, tokens, ROWS, EVEN), splits):
        _, head, _, _ = mean_rows(item, 0, heads, tokens, ROWS, EVEN)
        lead = item + tl.zeros([1], tl.int32) if EVEN else tl.minimum(head, heads - 1)
        mean = coded_value(halves_at(side, (lead * dim)[:, None] + column[None, :], fits), DTYPE)
        for step in range(0, tl.cdiv(tokens, ROWS) if EVEN else 1):
            row, head, token, exists = mean_rows(item, step, heads, tokens, ROWS, EVEN)
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
            store_hot(base, offsets, x, mask, inverse_fp8_scale, DTYPE)


# -- either way ------------------------------------------------------------------------------------------------------------


@triton.jit
def copy(
    base, head_stride, token_stride, heads, tokens, row_units, valid, existing, data, split, splits,
    ENCODE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """`raw`, in units of UNIT bytes, that strides count too."""
    N: tl.constexpr = 8 * GROUPS
    TYPE: tl.constexpr = (
        tl.uint8 if UNIT == 1 else (tl.uint16 if UNIT == 2 else (tl.uint32 if UNIT == 4 else tl.uint64))
    )
    hot, cold = base.to(tl.pointer_type(TYPE)), data.to(tl.pointer_type(TYPE))
    for item in range(split, tl.cdiv(heads * tokens * row_units, N), splits):
        unit = item * N + tl.arange(0, N)
        row = unit // row_units
        head = row // tokens
        token = row - head * tokens
        exists = unit < heads * tokens * row_units
        at = head.to(tl.int64) * head_stride + token.to(tl.int64) * token_stride + (unit - row * row_units)
        inside = exists & (token < valid)
        if ENCODE:
            tl.store(cold + unit, tl.load(hot + at, mask=inside, other=0), mask=exists)
        else:
            tl.store(hot + at, tl.load(cold + unit, mask=inside, other=0), mask=exists & (token < existing))
