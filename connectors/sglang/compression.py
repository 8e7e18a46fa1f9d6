"""Compression methods on SGLang's real scheduler: what the hooks call, on its thread.

A decode step's rows are written by a forward that is queued when the next batch is prepared. There the methods run: the
last step has ended, the next has not read its cache. Positions stay logical, so that every later forward adds what
was evicted to them; lengths and slots are physical.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import torch

from kvtier.abc.compression import LiveRequest
from kvtier.compression import CompressionPipeline
from kvtier.connectors.sglang.compression_cache import SlotCache

_log = logging.getLogger(__name__)

_LIVE = "kvtier_live"
"""Attribute of a request in decoding: its LiveRequest."""
_ATTACHED = "kvtier_compression"
"""Attribute of the engine's prefix cache: its SchedulerCompression. Batches and releases both know that cache."""


class SchedulerCompression:
    """The methods of one scheduler, and the requests that are decoding there."""

    def __init__(
        self,
        pipeline: CompressionPipeline,
        cache: SlotCache,
        *,
        count_error: Callable[[], None],
        ranks: int = 1,
        most_generated: int | None = None,
    ) -> None:
        """ranks: of the tensor-parallel group, each of which has a scheduler that does the same. most_generated: rows
        that a request holds behind its prompt at any time, where the methods bound them."""
        self.pipeline = pipeline
        self.cache = cache
        self.most_generated = most_generated
        self._count_error = count_error
        self._ranks = ranks
        self._names = itertools.count()
        self._prefilling: set[str] = set()

    def step(self, batch: Any) -> None:
        """The last forward of `batch` has been queued, and its next decode step is about to be prepared."""
        self.cache.begin_step()
        new: list[LiveRequest] = []
        joined, running = [], []
        for req, rows in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
            live = self._known(req, rows, new)
            if live.request_id in self._prefilling:
                self._prefilling.discard(live.request_id)
                joined.append(live)
            else:
                live.generated_tokens += rows - live.length
                running.append(live)
            live.length = rows
        try:
            self.pipeline.call("on_request_init", new)
            self.pipeline.call("on_prefill_chunk_end", joined, self.cache)
            self.pipeline.call("on_context_step_end", joined, self.cache)
            self.pipeline.call("on_generation_step_end", running, self.cache)
            self.pipeline.call("on_generation_step_begin", [*joined, *running], self.cache)
        finally:
            if self.cache.packed:
                self._rebind(batch)

    def chunk_ended(self, req: Any) -> None:
        """A chunk of a prompt that is not complete has been queued."""
        if self.pipeline.hooks("on_prefill_chunk_end"):
            self.cache.begin_step()
            new: list[LiveRequest] = []
            live = self._known(req, len(req.full_untruncated_fill_ids), new)
            live.length = req.prefix_len
            self.pipeline.call("on_request_init", new)
            self.pipeline.call("on_prefill_chunk_end", [live], self.cache)

    def ends(self, req: Any) -> None:
        """The request has all its tokens, and its last step gets its round as every other: what is evicted depends on
        the rows that were written, and on nothing else."""
        live: LiveRequest | None = getattr(req, _LIVE, None)
        if live is None:
            return
        written = req.kv.kv_committed_len - live.length
        if written > 0:
            self.cache.begin_step()
            live.generated_tokens += written
            live.length += written
            self.pipeline.call("on_generation_step_end", [live], self.cache)

    def forget(self, req: Any) -> None:
        """The request ended, was aborted, or was retracted: its rows go back to the allocator."""
        live: LiveRequest | None = getattr(req, _LIVE, None)
        if live is not None:
            delattr(req, _LIVE)
            self.cache.drop(live)
            self._prefilling.discard(live.request_id)
            self.pipeline.call("on_request_finish", [live])

    def guard(self, work: Callable[[], None]) -> None:
        """Run `work`; with one rank a failure is counted and the engine goes on. With several it goes through: ranks
        whose caches differ in length would answer wrongly from then on."""
        try:
            work()
        except Exception:
            self._count_error()
            if self._ranks > 1:
                raise
            _log.exception("kvtier: compression of a step failed, the engine goes on")

    def _known(self, req: Any, rows: int, new: list[LiveRequest]) -> LiveRequest:
        """rows: that its prefill has written, or will have; more than the prompt after a retraction."""
        live: LiveRequest | None = getattr(req, _LIVE, None)
        if live is None:
            # More than the prompt is pinned only where a retracted request found tokens of its own in the prefix cache.
            pinned = max(len(req.origin_input_ids), req.kv.cache_protected_len)
            live = LiveRequest(f"{next(self._names)}.{req.rid}", pinned, generated_tokens=rows - pinned)
            setattr(req, _LIVE, live)
            self.cache.add(live, req)
            self._prefilling.add(live.request_id)
            new.append(live)
        return live

    def _rebind(self, batch: Any) -> None:
        """New tensors: the forward under way still reads the old ones."""
        lengths = torch.tensor([getattr(req, _LIVE).length for req in batch.reqs], dtype=batch.seq_lens_cpu.dtype)
        batch.seq_lens_cpu = lengths
        batch.seq_lens = lengths.to(batch.seq_lens.device, batch.seq_lens.dtype)
        batch.seq_lens_sum = None


def attached(tree: Any) -> SchedulerCompression | None:
    return getattr(tree, _ATTACHED, None)


def attach(tree: Any, compression: SchedulerCompression) -> None:
    setattr(tree, _ATTACHED, compression)


def before_decode(batch: Any) -> None:
    """Before ``ScheduleBatch.prepare_for_decode``."""
    compression = attached(batch.tree_cache)
    if compression is not None:
        compression.guard(lambda: compression.step(batch))


def chunk_ended(_: None, scheduler: Any, req: Any) -> None:
    """After ``Scheduler.stash_chunked_request``."""
    compression = attached(scheduler.tree_cache)
    if compression is not None:
        compression.guard(lambda: compression.chunk_ended(req))


def positions(forward: Any, cls: Any, batch: Any, model_runner: Any, **kwargs: Any) -> None:
    """After ``ForwardBatch.init_new``: where a decoded token stands among all tokens, evicted ones included."""
    if not forward.forward_mode.is_decode():
        return
    evicted = [live.evicted_tokens if (live := getattr(req, _LIVE, None)) else 0 for req in batch.reqs]
    if any(evicted):
        shift = torch.tensor(evicted, dtype=forward.positions.dtype).to(forward.positions.device)
        forward.positions = forward.positions + shift
        if forward.mrope_positions is not None:
            forward.mrope_positions = forward.mrope_positions + shift


def growth(original: Callable[..., float], adder: Any, req: Any) -> float:
    """Around ``PrefillAdder._get_running_request_total_token_offset``: the slots that a running request will still
    take, which the engine leaves free when it admits others. With evictions it never grows beyond its budget."""
    estimate = original(adder, req)
    compression, live = attached(adder.tree_cache), getattr(req, _LIVE, None)
    if compression is None or compression.most_generated is None or live is None:
        return estimate
    page: int = adder.page_size
    most: int = -(-(live.prompt_tokens + compression.most_generated) // page) - -(-live.length // page)
    return min(estimate, max(0, most * page))


def released(req: Any, tree_cache: Any, *, checkpoint: bool) -> None:
    """Before ``release_kv_cache``, the one place at which a request gives its rows back. checkpoint: the engine wants
    to keep them in its prefix cache, which it never does for a retracted or an aborted request."""
    compression = attached(tree_cache)
    if compression is not None:
        if checkpoint and req.finished():
            compression.guard(lambda: compression.ends(req))
        compression.guard(lambda: compression.forget(req))


def retracted(_: None, req: Any) -> None:
    """After ``Req.reset_for_retract``. The prompt is in the prefix cache already; what is generated stays out of it, so
    that it can still be evicted once it was recomputed."""
    if req.output_ids:
        req.skip_radix_cache_insert = True


def refuse_beams(original: Callable[..., Any], coordinator: Any, req: Any, recv_req: Any) -> str:
    """Around ``BeamCoordinator.validate_and_init``: its answer is the reason why a request is refused."""
    width = req.sampling_params.beam_width
    return f"beam_width = {width}: sequences with evictions cannot be searched by beams; use 1"
