"""The linker that SGLang's radix cache drives: lookups, loads and offloads between device pools and kvtier's tiers.

Every method runs on the scheduler's thread, where an exception would end the engine: each catches everything, counts
it, and answers with the value that makes the engine recompute. Work that touches bytes runs in the mover's threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Any

from sglang.srt.arg_groups.overrides import model_config_of, resolving_view
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker
from sglang.srt.runtime_context import get_parallel

from kvtier.config import Config
from kvtier.connectors.sglang import compression_hooks, hooks, identity, opening, options
from kvtier.connectors.sglang.agreement import Agreement, Progress
from kvtier.connectors.sglang.boundaries import is_beside
from kvtier.connectors.sglang.guard import timed
from kvtier.connectors.sglang.loads import Loads
from kvtier.connectors.sglang.movers import Movers, Offloading, Part
from kvtier.connectors.sglang.offloads import Offloads
from kvtier.connectors.sglang.pools import page_hashes
from kvtier.connectors.sglang.pools.engine import EnginePools
from kvtier.connectors.sglang.port import open_port, show_open_requests, show_pending_offloads
from kvtier.connectors.sglang.prefixes import Prefix, Prefixes
from kvtier.connectors.sglang.ranks import Generations, Place, RankGroup
from kvtier.connectors.sglang.stages import Stages
from kvtier.connectors.sglang.steps import StepBudget
from kvtier.connectors.sglang.tool_calls import Hints, Text, hash_text
from kvtier.keys import Namespace
from kvtier.ledger import MissReason
from kvtier.mover import PageMover
from kvtier.server.http import HttpExporter

_log = logging.getLogger(__name__)

_DRAIN_S = 10.0
"""How long a flush or an update of weights waits for pages that are being copied."""
_CLOSE_S = 1.5
"""How long an engine that ends waits for pages under way, in all; tiers that hang add their own bound."""


class _Weights(Enum):
    """Whether what lies on the device was computed by the weights that are there now."""

    AS_LOADED = auto()
    CHANGED = auto()


class KVTierLinker(UnifiedCacheLinker):
    """See the module's docstring. `extra_config` is what `options.linker_options` put together."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Iterable[Any],
        extra_config: Mapping[str, Any],
        forward_stream: Any = None,
    ) -> None:
        hooks.check_engine()
        hooks.verify_installed(hooks.scheduler_hooks())
        args = resolving_view(server_args)
        model_config = model_config_of(server_args)
        config = options.resolve_config(extra_config)
        options.check_waiting(config)
        if config.compression.live:
            compression_hooks.verify_installed()
        opening.refuse_unsupported(args, model_config)
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        told = identity.cache_values(model_config, args, pool)
        self._pools = EnginePools.of(params, {c.name for c in components}, told)
        self.forward_stream = forward_stream
        self.pools = {PoolName(p.name): p for p in self._pools.all}
        self.layer_done_counter = LayerWiseLoadCounter(self._pools.counted_layers)
        if self._pools.has_states:  # the engine registers the counter with the KV pool, and with that only
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._ranks = RankGroup(params, args.pp_async_batch_depth)
        self._agreement = Agreement(self._ranks) if self._ranks.several else None
        self._stages = Stages(self._ranks) if self._ranks.staged else None
        self._place = Place.of(get_parallel(), args)
        self._generations = Generations(self._ranks.secret(self._place.rank == 0))
        self._load_started_s = self._prefill_launched_s = 0.0
        self._weights = _Weights.AS_LOADED
        self.page_tokens: int = params.page_size
        self._new: dict[str, None] = {}
        self.barred: dict[str, bool] = {}
        self._asked: dict[str, Prefix] = {}
        self._growing: dict[str, None] = {}
        self.budget = StepBudget()
        self._offloads = Offloads(self._stages, lambda: self.count_error("offload"))
        engine = identity.identify(model_config, args)
        self._stored = opening.stored_pools(config, self._pools, engine, self._place)
        self.compacted = opening.compacted_prefixes(config, self._stored, self._place, model_config, args)
        self._open(config)
        self._loads = Loads(
            self.layer_done_counter, self._pools.counted_layers, lambda error: self.count_error("load", error)
        )

    def _open(self, config: Config) -> None:
        self._config = config
        place = self._place
        self._store = opening.open_tiers(config, place, replicated=self._pools.replicated)
        self.ledger = self._store.ledger
        self._http: HttpExporter | None = None
        self._hints: Hints | None = None
        try:
            self._open_movers()
            self.compacted.put(self._store, config)
            show_open_requests(self.ledger.registry, self._open_requests)
            show_pending_offloads(self.ledger.registry, lambda: len(self._offloads))
            if config.http is not None:
                nbytes = self._mover.layout(self._stored[0].codec).cold_page_bytes
                self._http, self._hints = open_port(config, config.http, place, self._store, nbytes, self._keys_of)
        except BaseException:
            self._store.close()
            raise
        _log.info(
            "kvtier: namespace %s, pages of %d tokens, %d bytes hot",
            self._namespace.digest.hex()[:16],
            self.page_tokens,
            self._pools.kv.spec.hot_page_bytes,
        )

    @property
    def _namespace(self) -> Namespace:
        return self._stored[0].namespace

    @property
    def _mover(self) -> PageMover:
        return self._movers.kv

    def _open_requests(self) -> int:
        return sum(not is_beside(name) for name in self._store.open_requests())

    def _open_movers(self) -> None:
        self._movers = Movers(self._store, self._stored, self._config)
        self._prefixes = Prefixes(
            self._store, self._stored, self.budget, several=self._ranks.several, renamed=self.compacted.renamed
        )

    def _keys_of(self, text: Text) -> list[list[bytes]]:
        """The keys of a text's pages in every pool; for hints, in any thread."""
        hashes = page_hashes(hash_text(text, self.page_tokens))
        return [stored.namespace.page_keys(hashes) for stored in self._stored]

    @property
    def exports_metrics(self) -> bool:
        """Whether the ledger's registry is served over HTTP."""
        return self._http is not None

    # -- what the radix cache calls --------------------------------------------------------------------------------

    @timed("lookup", list)
    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """The longest prefix in pages, of the tail that is not on the device, that can be restored now: verified, in
        host memory, and pinned from here until the request starts or is dropped. The first call starts promotions; a
        long tail is looked up in this step and in the next ones, as a part of all requests together, and waits.

        SGLang takes all lengths, so that ranks find one that they have in common: they already have (`Agreement`)."""
        self._new.pop(rid, None)
        if self._loads.queued(rid):
            return []  # another request of the same name: the pages of the first must stay what its load expects
        if self._agreement is None:
            return list(self._look_up(rid, transfers).lengths()[-1:])
        hashes = transfers[0].keys
        agreed = self._agreement.asks(rid, (hashes[0], hashes[-1], len(hashes)), len(hashes))
        if self._agreement.is_open(rid):
            try:
                self._look_up(rid, transfers).lengths()
            except Exception:  # noqa: BLE001 - this rank has nothing, and answers like the others
                self.count_error("lookup")
                self._settle(rid)
        return list(agreed[-1:])

    def _look_up(self, rid: str, transfers: list[PoolTransfer]) -> Prefix:
        prefix = self._asked[rid] = self._prefixes.look_up(rid, transfers, self._asked.get(rid))
        if prefix.grows:
            self._growing[rid] = None
        return prefix

    @timed("lookup", lambda: None)
    def look_on(self) -> None:
        """Go on with requests that were looked up in part, in the order in which they came, for what this step has
        left."""
        for rid in list(self._growing):
            prefix = self._asked.get(rid)
            if prefix is None or not prefix.grows:
                del self._growing[rid]
                continue
            before = prefix.left
            try:
                there = self._prefixes.look_on(prefix)
            except Exception:  # noqa: BLE001 - it starts with nothing
                self.count_error("lookup")
                there = False
            if not there:
                self._settle(rid)
            elif prefix.left == before:
                return

    def _progress(self, rid: str) -> Progress:
        known = self._asked.get(rid)
        if known is None or not known.under_way():
            return Progress.COMPLETE
        return Progress.UNDER_WAY if time.monotonic() < known.lookup.deadline else Progress.EXPIRED

    def _freeze(self, rid: str) -> Sequence[int]:
        known = self._asked.get(rid)
        try:
            return self._prefixes.freeze(known) if known is not None else []
        except Exception:  # noqa: BLE001 - the other ranks wait for an answer
            self.count_error("lookup")
            return []

    def _use(self, rid: str, pages: int) -> None:
        """All ranks start with so many pages: others that this one has are none that all of them have in a row."""
        known = self._asked.get(rid)
        try:
            if known is not None:
                self._store.hold(known.lookup, pages, rest=MissReason.AFTER_GAP)
        except Exception:  # noqa: BLE001 - the load will tell
            self.count_error("lookup")

    @timed("load", bool)
    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Queue the pages that the last lookup of `rid` promised. The answer depends on its pins only."""
        if self._agreement is not None:
            return self._load_agreed(self._agreement, rid, transfers)
        known = self._asked.get(rid)
        parts = None if self._loads.queued(rid) or known is None else self._prefixes.parts(known, transfers)
        if known is None or parts is None:
            return False
        if not self._store.hold(known.lookup, len(transfers[0].keys)):
            return False  # the lease ended a moment ago
        self._loads.queue(rid, parts)
        return True

    def _load_agreed(self, agreement: Agreement, rid: str, transfers: list[PoolTransfer]) -> bool:
        """True on every rank or on none: what goes wrong on one of them fails the batch on all."""
        pages = len(transfers[0].keys)
        if self._loads.queued(rid) or not agreement.reaches(rid, pages):
            return False
        known = self._asked.get(rid)
        promised: list[Part] = []
        try:
            parts = None if known is None else self._prefixes.parts(known, transfers)
            if known is not None and parts and self._store.hold(known.lookup, pages, rest=MissReason.AFTER_GAP):
                promised = parts
        except Exception:  # noqa: BLE001 - as above
            self.count_error("load")
        self._loads.queue(rid, promised)
        return True

    @timed("load", lambda: -1)
    def start_layer_wise_loading(self) -> int:
        """Start every queued load; the forward waits for them layer by layer under the index returned, -1 without
        any."""
        if not self._loads.any_queued:
            return -1
        self._load_started_s = time.monotonic()
        return self._loads.start(self._movers, self.record_offload_ready)

    @timed("load", bool)
    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until nothing of the batch is being written any more; True if every layer of every load arrived."""
        batch = self._loads.finish(counter_index)
        if batch is None:
            return False  # asked only for batches that had loads: this one could not even be started
        for rid in batch.request_ids:
            self._settle(rid, loaded=True)
        if self._stages is not None:
            self._stages.landed(batch.request_ids, batch.ok)
            return True  # until all stages know of it
        return batch.ok

    @timed("load", bool)
    def cancel_queued_load(self, rid: str) -> bool:
        """Forget a load that was not started; True if there was one."""
        return self._loads.cancel(rid)

    @timed("offload", bool)
    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Queue a node's pages. The engine keeps them in place until the result is popped."""
        self._offloads.submit(len(transfers[0].keys), lambda check: self._offload(transfers, check))
        return True

    def _offload(self, transfers: list[PoolTransfer], check: Callable[[], None]) -> Offloading:
        plain = self.compacted.plain(transfers)
        if plain is None:
            return Offloading(())
        return self._movers.offload(plain, self.record_offload_ready(), check)

    def num_completed_offloads(self) -> int:
        """How many results can be popped now, in the order of submission."""
        return self._offloads.completed()

    def pop_completed_offload(self) -> bool:
        """The oldest result: whether all pages of the node are in a tier."""
        return self._offloads.pop()

    @property
    def staged(self) -> bool:
        """Whether the engine is a pipeline, of which this is a stage."""
        return self._stages is not None

    def settle_stages(self) -> None:
        """With a pipeline, whose stages all call this before they choose a batch: what offloads have ended on all."""
        self._offloads.step()

    def failed_loads(self, rids: list[str]) -> list[str]:
        """With a pipeline, of a batch that has left it: the requests whose loads failed on one of the stages."""
        return self._stages.failed(rids) if self._stages is not None else []

    @timed("reset", lambda: None)
    def reset(self) -> None:
        """The engine forgets its cache: end all copying, drop loads, pins and results. Stored pages stay."""
        self._loads.forget_queued()
        for index in self._loads.batches():
            self.finish_layer_wise_loading(index)
        self._quiesce()
        self._loads.drain()  # every load has ended; the counter's numbers start again below
        self._offloads.clear()
        for rid in {*self._asked, *self._store.open_requests()}:
            self._settle(rid)
        if self._agreement is not None:
            self._agreement.keep(())
        if self._stages is not None:
            self._stages.clear()
        self.barred.clear()
        self.layer_done_counter.reset()
        if self._weights is _Weights.CHANGED:  # what was stored since may rest on what the old ones had computed
            self._new_generation()
            self._weights = _Weights.AS_LOADED

    @timed("reset", lambda: None)
    def close(self) -> None:
        """End all copying and close every tier."""
        give_up = time.monotonic() + _CLOSE_S
        self._movers.close(_CLOSE_S / 2)
        self._loads.close()
        self._store.close(max(0.05, give_up - time.monotonic()))
        if self._http is not None:
            self._http.close()

    # -- what the scheduler's hooks call ---------------------------------------------------------------------------

    def request_queued(self, rid: str) -> None:
        """The request is in the queue, and not looked up yet: it waits until it is."""
        self._new[rid] = None

    def has_new(self) -> bool:
        return bool(self._new)

    def is_new(self, rid: str) -> bool:
        return rid in self._new

    def looked_up(self, rid: str) -> None:
        self._new.pop(rid, None)

    @property
    def looks_up(self) -> bool:
        """Whether requests wait for nothing but the next step, in which they are looked up."""
        return bool(self._new or self._growing)

    def waits(self, rid: str) -> bool:
        """Whether a page that would extend the request's prefix is on its way and its deadline has not passed; with
        several ranks, whether they have not yet agreed on it."""
        if rid in self._new:
            return True
        if self._agreement is not None:
            return self._agreement.is_open(rid)
        known = self._asked.get(rid)
        return known is not None and known.pending

    def agree(self, waiting: Iterable[str]) -> None:
        """With several ranks, which all call this in each scheduling step: settle what `waiting` requests can get."""
        if self._agreement is not None:
            self._agreement.step(waiting, self._progress, self._freeze, self._use)

    def request_started(self, rid: str) -> None:
        """The request is in a batch. Pages that it loads are counted when the load ends."""
        self._new.pop(rid, None)
        if self._agreement is not None:
            self._agreement.forget(rid)
        if rid in self._asked and not self.loads(rid):
            self._settle(rid)

    def requests_ended(self, reqs: Iterable[Any]) -> None:
        """A batch was processed: those of its requests that have ended may be named in hints."""
        if self._hints is None:
            return
        for req in reqs:
            if req.finished():
                self._hints.ended(req.rid, Text((req.origin_input_ids, req.output_ids), req.extra_key, req.cache_salt))

    def loads(self, rid: str) -> bool:
        """Whether the request is in a batch that loads pages of it."""
        return self._loads.loads(rid)

    def prefilled(self, tokens: int, launched_s: float) -> None:
        """A batch of so many prompt tokens, launched at that time of the monotonic clock, has just ended. With the next
        batch under way already this is more than they took, so that the break-even rule errs on the side of loading.
        Batches that waited for loads say nothing."""
        before, self._prefill_launched_s = self._prefill_launched_s, launched_s
        if not before < self._load_started_s <= launched_s:
            self._store.break_even.prefilled(tokens, time.monotonic() - launched_s)

    def request_dropped(self, rid: str) -> None:
        """The request was aborted before its forward ended. A load under way keeps its pins until it ends."""
        self.request_started(rid)

    def drop_all_but(self, waiting: Iterable[str]) -> None:
        """Let go of requests that left the queue in a way that nobody reported."""
        if self._hints is not None:
            self._hints.expire()
        waiting = set(waiting)
        self.compacted.keep(waiting)
        for rid in [rid for rid in self._new if rid not in waiting]:
            del self._new[rid]
        if self._agreement is not None:
            self._agreement.keep(waiting)
        if self._asked:
            keep = waiting | self._loads.requests()
            for rid in [rid for rid in self._asked if rid not in keep]:
                self._settle(rid)

    @timed("reset", lambda: None)
    def weights_changed(self) -> None:
        """Pages stored until now belong to weights that are gone: look none of them up again."""
        for rid in list(self._asked):
            self._settle(rid)
        if self._agreement is not None:
            self._agreement.keep(())
        self._quiesce()
        self.compacted.forget()
        self._new_generation()
        self._weights = _Weights.CHANGED

    @timed("reset", lambda: None)
    def end_copies(self) -> None:
        """The engine is about to give the memory of its pages back, with no request running."""
        self._quiesce()

    def _new_generation(self) -> None:
        self._movers.close()
        generation = self._generations.next()
        self._stored = [replace(s, namespace=replace(s.namespace, generation=generation)) for s in self._stored]
        self._open_movers()

    def count_error(self, where: str, error: BaseException | None = None) -> None:
        """Count and log the exception being handled (or `error`), which the engine does not see."""
        self.ledger.error("engine")
        _log.error("kvtier: %s failed, the engine goes on without it", where, exc_info=error or True)

    def _quiesce(self) -> None:
        """Return when no worker reads or writes the pool any more. Copies that have not begun are given up after a
        while; those that have are waited for, since the engine is about to reuse their pages."""
        if not self._movers.drain(_DRAIN_S):
            _log.warning("kvtier: pages were still waiting to be copied after %s s and are dropped", _DRAIN_S)
            self._offloads.give_up()
            self._movers.drain()

    def _settle(self, rid: str, *, loaded: bool = False) -> None:
        known = self._asked.pop(rid, None)
        self._growing.pop(rid, None)
        try:
            self._prefixes.settle(rid, loaded=loaded, pages=0 if known is None else len(known.hashes))
        except Exception:  # noqa: BLE001 - called from hooks on the scheduler's thread
            self.count_error("settling a request")
