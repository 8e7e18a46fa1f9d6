"""Pools of MHA, MQA and GQA models: K and V by layer, 16 and 32 bits wide or FP8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtier.connectors.sglang.pools.rows import Rows, Told, check_device, check_page
from kvtier.errors import EngineError
from kvtier.hot import HotLayout, dtype_of
from kvtier.spec import BufferSpec, DType, Role

POOL_CLASS = "MHATokenToKVPool"
DTYPES = (DType.BF16, DType.FP16, DType.FP32, DType.FP8_E4M3)
_LAYOUTS = {"nhd": HotLayout.NHD, "hnd": HotLayout.HND}
_PLAIN_FP8 = "cpu_fp8_e4m3"
"""The engine's name for e4m3 values of one scale per layer on CPUs. All its other quantized caches have more beside."""


def rows_of(pool: Any, page_tokens: int, told: Told, model_layers: Sequence[int], what: str) -> Rows:
    """NHD: per layer ``[slots, heads, dim]``, page p is slots ``[p * page_tokens, (p + 1) * page_tokens)``; HND: per
    layer ``[pages, heads, page_tokens, dim]``. K and V may differ in `dim`. model_layers: numbers of the pool's layers
    in the model. Raises EngineError."""
    layout = _LAYOUTS.get(pool.kv_cache_layout)
    if layout is None:
        raise EngineError(
            f"the {what} has layout {pool.kv_cache_layout!r}: kvtier serves {' and '.join(_LAYOUTS)}. "
            "Choose an attention backend that uses one of them"
        )
    check_page(pool, page_tokens, what)
    keys, values = list(pool.k_buffer), list(pool.v_buffer)
    check_device(keys[0], what)
    dtype = dtype_in(pool, keys[0])
    buffers, arrays = [], []
    for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
        for role, array in ((Role.K, k), (Role.V, v)):
            heads, dim = array.shape[1], array.shape[-1]
            scale = 1.0
            if dtype is DType.FP8_E4M3:
                scale = told.fp8_scales.get(role, {}).get(model_layers[layer], 1.0)
            rotary = (0, told.rotary_dim if role is Role.K and told.rotary_dim < dim else 0)
            buffers.append(BufferSpec(role, layer, heads, page_tokens, dim, dtype, scale, rotary))
            arrays.append(array)
    return Rows(tuple(buffers), tuple(arrays), layout)


def dtype_in(pool: Any, buffer: Any) -> DType:
    """Element type of a pool's values. EngineError for one that is not served, or has more than values."""
    # The engine stores FP8 in buffers of bytes, so its own dtype is the one to name.
    name = str(pool.dtype).removeprefix("torch.")
    dtype = DType.FP8_E4M3 if name == "float8_e4m3fn" else dtype_of(buffer)
    bytes_of_fp8 = dtype is DType.FP8_E4M3 and dtype_of(buffer) is DType.UINT8
    other = pool.store_dtype != pool.dtype and not bytes_of_fp8
    if _has_more_than_values(pool):
        raise EngineError(
            f"the KV cache is quantized as {pool.quant_method.name!r}, with scales beside its values: kvtier "
            f"serves {', '.join(d.value for d in DTYPES)}. Set --kv-cache-dtype to one of them"
        )
    if other or dtype not in DTYPES:
        raise EngineError(
            f"the KV cache has dtype {name}: kvtier serves {', '.join(d.value for d in DTYPES)}. "
            "Set --kv-cache-dtype to one of them, or leave it at auto"
        )
    return dtype


def _has_more_than_values(pool: Any) -> bool:
    """Whether the engine keeps block scales, or a copy, of a quantized cache: a page would then be a part of it."""
    return bool(getattr(pool, "is_quantized_kv_cache", False)) and pool.quant_method.name != _PLAIN_FP8
