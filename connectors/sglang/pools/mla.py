"""Pools of MLA models: one latent row per token and layer, and the index keys of sparse attention (DSA) beside it.

All ranks of tensor parallelism hold the same rows."""

from __future__ import annotations

from typing import Any

from kvtier.connectors.sglang.pools.mha import dtype_in
from kvtier.connectors.sglang.pools.rows import Rows, check_device, check_page
from kvtier.errors import EngineError
from kvtier.spec import GROUP, BufferSpec, DType, Role

POOL_CLASS = "MLATokenToKVPool"
SPARSE_CLASS = "DSATokenToKVPool"


def rows_of(pool: Any, page_tokens: int, what: str) -> Rows:
    """Latent rows ``[slots, 1, kv_lora_rank + qk_rope_head_dim]`` by layer. Rows that the engine packs itself (FP8
    values, their scales and the rotary part in 16 bits) are stored as they are. Raises EngineError."""
    check_page(pool, page_tokens, what)
    check_device(pool.kv_buffer[0], what)
    if pool.kv_scale_buffer is not None:
        raise EngineError(
            f"the {what} is a {type(pool).__name__} with scales beside its values, which kvtier does not serve. "
            "Set --kv-cache-dtype auto"
        )
    width, latent = int(pool.kv_cache_dim), int(pool.kv_lora_rank)
    dtype = DType.UINT8 if pool.dsa_kv_cache_store_fp8 else dtype_in(pool, pool.kv_buffer[0])
    role = Role.OPAQUE if dtype is DType.UINT8 else Role.LATENT
    apart = role is Role.LATENT and 0 < latent < width and latent % GROUP == 0 == width % GROUP
    rotary = (latent, width) if apart else (0, 0)
    buffers = [BufferSpec(role, n, 1, page_tokens, width, dtype, 1.0, rotary) for n in range(len(pool.kv_buffer))]
    arrays = list(pool.kv_buffer)
    if type(pool).__name__ == SPARSE_CLASS:
        index = _index_of(pool, what)
        order = sorted(
            [(b.layer, 0, b, a) for b, a in zip(buffers, arrays, strict=True)] + [(b.layer, 1, b, a) for b, a in index],
            key=lambda item: item[:2],
        )
        buffers, arrays = [item[2] for item in order], [item[3] for item in order]
    return Rows(tuple(buffers), tuple(arrays), replicated=True)


def _index_of(pool: Any, what: str) -> list[tuple[BufferSpec, Any]]:
    """Index keys by layer, one row of bytes per page: FP8 keys of all its tokens, then their scales. Layers that reuse
    another one's choice have none."""
    if pool.index_kpool != 1 or pool.index_page_size != pool.page_size:
        raise EngineError(
            f"the {what} is a {type(pool).__name__} whose index keys are pooled over {pool.index_kpool} tokens, with a "
            "remainder for each request: kvtier serves one index key per token. Start without --kv-connector"
        )
    return [
        (BufferSpec(Role.INDEX_KEY, layer, 1, 1, keys.shape[1], DType.UINT8), keys.unsqueeze(1))
        for layer, keys in enumerate(pool.index_k_with_scale_buffer)
        if keys.shape[0]
    ]
