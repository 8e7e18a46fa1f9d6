"""Chunks in kvtier's tiers: a store, and a mover for each layout of chunks that is met.

Keys are given with each call as bytes (`identity.encode_key`), chunks as addresses in memory. Thread-safe.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from prometheus_client import Gauge

from kvtier.abc.codec import Codec
from kvtier.abc.tier import Removal
from kvtier.build import open_codec, open_store
from kvtier.codecs.registry import codec
from kvtier.config import PRIORITIES
from kvtier.connectors.lmcache.catalogue import Catalogue, Known
from kvtier.connectors.lmcache.chunks import SAMPLE, Attention, Chunk, ChunkLayout, plain_layout
from kvtier.connectors.lmcache.gate import Gate, Passage
from kvtier.connectors.lmcache.identity import namespace_of
from kvtier.connectors.lmcache.options import LENT_S, AdapterOptions
from kvtier.errors import ConfigError
from kvtier.keys import Namespace
from kvtier.ledger import OffloadOutcome
from kvtier.lookup import UNPINNED, Lookup
from kvtier.mover import PageMover, policy_of
from kvtier.server.http import HttpExporter, HttpOptions
from kvtier.server.page import StatusPage
from kvtier.server.probe import store_ready
from kvtier.store import TieredStore
from kvtier.tickets import OffloadResult, OnboardResult

_log = logging.getLogger(__name__)
T = TypeVar("T")

_MOST_LAYOUTS = 64
"""Layouts served at a time: each has threads of its own."""
_CLOSE_S = 1.5
_LEAVE_S = 10.0
"""How long `close` waits for a job in LMCache's memory: if that is unmapped before it is out, the process crashes."""
_FILL_S = 30.0
"""What a job takes at most that has begun and has room, on a machine that is busy."""
_JOB_BYTES = 16 << 20
"""What one job moves: workers share the rest, and `close` waits for at most one per worker."""
_PROBE_BYTES = 1 << 16
"""What ``/readyz`` puts and gets: the size of chunks is not known before the first one."""
_UNKNOWN = plain_layout(1)
"""Stands for every chunk of which LMCache tells no shape."""


@dataclass(frozen=True, slots=True)
class Found:
    """A lookup of chunks. layouts: as asked for. pages: index of each chunk in `lookup`, which has one page for a chunk
    that is asked for twice. hashes: of the pages of `lookup`."""

    lookup: Lookup
    layouts: Sequence[ChunkLayout]
    pages: Sequence[int]
    hashes: Sequence[bytes]

    @property
    def ready(self) -> list[int]:
        """Chunks that are verified and pinned in host memory."""
        pins = self.lookup.pins
        return [i for i, page in enumerate(self.pages) if pins[page] != UNPINNED]


class ChunkStore:
    """See the module's docstring. on_stored, on_removed: told the chunks that came into the tiers, and those that are
    in none of them any more; in a worker's thread. rank, ranks: where each of several processes of a node has tiers of
    its own."""

    def __init__(
        self,
        options: AdapterOptions,
        *,
        rank: int = 0,
        ranks: int = 1,
        on_stored: Callable[[Sequence[Known]], object] = lambda known: None,
        on_removed: Callable[[Sequence[Known]], object] = lambda known: None,
    ) -> None:
        self.options = options
        self._config = options.config
        if self._config.kv_events is not None:
            raise ConfigError(
                "kv_events: LMCache names chunks by hashes of its own, which are no engine's block hashes; leave it "
                "out, and have LMCache publish its events"
            )
        if options.attention is not Attention.NONE:
            self._codec(SAMPLE)  # what is wrong with it is told now, not with every chunk
        self.catalogue = Catalogue(on_stored, on_removed)
        self._gate = Gate()
        self._lock = threading.Lock()
        self._movers: dict[ChunkLayout, PageMover] = {}
        self._namespaces: dict[ChunkLayout, Namespace] = {}
        self._numbers = itertools.count()
        self._removals = itertools.count(1)
        self._last_removal = 0
        self._closed = False
        self._too_large: set[int] = set()
        self.store: TieredStore = open_store(
            self._config, shard="lmcache", rank=rank, ranks=ranks, on_removed=self._removed
        )
        self._shared = {tier.name for tier in self.store.lower if tier.capabilities.shared}
        self.ledger = self.store.ledger
        # Not "instance", which is Prometheus's own label for where it asked.
        told = self.ledger.registry
        name = Gauge("kvtier_adapter_info", "The adapter whose metrics these are", ["adapter"], registry=told)
        name.labels(options.instance).set(1)
        self._http: HttpExporter | None = None
        try:
            for tier in self.store.lower:
                if not tier.capabilities.shared:
                    self.catalogue.add((key, Known(meta.origin, meta.nbytes)) for key, meta in tier.scan())
            if self._config.http is not None:
                self._http = HttpExporter(
                    self.ledger.registry,
                    HttpOptions.of(self._config.http),
                    rank=rank,
                    ready=lambda: store_ready(self.store, _PROBE_BYTES),
                    page=StatusPage(self.ledger.registry, self._config, lambda: self.store.observer),
                )
                _log.info("kvtier metrics on %s/metrics", self._http.url)
        except BaseException:
            self.store.close()
            raise
        if options.attention is Attention.NONE and self._config.cold_page is not None:
            _log.warning(
                "kvtier stores LMCache's chunks as they are: set attention to vllm, sglang or mla to have them smaller"
            )

    # -- keys --------------------------------------------------------------------------------------------------------

    def keys_of(self, layout: ChunkLayout, hashes: Sequence[bytes]) -> list[bytes]:
        """Page keys of chunks of one layout."""
        return self._namespace(layout).page_keys(hashes)

    def _namespace(self, layout: ChunkLayout) -> Namespace:
        layout = _keyed_by(layout)
        with self._lock:
            known = self._namespaces.get(layout)
            if known is None:
                known = self._namespaces[layout] = namespace_of(
                    layout,
                    policy_of(self._codec(layout)),
                    weights=self.options.weights,
                    salt=self._config.salt,
                )
            return known

    def _codec(self, layout: ChunkLayout) -> Codec:
        quantizes = any(b.compressible for b in layout.spec.buffers)
        return open_codec(self._config, layout.spec) if quantizes else codec("raw")

    def _mover(self, layout: ChunkLayout) -> PageMover:
        layout = layout.whole or layout
        namespace = self._namespace(layout)
        with self._lock:
            mover = self._movers.pop(layout, None)
            if mover is None:
                mover = PageMover(
                    self.store,
                    layout.spec,
                    namespace,
                    self._codec(layout),
                    workers=self._config.workers,
                    offload_wait_s=self._config.offload_wait,
                    priority=PRIORITIES[self._config.priority],
                )
            self._movers[layout] = mover  # the last one used is the last one let go
            last = next(iter(self._movers)) if len(self._movers) > _MOST_LAYOUTS else None
            surplus = self._movers.pop(last) if last is not None else None
        if surplus is not None:
            surplus.close(0.0)  # what it has queued ends by itself
        return mover

    # -- store, find, load -------------------------------------------------------------------------------------------

    def offload(
        self, hashes: Sequence[bytes], chunks: Sequence[Chunk], done: Callable[[bool, list[bool]], object]
    ) -> None:
        """Store chunks, of which a last one may be partial (`Chunk.tokens`); ``done(all went well, which were new)``
        follows, in a worker's thread. The memory must not change until then. A chunk that is not begun with before
        LMCache may take its memory back fails."""
        parts = _in_pools(chunks)
        movers = [self._mover(layout) for layout, _ in parts]  # what can fail comes before the first one reads
        pools = [layout.pool([chunks[i] for i in members]) for layout, members in parts]
        until = time.monotonic() + LENT_S - self._config.offload_wait - _FILL_S
        gather: _Gather[OffloadResult] = _Gather(
            len(parts), lambda results: self._offloaded(results, hashes, parts, done)
        )
        for n, ((layout, members), mover, (pool, ids)) in enumerate(zip(parts, movers, pools, strict=True)):
            passage = self._gate.passage(until)
            valid = [chunks[i].tokens or layout.spec.page_tokens for i in members]
            try:
                ticket = mover.offload(pool, [hashes[i] for i in members], ids, valid_tokens=valid, ready=passage.enter)
            except Exception as error:  # noqa: BLE001 - counted; the other parts may be reading already
                self._count("engine", "a store could not be started", error)
                gather.put(n, OffloadResult({OffloadOutcome.FAILED: len(members)}))
                continue
            ticket.then(partial(_leave, passage, partial(gather.put, n)))

    def _offloaded(
        self,
        results: Sequence[OffloadResult],
        hashes: Sequence[bytes],
        parts: Sequence[tuple[ChunkLayout, list[int]]],
        done: Callable[[bool, list[bool]], object],
    ) -> None:
        """Always ends in `done`."""
        fresh = [False] * len(hashes)
        ok = all(result.ok for result in results)
        try:
            for (layout, members), result in zip(parts, results, strict=True):
                if OffloadOutcome.TOO_LARGE in result.outcomes:
                    self._tell_too_large(layout.nbytes)
                keys = self.keys_of(layout, [hashes[i] for i in members])
                for i, new in zip(members, self._enter(keys, [hashes[i] for i in members]), strict=True):
                    fresh[i] = new
        except Exception as error:  # noqa: BLE001 - counted; the chunks are stored, if they are
            self._count("engine", "stored chunks could not be listed", error)
        done(ok, fresh)

    def _tell_too_large(self, nbytes: int) -> None:
        """Once for each size."""
        if nbytes not in self._too_large:
            self._too_large.add(nbytes)
            _log.warning(
                "kvtier: a chunk of %d bytes is not stored: it does not fit into the host tier, tiers[0].capacity = %d "
                "bytes; give that more, or LMCache a smaller chunk size",
                nbytes,
                self.store.host.usage().capacity_bytes,
            )

    def _enter(self, keys: Sequence[bytes], hashes: Sequence[bytes]) -> list[bool]:
        """List those of these chunks that are in a tier of this node; which were not listed before."""
        before = self._last_removal
        nbytes = self._lengths(keys)
        here = [i for i, n in enumerate(nbytes) if n >= 0]
        added = self.catalogue.add([(keys[i], Known(hashes[i], nbytes[i])) for i in here])
        fresh = [False] * len(keys)
        for i, new in zip(here, added, strict=True):
            fresh[i] = new
        if self._last_removal != before:
            # One that left between the two was not listed yet when that was told.
            self._forget_absent([keys[i] for i in here if fresh[i]])
        return fresh

    def _lengths(self, keys: Sequence[bytes]) -> list[int]:
        """Bytes of chunks in a tier of this node; negative where none is known to have them."""
        found = list(self.store.host.length_many(keys))
        for tier in self.store.lower:
            left = [i for i, n in enumerate(found) if n < 0] if not tier.capabilities.shared else []
            for i, n in zip(left, tier.length_many([keys[i] for i in left]), strict=True):
                found[i] = n
        return found

    def find(self, layouts: Sequence[ChunkLayout], hashes: Sequence[bytes]) -> Found:
        """Look chunks up, each of use by itself; pins what is in host memory and starts the promotion of the rest.
        `release` must follow."""
        keys: list[bytes] = [b""] * len(hashes)
        keyed = [_keyed_by(layout) for layout in layouts]
        for layout, members in _by_layout(keyed).items():
            for i, key in zip(members, self.keys_of(layout, [hashes[i] for i in members]), strict=True):
                keys[i] = key
        pages: Sequence[int] = range(len(keys))
        hash_of = dict(zip(keys, hashes, strict=True))
        if len(hash_of) < len(keys):
            at = {key: n for n, key in enumerate(hash_of)}
            pages = [at[key] for key in keys]
        lookup = self.store.lookup(f"lmcache-{next(self._numbers)}", list(hash_of), sparse=True)
        return Found(lookup, keyed, pages, list(hash_of.values()))

    def onboard(
        self, found: Found, wanted: Sequence[int], chunks: Sequence[Chunk], done: Callable[[set[int]], object]
    ) -> None:
        """Load chunks `wanted` (indices in `found`) into memory; ``done(those that arrived)`` follows, always. A chunk
        found bad leaves the tiers, and the others are loaded all the same; so are those for which there is memory of
        another layout than was asked for."""
        fits = [n for n, i in enumerate(wanted) if _keyed_by(chunks[n].layout) is found.layouts[i]]
        parts = _in_pools([chunks[n] for n in fits])
        gather: _Gather[set[int]] = _Gather(len(parts), lambda arrived: done(set().union(*arrived)))
        for part, (layout, members) in enumerate(parts):
            some, memory = [wanted[fits[i]] for i in members], [chunks[fits[i]] for i in members]
            self._onboard(found, layout, some, memory, partial(gather.put, part))

    def _onboard(
        self,
        found: Found,
        layout: ChunkLayout,
        wanted: list[int],
        chunks: list[Chunk],
        done: Callable[[set[int]], object],
    ) -> None:
        """Always ends in `done`: whoever waits for the other parts waits for this one too."""
        passage = self._gate.passage()

        def loaded(result: OnboardResult) -> None:
            if result.ok or not result.failed_pages:
                done(set(wanted) if result.ok else set())
                return
            good = [n for n, i in enumerate(wanted) if found.pages[i] not in result.failed_pages]
            self._drop(found.lookup, result.failed_pages)
            self._onboard(found, layout, [wanted[n] for n in good], [chunks[n] for n in good], done)

        if not wanted:
            done(set())
            return
        try:
            pool, ids = layout.pool(chunks)
            pages = [found.pages[i] for i in wanted]
            ticket = self._mover(layout).onboard(found.lookup, pool, ids, pages=pages, ready=passage.enter)
        except Exception as error:  # noqa: BLE001 - counted; nothing of this part was loaded
            self._count("load", "a load could not be started", error)
            done(set())
            return
        ticket.then(partial(_leave, passage, loaded))

    def _drop(self, lookup: Lookup, pages: Sequence[int]) -> None:
        """Remove chunks that are bad in host memory from below it too, so that they are stored again."""
        try:
            self.store.delete([lookup.keys[page] for page in pages])
        except Exception as error:  # noqa: BLE001 - the store is closing
            self._count("load", "a bad chunk could not be deleted", error)

    def _count(self, site: str, what: str, error: BaseException) -> None:
        self.ledger.error(site)
        _log.error("kvtier: %s", what, exc_info=error)

    def release(self, found: Found, used: Iterable[int]) -> None:
        """The request is over, and used these of its chunks: count them and let go of the pins."""
        lookup, pages = found.lookup, {found.pages[i] for i in used}
        try:
            self._enter_arrived(found)
        except Exception as error:  # noqa: BLE001 - counted; other lookups wait behind this one to be let go of
            self._count("engine", "chunks that arrived could not be listed", error)
        finally:
            unused = [page for page, pin in enumerate(lookup.pins) if pin != UNPINNED and page not in pages]
            self.store.give_back(lookup, unused)
            self.store.settle(lookup.request_id)

    def _enter_arrived(self, found: Found) -> None:
        """List what came from a tier that several machines share: now it is here too."""
        lookup = found.lookup
        came = [
            page
            for page, name in list(lookup.origins.items())
            if name in self._shared and lookup.pins[page] != UNPINNED and lookup.keys[page] not in self.catalogue
        ]
        if came:
            self._enter([lookup.keys[page] for page in came], [found.hashes[page] for page in came])

    def delete(self, hashes: Sequence[bytes]) -> None:
        """Remove chunks from every tier, of whatever layout they are."""
        with self._lock:
            layouts = list(self._namespaces)
        keys = self.catalogue.stored_under(hashes)
        for layout in layouts:
            keys.update(self.keys_of(layout, hashes))
        self.store.delete(sorted(keys))

    # -- what is there -----------------------------------------------------------------------------------------------

    def known(self) -> list[tuple[bytes, Known]]:
        """Every chunk in a tier of this node, by page key."""
        return self.catalogue.behind(b"", len(self.catalogue))

    def _removed(self, keys: Sequence[bytes], removal: Removal) -> None:
        self._last_removal = next(self._removals)  # before it is seen which of them are listed
        self._forget_absent([key for key in keys if key in self.catalogue])

    def _forget_absent(self, keys: Sequence[bytes]) -> None:
        """Take those of these chunks that no tier of this node has any more off the list."""
        if not keys:
            return
        here = self.store.host.contains_many(keys)
        below = self.store.known_below(keys)
        self.catalogue.remove([key for key, a, b in zip(keys, here, below, strict=True) if not (a or b)])

    def close(self) -> None:
        """End all copying and close every tier; from then on nobody touches memory of LMCache's. What is queued fails,
        what has begun ends. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            movers = list(self._movers.values())
        self._gate.shut()
        self.store.stop_waiting()
        if not self._gate.wait(_LEAVE_S):
            _log.error("kvtier: closed while chunks were still being copied")
        give_up = time.monotonic() + _CLOSE_S
        for mover in movers:
            mover.close(max(0.05, (give_up - time.monotonic()) / 2))
        self.store.close(max(0.05, give_up - time.monotonic()))
        if self._http is not None:
            self._http.close()


def _leave(passage: Passage, then: Callable[[T], object], result: T) -> None:
    passage.leave()
    then(result)


def _keyed_by(layout: ChunkLayout) -> ChunkLayout:
    """The layout by which the keys of a chunk are made."""
    return (layout.whole or layout) if layout.known else _UNKNOWN


class _Gather(Generic[T]):
    """Calls `done` with all results once the last of `parts` is there."""

    def __init__(self, parts: int, done: Callable[[list[T]], object]) -> None:
        self._results: dict[int, T] = {}
        self._parts, self._done = parts, done
        self._lock = threading.Lock()
        if not parts:
            done([])

    def put(self, part: int, result: T) -> None:
        with self._lock:
            self._results[part] = result
            complete = len(self._results) == self._parts
        if complete:
            self._done([self._results[n] for n in range(self._parts)])


def _by_layout(layouts: Sequence[ChunkLayout]) -> dict[ChunkLayout, list[int]]:
    """Indices by layout, in order."""
    parts: dict[ChunkLayout, list[int]] = {}
    for i, layout in enumerate(layouts):
        parts.setdefault(layout, []).append(i)
    return parts


def _in_pools(chunks: Sequence[Chunk]) -> list[tuple[ChunkLayout, list[int]]]:
    """Indices of the chunks that go through one pool, with its layout: so many of one, and each partial one by
    itself."""
    whole = [i for i, chunk in enumerate(chunks) if chunk.layout.whole is None]
    parts: list[tuple[ChunkLayout, list[int]]] = []
    for layout, members in _by_layout([chunks[i].layout for i in whole]).items():
        most = max(1, _JOB_BYTES // layout.nbytes)
        parts += [(layout, [whole[n] for n in members[at : at + most]]) for at in range(0, len(members), most)]
    return parts + [(chunk.layout, [i]) for i, chunk in enumerate(chunks) if chunk.layout.whole is not None]
