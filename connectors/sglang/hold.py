"""The scheduler's side of the connector: requests wait, within a bound, while pages of theirs are on their way up.

A linker is only asked for what is there at the moment of admission. So requests are looked up when they are queued, and
one whose next page is being promoted is left out of the batches until the page is there or the deadline
(`promote_deadline`) has passed: before the batch is built, so that it is not matched at every step, and once more where
it would be added. First lookups are spread over scheduling steps (`steps`): those of many requests, and the pages of a
long one, which waits meanwhile as for a promotion. With several ranks everything here is done by all of them in the
same order, since SGLang's lookups are collective. All functions run on the scheduler's thread and never raise.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from kvtier.connectors.sglang import steps
from kvtier.connectors.sglang.hooks import changes_weights

if TYPE_CHECKING:
    from kvtier.connectors.sglang.linker import KVTierLinker

_log = logging.getLogger(__name__)

_LOAD_FAILED = "External KV cache load failed"

_IDLE_S = 0.0005
"""Pause of a scheduler that has nothing but held requests: its loop would spin and starve the promoting threads."""


def linker_of(cache: Any) -> KVTierLinker | None:
    """This connector's linker behind a radix cache, if it has one."""
    linker = getattr(getattr(cache, "linker", None), "cache_linker", None)
    return linker if hasattr(linker, "request_started") else None


def request_queued(_: None, scheduler: Any, req: Any, storage_hit_end: int | None = None) -> None:
    """After ``Scheduler._prefetch_kvcache``, which every request passes before it is queued, again where it was
    retracted: its prefix is to be looked up."""
    linker = linker_of(scheduler.tree_cache)
    if linker is not None:
        try:
            linker.compacted.queued(req)
        except Exception:  # noqa: BLE001 - the request is ended when it starts
            linker.count_error("a request for a compacted prefix")
        linker.request_queued(req.rid)


def next_batch(scheduler: Any, running_batch: Any, last_batch: Any) -> None:
    """Before ``Scheduler.get_next_batch_to_run``, which takes results of offloads."""
    linker = linker_of(scheduler.tree_cache)
    if linker is not None:
        linker.settle_stages()


def _bar(linker: KVTierLinker, batch: Any) -> None:
    """With a pipeline, what loading requests compute is kept out of the cache until all stages know that the load was
    right: the next chunk of a prompt would insert it before."""
    for req in batch.reqs:
        if linker.loads(req.rid):
            linker.barred.setdefault(req.rid, req.skip_radix_cache_insert)
            req.skip_radix_cache_insert = True


def settle_loads(scheduler: Any, batch: Any, result: Any) -> None:
    """Before ``Scheduler.process_batch_result``: with a pipeline, end the requests of which one stage could not load a
    page, on every stage, as SGLang does where a rank of the stage says so."""
    linker = linker_of(scheduler.tree_cache)
    if linker is None or not linker.staged:
        return
    failed = linker.failed_loads([req.rid for req in batch.reqs])
    for req in batch.reqs:
        before = linker.barred.pop(req.rid, None)
        if req.rid not in failed:
            if before is not None:
                req.skip_radix_cache_insert = before
            continue
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        req.skip_radix_cache_insert = True
        req.discard_output_reason = FINISH_ABORT(_LOAD_FAILED, HTTPStatus.SERVICE_UNAVAILABLE)
        if req is scheduler.chunked_req:
            _abort_chunked(scheduler, req)


def _abort_chunked(scheduler: Any, req: Any) -> None:
    scheduler._pending_chunked_abort_req = req


def build_batch(
    original: Callable[..., tuple[Any, Any]], scheduler: Any, prefill_delayer_single_pass: Any, running_batch: Any
) -> tuple[Any, Any]:
    """Around ``Scheduler._get_new_batch_prefill_raw``: build the batch without the requests that wait for pages."""
    linker = linker_of(scheduler.tree_cache)
    if linker is None:
        return original(scheduler, prefill_delayer_single_pass, running_batch)
    linker.budget.begin()
    try:
        return _build(original, linker, scheduler, prefill_delayer_single_pass, running_batch)
    finally:
        linker.budget.end()


def _build(
    original: Callable[..., tuple[Any, Any]],
    linker: KVTierLinker,
    scheduler: Any,
    prefill_delayer_single_pass: Any,
    running_batch: Any,
) -> tuple[Any, Any]:
    queue = scheduler.waiting_queue
    held = _partition(linker, scheduler, queue) if queue else set()
    if held:
        scheduler.waiting_queue = [req for req in queue if id(req) not in held]
    try:
        batch, running = original(scheduler, prefill_delayer_single_pass, running_batch)
    finally:
        if held:
            scheduler.waiting_queue = _merged(queue, held, scheduler.waiting_queue)
    if batch is not None:
        if linker.staged:
            _bar(linker, batch)
        linker.compacted.started(batch.reqs, scheduler.chunked_req, lambda req: _abort_chunked(scheduler, req))
        for req in batch.reqs:
            linker.request_started(req.rid)
    elif held and not linker.looks_up and _idle(scheduler, running):
        time.sleep(_IDLE_S)
    linker.drop_all_but(req.rid for req in scheduler.waiting_queue)
    return batch, running


def _partition(linker: KVTierLinker, scheduler: Any, queue: list[Any]) -> set[int]:
    """Which requests of the queue, by their ids, are to be left out of this step."""
    _look_up_new(linker, scheduler, queue)
    linker.look_on()
    begin = time.perf_counter()
    linker.agree(req.rid for req in queue)
    held = {id(req) for req in queue if linker.waits(req.rid)}
    linker.ledger.time_engine("waiting", time.perf_counter() - begin)
    return held


def _look_up_new(linker: KVTierLinker, scheduler: Any, queue: list[Any]) -> None:
    """The first lookups of requests in the order of the queue, as many as fit into a step. SGLang's part of them is
    collective: here nothing may depend on what this rank has found."""
    left = steps.NEW_PAGES
    for req in queue if linker.has_new() else ():
        if not linker.is_new(req.rid):
            continue
        pages = (len(req.origin_input_ids) + len(req.output_ids)) // linker.page_tokens
        left -= steps.REQUEST_PAGES + min(pages, steps.FIRST_PAGES)
        if left < 0:
            return
        linker.looked_up(req.rid)
        try:
            req.init_next_round_input(scheduler.tree_cache, cow_mamba=False)
        except Exception:  # noqa: BLE001 - the engine looks the request up again when it admits it
            linker.count_error("the first lookup of a request")


def _idle(scheduler: Any, running: Any) -> bool:
    """Whether there is nothing to run; a stage of a pipeline has several batches under way."""
    return running.is_empty() and not any(getattr(scheduler, "mbs", ()))


def admit(
    original: Callable[..., Any], adder: Any, req: Any, has_chunked_req: bool, truncation_align_size: int | None
) -> Any:
    """Around ``PrefillAdder.add_one_req``: leave a request in the queue whose last match, a moment ago, found pages
    that are still on their way. Such is one that the partition above could not know: queued inside the call (a grammar
    was being compiled), or matched against less of the device's cache than when it was queued."""
    linker = linker_of(adder.tree_cache)
    if linker is not None and linker.waits(req.rid):
        return adder.budget_state()
    return original(adder, req, has_chunked_req, truncation_align_size)


def request_aborted(_: None, cache: Any, request: Any) -> None:
    """After ``UnifiedRadixCache.release_aborted_request``: the linker is not told otherwise."""
    linker = linker_of(cache)
    if linker is not None:
        linker.request_dropped(request.rid)


def batch_done(_: None, scheduler: Any, batch: Any, result: Any) -> None:
    """After ``Scheduler.process_batch_result``: what a prompt's tokens cost to compute, for the break-even rule; which
    requests have ended, for hints of tool calls."""
    linker = linker_of(scheduler.tree_cache)
    if linker is None:
        return
    linker.requests_ended(batch.reqs)
    if not batch.forward_mode.is_extend():
        return
    launched_s = getattr(batch, "launch_ts", None)  # monotonic
    if launched_s and batch.extend_num_tokens:
        linker.prefilled(batch.extend_num_tokens, launched_s)


def weights_change(updater: Any, recv_req: Any) -> None:
    """Before an update of the weights in place: what was stored until now must not be found again."""
    linker = linker_of(getattr(updater.scheduler, "tree_cache", None))
    if linker is not None and changes_weights(recv_req):
        linker.weights_changed()


def memory_released(updater: Any, recv_req: Any) -> None:
    """Before an idle engine gives memory back: what is still being copied out of its pages ends first."""
    linker = linker_of(getattr(updater.scheduler, "tree_cache", None))
    if linker is not None:
        linker.end_copies()


def _merged(before: list[Any], held: set[int], after: list[Any]) -> list[Any]:
    """The old queue in its order, without what left it, then what joined it meanwhile."""
    left = {id(req) for req in after}
    old = {id(req) for req in before}
    return [r for r in before if id(r) in held or id(r) in left] + [r for r in after if id(r) not in old]
