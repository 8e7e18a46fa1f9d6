"""The public helper: kinds, shapes, and messages that name the way out."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from kvtier import nvfp4
from kvtier.errors import CodecError
from kvtier.kernels.nvfp4 import reference


@pytest.fixture(autouse=True)
def _same_values() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_torch_in_torch_out(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 64).to(dtype)
    data, scales = nvfp4.quantize(x, global_scale_log2=-4)
    assert (data.dtype, tuple(data.shape)) == (torch.uint8, (3, 5, 32))
    assert (scales.dtype, tuple(scales.shape)) == (torch.uint8, (3, 5, 4))
    expected = reference.quantize(x.float().numpy(), -4)
    assert data.numpy().tobytes() == expected[0].tobytes()
    assert scales.numpy().tobytes() == expected[1].tobytes()
    y = nvfp4.dequantize(data, scales, dtype, global_scale_log2=-4)
    assert (y.dtype, y.shape) == (dtype, x.shape)
    assert torch.equal(y.float(), torch.from_numpy(reference.dequantize(*expected, -4)))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_numpy_in_numpy_out(dtype: type[np.floating]) -> None:
    x = np.random.default_rng(0).standard_normal((4, 32)).astype(dtype)
    data, scales = nvfp4.quantize(x)
    y = nvfp4.dequantize(data, scales, dtype)
    assert isinstance(y, np.ndarray) and y.dtype == dtype and y.shape == x.shape
    np.testing.assert_array_equal(y, reference.dequantize(*reference.quantize(x.astype(np.float32))).astype(dtype))


def test_bf16_without_torch_is_its_bits() -> None:
    x = np.full((2, 16), 6, np.float32)
    y = nvfp4.dequantize(*nvfp4.quantize(x), "bf16")
    assert y.dtype == np.uint16 and (y == 0x40C0).all()


def test_strided_input_is_taken_in_its_own_order() -> None:
    x = torch.randn(64, 32, dtype=torch.bfloat16).t()
    assert torch.equal(nvfp4.quantize(x)[0], nvfp4.quantize(x.contiguous())[0])
    y = np.random.default_rng(1).standard_normal((32, 64)).astype(np.float32)[:, ::2]
    np.testing.assert_array_equal(nvfp4.quantize(y)[0], nvfp4.quantize(y.copy())[0])


def test_k_may_be_a_numpy_integer() -> None:
    x = np.ones((1, 16), np.float32)
    k: Any = np.int8(-3)
    np.testing.assert_array_equal(nvfp4.quantize(x, -3)[1], nvfp4.quantize(x, k)[1])


@pytest.mark.parametrize(
    "x", [np.empty((0, 32), np.float32), np.empty((0, 32), np.float16), torch.empty((0, 32), dtype=torch.bfloat16)]
)
def test_empty_is_empty(x: Any) -> None:
    data, scales = nvfp4.quantize(x)
    assert data.shape == (0, 16) and scales.shape == (0, 2)
    assert nvfp4.dequantize(data, scales, "fp32").shape == (0, 32)


@pytest.mark.parametrize("dtype", ["f4", "f2"])
def test_the_byte_order_of_an_array_does_not_matter(dtype: str) -> None:
    x = np.random.default_rng(0).standard_normal((4, 32)).astype(f"<{dtype}")
    for native, swapped in zip(nvfp4.quantize(x), nvfp4.quantize(x.astype(f">{dtype}")), strict=True):
        assert np.array_equal(native, swapped)


@pytest.mark.parametrize(
    ("x", "k", "message"),
    [
        (np.zeros((2, 24), np.float32), 0, r"\(2, 24\), is not a multiple of 16; pad"),
        (np.float32(1), 0, "give a torch tensor or a numpy array"),
        (np.zeros((2, 32), np.float64), 0, "float64 cannot be used.*bf16, fp16 and fp32.*convert"),
        (np.zeros((2, 32), np.int16), 0, "int16 cannot be used"),
        (torch.zeros(2, 32, dtype=torch.int8), 0, "int8 cannot be used"),
        ([1.0] * 16, 0, "x is a list; give"),
        (torch.eye(16).to_sparse(), 0, "layout torch.sparse_coo; convert"),
        (np.zeros((2, 32), np.float32), 101, r"global_scale_log2 = 101: must be an integer in \[-100, 100\]"),
        (np.zeros((2, 32), np.float16), 5, r"global_scale_log2 = 5: must be an integer in \[-14, 4\] for fp16"),
        (np.zeros((2, 32), np.float32), 0.5, "global_scale_log2 = 0.5"),
        (np.full((2, 32), np.inf, np.float16), 0, r"NaN or infinity, first at index \(0, 0\)"),
        (torch.tensor([[0.0] * 16, [0.0] * 15 + [float("nan")]], dtype=torch.bfloat16), 0, r"first at index \(1, 15\)"),
    ],
)
def test_bad_input_is_named(x: object, k: int, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        nvfp4.quantize(x, k)


def test_data_and_scales_must_belong_together() -> None:
    data, scales = nvfp4.quantize(np.zeros((2, 32), np.float32))
    with pytest.raises(CodecError, match="do not belong together"):
        nvfp4.dequantize(data, scales[:, :1], np.float32)
    with pytest.raises(CodecError, match="scales has dtype int8, must be uint8"):
        nvfp4.dequantize(data, scales.view(np.int8), np.float32)
    with pytest.raises(CodecError, match="float64 cannot be used"):
        nvfp4.dequantize(data, scales, np.float64)


def test_torch_is_not_imported_for_numpy() -> None:
    code = (
        "import sys, numpy as np; from kvtier import nvfp4;"
        "nvfp4.dequantize(*nvfp4.quantize(np.ones(16, 'f4')), 'bf16');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
