"""The number formats of a cold page as Triton functions on tiles: bit for bit what `reference.py` computes.

Compile with ``enable_fp_fusion=False``: a fused multiply-add rounds once where the format rounds twice. Reciprocals are
`div_rn`, never ``/``, which Triton may approximate.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

BF16 = tl.constexpr(0)
FP16 = tl.constexpr(1)
FP32 = tl.constexpr(2)
FP8 = tl.constexpr(4)
"""Element types by their number in a plan."""


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def power_of_two(k):
    return float_of((k + 127) << 23)


@triton.jit
def bf16_bits(x):
    """Nearest even, as int32."""
    b = bits_of(x)
    return ((b + 0x7FFF + ((b >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def coded_bits(x, DTYPE: tl.constexpr):
    """Float32 as uint16 bits of the 16-bit type that a buffer of DTYPE is encoded from."""
    if (DTYPE == BF16) or (DTYPE == FP32):
        return bf16_bits(x).to(tl.uint16)
    else:
        return x.to(tl.float16).to(tl.uint16, bitcast=True)


@triton.jit
def coded_value(bits, DTYPE: tl.constexpr):
    if (DTYPE == BF16) or (DTYPE == FP32):
        return float_of(bits.to(tl.int32) << 16)
    else:
        return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def e4m3_value(code):
    """int32 code -> float32. Code 0x7f is worth 480 here: pages that hold it are refused by `hot_value`'s callers."""
    magnitude = code & 0x7F
    small = magnitude.to(tl.float32) * 0.001953125
    normal = float_of((magnitude << 20) + (120 << 23))
    value = tl.where(magnitude < 8, small, normal)
    return float_of(bits_of(value) | ((code & 0x80) << 24))


@triton.jit
def e4m3_code(x):
    """Nearest even, saturating at 448, int32; the sign of zero is kept."""
    b = bits_of(x)
    limited = tl.minimum(b & 0x7FFFFFFF, 0x43E00000)
    small = bits_of(float_of(limited) + 16384.0) - 0x46800000  # the sum's last bit is worth 2^-9
    normal = ((limited + 0x7FFFF + ((limited >> 20) & 1)) >> 20) - (120 << 3)
    return tl.where(limited < 0x3C800000, small, normal) | ((b >> 24) & 0x80)


@triton.jit
def pointer(address, TYPE: tl.constexpr, ALIGN: tl.constexpr):
    """To elements of TYPE; ALIGN in elements."""
    SIZE: tl.constexpr = TYPE.primitive_bitwidth // 8
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), ALIGN * SIZE)


@triton.jit
def load_hot(base, offsets, mask, fp8_scale, DTYPE: tl.constexpr, HOT_ALIGN: tl.constexpr):
    """Elements at address `base`, a multiple of HOT_ALIGN elements, plus `offsets` elements, as float32 values of the
    coded type; 0 where not `mask`. NaN of any type becomes NaN or infinity."""
    if DTYPE == BF16:
        bits = tl.load(pointer(base, tl.uint16, HOT_ALIGN) + offsets, mask=mask, other=0)
        return float_of(bits.to(tl.int32) << 16)
    elif DTYPE == FP16:
        bits = tl.load(pointer(base, tl.uint16, HOT_ALIGN) + offsets, mask=mask, other=0)
        return bits.to(tl.float16, bitcast=True).to(tl.float32)
    elif DTYPE == FP32:
        x = tl.load(pointer(base, tl.float32, HOT_ALIGN) + offsets, mask=mask, other=0.0)
        # Kept from the carry of the rounding, that could turn a NaN into a number.
        magnitude = tl.minimum(bits_of(x) & 0x7FFFFFFF, 0x7F800000)
        return float_of((bf16_bits(float_of(magnitude)) << 16) | (bits_of(x) & (-2147483647 - 1)))
    else:
        code = tl.load(pointer(base, tl.uint8, HOT_ALIGN) + offsets, mask=mask, other=0).to(tl.int32)
        value = e4m3_value(code) * fp8_scale
        value = tl.where((code & 0x7F) == 0x7F, float("inf"), value)
        return value.to(tl.float16).to(tl.float32)


@triton.jit
def store_hot(base, offsets, x, mask, inverse_fp8_scale, DTYPE: tl.constexpr, HOT_ALIGN: tl.constexpr):
    if DTYPE == BF16:
        tl.store(pointer(base, tl.uint16, HOT_ALIGN) + offsets, bf16_bits(x).to(tl.uint16), mask=mask)
    elif DTYPE == FP16:
        bits = x.to(tl.float16).to(tl.uint16, bitcast=True)
        tl.store(pointer(base, tl.uint16, HOT_ALIGN) + offsets, bits, mask=mask)
    elif DTYPE == FP32:
        tl.store(pointer(base, tl.float32, HOT_ALIGN) + offsets, float_of(bf16_bits(x) << 16), mask=mask)
    else:
        code = e4m3_code(x * inverse_fp8_scale)
        tl.store(pointer(base, tl.uint8, HOT_ALIGN) + offsets, code.to(tl.uint8), mask=mask)


@triton.jit
def k_low(DTYPE: tl.constexpr):
    low: tl.constexpr = -14 if DTYPE == FP16 else (-2 if DTYPE == FP8 else -100)
    return low


@triton.jit
def k_high(DTYPE: tl.constexpr):
    high: tl.constexpr = 100 if (DTYPE == BF16) or (DTYPE == FP32) else 4
    return high


@triton.jit
def select_k(amax_bits, DTYPE: tl.constexpr):
    """(k, whether it is too small): the smallest k with ``amax <= 2784 * 2**k``. 2784 is 1.359375 * 2**11, so the
    mantissa decides between two neighbours."""
    k = (amax_bits >> 23) - 138 + ((amax_bits & 0x7FFFFF) > 0x2E0000).to(tl.int32)
    return tl.minimum(tl.maximum(k, k_low(DTYPE)), k_high(DTYPE)), k > k_high(DTYPE)


@triton.jit
def e2m1_code(steps):
    """Magnitude code of steps >= 0: nearest, ties to even, saturating."""
    code = (steps > 0.25).to(tl.int32) + (steps >= 0.75).to(tl.int32)
    code += (steps > 1.25).to(tl.int32) + (steps >= 1.75).to(tl.int32)
    code += (steps > 2.5).to(tl.int32) + (steps >= 3.5).to(tl.int32)
    return code + (steps > 5.0).to(tl.int32)


@triton.jit
def e2m1_value(code):
    """Codes with sign -> float32; -0 for code 8."""
    magnitude = code & 7
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, float_of((magnitude + 252) << 22))
    return float_of(bits_of(value) | ((code & 8) << 28))


@triton.jit
def scale_code(amax, global_scale):
    wanted = tl.minimum(tl.maximum(global_scale * (amax * (1.0 / 6.0)), 0.015625), 448.0)
    b = bits_of(wanted)
    return ((b + 0x7FFFF + ((b >> 20) & 1)) >> 20) - (120 << 3)


@triton.jit
def quantize(x, global_scale, unit, AXIS: tl.constexpr):
    """Groups along AXIS, of 16: (codes, scale codes, values of the codes). Codes and values are shaped like x. `unit`
    is the reciprocal of `global_scale`."""
    scales = scale_code(tl.max(tl.abs(x), AXIS), global_scale)
    step = float_of((scales << 20) + (120 << 23)) * unit
    inverse = tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step)
    code = e2m1_code(tl.abs(x) * tl.expand_dims(inverse, AXIS)) | ((bits_of(x) >> 28) & 8)
    return code, scales, e2m1_value(code) * tl.expand_dims(step, AXIS)


@triton.jit
def scale_step(scales, unit):
    """What one unit of e2m1 is worth under int32 scale codes, their sign bit ignored."""
    return e4m3_value(scales & 0x7F) * unit


@triton.jit
def positive_zeros(codes):
    return tl.where(codes == 8, 0, codes)


@triton.jit
def pack(codes, GROUPS: tl.constexpr):
    """``[GROUPS, 16]`` codes -> int32 ``[GROUPS, 2]``: eight nibbles a word, the first one lowest."""
    nibbles = tl.reshape(codes, (GROUPS, 2, 8)) << (tl.arange(0, 8) * 4)[None, None, :]
    return tl.sum(nibbles, 2)  # no two have a bit in common


@triton.jit
def unpack(words, GROUPS: tl.constexpr):
    """The inverse."""
    nibbles = (words[:, :, None] >> (tl.arange(0, 8) * 4)[None, None, :]) & 15
    return tl.reshape(nibbles, (GROUPS, 16))


@triton.jit
def sum_of_16(x, GROUPS: tl.constexpr):
    """``[GROUPS, 16]`` -> ``[GROUPS]``, halves first: a sum of two has one result in whatever order."""
    x = tl.sum(tl.reshape(x, (GROUPS, 2, 8)), 1)
    x = tl.sum(tl.reshape(x, (GROUPS, 2, 4)), 1)
    x = tl.sum(tl.reshape(x, (GROUPS, 2, 2)), 1)
    return tl.sum(x, 1)
