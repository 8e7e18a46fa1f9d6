"""The staged path in this process: the engine's real host pools and storage factory, without a model."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _mha_host_inputs
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs

from kvtier.connectors.sglang.arguments import translate
from kvtier.connectors.sglang.hicache import KVTierStorage

from .harness import PATIENCE_S, RAW, Engine, config, until

LAYERS, HEADS, DIM, V_DIM = 3, 2, 32, 16
LATENT, ROPE = 64, 16
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def open_storage(
    model: Path, block: dict[str, Any], host_pool: Any, *, page: int = 16, beside: dict[Any, Any] | None = None
) -> KVTierStorage:
    """Storage as SGLang creates it, its pools registered in SGLang's order."""
    options = translate(
        {
            "model_path": str(model),
            "device": "cpu",
            "attention_backend": "torch_native",
            "page_size": page,
            "skip_tokenizer_init": True,
            "kv_connector": "kvtier-hicache",
            "kv_connector_config": block,
        }
    )
    args = ServerArgs(**options)
    args.resolve_once()
    args.check_server_args()
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=True, is_page_first_layout=False, model_name=None,
        extra_config=json.loads(options["hicache_storage_backend_extra_config"]),
    )  # fmt: skip
    storage = StorageBackendFactory.create_backend("dynamic", config, host_pool)
    assert isinstance(storage, KVTierStorage)
    storage.register_mem_pool_host(host_pool)
    for name, pool in {PoolName.KV: host_pool, **(beside or {})}.items():
        storage.register_mem_host_pool_v2(pool, name)
    storage.on_host_pools_registered()
    return storage


def end(storage: Any) -> None:
    """Close a storage once its tiers have what they are to have, for whoever opens them next."""
    assert storage._store.flush(PATIENCE_S), "a lower tier did not take its pages"
    assert storage._store._promotions.drain(PATIENCE_S), "pages are still on their way up"
    storage.close()
    until(lambda: not any(t.name.startswith("kvtier-close") for t in threading.enumerate()))


def mha_pool(
    layout: str, *, page: int = 16, pages: int = 8, dtype: str = "bf16", dim: int = DIM, v_dim: int | None = None
) -> Any:
    """The engine's host pool behind its MHA pool, every value another."""
    device = MHATokenToKVPool(
        size=pages * page, page_size=page, dtype=DTYPES[dtype], head_num=HEADS, head_dim=dim, layer_num=LAYERS,
        device="cpu", enable_memory_saver=False, v_head_dim=dim if v_dim is None else v_dim,
    )  # fmt: skip
    host, info, more = _mha_host_inputs(device)
    pool = host(info, 2.0, 0, page, layout, pin_memory=False, **more)
    fill(pool)
    return pool


def mla_pool(layout: str, *, page: int = 16, pages: int = 8) -> Any:
    """The same of an MLA pool."""
    device = MLATokenToKVPool(
        size=pages * page, page_size=page, dtype=torch.bfloat16, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE,
        layer_num=LAYERS, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    (info,) = device.get_device_pool_infos()
    pool = MLATokenToKVPoolHost(
        info.buffer_info, 2.0, 0, page, layout, pin_memory=False, device_capacity_tokens=device.size,
        start_layer=device.start_layer, end_layer=device.end_layer, target_layer_num=device.layer_num,
        override_kv_cache_dim=device.kv_cache_dim,
    )  # fmt: skip
    fill(pool)
    return pool


def buffers_of(pool: Any) -> list[torch.Tensor]:
    if hasattr(pool, "index_k_with_scale_buffer"):
        return [pool.index_k_with_scale_buffer]
    if hasattr(pool, "temporal_buffer"):
        return [pool.temporal_buffer, *pool.conv_buffer]
    return list(pool.kv_buffer) if isinstance(pool.kv_buffer, (tuple, list)) else [pool.kv_buffer]


def fill(pool: Any, seed: int = 0) -> None:
    draw = torch.Generator().manual_seed(seed)
    for buffer in buffers_of(pool):
        if buffer.dtype.is_floating_point:
            buffer.copy_(torch.randn(buffer.shape, generator=draw))
        else:
            buffer.copy_(torch.randint(0, 255, buffer.shape, generator=draw))


def slots(pages: Sequence[int], page: int = 16) -> torch.Tensor:
    """Host indices of whole pages, as the engine hands them out."""
    return torch.cat([torch.arange(p * page, (p + 1) * page) for p in pages]) if pages else torch.empty(0).long()


def names(count: int, first: int = 0) -> list[str]:
    """Page hashes as the engine writes them."""
    return [f"{n:064x}" for n in range(first + 1, first + count + 1)]


def transfer(name: Any, keys: list[str] | None, indices: torch.Tensor | None, **more: Any) -> PoolTransfer:
    return PoolTransfer(name=name, keys=keys, host_indices=indices, **more)


__all__ = [
    "RAW", "Engine", "KVTierStorage", "PoolHitPolicy", "PoolName", "buffers_of", "config", "end", "fill",
    "mha_pool", "mla_pool", "names", "open_storage", "slots", "transfer",
]  # fmt: skip


def page_of(pool: Any, page: int, tokens: int = 16) -> torch.Tensor:
    """One page as the engine itself flattens it, which depends on the layout."""
    flat: torch.Tensor = pool.get_data_page(page * tokens)
    return flat.clone()


def add_up(storage: Any) -> Any:
    """The counts, which must add up, with nobody left."""
    assert storage.reads.open == 0 and storage._store.open_requests() == []
    counts = storage.ledger.snapshot()
    assert counts.lookups == sum(counts.hits.values()) + sum(counts.misses.values())
    return counts
