"""How the parts of a page are cut into tiles, and copied: what both directions of the Triton codec share.

A part's work is cut into items; program `split` of `splits` takes every `splits`-th. Tiles are ``[GROUPS, 16]``, groups
of 16 neighbours (`nvfp4_token`: blocks of 16 tokens by 16 columns; `fp8_mean`: rows). `base` is the address of a page's
first hot element; strides count elements.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from kvtier.kernels.nvfp4.triton_numbers import pack, unpack

GROUPS = tl.constexpr(128)
"""Groups of a tile."""
WALKERS = tl.constexpr(64)
"""Groups of a tile of `nvfp4_offset`, which needs more registers."""
UNITS = tl.constexpr(16)
"""Of them side by side; the others are of the next tokens."""
ROWS = tl.constexpr(8)
"""Rows of a tile of `fp8_mean`: those of a byte of flags."""
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
def put_groups(address, group, codes, mask, N: tl.constexpr):
    """Codes ``[N, 16]`` of the groups with these numbers."""
    offsets = tl.multiple_of(group * 2, 2)[:, None] + tl.arange(0, 2)[None, :]
    tl.store(words_at(address) + offsets, pack(codes, N), mask=mask[:, None])


@triton.jit
def take_groups(address, group, mask, N: tl.constexpr):
    offsets = tl.multiple_of(group * 2, 2)[:, None] + tl.arange(0, 2)[None, :]
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
    lane = tl.arange(0, WALKERS)
    unit = item * UNITS + lane % UNITS
    per_row = dim // 16
    head = unit // per_row
    return head, (unit - head * per_row) * 16, lane // UNITS, unit < heads * per_row


@triton.jit
def token_blocks(item, heads, tokens, dim):
    """Blocks of 16 tokens by 16 columns: number, head, first token, first column, whether it exists."""
    block = item * BLOCKS + tl.arange(0, BLOCKS)
    per_row, per_head = dim // 16, (dim // 16) * (tokens // 16)
    head = block // per_head
    down = (block - head * per_head) // per_row
    return block, head, down * 16, (block % per_row) * 16, block < heads * per_head


@triton.jit
def mean_items(heads, tokens, EVEN: tl.constexpr):
    """How many items `fp8_mean` has: heads; or, where heads share a byte of flags, tiles of rows."""
    return heads if EVEN else tl.cdiv(heads * tokens, ROWS)


@triton.jit
def mean_rows(item, step, heads, tokens, EVEN: tl.constexpr):
    """Rows of a tile of `fp8_mean`: number, head, token, whether it exists."""
    lane = tl.arange(0, ROWS)
    row = item * tokens + step * ROWS + lane if EVEN else item * ROWS + lane
    head = row // tokens
    token = step * ROWS + lane if EVEN else row - head * tokens
    exists = token < tokens if EVEN else row < heads * tokens
    return row, head, token, exists


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
