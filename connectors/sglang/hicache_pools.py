"""The host pools of SGLang's hierarchical cache described as hot pages, so that codecs read and write them in place."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.errors import EngineError
from kvtier.hot import HotBuffer, HotPool, dtype_of
from kvtier.spec import GROUP, BufferSpec, DType, PageSpec, Role

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
_MHA = ("MHATokenToKVPoolHost", "AsymmetricMHATokenToKVPoolHost")
_MLA = ("MLATokenToKVPoolHost",)
_INDEXER = ("DSAIndexerPoolHost",)
_FLOATS = (DType.BF16, DType.FP16, DType.FP32)
_PROBED_PAGES = 3


@dataclass(frozen=True, slots=True)
class StagedPool:
    """One host pool: `hot` describes its memory, which nothing is copied out of or into but by a codec.

    slots: host indices of one page; page i of a call starts at ``host_indices[i * slots]``."""

    name: str
    spec: PageSpec
    hot: HotPool
    slots: int

    def page_ids(self, host_indices: Any, pages: int) -> npt.NDArray[np.int64]:
        """Page ids ``[pages]`` of an int64 CPU tensor with one index per slot. EngineError if they are not whole pages:
        nothing may then be read or written."""
        flat = np.asarray(host_indices, dtype=np.int64)
        if flat.shape != (pages * self.slots,):
            raise EngineError(f"pool {self.name}: {flat.shape} indices for {pages} pages of {self.slots}")
        table = flat.reshape(pages, self.slots)
        ids = table[:, 0] // self.slots
        if not np.array_equal(table, ids[:, None] * self.slots + np.arange(self.slots)):
            raise EngineError(f"pool {self.name}: host indices do not form whole pages of {self.slots}")
        if pages and not 0 <= ids.min() <= ids.max() < self.hot.num_pages:
            raise EngineError(f"pool {self.name}: host indices beyond its {self.hot.num_pages} pages")
        return ids


def describe(
    name: str,
    pool: Any,
    *,
    fp8: bool = False,
    rotary_dim: int = 0,
    fp8_scales: Mapping[Role, Mapping[int, float]] | None = None,
) -> StagedPool:
    """What lies where in the host pool `pool`. EngineError names a pool or a layout that is not served.

    fp8: its bytes are e4m3 values. rotary_dim, fp8_scales: as of `DevicePool.of`. Pools of MHA, MQA, GQA and MLA caches
    are described value by value; of all others a page is the bytes that the pool itself names, stored as they are."""
    kind = type(pool).__name__
    if kind in _MHA:
        return _mha(name, pool, DType.FP8_E4M3 if fp8 else None, rotary_dim, fp8_scales or {})
    if kind in _MLA:
        return _mla(name, pool)
    if kind in _INDEXER:
        return _indexer(name, pool)
    return _bytes(name, pool)


def _mha(
    name: str, pool: Any, fp8: DType | None, rotary_dim: int, scales: Mapping[Role, Mapping[int, float]]
) -> StagedPool:
    tokens, first = int(pool.page_size), int(getattr(pool, "start_layer", 0) or 0)
    dtype = _dtype(name, pool.k_buffer, fp8)
    buffers, places = [], []
    for layer in range(pool.layer_num):
        for role, tensor in ((Role.K, pool.k_buffer), (Role.V, pool.v_buffer)):
            view, axes = _layer_of(name, pool, tensor, layer)
            heads, dim = view.shape[axes.index("head")], view.shape[-1]
            # As of `DevicePool`: what a linker stored is what is staged.
            rotary = (0, rotary_dim if role is Role.K and rotary_dim < dim else 0)
            scale = scales.get(role, {}).get(layer + first, 1.0) if dtype is DType.FP8_E4M3 else 1.0
            if dtype is DType.UINT8:
                buffers.append(BufferSpec(Role.OPAQUE, layer, heads, tokens, dim, dtype))
            else:
                buffers.append(BufferSpec(role, layer, heads, tokens, dim, dtype, scale, rotary))
            places.append(_place(view, axes, tokens))
    spec = PageSpec(tokens, tuple(buffers))
    return StagedPool(name, spec, HotPool(spec, tuple(places)), tokens)


def _mla(name: str, pool: Any) -> StagedPool:
    tokens, width = int(pool.page_size), int(pool.kv_cache_dim)
    dtype = _dtype(name, pool.kv_buffer, None)
    latent = int(getattr(pool, "kv_lora_rank", 0) or 0)
    plain = dtype in _FLOATS
    rotary = (latent, width) if plain and 0 < latent < width and latent % GROUP == 0 == width % GROUP else (0, 0)
    buffers, places = [], []
    for layer in range(pool.layer_num):
        view, axes = _layer_of(name, pool, pool.kv_buffer, layer)
        role = Role.LATENT if plain else Role.OPAQUE
        buffers.append(BufferSpec(role, layer, 1, tokens, width, dtype, 1.0, rotary))
        places.append(_place(view, axes, tokens))
    spec = PageSpec(tokens, tuple(buffers))
    return StagedPool(name, spec, HotPool(spec, tuple(places)), tokens)


def _indexer(name: str, pool: Any) -> StagedPool:
    """Index keys of sparse attention: ``[layers, pages, bytes]``, or ``[pages, layers, 1, bytes]``."""
    tokens, tensor = int(pool.page_size), pool.index_k_with_scale_buffer
    buffers, places = [], []
    for layer in range(pool.layer_num):
        view = tensor[layer] if pool.layout == "layer_first" else tensor[:, layer, 0]
        nbytes = view.shape[-1] * view.element_size()
        buffers.append(BufferSpec(Role.INDEX_KEY, layer, 1, 1, nbytes, DType.UINT8))
        stride = view.stride(0) * view.element_size()
        places.append(HotBuffer(view.data_ptr(), stride, 0, 0, view.shape[0] * tokens, tensor))
    spec = PageSpec(tokens, tuple(buffers))
    return StagedPool(name, spec, HotPool(spec, tuple(places)), tokens)


def _bytes(name: str, pool: Any) -> StagedPool:
    """A page as the ranges of bytes that the pool names for it (``get_page_buffer_meta``), which must lie at equal
    distances from page to page."""
    import torch

    slots = int(getattr(pool, "page_size", 1) or 1)
    pages = int(pool.size) // slots
    probed = min(pages, _PROBED_PAGES)
    try:
        metas = [pool.get_page_buffer_meta(torch.arange(n * slots, (n + 1) * slots)) for n in range(probed)]
    except Exception as error:
        raise EngineError(
            f"host pool {name} is a {type(pool).__name__} with layout {pool.layout!r}, of which SGLang names no bytes "
            f"to store ({error}). Give --hicache-mem-layout page_first, or start without kvtier"
        ) from error
    starts = [np.array(addresses, dtype=np.int64) for addresses, _ in metas]
    sizes = [int(n) for n in metas[0][1]]
    steps = [b - a for a, b in itertools.pairwise(starts)]
    even = all(np.array_equal(step, steps[0]) for step in steps) and all(m[1] == metas[0][1] for m in metas)
    if not sizes or min(sizes) < 1 or not even:
        raise EngineError(
            f"host pool {name} is a {type(pool).__name__} whose pages do not lie at equal distances: kvtier cannot "
            "serve it. Start this model without kvtier"
        )
    stride = steps[0] if steps else np.array(sizes)
    spec = PageSpec(slots, tuple(BufferSpec(Role.OPAQUE, n, 1, 1, size, DType.UINT8) for n, size in enumerate(sizes)))
    places = tuple(HotBuffer(int(starts[0][n]), int(stride[n]), 0, 0, pages * slots, pool) for n in range(len(sizes)))
    return StagedPool(name, spec, HotPool(spec, places), slots)


def _layer_of(name: str, pool: Any, tensor: Any, layer: int) -> tuple[Any, tuple[str, ...]]:
    """One layer of a K, V or latent buffer as a view, and its axes."""
    views: dict[str, Callable[[], tuple[Any, tuple[str, ...]]]] = {
        "layer_first": lambda: (tensor[layer], ("slot", "head", "dim")),
        "page_first": lambda: (tensor[:, layer], ("slot", "head", "dim")),
        "page_first_direct": lambda: (tensor[:, layer], ("page", "token", "head", "dim")),
        "page_head": lambda: (tensor[:, :, :, layer], ("page", "head", "token", "dim")),
    }
    if pool.layout not in views:
        raise EngineError(
            f"host pool {name} has layout {pool.layout!r}: kvtier serves {', '.join(LAYOUTS)}. "
            "Set --hicache-mem-layout to one of them"
        )
    return views[pool.layout]()


def _place(view: Any, axes: tuple[str, ...], tokens: int) -> HotBuffer:
    step = {axis: stride * view.element_size() for axis, stride in zip(axes, view.stride(), strict=True)}
    if "slot" in step:
        return HotBuffer(view.data_ptr(), step["slot"] * tokens, step["head"], step["slot"], view.shape[0], view)
    return HotBuffer(view.data_ptr(), step["page"], step["head"], step["token"], view.shape[0] * tokens, view)


def _dtype(name: str, tensor: Any, fp8: DType | None) -> DType:
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind in ("uint8", "float8_e4m3fn") and fp8 is not None:
        return fp8
    if kind.startswith(("float8", "float4", "int8", "uint8")):
        return DType.UINT8  # stored as it is
    dtype = dtype_of(tensor)
    if dtype not in _FLOATS:
        raise EngineError(f"host pool {name} has dtype {kind}: kvtier serves {', '.join(d.value for d in _FLOATS)}")
    return dtype
