"""Stand-ins for what SGLang has for accelerators only, so that its caches can be measured and tested on a CPU.

Each replaces one function of SGLang by a plain one of the same meaning, in the process that calls it. Nothing of kvtier
is changed by them, and kvtier never calls them in service: benches and tests do, and say so.
"""

from __future__ import annotations

import inspect
from typing import Any

ATTENTION = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_extend"


def extend(
    backend: Any,
    query: Any,
    output: Any,
    k_cache: Any,
    v_cache: Any,
    req_to_token: Any,
    req_pool_indices: Any,
    seq_lens: Any,
    extend_prefix_lens: Any,
    extend_seq_lens: Any,
    encoder_lens: Any = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> Any:
    """Attention of new tokens over cached and new ones, for the new rows only.

    SGLang's own function for CPUs attends with a query as long as the whole sequence and throws the cached rows away,
    so there even a full hit costs as much attention as a miss, which no accelerator does. `query`, `output`:
    ``[new tokens, heads, dim]``; `k_cache`, `v_cache`: ``[slots, kv heads, dim]``.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    done = 0
    for i, total in enumerate(seq_lens.tolist()):
        new, cached = int(extend_seq_lens[i]), int(extend_prefix_lens[i])
        slots = req_to_token[req_pool_indices[i], :total]
        q = query[done : done + new].transpose(0, 1)
        k, v = (cache[slots].transpose(0, 1).to(q.dtype) for cache in (k_cache, v_cache))
        places, rows = torch.arange(total), torch.arange(cached, total)[:, None]
        seen = places <= rows if causal else None
        if seen is not None and sliding_window_size is not None and sliding_window_size > -1:
            seen &= places >= rows - sliding_window_size
        out = scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=seen, scale=scaling, enable_gqa=enable_gqa
        )
        output[done : done + new] = out[0].transpose(0, 1)
        done += new
    return output


def replace_attention() -> None:
    """Prefills pay for the tokens that they compute. Registered before SGLang loads its plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(ATTENTION, extend, HookType.REPLACE)


def allow_host_pools() -> None:
    """SGLang's hierarchical cache without an accelerator: memory that is not registered with one, no 10 GiB kept free,
    and plain copies in the place of its kernels (I/O backend ``direct``; K and V of every layer)."""
    import sglang.srt.mem_cache.pool_host.base as base
    import sglang.srt.mem_cache.pool_host.mha as mha

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    original = base.HostKVCache.__init__

    def unpinned(self: Any, *arguments: Any, **named: Any) -> None:
        bound = inspect.signature(original).bind(self, *arguments, **named)
        bound.arguments["pin_memory"] = False
        original(*bound.args, **bound.kwargs)

    base.HostKVCache.__init__ = unpinned
    mha.transfer_kv_direct = _copy_layers
    mha.transfer_kv_all_layer_direct_lf_pf = _layers_to_pages
    mha.transfer_kv_per_layer_direct_pf_lf = _pages_to_layer


def _copy_layers(src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def _layers_to_pages(src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    """`src_ptrs`: K of every layer, then V. `dst_ptrs`: K and V, each ``[pages, layers, page, heads, dim]``."""
    pages, layers = dst_indices.view(-1, page_size)[:, 0] // page_size, len(src_ptrs) // len(dst_ptrs)
    for n, source in enumerate(src_ptrs):
        target = dst_ptrs[n // layers]
        target[pages, n % layers] = source[src_indices].view(len(pages), page_size, *target.shape[3:])


def _pages_to_layer(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:
    pages = src_indices.view(-1, page_size)[:, 0] // page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id].reshape(len(dst_indices), *target.shape[1:])
