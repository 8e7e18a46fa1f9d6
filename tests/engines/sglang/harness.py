"""The engine's real radix cache, allocator and pool with our linker behind them, driven as the scheduler drives them,
but without a model: pages are filled with random values and compared bit for bit after a restore."""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

from kvtier.connectors.sglang.arguments import translate
from kvtier.connectors.sglang.linker import KVTierLinker

RAW = {"algorithm": "quantization_for_cold_page", "quant": "none"}
PATIENCE_S = 60.0
"""Whatever a test waits for happens at once on an idle machine: this is for one that stalls."""
Rows = list[tuple[torch.Tensor, torch.Tensor]]


def config(nvme: Path | None = None, *, host: str = "16MiB", raw: bool = True, **more: Any) -> dict[str, Any]:
    tiers: list[dict[str, Any]] = [{"type": "host", "capacity": host}]
    if nvme is not None:
        tiers.append({"type": "nvme", "path": str(nvme), "capacity": "64MiB"})
    block: dict[str, Any] = {"tiers": tiers, "promote_deadline": "60s", "break_even": False, **more}
    if raw:
        block["kv_cache_compression_config"] = [RAW]
    return block


class Engine:
    """One engine's cache. `layers` x K and V of ``[slots, 2, 16]``, or HND, room for `pages` pages."""

    layers, heads, dim = 3, 2, 16

    def __init__(
        self,
        model: Path,
        block: dict[str, Any],
        *,
        page: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        hnd: bool = False,
        pages: int = 64,
        rank: int = 0,
        groups: Mapping[str, Any] | None = None,
        **args: Any,
    ) -> None:
        """rank: of the world, where `args` say that there are several; groups: over which the cache decides, by the
        names of CacheInitParams, which takes the sizes and ranks of pipelines as well."""
        options = translate(
            {
                "model_path": str(model),
                "device": "cpu",
                "attention_backend": "torch_native",
                "page_size": page,
                "skip_tokenizer_init": True,
                "kv_connector": "kvtier",
                "kv_connector_config": block,
                **args,
            }
        )
        self.args = ServerArgs(**options)
        self.args.resolve_once()
        self.args.check_server_args()
        publish(self.args, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=0))
        self.page, self.hnd = page, hnd
        params = self.parts(pages * page, dtype, groups or {})
        self.cache = UnifiedRadixCache(params)
        linker = create_unified_cache_linker(
            self.args,
            params,
            backend="dynamic",
            config=options["unified_cache_external_linker_config"],
            components=set(self.cache.components),
            forward_stream=None,
        )
        assert isinstance(linker, KVTierLinker)
        self.linker = linker
        self.cache.init_cache_linker(linker)
        self.pool.register_layer_transfer_counter(self.cache.linker.layer_done_counter)
        self.free_at_start = self.allocator.available_size()

    def parts(self, size: int, dtype: torch.dtype, groups: Mapping[str, Any]) -> CacheInitParams:
        """Make the pools, with room for `size` tokens, and their allocators."""
        with _environment("SGLANG_USE_HND_KVCACHE", "1" if self.hnd else None):
            self.pool = MHATokenToKVPool(
                size=size,
                page_size=self.page,
                dtype=dtype,
                head_num=self.heads,
                head_dim=self.dim,
                layer_num=self.layers,
                device="cpu",
                enable_memory_saver=False,
            )
        if self.page == 1:
            self.allocator: Any = TokenToKVPoolAllocator(size, dtype, "cpu", self.pool, False)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(size, self.page, dtype, "cpu", self.pool, False)
        rows = ReqToTokenPool(size=8, max_context_len=size, device="cpu", enable_memory_saver=False)
        return CacheInitParams(
            disable=False,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=self.page,
            tree_components=(ComponentType.FULL,),
            **groups,
        )

    # -- device pages -------------------------------------------------------------------------------------------

    def _rows(self, slots: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        if not self.hnd:
            return buffer[slots]
        return buffer[slots // self.page, :, slots % self.page]

    def read(self, slots: torch.Tensor, *, waiting: bool = False) -> Rows:
        """K and V of `slots` by layer; `waiting` reads as the forward does, which waits for layers under load."""
        keys, values = self.pool.k_buffer, self.pool.v_buffer
        if waiting:
            return [
                (self._rows(slots, self.pool.get_key_buffer(i)), self._rows(slots, self.pool.get_value_buffer(i)))
                for i in range(self.layers)
            ]
        return [(self._rows(slots, k), self._rows(slots, v)) for k, v in zip(keys, values, strict=True)]

    def compute(
        self,
        tokens: Sequence[int],
        *,
        extra_key: str | None = None,
        salt: str | None = None,
        seed: int = 0,
        wait: bool = True,
    ) -> Rows:
        """Stand in for a prefill: fill pages with random values and insert them. Waits until they are offloaded."""
        slots = self.allocator.alloc(len(tokens))
        draw = torch.Generator().manual_seed(seed)
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            values = torch.randn(len(tokens), self.heads, self.dim, generator=draw).to(buffer.dtype)
            if self.hnd:
                buffer[slots // self.page, :, slots % self.page] = values
            else:
                buffer[slots] = values
        rows = self.read(slots)
        self.cache.insert(InsertParams(key=key_of(tokens, extra_key, salt), value=slots))
        if wait:
            self.offloaded()
        return rows

    def offloaded(self) -> None:
        """Pop offload results until there are none left, as the scheduler does at each step."""
        until(lambda: (self.cache.check_hicache_events(), not self.cache.linker.pending_offloads)[1])

    def flush(self) -> None:
        """What ``/flush_cache`` does, and then device memory is filled with another value."""
        self.cache.reset()
        self.allocator.clear()
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer.fill_(-7.0)

    # -- requests -----------------------------------------------------------------------------------------------

    def request(
        self,
        rid: str,
        tokens: Sequence[int],
        *,
        extra_key: str | None = None,
        salt: str | None = None,
        lora: str | None = None,
    ) -> Req:
        """A queued request: looked up once, as the hook does. One more token than `tokens` is still to be computed."""
        req = self.new_request(rid, tokens, extra_key=extra_key, salt=salt, lora=lora)
        req.init_next_round_input(self.cache)
        return req

    def new_request(
        self,
        rid: str,
        tokens: Sequence[int],
        *,
        extra_key: str | None = None,
        salt: str | None = None,
        lora: str | None = None,
    ) -> Req:
        """A request that was not looked up yet."""
        return Req(
            rid=rid,
            origin_input_text="",
            origin_input_ids=array("q", [*tokens, 9]),
            sampling_params=SamplingParams(max_new_tokens=4),
            vocab_size=512,
            extra_key=extra_key,
            cache_salt=salt,
            lora_id=lora,
        )

    def admit(self, req: Req, *, wait: bool = True) -> Restored:
        """Admit a request: wait until it is not held any more, match again, load what was found."""
        if wait:
            until(lambda: not self.linker.waits(req.rid))
        req.init_next_round_input(self.cache)
        device = req.prefix_len
        loaded, slots = 0, None
        if req.needs_host_load_back():
            loaded, req.last_node = self.cache.init_load_back(
                InitLoadBackParams(best_match_node=req.best_match_node, host_hit_length=req.host_hit_length, req=req)
            )
            slots = self.cache.linker.private_load_indices.get(req.rid)
        index = self.cache.ready_to_load_host_cache()
        self.linker.request_started(req.rid)
        return Restored(self, req, device, loaded, slots, index)

    def abort(self, req: Req) -> None:
        """A client went away while the request was queued. The hook on this method informs the linker."""
        self.cache.release_aborted_request(req.cache_request_handle)

    def close(self) -> None:
        """End with everything written that lower tiers are to have: the second and a half that an ending engine gives
        them may not do on a machine that is busy. Whoever opens their directories next finds them left."""
        assert self.linker._store.flush(PATIENCE_S), "a lower tier did not take its pages"
        assert self.linker._store._promotions.drain(PATIENCE_S), "pages are still on their way up"
        self.end()
        until(lambda: not any(t.name.startswith("kvtier-close") for t in threading.enumerate()))

    def end(self) -> None:
        """End at once, as an engine does. Safe to call twice."""
        self.cache.release_host_resources()

    # -- what is left -------------------------------------------------------------------------------------------

    @property
    def counts(self) -> Any:
        return self.linker.ledger.snapshot()

    def assert_nothing_held(self) -> None:
        """No request is open, no page pinned or reserved, no offload pending, and hits and misses add up."""
        assert self.linker._store.open_requests() == []
        assert self.linker._asked == {} and self.linker._loads.requests() == set()
        assert not self.cache.linker.pending_offloads and not self.cache.linker.inflight_load_rids
        assert self.linker._store.flush(PATIENCE_S), "a lower tier did not take its pages"
        counts = self.counts
        assert counts.lookups == sum(counts.hits.values()) + sum(counts.misses.values())


class Restored(SimpleNamespace):
    """A request in a batch: `device` tokens matched, `loaded` tokens being loaded into `slots`."""

    def __init__(
        self, engine: Engine, req: Req, device: int, loaded: int, slots: torch.Tensor | None, index: int
    ) -> None:
        super().__init__(engine=engine, req=req, device=device, loaded=loaded, slots=slots, index=index)

    def forward(self) -> Rows:
        """Run the forward's reads, which wait for the layers, and return what it saw."""
        self.engine.cache.linker.layer_done_counter.set_consumer(self.index)
        rows = self.engine.read(self.slots, waiting=True) if self.slots is not None else []
        self.engine.cache.linker.layer_done_counter.set_consumer(-1)
        return rows

    def finish(self) -> bool:
        """End of the forward; False if the engine aborts the request with 503. Frees the private slots."""
        failed = self.engine.cache.finish_external_linker_loads([self.req])
        if self.slots is not None:
            self.engine.allocator.free(self.slots)
        if failed:
            reason = self.req.discard_output_reason
            assert reason.status_code == 503 and self.req.skip_radix_cache_insert
        return not failed


def same(got: Rows, want: Rows, tokens: int) -> bool:
    """Bit equality of the first `tokens` tokens of every layer's K and V."""
    bits = {2: torch.int16, 4: torch.int32}
    return len(got) == len(want) and all(
        torch.equal(
            a[:tokens].contiguous().view(bits[a.element_size()]), b[:tokens].contiguous().view(bits[b.element_size()])
        )
        for pair_a, pair_b in zip(got, want, strict=True)
        for a, b in zip(pair_a, pair_b, strict=True)
    )


def until(condition: Callable[[], bool], limit_s: float = PATIENCE_S) -> None:
    """Poll until `condition()`; fails after `limit_s`."""
    give_up = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < give_up, "did not happen in time"
        time.sleep(0.002)


class Gate:
    """Holds up calls of a method until it is opened, and says that one has come. Set it on an object, or a class, with
    pytest's monkeypatch: `Gate.of(monkeypatch, tier, "get_many_into")`. first: how many calls pass before."""

    def __init__(self, first: int = 0) -> None:
        self._passing = first
        self._lock = threading.Lock()
        self._reached, self._opened = threading.Event(), threading.Event()

    @staticmethod
    def of(
        monkeypatch: Any, owner: Any, method: str, *, first: int = 0, only: Callable[..., bool] = lambda *_, **__: True
    ) -> Gate:
        """only: which calls it is for, by their arguments."""
        gate, real = Gate(first), getattr(owner, method)

        def gated(*args: Any, **named: Any) -> Any:
            if only(*args, **named):
                gate.come()
            return real(*args, **named)

        monkeypatch.setattr(owner, method, gated)
        return gate

    def come(self) -> None:
        with self._lock:
            self._passing -= 1
            if self._passing >= 0:
                return
        self._reached.set()
        assert self._opened.wait(2 * PATIENCE_S), "the test never opened the gate"

    def reached(self) -> None:
        """Wait until somebody stands before it."""
        assert self._reached.wait(PATIENCE_S), "nobody came to the gate"

    def open(self) -> None:
        self._opened.set()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()


def expire(engine: Engine, rid: str) -> None:
    """The deadline of a request that waits for pages passes now."""
    engine.linker._asked[rid].lookup.deadline = time.monotonic()


def key_of(tokens: Sequence[int], extra_key: str | None = None, salt: str | None = None) -> RadixKey:
    return RadixKey(token_ids=array("q", tokens), extra_key=extra_key, cache_salt=salt)


@contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
