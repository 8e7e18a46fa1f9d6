"""Native kernels against the numpy reference, the reference against torchao, and round trips, exhaustively."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.kernels import _native
from kvtier.kernels.nvfp4 import reference

CODES = {"bf16": 0, "fp16": 1, "fp32": 2}
U8 = npt.NDArray[np.uint8]


def native_quantize(x: npt.NDArray[Any], dtype: str, k: int) -> tuple[U8, U8]:
    data = np.full((*x.shape[:-1], x.shape[-1] // 2), 0xEE, np.uint8)
    scales = np.full((*x.shape[:-1], x.shape[-1] // 16), 0xEE, np.uint8)
    assert _native.quantize(x.reshape(-1), CODES[dtype], k, data.reshape(-1), scales.reshape(-1))
    return data, scales


def native_dequantize(data: U8, scales: U8, dtype: str, k: int) -> npt.NDArray[Any]:
    out = np.full((*data.shape[:-1], data.shape[-1] * 2), 77, np.float32 if dtype == "fp32" else np.uint16)
    _native.dequantize(data.reshape(-1), scales.reshape(-1), CODES[dtype], k, out.reshape(-1))
    return out


def spread(rng: np.random.Generator, rows: int, dim: int, low: float, high: float) -> npt.NDArray[np.float32]:
    """Normal rows whose sizes range over powers of ten."""
    return (rng.standard_normal((rows, dim)) * 10.0 ** rng.uniform(low, high, (rows, 1))).astype(np.float32)


def test_more_than_the_fallback_is_tested_on_x86() -> None:
    assert _native.isas()[-1] == "scalar"


def test_an_unknown_instruction_set_is_told() -> None:
    with pytest.raises(ValueError, match=r"KVTIER_ISA = 'mmx'.*scalar"):
        _native.use_isa("mmx")


@pytest.mark.parametrize("dim", [16, 32, 48, 80, 128, 1040])
@pytest.mark.parametrize(
    ("dtype", "k"),
    [(d, k) for d in CODES for k in (0, -6, 4, -14)] + [("bf16", 5), ("bf16", 100), ("bf16", -100), ("fp32", 77)],
)
def test_native_equals_reference(isa: str, dtype: str, k: int, dim: int) -> None:
    rng = np.random.default_rng(dim)
    bits = reference.from_float32(spread(rng, 64, dim, -7, 4.5) * np.float32(2.0 ** min(k, 0)), dtype)
    bits = np.ascontiguousarray(bits)
    if dtype == "fp16":
        bits = np.where((bits & 0x7C00) == 0x7C00, np.uint16(0x7BFF), bits)
    data, scales = native_quantize(bits, dtype, k)
    expected_data, expected_scales = reference.quantize(reference.to_float32(bits, dtype), k)
    np.testing.assert_array_equal(scales, expected_scales)
    np.testing.assert_array_equal(data, expected_data)
    got = native_dequantize(data, scales, dtype, k)
    expected = reference.from_float32(reference.dequantize(data, scales, k), dtype)
    assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", CODES)
def test_every_scale_byte_decodes_as_the_reference_says(isa: str, dtype: str) -> None:
    scales = np.repeat(np.arange(256, dtype=np.uint8), 16).reshape(-1, 1)
    data = np.tile(np.arange(16, dtype=np.uint8)[:, None] * np.full(8, 0x11, np.uint8), (256, 1))
    got = native_dequantize(data, scales, dtype, -3)
    expected = reference.from_float32(reference.dequantize(data, scales, -3), dtype)
    nan = np.isnan(reference.to_float32(expected, dtype))
    assert (np.isnan(reference.to_float32(got, dtype)) == nan).all()
    np.testing.assert_array_equal(got[~nan], expected[~nan])


EDGES = {
    "all zeros": ([0.0] * 16, 0x08),
    "negative zeros": ([-0.0] * 16, 0x08),
    "below the smallest normal scale": ([1e-3, -1e-3] * 8, 0x08),
    "just at the floor": ([6 * 2.0**-6] * 16, 0x08),
    "clips": ([3000.0, -5000.0] + [1.0] * 14, 0x7E),
    "largest without clipping": ([2688.0] + [0.0] * 15, 0x7E),
    "last tie of the scale": ([2784.0] + [1.0] * 15, 0x7E),
    "ties of e2m1": ([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -6], 0x38),
    "denormals": ([1e-40, -1e-40] * 8, 0x08),
    "huge": ([3e38, -3e38] * 8, 0x7E),
}


@pytest.mark.parametrize("case", EDGES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_edge_cases(isa: str, case: str, dtype: str) -> None:
    values, scale = EDGES[case]
    bits = reference.from_float32(np.array([values], np.float32), dtype)
    data, scales = native_quantize(bits, dtype, 0)
    expected_data, expected_scales = reference.quantize(reference.to_float32(bits, dtype))
    assert scales.tolist() == expected_scales.tolist() == [[scale]]
    assert data.tolist() == expected_data.tolist()


def test_ties_go_to_the_even_code_and_the_even_element_is_low() -> None:
    values = np.array([EDGES["ties of e2m1"][0]], np.float32)
    data, scales = reference.quantize(values)
    assert scales.tolist() == [[0x38]]
    codes = [7, 0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14, 15]
    assert data.tolist() == [[codes[i] | codes[i + 1] << 4 for i in range(0, 16, 2)]]


def test_all_zero_decodes_to_zeros_with_their_sign() -> None:
    data, scales = native_quantize(np.array([[0x0000, 0x8000] * 8], np.uint16), "bf16", 0)
    assert native_dequantize(data, scales, "bf16", 0).tolist() == [[0x0000, 0x8000] * 8]


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 15, 16, 79])
def test_non_finite_is_flagged(isa: str, dtype: str, bad: float, at: int) -> None:
    x = np.ones(80, np.float32)
    x[at] = bad
    bits = reference.from_float32(x, dtype)
    assert not _native.quantize(bits, CODES[dtype], 0, np.zeros(40, np.uint8), np.zeros(5, np.uint8))


def torchao_quantize(x: npt.NDArray[np.generic], dtype: str) -> tuple[U8, U8]:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    tensor = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if dtype == "bf16" else torch.from_numpy(x)
    scales, data = nvfp4_quantize(tensor, 16, per_tensor_scale=None)
    return data.view(torch.uint8).numpy(), scales.view(torch.uint8).numpy()


@pytest.mark.parametrize("dtype", CODES)
def test_bit_equal_to_torchao(isa: str, dtype: str) -> None:
    rng = np.random.default_rng(18)
    x = spread(rng, 1024, 2048, -4, 4)
    x.reshape(-1, 16)[: len(EDGES)] = np.array([v for v, _ in EDGES.values()], np.float32)
    bits = reference.from_float32(np.clip(x, -65504, 65504) if dtype == "fp16" else x, dtype)
    data, scales = native_quantize(bits, dtype, 0)
    # torchao does not take FP16; widening it is exact.
    theirs = (
        torchao_quantize(bits, dtype)
        if dtype != "fp16"
        else torchao_quantize(reference.to_float32(bits, dtype), "fp32")
    )
    assert scales.tobytes() == theirs[1].reshape(scales.shape).tobytes()
    assert data.tobytes() == theirs[0].tobytes()


@pytest.mark.parametrize(
    ("dtype", "k"), [("bf16", 0), ("bf16", -6), ("bf16", 5), ("fp16", 0), ("fp16", -6), ("fp16", 4)]
)
def test_every_amax_with_every_code_round_trips(isa: str, dtype: str, k: int) -> None:
    """encode(decode(encode(x))) == encode(x): per finite amax one group with every code, of both signs, it can hold."""
    last = 0x7F7F if dtype == "bf16" else 0x7BFF
    amax = np.arange(last + 1, dtype=np.uint16)
    alone = np.zeros((len(amax), 16), np.uint16)
    alone[:, 0] = amax
    _, scales = native_quantize(alone, dtype, k)
    # What each of the 16 codes means under the scale of that amax, but never above it.
    every_code = np.tile(np.array([a | (a + 1) << 4 for a in range(0, 16, 2)], np.uint8), (len(amax), 1))
    group = native_dequantize(every_code, scales, dtype, k)
    group = np.minimum(group & 0x7FFF, amax[:, None]) | (group & 0x8000)
    group[:, 0] = amax
    first_data, first_scales = native_quantize(np.ascontiguousarray(group), dtype, k)
    again = native_dequantize(first_data, first_scales, dtype, k)
    second_data, second_scales = native_quantize(again, dtype, k)
    np.testing.assert_array_equal(first_scales, scales)
    np.testing.assert_array_equal(second_scales, first_scales)
    np.testing.assert_array_equal(second_data, first_data)
    reached = np.concatenate([(first_data[:, 1:] & 15).reshape(-1), (first_data[:, 1:] >> 4).reshape(-1)])
    assert set(np.unique(reached)) >= set(range(16)) - {0, 1}


def test_without_the_floor_the_exhaustive_test_would_fail() -> None:
    """A group whose scale would be subnormal: the reason for the floor, and proof that the test above can fail."""
    grid = reference.e4m3_values(np.arange(0x7F)).astype(np.float64)

    def quantize_without_floor(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        amax = np.abs(x).max(axis=-1)
        scale = grid[reference.nearest_even(grid, amax * np.float32(1 / 6))].astype(np.float32)
        with np.errstate(divide="ignore", invalid="ignore"):
            codes = reference.nearest_even(reference.E2M1_MAGNITUDES, (np.abs(x) / scale[:, None]).astype(np.float32))
        return (reference.E2M1_MAGNITUDES[codes] * scale[:, None]).astype(np.float32)

    amax = (np.arange(1, 0x3F80, dtype=np.uint32) << 16).view(np.float32)
    once = quantize_without_floor(np.stack([amax] * 16, axis=-1))
    once = once[np.isfinite(once).all(axis=-1)]
    assert (quantize_without_floor(once) != once).any()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_k_is_the_smallest_that_fits_and_stays(dtype: str) -> None:
    for amax in (1e-30, 1e-6, 0.3, 1.0, 2784.0, 2784.1, 5568.0, 44544.0):
        low, high = reference.K_LIMITS[dtype]
        k = reference.select_k(amax, dtype)
        assert low <= k <= high
        assert amax <= 2784 * 2.0**k or k == high
        assert k == low or amax > 2784 * 2.0 ** (k - 1)
    assert reference.select_k(0.0, dtype) == reference.K_LIMITS[dtype][0]


@pytest.mark.parametrize("dtype", CODES)
def test_nothing_is_quantized_to_nothing(isa: str, dtype: str) -> None:
    data, scales = native_quantize(reference.from_float32(np.zeros((0, 16), np.float32), dtype), dtype, 0)
    assert data.size == scales.size == 0
