"""SGLang's device pools described as hot pages: which buffers a page has, and which page a token's slot lies in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.errors import EngineError
from kvtier.hot import HotLayout, HotPool, dtype_of
from kvtier.spec import BufferSpec, DType, PageSpec, Role

POOL_CLASS = "MHATokenToKVPool"
DTYPES = (DType.BF16, DType.FP16, DType.FP32, DType.FP8_E4M3)
_LAYOUTS = {"nhd": HotLayout.NHD, "hnd": HotLayout.HND}
_PLAIN_FP8 = "cpu_fp8_e4m3"
"""The engine's name for e4m3 values of one scale per layer on CPUs. All its other quantized caches have more beside."""


@dataclass(frozen=True, slots=True)
class DevicePool:
    """The K and V buffers of an MHA or GQA pool, by layer.

    NHD: per layer ``[slots, heads, dim]``, page p is slots ``[p * page_tokens, (p + 1) * page_tokens)``; HND: per
    layer ``[pages, heads, page_tokens, dim]``. Page 0 belongs to the engine's padding and never comes up. K and V may
    differ in `dim`.
    """

    spec: PageSpec
    hot: HotPool
    layers: int

    @staticmethod
    def of(
        pool: Any,
        page_tokens: int,
        *,
        rotary_dim: int = 0,
        fp8_scales: Mapping[Role, Mapping[int, float]] | None = None,
    ) -> DevicePool:
        """Describe `pool`. EngineError names what this connector cannot serve.

        rotary_dim: leading columns of K with a rotary position, where they are a part of it. fp8_scales: of an FP8
        cache, by role and the model's layer, where they are not 1."""
        kind = type(pool).__name__
        if kind != POOL_CLASS:
            raise EngineError(
                f"the KV pool is a {kind}: kvtier serves {POOL_CLASS} (MHA, MQA and GQA models without a quantized, "
                "sliding-window or hybrid cache). Start this model without --kv-connector"
            )
        layout = _LAYOUTS.get(pool.kv_cache_layout)
        if layout is None:
            raise EngineError(
                f"the KV pool has layout {pool.kv_cache_layout!r}: kvtier serves {' and '.join(_LAYOUTS)}. "
                "Choose an attention backend that uses one of them"
            )
        if pool.page_size != page_tokens:
            raise EngineError(f"the KV pool has pages of {pool.page_size} tokens and the cache of {page_tokens}")
        keys, values = list(pool.k_buffer), list(pool.v_buffer)
        device = keys[0].device.type
        if device != "cpu":
            raise EngineError(f"the KV pool lies on {device!r}: this version of kvtier serves pools in CPU memory only")
        # The engine stores FP8 in buffers of bytes, so its own dtype is the one to name.
        name = str(pool.dtype).removeprefix("torch.")
        dtype = DType.FP8_E4M3 if name == "float8_e4m3fn" else dtype_of(keys[0])
        bytes_of_fp8 = dtype is DType.FP8_E4M3 and dtype_of(keys[0]) is DType.UINT8
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
        buffers, arrays, first = [], [], getattr(pool, "start_layer", None) or 0
        for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
            for role, array in ((Role.K, k), (Role.V, v)):
                heads, dim = array.shape[1], array.shape[-1]
                scale = 1.0
                if dtype is DType.FP8_E4M3 and fp8_scales is not None:
                    scale = fp8_scales.get(role, {}).get(layer + first, 1.0)
                rotary = (0, rotary_dim if role is Role.K and rotary_dim < dim else 0)
                buffers.append(BufferSpec(role, layer, heads, page_tokens, dim, dtype, scale, rotary))
                arrays.append(array)
        spec = PageSpec(page_tokens, tuple(buffers))
        return DevicePool(spec, HotPool.of(spec, arrays, layout), len(keys))

    def page_ids(self, slots: Any, pages: int) -> npt.NDArray[np.int64]:
        """Page ids ``[pages]`` of `slots`, an int64 CPU tensor with one slot per token. EngineError if the slots are
        not whole pages: nothing may then be read or written."""
        tokens = self.spec.page_tokens
        flat = np.asarray(slots, dtype=np.int64)
        if flat.shape != (pages * tokens,):
            raise EngineError(f"{flat.shape} slots for {pages} pages of {tokens} tokens")
        table = flat.reshape(pages, tokens)
        ids = table[:, 0] // tokens
        if not np.array_equal(table, ids[:, None] * tokens + np.arange(tokens)):
            raise EngineError(f"slots do not form whole pages of {tokens} tokens")
        return ids


def _has_more_than_values(pool: Any) -> bool:
    """Whether the engine keeps block scales, or a copy, of a quantized cache: a page would then be a part of it."""
    return bool(getattr(pool, "is_quantized_kv_cache", False)) and pool.quant_method.name != _PLAIN_FP8


def page_hashes(keys: Iterable[str]) -> list[bytes]:
    """The engine's page hashes, hex as it hands them out, as bytes."""
    return [bytes.fromhex(key) for key in keys]
