"""NVFP4 for arrays: quantize and dequantize, on torch tensors or numpy arrays, with the codec's kernels.

>>> data, scales = quantize(x)                                # x: [..., d], d a multiple of 16
>>> y = dequantize(data, scales, torch.bfloat16)              # [..., d] again
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.errors import CodecError
from kvtier.kernels import _native

GROUP = 16
_CODES = {"bf16": 0, "fp16": 1, "fp32": 2}
_K_LIMITS = {"bf16": (-100, 100), "fp16": (-14, 4), "fp32": (-100, 100)}
_TORCH_NAMES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
_NUMPY_NAMES = {"float16": "fp16", "float32": "fp32"}
_SUPPORTED = "bf16, fp16 and fp32 are supported"


def quantize(x: Any, global_scale_log2: int = 0) -> tuple[Any, Any]:
    """Packed nibbles uint8 ``[..., d / 2]`` and e4m3 scales uint8 ``[..., d / 16]`` of `x` ``[..., d]``.

    `x`: a torch CPU tensor (bfloat16, float16, float32) or a numpy array (float16, float32), taken as it is: float32
    is not rounded to BF16 first. The result is of the same kind. A value is worth
    ``e2m1 * e4m3 * 2**global_scale_log2``; larger values clip at 2688 times that power of two.
    Raises CodecError if d is not a multiple of 16, or x holds NaN or infinity.
    """
    bits, name, from_torch = _bits(x)
    k = _checked_k(global_scale_log2, name)
    if bits.ndim < 1 or bits.shape[-1] % GROUP:
        raise CodecError(
            f"the last dimension of x, of shape {tuple(bits.shape)}, is not a multiple of {GROUP}; pad it with zeros, "
            "or keep such a tensor uncompressed"
        )
    data = np.empty((*bits.shape[:-1], bits.shape[-1] // 2), np.uint8)
    scales = np.empty((*bits.shape[:-1], bits.shape[-1] // GROUP), np.uint8)
    if bits.size and not _native.quantize(bits.reshape(-1), _CODES[name], k, data.reshape(-1), scales.reshape(-1)):
        where = np.argwhere(~np.isfinite(_floats(bits, name)))[0]
        raise CodecError(
            f"x holds NaN or infinity, first at index {tuple(int(i) for i in where)}; NVFP4 cannot represent them: "
            "replace them, or keep the tensor uncompressed"
        )
    return (_to_torch(data), _to_torch(scales)) if from_torch else (data, scales)


def dequantize(data: Any, scales: Any, dtype: Any, global_scale_log2: int = 0) -> Any:
    """Values ``[..., d]`` of `data` uint8 ``[..., d / 2]`` and `scales` uint8 ``[..., d / 16]``, rounded to `dtype`.

    `dtype`: a torch dtype, a numpy dtype, or one of ``"bf16"``, ``"fp16"``, ``"fp32"``. The result is of the kind of
    `data`; numpy has no BF16, there ``"bf16"`` gives its bits as uint16.
    """
    name = _dtype_name(dtype)
    k = _checked_k(global_scale_log2, name)
    packed, from_torch = _bytes(data, "data")
    steps, _ = _bytes(scales, "scales")
    if packed.ndim < 1 or packed.shape[:-1] != steps.shape[:-1] or packed.shape[-1] != steps.shape[-1] * 8:
        raise CodecError(
            f"data of shape {packed.shape} and scales of shape {steps.shape} do not belong together: "
            "[..., d / 2] and [..., d / 16] are expected"
        )
    shape = (*packed.shape[:-1], packed.shape[-1] * 2)
    code = _CODES[name]
    if name == "fp32":
        values = np.empty(shape, np.float32)
        _native.dequantize(packed.reshape(-1), steps.reshape(-1), code, k, values.reshape(-1))
        return _to_torch(values) if from_torch else values
    bits = np.empty(shape, np.uint16)
    _native.dequantize(packed.reshape(-1), steps.reshape(-1), code, k, bits.reshape(-1))
    if not from_torch:
        return bits if name == "bf16" else bits.view(np.float16)
    import torch

    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16 if name == "bf16" else torch.float16)


def _checked_k(k: object, name: str) -> int:
    low, high = _K_LIMITS[name]
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or not low <= int(k) <= high:
        raise CodecError(f"global_scale_log2 = {k!r}: must be an integer in [{low}, {high}] for {name}")
    return int(k)


def _is_torch(x: Any) -> bool:
    return type(x).__module__.partition(".")[0] == "torch" or hasattr(x, "data_ptr")


def _host_tensor(x: Any, what: str) -> Any:
    if x.device.type != "cpu":
        raise CodecError(f"{what} is on {x.device}; move it to the CPU first")
    if str(x.layout) != "torch.strided":
        raise CodecError(f"{what} has layout {x.layout}; convert it with to_dense() first")
    return x.detach().contiguous()


def _bits(x: Any) -> tuple[npt.NDArray[Any], str, bool]:
    """The elements as uint16 bits or float32, contiguous; the name of their type; whether x is a torch tensor."""
    if _is_torch(x):
        name = _dtype_name(x.dtype)
        tensor = _host_tensor(x, "x")
        if name == "fp32":
            return tensor.numpy(), name, True
        import torch

        return tensor.view(torch.int16).numpy().view(np.uint16), name, True
    if not isinstance(x, np.ndarray):
        raise CodecError(f"x is a {type(x).__name__}; give a torch tensor or a numpy array")
    name = _dtype_name(x.dtype)
    contiguous = np.ascontiguousarray(x, dtype=x.dtype.newbyteorder("="))
    return (contiguous if name == "fp32" else contiguous.view(np.uint16)), name, False


def _bytes(x: Any, what: str) -> tuple[npt.NDArray[np.uint8], bool]:
    from_torch = _is_torch(x)
    if not from_torch and not isinstance(x, np.ndarray):
        raise CodecError(f"{what} is a {type(x).__name__}; give a torch tensor or a numpy array")
    if str(x.dtype).removeprefix("torch.") != "uint8":
        raise CodecError(f"{what} has dtype {x.dtype}, must be uint8")
    return (_host_tensor(x, what).numpy() if from_torch else np.ascontiguousarray(x)), from_torch


def _dtype_name(dtype: Any) -> str:
    if isinstance(dtype, str) and dtype in _CODES:
        return dtype
    if str(dtype) in _TORCH_NAMES:
        return _TORCH_NAMES[str(dtype)]
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in _NUMPY_NAMES:
        raise CodecError(f"dtype {name} cannot be used with NVFP4: {_SUPPORTED}; convert it first")
    return _NUMPY_NAMES[name]


def _floats(bits: npt.NDArray[Any], name: str) -> npt.NDArray[np.float32]:
    if name == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16).astype(np.float32) if name == "fp16" else bits


def _to_torch(array: npt.NDArray[Any]) -> Any:
    import torch

    return torch.from_numpy(array)
