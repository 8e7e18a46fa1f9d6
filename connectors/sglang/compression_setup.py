"""A scheduler that was just built gets its compression methods: what it is, checked against what they can do."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge

from kvtier.abc.compression import AttentionKind, CacheGeometry, Platform
from kvtier.compression import build_compression
from kvtier.compression.triattention.rotary import Rotary, rotary_of
from kvtier.connectors.sglang import compression_hooks, hooks
from kvtier.connectors.sglang.compression import SchedulerCompression, attach
from kvtier.connectors.sglang.compression_cache import SlotCache
from kvtier.connectors.sglang.compression_options import EXCLUDED, FLAG, VARIABLE, resolve
from kvtier.connectors.sglang.compression_rotary import check_rotary
from kvtier.connectors.sglang.hold import linker_of
from kvtier.connectors.sglang.options import refuse_excluded
from kvtier.connectors.sglang.pools import POOL_CLASS
from kvtier.errors import EngineError
from kvtier.server.http import HttpExporter, HttpOptions

_log = logging.getLogger(__name__)


def scheduler_built(_: None, scheduler: Any, server_args: Any, port_args: Any) -> None:
    """After ``Scheduler.__init__``. Raises, and so ends the engine's start, for what cannot work."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.managers import schedule_policy

    compression_hooks.check_engine()
    hooks.verify_installed(compression_hooks.scheduler_hooks())
    options = resolve(os.environ[VARIABLE])
    args = resolving_view(server_args)
    refuse_excluded({e.option: getattr(args, e.option, None) for e in EXCLUDED}, EXCLUDED, asked=FLAG)
    _check_model(scheduler.model_config, args)
    parallel = _Parallel(scheduler)
    platform = platform_of(scheduler, parallel)
    _check_pool(scheduler.token_to_kv_pool_allocator.get_kvcache())
    linker = linker_of(scheduler.tree_cache)
    registry = linker.ledger.registry if linker is not None else CollectorRegistry()
    rotary = _rotary_reader(scheduler)
    pipeline = build_compression(
        options.live, platform, rotary=rotary, registry=registry, reduce_max=parallel.reduce_max
    )
    cache = SlotCache(
        scheduler.token_to_kv_pool_allocator.get_kvcache(),
        scheduler.req_to_token_pool.req_to_token,
        scheduler.tree_cache,
        _fence(scheduler),
    )
    most = max(method.budget + method.beta for method in options.live)
    compression = SchedulerCompression(
        pipeline,
        cache,
        count_error=_error_counter(linker, registry),
        ranks=parallel.size,
        most_generated=most,
    )
    attach(scheduler.tree_cache, compression)
    # SGLang admits a request if what it may still generate, but for this many tokens at most, fits.
    schedule_policy.CLIP_MAX_NEW_TOKENS = min(schedule_policy.CLIP_MAX_NEW_TOKENS, most)
    Gauge("kvtier_live_requests", "Requests known to methods for live caches", registry=registry).set_function(
        lambda: len(cache)
    )
    if options.http is not None and (linker is None or not linker.exports_metrics):
        exporter = HttpExporter(registry, HttpOptions.of(options.http), rank=parallel.rank)
        _log.info("kvtier metrics on %s/metrics", exporter.url)
        scheduler.kvtier_metrics = exporter  # lives as long as the scheduler
    _log.info("kvtier: %s on %s", ", ".join(m.algorithm for m in pipeline.managers), platform)


class _Parallel:
    """The tensor-parallel group of the attention."""

    def __init__(self, scheduler: Any) -> None:
        from sglang.srt.runtime_context import get_parallel

        self.rank = int(get_parallel().attn_tp_rank)
        self.size = int(get_parallel().attn_tp_size)
        self._group = scheduler.attn_tp_cpu_group

    def reduce_max(self, scores: torch.Tensor) -> torch.Tensor:
        """Element-wise maximum over the ranks, the same bits on all of them. Through host memory: the group's other
        communicator belongs to the forward."""
        if self.size == 1:
            return scores
        on_host = scores.cpu().contiguous()
        torch.distributed.all_reduce(on_host, torch.distributed.ReduceOp.MAX, group=self._group)
        return on_host.to(scores.device)


def platform_of(scheduler: Any, parallel: Any) -> Platform:
    """What this scheduler's model and cache offer to methods."""
    config = scheduler.model_config
    text = config.hf_text_config
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    heads = int(config.num_attention_heads) // parallel.size
    components = {c.name for c in getattr(scheduler.tree_cache, "components", ())} - {"FULL"}
    return Platform(
        engine="SGLang",
        geometry=CacheGeometry(
            layers=int(text.num_hidden_layers),
            query_heads=heads,
            kv_heads=int(getattr(pool, "head_num", 0)) or 1,
            head_dim=int(config.head_dim),
            first_query_head=parallel.rank * heads,
        ),
        attention=AttentionKind.MLA if config.attention_arch.name == "MLA" else AttentionKind.MHA,
        sliding_pools=bool(
            scheduler.is_hybrid_swa or config.sliding_window_size or config.attention_chunk_size or "SWA" in components
        ),
        recurrent=bool(scheduler.is_hybrid_ssm or "MAMBA" in components),
        context_tokens=int(config.context_len),
    )


def _check_model(config: Any, args: Any) -> None:
    for what, wrong in (
        ("generates no tokens", not config.is_generation),
        ("has an encoder", config.is_encoder_decoder),
        (
            "takes images or sound (without --language-model-only)",
            config.is_multimodal and not args.language_model_only,
        ),
    ):
        if wrong:
            raise EngineError(f"{FLAG}: this model {what}, which is not supported; start it without that flag")


def _check_pool(pool: Any) -> None:
    kind = type(pool).__name__
    if kind != POOL_CLASS or pool.kv_cache_layout not in ("nhd", "hnd"):
        raise EngineError(
            f"{FLAG}: the KV pool is a {kind} of layout {getattr(pool, 'kv_cache_layout', None)!r}: rows can be packed "
            f"in a {POOL_CLASS} of layout nhd or hnd. Start this model without it"
        )
    if pool.store_dtype != pool.dtype:
        raise EngineError(f"{FLAG}: the KV cache has dtype {pool.dtype}: set --kv-cache-dtype to auto or bf16")
    if pool.k_buffer[0].device.type != "cpu":
        _log.warning("kvtier: evicting rows was tested on pools in CPU memory only, not on %s", pool.k_buffer[0].device)


def _rotary_reader(scheduler: Any) -> Callable[[int, str], Rotary]:
    """(layer, rope style) -> the rotary embedding of the configuration, which must be that of the engine's model."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    model = scheduler.tp_worker.model_runner.model
    config = scheduler.model_config.hf_config

    def read(layer: int, style: str) -> Rotary:
        rotary = rotary_of(config, ROPE_INIT_FUNCTIONS, layer, style=style)
        check_rotary(model, rotary, layer, style)
        return rotary

    return read


def _fence(scheduler: Any) -> Callable[[], None]:
    """Orders the scheduler's stream behind the forward under way, which writes the rows that are read next. The next
    forward waits for the scheduler's stream by itself."""
    if torch.device(scheduler.device).type == "cpu":
        return lambda: None
    device_module = torch.get_device_module(scheduler.device)
    return lambda: device_module.current_stream().wait_stream(scheduler.forward_stream)


def _error_counter(linker: Any, registry: CollectorRegistry) -> Callable[[], None]:
    if linker is not None:
        return lambda: linker.ledger.error("engine")
    errors = Counter("kvtier_errors", "Exceptions caught so that the engine keeps serving", ["site"], registry=registry)
    at_engine = errors.labels("engine")
    return at_engine.inc
