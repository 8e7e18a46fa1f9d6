"""The staged path's hooks: which request SGLang's threads work for, when requests start and end, updates of weights.

SGLang's storage interface says none of it, and without it a page could be counted twice, or restored after its weights
are gone. All functions but the first two run on the scheduler's thread; none raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from kvtier.connectors.sglang.hooks import WEIGHT_UPDATES, Expected, Hook, changes_weights

if TYPE_CHECKING:
    from kvtier.connectors.sglang.hicache import KVTierStorage

_CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

USED = (
    Expected(
        "sglang.srt.mem_cache.hicache_storage.HiCacheStorage",
        (
            "register_mem_pool_host", "register_mem_host_pool_v2", "on_host_pools_registered", "batch_exists",
            "batch_exists_v2", "batch_get_v1", "batch_get_v2", "batch_set_v1", "batch_set_v2", "clear", "get_stats",
        ),
    ),
    Expected(_CONTROLLER, ("attach_storage_backend", "detach_storage_backend", "clear_storage_backend")),
    Expected("sglang.srt.runtime_context", ("get_server_args", "get_model")),
)  # fmt: skip


def scheduler_hooks() -> tuple[Hook, ...]:
    """Hooks in the process of the scheduler."""
    return (
        Hook(f"{_CONTROLLER}._storage_hit_query", "AROUND", ("self", "operation"), ask),
        Hook(f"{_CONTROLLER}._page_transfer", "AROUND", ("self", "operation"), load),
        Hook(
            f"{_SCHEDULER}._get_new_batch_prefill_raw",
            "AFTER",
            ("self", "prefill_delayer_single_pass", "running_batch"),
            batch_built,
        ),
        Hook(f"{_CACHE}.release_aborted_request", "AFTER", ("self", "request"), request_aborted),
        Hook(f"{_CACHE}.reset", "AFTER", ("self",), cache_reset),
        Hook(f"{_SCHEDULER}.process_batch_result", "AFTER", ("self", "batch", "result"), batch_done),
        *(Hook(target, "BEFORE", ("self", "recv_req"), weights_change) for target in WEIGHT_UPDATES),
    )


def storage_of(cache: Any) -> KVTierStorage | None:
    """This connector's storage behind a radix cache, if it has one."""
    return _ours(getattr(cache, "cache_controller", None))


def _ours(controller: Any) -> KVTierStorage | None:
    storage = getattr(controller, "storage_backend", None)
    return storage if hasattr(storage, "batch_built") else None


def ask(original: Callable[..., Any], controller: Any, operation: Any) -> Any:
    """Around ``HybridCacheController._storage_hit_query``, in the prefetch thread."""
    return _for_request(original, controller, operation)


def load(original: Callable[..., Any], controller: Any, operation: Any) -> Any:
    """Around ``HybridCacheController._page_transfer``, in the input thread."""
    return _for_request(original, controller, operation)


def _for_request(original: Callable[..., Any], controller: Any, operation: Any) -> Any:
    storage = _ours(controller)
    with nullcontext() if storage is None else storage.reads.serving(operation.request_id):
        return original(controller, operation)


def batch_built(result: tuple[Any, Any], scheduler: Any, prefill_delayer_single_pass: Any, running_batch: Any) -> None:
    """After ``Scheduler._get_new_batch_prefill_raw``."""
    storage = storage_of(scheduler.tree_cache)
    if storage is not None:
        started = [] if result[0] is None else [req.rid for req in result[0].reqs]
        storage.batch_built(started, lambda: {req.rid for req in scheduler.waiting_queue})


def request_aborted(_: None, cache: Any, request: Any) -> None:
    """After ``UnifiedRadixCache.release_aborted_request``."""
    storage = storage_of(cache)
    if storage is not None:
        storage.request_dropped(request.rid)


def cache_reset(_: None, cache: Any) -> None:
    """After ``UnifiedRadixCache.reset``, of which storage is not told. Stored pages stay."""
    storage = storage_of(cache)
    if storage is not None:
        storage.cache_reset()


def batch_done(_: None, scheduler: Any, batch: Any, result: Any) -> None:
    """After ``Scheduler.process_batch_result``: what a prompt's tokens cost to compute, for the break-even rule."""
    storage = storage_of(scheduler.tree_cache)
    if storage is None or not batch.forward_mode.is_extend():
        return
    launched_s = getattr(batch, "launch_ts", None)  # monotonic
    if launched_s and batch.extend_num_tokens:
        storage.prefilled(batch.extend_num_tokens, time.monotonic() - launched_s)


def weights_change(updater: Any, recv_req: Any) -> None:
    """Before an update of the weights in place: what was stored until now must not be found again."""
    storage = storage_of(getattr(updater.scheduler, "tree_cache", None))
    if storage is not None and changes_weights(recv_req):
        storage.weights_changed()
