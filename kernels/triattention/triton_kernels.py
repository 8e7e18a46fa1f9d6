"""TriAttention's device work in Triton: weight rows of the mean phase, scores of paged keys, reductions, selection."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

UNION = tl.constexpr(0)
PER_HEAD = tl.constexpr(1)
PER_LAYER_PERHEAD = tl.constexpr(2)

TURNS_PER_RADIAN = tl.constexpr(0.15915494309189535)
RADIANS_PER_TURN = tl.constexpr(6.283185307179586)
LEAST = tl.constexpr(-2147483647 - 1)


@triton.jit
def cosine_and_sine(angle):
    """Of fp64 angles, to 1e-9: the part of a turn that is left, then Taylor's series up to half a turn. The library's
    own functions keep a table on the stack, for larger arguments than there are positions."""
    turns = angle * TURNS_PER_RADIAN
    x = (turns - tl.floor(turns + 0.5)) * RADIANS_PER_TURN
    y = x * x
    cosine, sine = y * 0.0 + 1.0, y * 0.0 + 1.0
    for n in tl.static_range(10):
        # From the innermost bracket outwards.
        cosine = 1.0 - cosine * y * (1.0 / ((20 - 2 * n) * (19 - 2 * n)))
        sine = 1.0 - sine * y * (1.0 / ((21 - 2 * n) * (20 - 2 * n)))
    return cosine, sine * x


@triton.jit(do_not_specialize=["position", "frequencies"])
def rows_kernel(
    real_mean, imag_mean, omega, rows, position, frequencies,
    OFFSETS: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Weights of one query head a program. real_mean, imag_mean: fp64 ``[heads, frequencies]``, with the gain; omega:
    fp64 ``[frequencies]``; rows: fp32 ``[heads, 2, frequencies]``. Offsets are ``1 << n`` for n below OFFSETS."""
    head = tl.program_id(0).to(tl.int64)
    f = tl.arange(0, F)
    inside = f < frequencies
    w = tl.load(omega + f, mask=inside, other=0.0)
    cosine, sine = w * 0.0, w * 0.0
    for n in range(0, OFFSETS):
        c, s = cosine_and_sine(w * (position + (1 << n)).to(tl.float64))
        cosine += c
        sine += s
    cosine, sine = cosine * (1.0 / OFFSETS), sine * (1.0 / OFFSETS)
    a = tl.load(real_mean + head * frequencies + f, mask=inside, other=0.0)
    b = tl.load(imag_mean + head * frequencies + f, mask=inside, other=0.0)
    out = rows + head * 2 * frequencies + f
    tl.store(out, (a * cosine - b * sine).to(tl.float32), mask=inside)
    tl.store(out + frequencies, (a * sine + b * cosine).to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["first", "count", "page_tokens", "frequencies", "heads"])
def score_kernel(
    pools, table, real, imag, rows, spread, scores, first, count, page_tokens, frequencies, heads,
    page_stride, token_stride, head_stride,
    DTYPE: tl.constexpr, F: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """A block of keys of one KV head of one layer a program, for its GROUP query heads. Grid: blocks, KV heads, layers.

    pools: int64 addresses of the layers' keys, strides in elements of DTYPE. table: int64 page of each ordinal
    ``// page_tokens``. rows: of `rows_kernel`, ``[layers, heads, 2, frequencies]``; spread: fp32 ``[layers, heads,
    frequencies]``; heads: query heads. scores: fp32 ``[layers, heads, count]`` of ordinals ``first + [0, count)``."""
    layer, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    n = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists = n < count
    ordinal = first + n
    page = tl.load(table + ordinal // page_tokens, mask=exists, other=0)
    base = tl.load(pools + layer).to(tl.pointer_type(DTYPE)) + head.to(tl.int64) * head_stride
    row = page * page_stride + (ordinal % page_tokens).to(tl.int64) * token_stride
    f = tl.arange(0, F)
    mask = exists[:, None] & (f < frequencies)[None, :]
    at_real = tl.load(real + f, mask=f < frequencies, other=0)
    at_imag = tl.load(imag + f, mask=f < frequencies, other=0)
    a = tl.load(base + row[:, None] + at_real[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(base + row[:, None] + at_imag[None, :], mask=mask, other=0.0).to(tl.float32)
    size = tl.sqrt_rn(a * a + b * b)
    for q in range(0, GROUP):
        query = layer * heads + head * GROUP + q
        weights = rows + query * 2 * frequencies + f
        u = tl.load(weights, mask=f < frequencies, other=0.0)
        v = tl.load(weights + frequencies, mask=f < frequencies, other=0.0)
        s = tl.load(spread + query * frequencies + f, mask=f < frequencies, other=0.0)
        value = tl.sum(a * u[None, :] + b * v[None, :] + size * s[None, :], 1)
        tl.store(scores + query * count + n, value, mask=exists)


@triton.jit(do_not_specialize=["count"])
def statistics_kernel(scores, statistics, count, FLOOR: tl.constexpr, TOKENS: tl.constexpr):
    """Mean and reciprocal deviation (population, floored) of one row ``[count]`` a program, fp64 ``[rows, 2]``."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([TOKENS], tl.float64)
    for start in range(0, count, TOKENS):
        n = start + tl.arange(0, TOKENS)
        total += tl.load(scores + row * count + n, mask=n < count, other=0.0).to(tl.float64)
    mean = tl.sum(total, 0) / count
    total = tl.zeros([TOKENS], tl.float64)
    for start in range(0, count, TOKENS):
        n = start + tl.arange(0, TOKENS)
        x = tl.load(scores + row * count + n, mask=n < count, other=0.0).to(tl.float64) - mean
        total += tl.where(n < count, x * x, 0.0)
    deviation = tl.maximum(tl.sqrt(tl.sum(total, 0) / count), FLOOR)
    tl.store(statistics + 2 * row, mean)
    tl.store(statistics + 2 * row + 1, 1.0 / deviation)


@triton.jit(do_not_specialize=["count", "layers", "heads", "kv_heads"])
def reduce_kernel(
    scores, statistics, out, count, layers, heads, kv_heads,
    MODE: tl.constexpr, NORMALIZED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """scores: fp32 ``[layers, heads, count]`` -> out: fp32 ``[layers or 1, kv_heads or 1, count]``. Grid: blocks of
    tokens, rows of `out`. statistics: of `statistics_kernel`, read where NORMALIZED."""
    result = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mask = n < count
    group = heads // kv_heads
    # Rows whose best counts, `span` at a time, and how many times, `step` rows apart.
    first = result * 0
    span, times, step = layers * heads, 1, 0
    if MODE == PER_HEAD:
        first, span, times, step = result * group, group, layers, heads
    if MODE == PER_LAYER_PERHEAD:
        first, span = result * group, group
    total = tl.zeros([TOKENS], tl.float32)
    for i in range(0, times):
        best = tl.full([TOKENS], float("-inf"), tl.float32)
        for j in range(0, span):
            row = first + i * step + j
            x = tl.load(scores + row * count + n, mask=mask, other=0.0)
            if NORMALIZED:
                mean, scale = tl.load(statistics + 2 * row), tl.load(statistics + 2 * row + 1)
                x = ((x.to(tl.float64) - mean) * scale).to(tl.float32)
            best = tl.where((x > best) | (x != x), x, best)  # NaN stays
        total += best
    if MODE == PER_HEAD:
        total = total / layers
    tl.store(out + result * count + n, total, mask=mask)


@triton.jit
def ranks(scores, n, mask):
    """int32 that order like the scores: NaN like the least, both zeros alike, nothing below LEAST + 1."""
    x = tl.load(scores + n, mask=mask, other=0.0)
    x = tl.where(x != x, float("-inf"), tl.where(x == 0.0, 0.0, x))
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(mask, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), LEAST)


@triton.jit
def count_at_least(scores, least, count, TOKENS: tl.constexpr):
    found = tl.zeros([TOKENS], tl.int32)
    for start in range(0, count, TOKENS):
        n = start + tl.arange(0, TOKENS)
        found += (ranks(scores, n, n < count) >= least).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit(do_not_specialize=["count", "budget"])
def select_kernel(scores, kept, count, budget, TOKENS: tl.constexpr):
    """The best `budget` of one row ``[count]`` a program, int64 ``[rows, budget]``, ascending, ties by lowest index.
    The lowest rank that is kept is found bit by bit: each asks how many are at least that high."""
    row = tl.program_id(0).to(tl.int64)
    scores += row * count
    kept += row * budget
    lowest = tl.full([], LEAST, tl.int32)
    # The sign first: half of all ranks are at least 0.
    lowest = tl.where(count_at_least(scores, 0, count, TOKENS) >= budget, 0, lowest)
    for bit in range(0, 31):
        higher = lowest + (1 << (30 - bit))
        lowest = tl.where(count_at_least(scores, higher, count, TOKENS) >= budget, higher, lowest)
    room = budget - count_at_least(scores, lowest + 1, count, TOKENS)
    ties, written = room * 0, room * 0
    for start in range(0, count, TOKENS):
        n = start + tl.arange(0, TOKENS)
        mask = n < count
        rank = ranks(scores, n, mask)
        tie = mask & (rank == lowest)
        nth = ties + tl.cumsum(tie.to(tl.int32), 0)
        chosen = (mask & (rank > lowest)) | (tie & (nth <= room))
        place = written + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(kept + place, n.to(tl.int64), mask=chosen)
        ties += tl.sum(tie.to(tl.int32), 0)
        written += tl.sum(chosen.to(tl.int32), 0)
