"""The two kernels of the page codec: hot buffers to cold slots, and back. A program has a share of a part of a page.

Rows of the plan are described in `triton.py`. What codings and types a page has is known when a kernel is compiled
(KINDS); which part is of which kind is read from the plan, so that one launch serves every part of every page.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from kvtier.kernels.nvfp4.triton_decode import decode_fp8, decode_fp8_mean, decode_offset, decode_plain, decode_token
from kvtier.kernels.nvfp4.triton_encode import (
    encode_fp8,
    encode_fp8_mean,
    encode_offset,
    encode_plain,
    encode_token,
    largest_bits,
)
from kvtier.kernels.nvfp4.triton_numbers import FP8, FP32, float_of, power_of_two, select_k
from kvtier.kernels.nvfp4.triton_tiles import copy

RAW = tl.constexpr(0)
NVFP4 = tl.constexpr(1)
TWO_FP4 = tl.constexpr(2)
OFFSET = tl.constexpr(3)
TOKEN = tl.constexpr(4)
FP8_PLAIN = tl.constexpr(5)
FP8_MEAN = tl.constexpr(6)

FIELDS = tl.constexpr(22)
ADDRESS = tl.constexpr(0)
PAGE_STRIDE = tl.constexpr(1)
HEAD_STRIDE = tl.constexpr(2)
TOKEN_STRIDE = tl.constexpr(3)
NUM_TOKENS = tl.constexpr(4)
HEADS = tl.constexpr(5)
TOKENS = tl.constexpr(6)
DIM = tl.constexpr(7)
DATA = tl.constexpr(10)
SCALES = tl.constexpr(11)
SIDE = tl.constexpr(12)
FP8_SCALE = tl.constexpr(13)
GLOBAL_SCALE = tl.constexpr(14)
KIND = tl.constexpr(15)
TABLE = tl.constexpr(16)
PADDING = tl.constexpr(17)
PER_TOKEN = tl.constexpr(21)

DONE = tl.constexpr(1)
NON_FINITE = tl.constexpr(2)
OUT_OF_RANGE = tl.constexpr(3)


@triton.jit
def small(plan, FIELD: tl.constexpr):
    return tl.load(plan + FIELD).to(tl.int32)


@triton.jit(do_not_specialize=["arena", "first_part", "parts", "splits"])
def encode_kernel(
    plan, pages, status, arena, first_part, parts, splits,
    KINDS: tl.constexpr, EVEN: tl.constexpr, COLUMNS: tl.constexpr, HOT_ALIGN: tl.constexpr,
    COLD_ALIGN: tl.constexpr,
):  # fmt: skip
    """plan: int64 ``[all parts, FIELDS]``. pages: int64 ``[pages, 3]``: page, valid tokens, offset in the arena, whose
    address is `arena`. status: uint8 ``[pages, parts, splits]``: DONE or a refusal. Grid: pages * parts * splits."""
    program = tl.program_id(0).to(tl.int64)
    split = (program % splits).to(tl.int32)
    part = program // splits % parts
    page = pages + 3 * (program // splits // parts)
    plan += (first_part + part) * FIELDS
    cold = arena + tl.load(page + 2)
    kind = small(plan, KIND)
    answer = DONE + program * 0
    for n in tl.static_range(len(KINDS)):
        if kind == n:
            answer = encode_part(
                plan, tl.load(page), tl.load(page + 1).to(tl.int32), cold, split, splits,
                KINDS[n] // 16, KINDS[n] % 16, EVEN, COLUMNS, HOT_ALIGN, COLD_ALIGN,
            ) + program * 0  # fmt: skip
    tl.store(status + program, answer.to(tl.uint8))
    if split == 0:
        for n in tl.static_range(2):
            at = tl.load(plan + PADDING + 2 * n)
            length = tl.load(plan + PADDING + 2 * n + 1)
            lane = tl.arange(0, 16)
            out = (cold + at).to(tl.pointer_type(tl.uint8)) + lane
            tl.store(out, tl.zeros([16], tl.uint8), mask=lane < length)


@triton.jit(do_not_specialize=["arena", "first_part", "parts", "splits", "page_tokens"])
def decode_kernel(
    plan, pages, arena, first_part, parts, splits, page_tokens,
    KINDS: tl.constexpr, EVEN: tl.constexpr, COLUMNS: tl.constexpr, HOT_ALIGN: tl.constexpr,
    COLD_ALIGN: tl.constexpr,
):  # fmt: skip
    """As `encode_kernel`, the other way."""
    program = tl.program_id(0).to(tl.int64)
    split = (program % splits).to(tl.int32)
    part = program // splits % parts
    page = pages + 3 * (program // splits // parts)
    plan += (first_part + part) * FIELDS
    cold = arena + tl.load(page + 2)
    kind = small(plan, KIND)
    for n in tl.static_range(len(KINDS)):
        if kind == n:
            decode_part(
                plan, tl.load(page), tl.load(page + 1).to(tl.int32), cold, split, splits, page_tokens,
                KINDS[n] // 16, KINDS[n] % 16, EVEN, COLUMNS, HOT_ALIGN, COLD_ALIGN,
            )  # fmt: skip


@triton.jit
def encode_part(
    plan, page, valid_tokens, cold, split, splits,
    CODING: tl.constexpr, DTYPE: tl.constexpr, EVEN: tl.constexpr, COLUMNS: tl.constexpr,
    HOT_BYTES: tl.constexpr, COLD_ALIGN: tl.constexpr,
):  # fmt: skip
    """Returns DONE or a refusal. For RAW parts DTYPE is the number of bytes in a unit."""
    base = tl.load(plan + ADDRESS) + page * tl.load(plan + PAGE_STRIDE)
    head_bytes, token_bytes = tl.load(plan + HEAD_STRIDE), tl.load(plan + TOKEN_STRIDE)
    heads, tokens, dim = small(plan, HEADS), small(plan, TOKENS), small(plan, DIM)
    data, scales, side = cold + tl.load(plan + DATA), cold + tl.load(plan + SCALES), cold + tl.load(plan + SIDE)
    valid = tl.where(tl.load(plan + PER_TOKEN) != 0, valid_tokens, tokens)
    SIZE: tl.constexpr = DTYPE if CODING == RAW else (4 if DTYPE == FP32 else (1 if DTYPE == FP8 else 2))
    HOT_ALIGN: tl.constexpr = HOT_BYTES // SIZE
    head_stride, token_stride = head_bytes // SIZE, token_bytes // SIZE
    answer = DONE
    if CODING == RAW:
        copy(base, head_stride, token_stride, heads, tokens, dim, valid, valid, data, split, splits, True, DTYPE)
    else:
        fp8_scale = float_of(small(plan, FP8_SCALE))
        most = largest_bits(
            base, head_stride, token_stride, heads, tokens, dim, valid, fp8_scale, DTYPE, HOT_ALIGN
        )  # fmt: skip
        gs = power_of_two(most * 0)
        clips = most < 0
        table = tl.load(plan + TABLE)
        given = small(plan, GLOBAL_SCALE)
        if (table >= 0) & (given != 0):
            gs = float_of(given)
            if split == 0:
                tl.store((cold + table).to(tl.pointer_type(tl.int32)), given)
        elif table >= 0:
            if (CODING == OFFSET) or (CODING == TOKEN):
                # The distance from a mean is at most twice the amax.
                k, clips = select_k((float_of(most) * 2.0).to(tl.int32, bitcast=True), DTYPE)
            else:
                k, clips = select_k(most, DTYPE)
            gs = power_of_two(-k)
            if split == 0:
                tl.store((cold + table).to(tl.pointer_type(tl.uint8)), (k & 0xFF).to(tl.uint8))
        unit = tl.div_rn(power_of_two(most * 0), gs)
        if (CODING == NVFP4) or (CODING == TWO_FP4):
            encode_plain(
                base, head_stride, token_stride, heads, tokens, dim, valid, fp8_scale, gs, unit, data, scales, split,
                splits, CODING == TWO_FP4, DTYPE, HOT_ALIGN,
            )  # fmt: skip
        elif CODING == OFFSET:
            encode_offset(
                base, head_stride, token_stride, heads, tokens, dim, valid, fp8_scale, gs, unit, data, scales, side,
                split, splits, DTYPE, HOT_ALIGN,
            )  # fmt: skip
        elif CODING == TOKEN:
            encode_token(
                base, head_stride, token_stride, heads, tokens, dim, valid, fp8_scale, gs, unit, data, scales, side,
                split, splits, DTYPE, HOT_ALIGN,
            )  # fmt: skip
        elif CODING == FP8_PLAIN:
            clips = encode_fp8(
                base, head_stride, token_stride, heads, tokens, dim, valid, fp8_scale, data, split, splits, DTYPE,
                HOT_ALIGN, COLD_ALIGN,
            ) > 0  # fmt: skip
        else:
            clips = encode_fp8_mean(
                base, head_stride, token_stride, heads, tokens, dim, valid, fp8_scale, data, side, split, splits, DTYPE,
                HOT_ALIGN, COLD_ALIGN, COLUMNS, EVEN,
            ) > 0  # fmt: skip
        answer = tl.where(most >= 0x7F800000, NON_FINITE, tl.where(clips, OUT_OF_RANGE, DONE))
    return answer


@triton.jit
def decode_part(
    plan, page, valid_tokens, cold, split, splits, page_tokens,
    CODING: tl.constexpr, DTYPE: tl.constexpr, EVEN: tl.constexpr, COLUMNS: tl.constexpr,
    HOT_BYTES: tl.constexpr, COLD_ALIGN: tl.constexpr,
):  # fmt: skip
    base = tl.load(plan + ADDRESS) + page * tl.load(plan + PAGE_STRIDE)
    head_bytes, token_bytes = tl.load(plan + HEAD_STRIDE), tl.load(plan + TOKEN_STRIDE)
    heads, tokens, dim = small(plan, HEADS), small(plan, TOKENS), small(plan, DIM)
    data, scales, side = cold + tl.load(plan + DATA), cold + tl.load(plan + SCALES), cold + tl.load(plan + SIDE)
    per_token = tl.load(plan + PER_TOKEN) != 0
    valid = tl.where(per_token, valid_tokens, tokens)
    # The last page of a sequence may have less memory than a page.
    behind = tl.minimum(tl.load(plan + NUM_TOKENS) - page * page_tokens, tokens).to(tl.int32)
    existing = tl.where(per_token, behind, tokens)
    SIZE: tl.constexpr = DTYPE if CODING == RAW else (4 if DTYPE == FP32 else (1 if DTYPE == FP8 else 2))
    HOT_ALIGN: tl.constexpr = HOT_BYTES // SIZE
    head_stride, token_stride = head_bytes // SIZE, token_bytes // SIZE
    if CODING == RAW:
        copy(base, head_stride, token_stride, heads, tokens, dim, valid, existing, data, split, splits, False, DTYPE)
    else:
        one = power_of_two(heads * 0)
        inverse = tl.div_rn(one, float_of(small(plan, FP8_SCALE)))
        unit = one
        table = tl.load(plan + TABLE)
        if (table >= 0) & (small(plan, GLOBAL_SCALE) != 0):
            unit = tl.div_rn(one, float_of(tl.load((cold + table).to(tl.pointer_type(tl.int32)))))
        elif table >= 0:
            unit = power_of_two(tl.load((cold + table).to(tl.pointer_type(tl.int8))).to(tl.int32))
        if (CODING == NVFP4) or (CODING == TWO_FP4):
            decode_plain(
                base, head_stride, token_stride, heads, tokens, dim, valid, existing, inverse, unit, data, scales,
                split, splits, CODING == TWO_FP4, DTYPE, HOT_ALIGN,
            )  # fmt: skip
        elif CODING == OFFSET:
            decode_offset(
                base, head_stride, token_stride, heads, tokens, dim, valid, existing, inverse, unit, data, scales, side,
                split, splits, DTYPE, HOT_ALIGN,
            )  # fmt: skip
        elif CODING == TOKEN:
            decode_token(
                base, head_stride, token_stride, heads, tokens, dim, valid, existing, inverse, unit, data, scales, side,
                split, splits, DTYPE, HOT_ALIGN,
            )  # fmt: skip
        elif CODING == FP8_PLAIN:
            decode_fp8(
                base, head_stride, token_stride, heads, tokens, dim, valid, existing, inverse, data, split, splits,
                DTYPE, HOT_ALIGN, COLD_ALIGN,
            )  # fmt: skip
        else:
            decode_fp8_mean(
                base, head_stride, token_stride, heads, tokens, dim, valid, existing, inverse, data, side, split,
                splits, DTYPE, HOT_ALIGN, COLD_ALIGN, COLUMNS, EVEN,
            )  # fmt: skip
