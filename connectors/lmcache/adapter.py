"""The L2 adapter for ``lmcache server``: LMCache's chunks in kvtier's tiers. Contract: LMCache 0.5.6,
`lmcache/v1/distributed/l2_adapters/base.py`.

LMCache calls from two threads of its own, in which an exception loses a task for ever and a wait holds up every other
adapter. So nothing here blocks or raises: each call catches everything, counts it, and answers what makes LMCache
compute. A lookup is answered once its chunks are verified and pinned in host memory, or its deadline has passed.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, TypeVar

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyEntry, KeyListPage, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.mp_observability.event import EventType

from kvtier.connectors.lmcache.catalogue import Known
from kvtier.connectors.lmcache.chunk_store import ChunkStore, Found
from kvtier.connectors.lmcache.chunks import Chunk, ChunkLayout, object_chunks, object_layout
from kvtier.connectors.lmcache.identity import decode_key, encode_key, salt_of
from kvtier.connectors.lmcache.leases import Held, Leases
from kvtier.connectors.lmcache.options import HELP, AdapterOptions
from kvtier.connectors.lmcache.tasks import TaskBoard

_log = logging.getLogger(__name__)

_EXPIRE_EVERY_S = 5.0
_NO_LIMIT_BYTES = 1 << 60
P = ParamSpec("P")
R = TypeVar("R")


class KvtierL2AdapterConfig(L2AdapterConfigBase):
    """`adapter_params` of ``--l2-adapter``."""

    def __init__(self, options: AdapterOptions) -> None:
        self.options = options

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> KvtierL2AdapterConfig:
        """Raises ConfigError, which is a ValueError, for a mistake in the parameters."""
        return cls(AdapterOptions.of(d))

    @classmethod
    def help(cls) -> str:
        return HELP


def _guarded(
    fallback: Callable[[], Any],
) -> Callable[[Callable[Concatenate[KvtierL2Adapter, P], R]], Callable[Concatenate[KvtierL2Adapter, P], R]]:
    """Catch everything, count it, answer `fallback()`."""

    def wrap(method: Callable[Concatenate[KvtierL2Adapter, P], R]) -> Callable[Concatenate[KvtierL2Adapter, P], R]:
        @wraps(method)
        def guarded(self: KvtierL2Adapter, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - see the module's docstring
                self.count_error(method.__name__, error)
                answer: R = fallback()
                return answer

        return guarded

    return wrap


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A lookup that waits for pages on their way up; `go` when they are there or time is over."""

    found: Found
    go: Callable[[], object]
    give_up: Callable[[], object]


class KvtierL2Adapter(L2AdapterInterface):
    """See the module's docstring. `config` comes from `KvtierL2AdapterConfig`."""

    def __init__(self, config: KvtierL2AdapterConfig, l1_memory_desc: Any = None) -> None:
        super().__init__()
        self._options = config.options
        self._tasks = itertools.count()
        self._stores: TaskBoard[L2StoreResult] = TaskBoard()
        self._lookups: TaskBoard[Bitmap] = TaskBoard()
        self._loads: TaskBoard[Bitmap] = TaskBoard()
        self._arrival = threading.Condition()
        self._waiting: dict[_Waiting, float] = {}  # until when; monotonic seconds
        self._closed = False
        # So often that who begins to wait need not wake the thread: it looks again before that one's deadline.
        block = self._options.config
        self._look_every_s = min(_EXPIRE_EVERY_S, block.lease / 4, block.promote_deadline)
        self._bytes_by_salt: dict[str, int] = {}
        self._chunks = ChunkStore(self._options, on_stored=self._tell_stored, on_removed=self._tell_removed)
        self._leases = Leases(self._options.config.lease, self._chunks.release)
        self._waiter = threading.Thread(target=self._wait, name="kvtier-lmcache-wait", daemon=True)
        self._waiter.start()

    # -- events ------------------------------------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        return self._stores.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.fileno()

    def get_load_event_fd(self) -> int:
        return self._loads.fileno()

    # -- store -------------------------------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        """Store `objects`, which LMCache keeps until the task's result was posted."""
        task = next(self._tasks)
        self._stores.begin(task, L2StoreResult(False, 0))
        if not self._start_store(task, keys, objects):
            self._stores.fail(task)
        return task

    @_guarded(bool)
    def _start_store(self, task: int, keys: list[ObjectKey], objects: list[Any]) -> bool:
        chunks = self._chunks_of(objects)
        there = [(encode_key(key), chunk) for key, chunk in zip(keys, chunks, strict=True) if chunk is not None]

        def done(ok: bool, fresh: list[bool]) -> None:
            ok = ok and len(there) == len(keys)
            moved = sum(chunk.layout.nbytes for (_, chunk), new in zip(there, fresh, strict=True) if new)
            self._stores.finish(task, L2StoreResult(ok, moved if ok else 0))

        self._chunks.offload([key for key, _ in there], [chunk for _, chunk in there], done)
        return True

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.pop_all()

    # -- lookup ------------------------------------------------------------------------------------------------------

    def submit_lookup_and_lock_task(self, keys: list[ObjectKey], group_layout_descs: Mapping[int, Any]) -> int:
        """Find chunks and pin them. What lies below host memory is promoted meanwhile."""
        task = next(self._tasks)
        self._lookups.begin(task, Bitmap(len(keys)))
        if not self._start_lookup(task, keys, group_layout_descs):
            self._lookups.fail(task)
        return task

    @_guarded(bool)
    def _start_lookup(self, task: int, keys: list[ObjectKey], descs: Mapping[int, Any]) -> bool:
        layouts = {group: self._layout_of(descs.get(group)) for group in {key.object_group_id for key in keys}}
        found = self._chunks.find([layouts[key.object_group_id] for key in keys], [encode_key(key) for key in keys])
        self._when_there(found, partial(self._answer, task, keys, found), partial(self._lookups.fail, task))
        return True

    def _answer(self, task: int, keys: list[ObjectKey], found: Found) -> None:
        ready = found.ready
        if not ready or self._closed:
            self._chunks.release(found, ())
            self._lookups.fail(task)
            return
        bitmap = Bitmap(len(keys))
        bitmap.batched_set(ready)
        self._leases.add(keys, found, ready)
        self._lookups.finish(task, bitmap)

    def _when_there(self, found: Found, go: Callable[[], object], give_up: Callable[[], object]) -> None:
        """Call `go` when nothing that `found` could gain is on its way any more, or its deadline has passed. `give_up`
        is called instead where that fails."""
        waiting = _Waiting(found, go, give_up)
        with self._arrival:
            waits = not self._closed
            if waits:
                self._waiting[waiting] = found.lookup.deadline
        if waits and not self._chunks.store.when_there(found.lookup, partial(self._there, waiting)):
            with self._arrival:
                waits = self._waiting.pop(waiting, None) is None  # the adapter was closed, and has ended it
        if not waits:
            self._end_waiting(waiting)

    def _there(self, waiting: _Waiting) -> None:
        """In the thread that brings the last page, which has other things to do."""
        with self._arrival:
            if waiting in self._waiting:
                self._waiting[waiting] = 0.0
                self._arrival.notify()

    def _wait(self) -> None:
        while not self._closed:
            try:
                self._wait_once()
            except Exception as error:  # noqa: BLE001, PERF203 - no other thread answers lookups that wait
                self.count_error("lookup", error)
                with self._arrival:
                    waiting, self._waiting = self._waiting, {}
                for w in waiting:
                    self._end_waiting(w)

    def _wait_once(self) -> None:
        with self._arrival:
            soonest = min(self._waiting.values(), default=math.inf)
            left = min(self._look_every_s, soonest - time.monotonic())
            if left > 0 and not self._closed:
                self._arrival.wait(left)
            if self._closed:
                return
            now = time.monotonic()
            over = [w for w, until in self._waiting.items() if until <= now]
            for w in over:
                del self._waiting[w]
        for w in over:
            self._end_waiting(w)
        self._expire()

    @_guarded(lambda: None)
    def _expire(self) -> None:
        ended = self._leases.expire()
        if ended:
            _log.warning("kvtier: %d lookups were neither loaded nor unlocked within the lease, and are let go", ended)

    def _end_waiting(self, waiting: _Waiting) -> None:
        try:
            waiting.go()
        except Exception as error:  # noqa: BLE001 - the thread serves other tasks, and this one must be answered
            self.count_error("lookup", error)
            waiting.give_up()

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.pop(task_id)

    @_guarded(lambda: None)
    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Let go of chunks that were looked up, and were loaded or will not be."""
        for held, pages in self._leases.unlock(keys).items():
            self._leases.end(held, len(pages))

    # -- load --------------------------------------------------------------------------------------------------------

    def submit_load_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        """Decode chunks into `objects`, which LMCache keeps until the task's result was posted."""
        task = next(self._tasks)
        self._loads.begin(task, Bitmap(len(keys)))
        if not self._start_load(task, keys, objects):
            self._loads.fail(task)
        return task

    @_guarded(bool)
    def _start_load(self, task: int, keys: list[ObjectKey], objects: list[Any]) -> bool:
        chunks = self._chunks_of(objects)
        if len(chunks) != len(keys):
            raise ValueError(f"{len(keys)} keys and {len(chunks)} objects")
        taken = self._leases.load(keys)
        if not taken:
            return self._find_and_load(task, keys, chunks)
        bitmap = Bitmap(len(keys))
        left = len(taken)
        lock = threading.Lock()

        def arrived(held: Held, places: dict[int, int], pages: set[int]) -> None:
            nonlocal left
            with lock:
                bitmap.batched_set([places[page] for page in pages])
                left -= 1
                over = left == 0
            try:
                self._leases.end(held, len(places), pages)
            except Exception as error:  # noqa: BLE001 - the task must be answered
                self.count_error("load", error)
            if over:
                self._tell_accessed(keys, bitmap)
                self._loads.finish(task, bitmap)

        for held, places in taken.items():
            there = {page: chunk for page, at in places.items() if (chunk := chunks[at]) is not None}
            self._load(held.found, list(there), list(there.values()), partial(arrived, held, places))
        return True

    def _load(self, found: Found, pages: list[int], chunks: list[Chunk], arrived: Callable[[set[int]], object]) -> None:
        """Always ends in `arrived`: with nothing, where the lease of the lookup ended before."""
        if not self._chunks.store.hold(found.lookup):
            arrived(set())
            return
        self._chunks.onboard(found, pages, chunks, arrived)

    def _find_and_load(self, task: int, keys: list[ObjectKey], chunks: Sequence[Chunk | None]) -> bool:
        """A load without a lookup before it."""
        there = [i for i, chunk in enumerate(chunks) if chunk is not None]
        whole = [chunk for chunk in chunks if chunk is not None]
        found = self._chunks.find([chunk.layout for chunk in whole], [encode_key(keys[i]) for i in there])

        def arrived(pages: set[int]) -> None:
            try:
                self._chunks.release(found, pages)
            except Exception as error:  # noqa: BLE001 - the task must be answered
                self.count_error("load", error)
            bitmap = Bitmap(len(keys))
            bitmap.batched_set([there[n] for n in pages])
            self._tell_accessed(keys, bitmap)
            self._loads.finish(task, bitmap)

        def go() -> None:
            ready = found.ready
            self._load(found, ready, [whole[n] for n in ready], arrived)

        self._when_there(found, go, lambda: arrived(set()))
        return True

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loads.pop(task_id)

    # -- what is there -----------------------------------------------------------------------------------------------

    @_guarded(lambda: None)
    def delete(self, keys: list[ObjectKey]) -> None:
        """Remove chunks from every tier. Listeners hear of those that were there."""
        self._chunks.delete([encode_key(key) for key in keys])

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """Chunks in the tiers of this node, in the order of their page keys; those that are only in a shared tier are
        not listed. ValueError for a bad `page_size` or `cursor`."""
        if page_size < 1:
            raise ValueError(f"page_size = {page_size}: must be at least 1")
        after = bytes.fromhex(cursor) if cursor else b""
        entries: list[tuple[bytes, KeyEntry]] = []
        while True:
            some = self._chunks.catalogue.behind(after, page_size + 1)
            for key, known in some:
                told = _object_key(known.origin)
                if told is not None and model_name in (None, told.model_name):
                    entries.append((key, KeyEntry(told.to_encoded_object_key(), known.nbytes)))
            if len(entries) > page_size:
                return KeyListPage(tuple(entry for _, entry in entries[:page_size]), entries[page_size - 1][0].hex())
            if len(some) <= page_size:
                return KeyListPage(tuple(entry for _, entry in entries), None)
            after = some[-1][0]

    def get_usage(self) -> AdapterUsage:
        """Bytes in the tiers, each counted with its own copy; by tenant, what its chunks are long, counted once.
        The capacity is 0, as LMCache has it, where one of them has no limit."""
        usages = [tier.usage() for tier in (self._chunks.store.host, *self._chunks.store.lower)]
        capacity = sum(u.capacity_bytes for u in usages)
        return AdapterUsage(
            total_bytes_used=sum(u.used_bytes for u in usages),
            total_capacity_bytes=capacity if capacity < _NO_LIMIT_BYTES else 0,
            bytes_by_cache_salt=MappingProxyType(self._bytes_by_salt.copy()),
        )

    @_guarded(lambda: {"is_healthy": False, "type": "KvtierL2Adapter"})
    def report_status(self) -> dict[str, Any]:
        """For LMCache's ``/status``: the accounting by tier, and whether a tier is out of use."""
        ledger = self._chunks.ledger.snapshot()
        tiers = {t.name: t.usage() for t in (self._chunks.store.host, *self._chunks.store.lower)}
        return {
            "is_healthy": not self._closed,
            "type": "KvtierL2Adapter",
            "instance": self._options.instance,
            "attention": self._options.attention.value,
            "open_lookups": len(self._chunks.store.open_requests()),
            "tiers": {
                name: {
                    "hits": ledger.hits.get(name, 0),
                    "resident_chunks": usage.resident_pages,
                    "used_bytes": usage.used_bytes,
                    "capacity_bytes": usage.capacity_bytes,
                    "evicted_chunks": usage.evicted_pages,
                    "quarantined_chunks": usage.quarantined_pages,
                }
                for name, usage in tiers.items()
            },
            **ledger.as_dict(),
        }

    def count_error(self, where: str, error: BaseException) -> None:
        """Count and log an exception that LMCache does not see."""
        self._chunks.ledger.error("engine")
        _log.error("kvtier: %s failed, LMCache goes on without it", where, exc_info=error)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until every chunk that a lower tier is to have was written there; False on timeout. LMCache does not
        call this."""
        return self._chunks.store.flush(timeout_s)

    def close(self) -> None:
        """End all copying, answer what is open with nothing, close every tier."""
        with self._arrival:
            if self._closed:
                return
            self._closed = True
            waiting, self._waiting = self._waiting, {}
            self._arrival.notify_all()
        for left in waiting:
            left.give_up()
        if self._waiter is not threading.current_thread():
            self._waiter.join(1.0)
        try:
            self._chunks.close()
        except Exception as error:  # noqa: BLE001 - the tasks that are open must be answered all the same
            self.count_error("close", error)
        for board in (self._stores, self._lookups, self._loads):
            board.close()

    def _layout_of(self, desc: Any) -> ChunkLayout:
        return object_layout(desc, self._options.attention, self._options.rope_dim)

    def _chunks_of(self, objects: Sequence[Any]) -> list[Chunk | None]:
        return object_chunks(objects, self._options.attention, self._options.rope_dim)

    # -- what LMCache is told ----------------------------------------------------------------------------------------

    def _heard(self, event: EventType) -> bool:
        """Whether anybody listens: an eviction policy of LMCache's, or its coordinator."""
        return bool(self._listeners) or self._event_bus.has_subscribers(event)

    @_guarded(lambda: None)
    def _tell_stored(self, known: Sequence[Known]) -> None:
        self._count_by_salt(known, 1)
        if self._heard(EventType.L2_KEYS_STORED):
            keys, sizes = _told(known)
            if keys:
                self._notify_keys_stored(keys, sizes)

    @_guarded(lambda: None)
    def _tell_removed(self, known: Sequence[Known]) -> None:
        self._count_by_salt(known, -1)
        if self._heard(EventType.L2_KEYS_DELETED):
            keys, sizes = _told(known)
            if keys:
                # LMCache's own sum knows only what was stored since somebody listens, and warns below 0.
                self._notify_keys_deleted(keys, [0] * len(sizes))

    @_guarded(lambda: None)
    def _tell_accessed(self, keys: list[ObjectKey], loaded: Bitmap) -> None:
        if self._heard(EventType.L2_KEYS_ACCESSED):
            accessed = [key for i, key in enumerate(keys) if loaded.test(i)]
            if accessed:
                self._notify_keys_accessed(accessed)

    def _count_by_salt(self, known: Sequence[Known], sign: int) -> None:
        """In one thread at a time: the catalogue's listeners are told one after the other."""
        counted = self._bytes_by_salt
        for origin, nbytes in known:
            salt = salt_of(origin)
            if salt is not None:
                counted[salt] = counted.get(salt, 0) + sign * nbytes
                if not counted[salt]:
                    del counted[salt]


def _told(known: Sequence[Known]) -> tuple[list[ObjectKey], list[int]]:
    pairs = [(key, k.nbytes) for k in known if (key := _object_key(k.origin)) is not None]
    return [key for key, _ in pairs], [nbytes for _, nbytes in pairs]


def _object_key(origin: bytes) -> ObjectKey | None:
    parts = decode_key(origin)
    return None if parts is None else ObjectKey(*parts)
