"""kvtier as the storage behind SGLang's hierarchical cache: the staged path.

SGLang copies pages between the device and host pools of its own; codecs read and write these pools in place, so that
nothing is copied in between. SGLang asks, loads and stores in three threads of its own, attaches and detaches on the
scheduler's. An answer of another type than expected ends the thread that asked and silently turns storage off: every
method catches everything, counts it, and answers with exactly the type that is expected.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from sglang.srt.arg_groups.overrides import model_config_of, resolving_view
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.runtime_context import get_model, get_server_args

from kvtier.abc.codec import Codec
from kvtier.build import open_codec, open_store
from kvtier.codecs.registry import codec as codec_named
from kvtier.config import PRIORITIES
from kvtier.connectors.sglang import compression_hooks, hicache_hooks, hicache_options, hooks, identity, options
from kvtier.connectors.sglang.guard import exactly
from kvtier.connectors.sglang.hicache_pools import StagedPool, describe
from kvtier.connectors.sglang.hicache_reads import Reads
from kvtier.connectors.sglang.hicache_transfers import Transfers
from kvtier.connectors.sglang.port import show_open_requests
from kvtier.connectors.sglang.ranks import Generations, Place, shared_secret
from kvtier.connectors.sglang.versions import Part
from kvtier.errors import ConfigError
from kvtier.keys import Namespace
from kvtier.mover import PageMover, policy_of
from kvtier.server.http import HttpExporter, HttpOptions
from kvtier.server.page import StatusPage
from kvtier.server.probe import store_ready

_log = logging.getLogger(__name__)

_CLOSE_S = 1.5


@dataclass(frozen=True, slots=True)
class _Pool:
    """A host pool of the engine and what moves its pages."""

    staged: StagedPool
    codec: Codec
    namespace: Namespace
    mover: PageMover


def _no_page(keys: Sequence[str], *_: Any, **__: Any) -> list[bool]:
    return [False] * len(keys)


def _no_page_of_any(transfers: Sequence[PoolTransfer], *_: Any, **__: Any) -> dict[str, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or []) for transfer in transfers}


class KVTierStorage(HiCacheStorage):
    """See the module's docstring. Built on the scheduler's thread, by SGLang's ``dynamic`` backend."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        hooks.check_version(Part.STAGED)
        hooks.check_used(hicache_hooks.USED)
        hooks.verify_installed(hicache_hooks.scheduler_hooks())
        extra: Mapping[str, Any] = storage_config.extra_config or {}
        if not extra.get("interface_v1"):
            raise ConfigError(
                'the storage backend\'s extra configuration lacks "interface_v1": 1: without it SGLang copies every '
                "page once more. Add it"
            )
        server_args = get_server_args()
        self._args = resolving_view(server_args)
        self._model_config = model_config_of(server_args)
        hicache_options.refuse_unsupported(self._args, self._model_config, storage_config)
        self._config = options.resolve_config(extra)
        if self._config.compacted:
            raise ConfigError("compacted: --kv-connector kvtier serves compacted prefixes, kvtier-hicache does not")
        if self._config.compression.live:
            compression_hooks.verify_installed()
        self._place = Place(storage_config.tp_rank, storage_config.tp_size, nodes=max(1, self._args.nnodes))
        self._replicated = bool(storage_config.is_mla_model)
        self._engine = identity.identify(self._model_config, self._args)
        self._generations, self._generation = Generations(shared_secret(self._place.ranks, get_tp_group)), ""
        self._weights_changed = False
        self._pools: dict[str, _Pool] = {}
        self._transfers = Transfers()
        self._closed = False
        self._http: HttpExporter | None = None
        self._store = open_store(
            self._config, shard=self._place.folder, rank=self._place.node_rank, ranks=self._place.node_ranks
        )
        self.ledger = self._store.ledger
        self.reads = Reads(self._store)
        show_open_requests(self.ledger.registry, lambda: len(self._store.open_requests()))

    # -- host pools --------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool whose pages requests are counted in. Raises EngineError for one that is not served; the engine then
        does not start, or does not attach."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(str(PoolName.KV), mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A pool beside it: states, windows, index keys, drafts."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        # Pools without memory of their own only hand out the indices of another.
        if name != str(PoolName.KV) and not getattr(host_pool, "_is_dummy", False):
            self._register(name, host_pool)

    def _register(self, name: str, host_pool: Any) -> None:
        try:
            staged = describe(name, host_pool, **self._values(name))
            codec = open_codec(self._config, staged.spec)
            if not any(b.compressible for b in staged.spec.buffers) and codec.id != "lossless":
                codec = codec_named("raw")
            replicated = self._replicated and name != str(PoolName.MAMBA)
            shard = self._place.replicated_shard if replicated else self._place.shard
            namespace = Namespace.of(
                staged.spec,
                policy_of(codec),
                model=self._engine.model,
                weights=self._engine.weights,
                dtype=staged.spec.buffers[0].dtype.value,
                # Two pools may have pages of one geometry, under the same hashes.
                shard=shard if name == str(PoolName.KV) else f"{shard}.{name}",
                generation=self._generation,
                lora=self._engine.lora,
                salt=self._config.salt,
            )
            self._pools[name] = self._open_pool(name, staged, codec, namespace)
        except BaseException:
            self.close()  # after the first pool, nobody else would
            raise
        _log.info(
            "kvtier: host pool %s, namespace %s, pages of %d slots, %d bytes hot",
            name,
            namespace.digest.hex()[:16],
            staged.slots,
            staged.spec.hot_page_bytes,
        )

    def _values(self, name: str) -> dict[str, Any]:
        """What model and checkpoint say about the numbers in a pool."""
        if name != str(PoolName.KV):
            return {}
        fp8 = str(get_model().kv_cache_dtype) == "fp8_e4m3"  # what auto became is not told: as it is, then
        pool = SimpleNamespace(dtype="float8_e4m3fn" if fp8 else "")
        return {"fp8": fp8, **identity.cache_values(self._model_config, self._args, pool)}

    def _open_pool(self, name: str, staged: StagedPool, codec: Codec, namespace: Namespace) -> _Pool:
        mover = PageMover(
            self._store,
            staged.spec,
            namespace,
            codec,
            workers=self._config.workers,
            offload_wait_s=self._config.offload_wait,
            priority=PRIORITIES[self._config.priority],
            beside=name != str(PoolName.KV),
        )
        return _Pool(staged, codec, namespace, mover)

    def on_host_pools_registered(self) -> None:
        """Every pool is known: from now on the metrics say that the store is ready."""
        if self._config.http is None or self._http is not None or str(PoolName.KV) not in self._pools:
            return
        main = self._pools[str(PoolName.KV)]
        nbytes = main.mover.layout(main.codec).cold_page_bytes
        try:
            self._http = HttpExporter(
                self.ledger.registry,
                HttpOptions.of(self._config.http),
                rank=self._place.node_rank,
                ready=lambda: store_ready(self._store, nbytes),
                page=StatusPage(self.ledger.registry, self._config, lambda: self._store.observer),
            )
        except BaseException:
            self.close()
            raise
        _log.info("kvtier metrics on %s/metrics", self._http.url)

    # -- questions, in the engine's prefetch thread ------------------------------------------------------------------

    @exactly("exists", lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        """Whether some tier has one page. Counts nothing."""
        return self._present(self._pools[str(PoolName.KV)], [key])[0]

    @exactly("batch_exists", lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many leading pages can be loaded: in host memory, pinned, or on their way there. Index only, but for a
        shared tier, which is asked."""
        if not keys:
            return 0
        pool, rid = self._pools[str(PoolName.KV)], self.reads.request
        if rid is None:
            there = self._present(pool, keys)
            return there.index(False) if False in there else len(there)
        hashes = [bytes.fromhex(key) for key in keys]
        return self.reads.promised(self.reads.find(rid, pool.namespace.page_keys(hashes), hashes))

    @exactly("batch_exists_v2", lambda *_, **__: PoolTransferResult.empty())
    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """As `batch_exists`, of prefixes for which the pools beside have what they must: every page of it, or those at
        its end. A pool of block groups never holds a prefix back, and is not stored here."""
        pages = self.batch_exists(keys, extra_info)
        hits: dict[str, int] = {str(PoolName.KV): pages} if pages else {}
        lengths = list(range(1, pages + 1))
        for transfer in pool_transfers or []:
            if not lengths:
                break
            if transfer.hit_policy is PoolHitPolicy.BLOCK_GROUPS:
                continue
            pool = self._pools.get(str(transfer.name))
            there = self._present(pool, keys[:pages]) if pool is not None else [False] * pages
            good = set(_restorable(there, transfer))
            if good:
                hits[transfer.name] = max(good)
            lengths = [n for n in lengths if n in good]
        return PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

    def _present(self, pool: _Pool, keys: Sequence[str]) -> list[bool]:
        return self.reads.present(pool.namespace.page_keys(bytes.fromhex(key) for key in keys)) if keys else []

    # -- loads, in the engine's input thread -------------------------------------------------------------------------

    @exactly("batch_get_v1", _no_page)
    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Decode pages into the host pool; page i starts at ``host_indices[i * page_size]``. Blocks until all that can
        come in time has come; what is True is complete and verified."""
        if not keys:
            return []
        pool = self._pools[str(PoolName.KV)]
        page_ids = pool.staged.page_ids(host_indices, len(keys))
        hashes = [bytes.fromhex(key) for key in keys]
        named = self.reads.request
        rid = named if named is not None else self.reads.nameless()
        start = time.perf_counter()
        try:
            page_keys = pool.namespace.page_keys(hashes)
            arrived = self.reads.load(rid, page_keys, hashes, pool.mover, pool.staged.hot, page_ids)
        finally:
            if named is None:
                self.reads.ended(rid)
        self._transfers.loaded(arrived, pool.staged.spec.hot_page_bytes, time.perf_counter() - start)
        return [True] * arrived + [False] * (len(keys) - arrived)

    @exactly("batch_get_v2", _no_page_of_any)
    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """As `batch_get_v1`, of pools beside; each page is of use by itself."""
        return {transfer.name: self._get_beside(transfer) for transfer in transfers}

    @exactly("batch_get_v2", lambda transfer: [False] * len(transfer.keys or []))
    def _get_beside(self, transfer: PoolTransfer) -> list[bool]:
        keys, pool = list(transfer.keys or []), self._pools.get(str(transfer.name))
        if not keys or pool is None:
            return [False] * len(keys)
        if str(transfer.name) == str(PoolName.KV):
            return self.batch_get_v1(keys, transfer.host_indices)
        page_ids = pool.staged.page_ids(transfer.host_indices, len(keys))
        page_keys = pool.namespace.page_keys(bytes.fromhex(key) for key in keys)
        return self.reads.load_beside(page_keys, pool.mover, pool.staged.hot, page_ids)

    # -- stores, in the engine's backup thread -----------------------------------------------------------------------

    @exactly("batch_set_v1", _no_page)
    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Encode pages from the host pool. Blocks until each is in a tier or given up: the engine then reuses them."""
        return self._set(self._pools[str(PoolName.KV)], keys, host_indices) if keys else []

    @exactly("batch_set_v2", _no_page_of_any)
    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """As `batch_set_v1`, of pools beside."""
        return {transfer.name: self._set_beside(transfer) for transfer in transfers}

    @exactly("batch_set_v2", lambda transfer: [False] * len(transfer.keys or []))
    def _set_beside(self, transfer: PoolTransfer) -> list[bool]:
        keys, pool = list(transfer.keys or []), self._pools.get(str(transfer.name))
        return self._set(pool, keys, transfer.host_indices) if keys and pool is not None else [False] * len(keys)

    def _set(self, pool: _Pool, keys: Sequence[str], host_indices: Any) -> list[bool]:
        page_ids = pool.staged.page_ids(host_indices, len(keys))
        hashes = [bytes.fromhex(key) for key in keys]
        self._store.wait_counted()
        start = time.perf_counter()
        result = pool.mover.offload(pool.staged.hot, hashes, page_ids).result()
        stored = [True] * len(keys)
        if not result.ok:  # it says how many, and the engine must know which
            page_keys = pool.namespace.page_keys(hashes)
            here = self._store.host.contains_many(page_keys)
            stored = [a or b for a, b in zip(here, self._store.known_below(page_keys), strict=True)]
        self._transfers.stored(sum(stored), pool.staged.spec.hot_page_bytes, time.perf_counter() - start)
        return stored

    # -- the interface of single copies, which the engine does not use with interface_v1 -----------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Nothing: pages are decoded into the host pool, not copied through a tensor of their own."""
        return

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        return [None] * len(keys)

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return False

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return False

    # -- on the scheduler's thread -----------------------------------------------------------------------------------

    @exactly("get_stats", lambda: StorageMetrics())
    def get_stats(self) -> StorageMetrics:
        """Pages per transfer, and GiB of hot pages per second, since the last call."""
        return self._transfers.take()

    @exactly("clear", lambda: None)
    def clear(self) -> None:
        """Delete what this engine's model has stored. Local tiers are searched for it; in a shared one it stays, but
        this engine does not find it again until it restarts."""
        self.reads.end_all()
        for tier in (self._store.host, *self._store.lower):
            found = [(key, meta.origin) for key, meta in tier.scan() if meta.origin]
            for pool in self._pools.values():
                ours = pool.namespace.page_keys(origin for _, origin in found)
                self._store.delete([key for (key, _), mine in zip(found, ours, strict=True) if key == mine])
        if any(tier.capabilities.shared for tier in self._store.lower):
            self._new_generation()

    @exactly("close", lambda: None)
    def close(self) -> None:
        """End all copying and close every tier. Every question is answered with nothing from now on."""
        if self._closed:
            return
        self._closed = True
        give_up = time.monotonic() + _CLOSE_S
        self.reads.end_all()
        for pool in self._pools.values():
            pool.mover.close(_CLOSE_S / 2 / len(self._pools))
        self._store.close(max(0.05, give_up - time.monotonic()))
        if self._http is not None:
            self._http.close()

    @exactly("weights_changed", lambda: None)
    def weights_changed(self) -> None:
        """Pages stored until now belong to weights that are gone: look none of them up again."""
        self._new_generation()
        self._weights_changed = True

    @exactly("cache_reset", lambda: None)
    def cache_reset(self) -> None:
        """The engine forgot its cache. What was stored since an update of the weights may rest on what the old ones had
        computed."""
        self.reads.end_all()
        if self._weights_changed:
            self._new_generation()
            self._weights_changed = False

    @exactly("requests", lambda *_: None)
    def batch_built(self, started: Sequence[str], waiting: Callable[[], Collection[str]]) -> None:
        """Requests start; those that are in no queue any more are let go."""
        for rid in started:
            self.reads.ended(rid)
        if self.reads.open:
            self.reads.keep(waiting())

    @exactly("requests", lambda *_: None)
    def request_dropped(self, rid: str) -> None:
        """The request was aborted. A load under way keeps its pins until it ends."""
        self.reads.ended(rid)

    @exactly("requests", lambda *_: None)
    def prefilled(self, tokens: int, seconds: float) -> None:
        """So many prompt tokens were computed in that time: for the break-even rule."""
        self._store.break_even.prefilled(tokens, seconds)

    def count_error(self, where: str) -> None:
        """Count and log the exception being handled, which the engine does not see."""
        self.ledger.error("engine")
        _log.exception("kvtier: %s failed, the engine goes on without it", where)

    def _new_generation(self) -> None:
        if self._closed:
            return
        self.reads.end_all()
        self._generation = self._generations.next()
        for name, pool in list(self._pools.items()):
            pool.mover.close()
            namespace = replace(pool.namespace, generation=self._generation)
            self._pools[name] = self._open_pool(name, pool.staged, pool.codec, namespace)


def _restorable(there: Sequence[bool], transfer: PoolTransfer) -> list[int]:
    """Lengths of prefixes for which a pool beside has what its policy asks for."""
    if transfer.hit_policy is PoolHitPolicy.ALL_PAGES:
        reach = there.index(False) if False in there else len(there)
        return list(range(1, reach + 1))
    window = max(1, len(transfer.keys or []))
    return [n for n in range(1, len(there) + 1) if all(there[max(0, n - window) : n])]
