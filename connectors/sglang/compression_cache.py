"""Live requests' rows in SGLang's pools, as compression methods see them.

A request's rows lie in the slots that its row of the token table lists, whole pages at a time. Kept rows are packed
into the request's own first slots, and the pages that become empty behind them go back to the allocator. Single slots
are never freed: with pages of more than one token that would free their neighbours too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvtier.abc.compression import KeepSet, LiveCache, LiveRequest
from kvtier.errors import EngineError
from kvtier.kernels.rowpack import fast as rowpack
from kvtier.kernels.rowpack.sequences import PagedSequence

Group = list[torch.Tensor]


class SlotCache(LiveCache):
    """Used on the scheduler's thread, between a batch's forward and the next."""

    def __init__(self, pool: Any, table: torch.Tensor, tree: Any, fence: Callable[[], None]) -> None:
        """pool: SGLang's MHA pool. table: ``[requests, tokens]``, its slots by request. tree: its prefix cache, which
        frees rows. fence: orders what comes next on the device behind the forward under way."""
        self._layers = paged(pool)
        self._page_tokens = int(self._layers[0][0].shape[1])
        self._table = table
        self._tree = tree
        self._fence = fence
        self._reqs: dict[str, Any] = {}
        self._places: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._fenced = False
        self.packed: set[str] = set()
        """Requests packed since `begin_step`."""

    def __len__(self) -> int:
        """Requests known."""
        return len(self._reqs)

    def add(self, request: LiveRequest, req: Any) -> None:
        self._reqs[request.request_id] = req

    def drop(self, request: LiveRequest) -> None:
        del self._reqs[request.request_id]

    def begin_step(self) -> None:
        """A forward has been queued since, and rows may have moved in the table."""
        self._places.clear()
        self.packed.clear()
        self._fenced = False

    def keys(self, request: LiveRequest, layer: int, first_row: int = 0) -> torch.Tensor:
        self._order()
        rows = (request.request_id, first_row)
        if rows not in self._places:
            slots = self._table[self._reqs[request.request_id].kv.req_pool_idx, first_row : request.length].long()
            self._places[rows] = slots // self._page_tokens, slots % self._page_tokens
        return self._layers[layer][0][self._places[rows]].transpose(0, 1)

    def compact(self, requests: Sequence[LiveRequest], keep: Sequence[KeepSet]) -> None:
        """Raises EngineError, with nothing moved, for rows that are not the request's own. A failure after that leaves
        rows half moved: the engine then ends these requests."""
        self._order()
        reqs = [self._reqs[request.request_id] for request in requests]
        sequences = [
            self._sequence(req, request, kept) for req, request, kept in zip(reqs, requests, keep, strict=True)
        ]
        try:
            rowpack.pack(self._layers, sequences)
            for req, request, kept in zip(reqs, requests, keep, strict=True):
                self._shrink(req, request, kept.kept_rows)
        except BaseException:
            for req in reqs:
                _end(req)
            raise

    def _sequence(self, req: Any, request: LiveRequest, kept: KeepSet) -> PagedSequence:
        if not request.length == req.kv.kv_committed_len == req.kv.kv_allocated_len:
            raise EngineError(
                f"request {req.rid!r} has {request.length} rows, the engine committed {req.kv.kv_committed_len} and "
                f"allocated {req.kv.kv_allocated_len}: nothing was evicted"
            )
        if kept.first_row < max(req.kv.cache_protected_len, request.prompt_tokens):
            raise EngineError(
                f"rows of request {req.rid!r} from {kept.first_row} on would move, but others share its first "
                f"{req.kv.cache_protected_len} and its prompt has {request.prompt_tokens}: nothing was evicted"
            )
        # The table begins at the page in which rows move: those before it may belong to the prefix cache.
        page = self._page_tokens
        first_page = kept.first_row // page
        slots = self._table[req.kv.req_pool_idx, first_page * page : request.length : page]
        return PagedSequence(
            pages=slots.long() // page,
            rows=request.length - first_page * page,
            first_row=kept.first_row - first_page * page,
            kept=torch.as_tensor(kept.ordinals),
        )

    def _shrink(self, req: Any, request: LiveRequest, rows: int) -> None:
        first_free = -(-rows // self._page_tokens) * self._page_tokens
        if first_free < request.length:
            self._tree.free_kv_row(req.kv, [(first_free, request.length)])
        req.kv.kv_committed_len = req.kv.kv_allocated_len = rows
        req.skip_radix_cache_insert = True  # from here on these rows are not the KV of the request's tokens
        request.length = rows
        self.packed.add(request.request_id)
        for rows_read in [known for known in self._places if known[0] == request.request_id]:
            del self._places[rows_read]

    def _order(self) -> None:
        if not self._fenced:
            self._fence()
            self._fenced = True


def paged(pool: Any) -> list[Group]:
    """K and V by layer as ``[pages, page_tokens, heads, dim]`` views of an MHA pool's buffers."""

    def view(buffer: torch.Tensor) -> torch.Tensor:
        if pool.kv_cache_layout == "hnd":
            return buffer.transpose(1, 2)
        return buffer.view(-1, pool.page_size, *buffer.shape[1:])

    return [[view(k), view(v)] for k, v in zip(pool.k_buffer, pool.v_buffer, strict=True)]


def _end(req: Any) -> None:
    """Let the engine end a request whose rows can no longer be trusted."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    req.skip_radix_cache_insert = True
    req.to_finish = FINISH_ABORT("kvtier could not evict rows of this request; send it again", status_code=500)
