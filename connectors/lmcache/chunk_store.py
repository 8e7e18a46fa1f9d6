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
from typing import Generic, NamedTuple, TypeVar

from kvtier.abc.codec import Codec
from kvtier.abc.tier import Removal
from kvtier.build import open_codec, open_store
from kvtier.codecs.registry import codec
from kvtier.connectors.lmcache.chunks import Attention, Chunk, ChunkLayout, plain_layout
from kvtier.connectors.lmcache.identity import namespace_of
from kvtier.connectors.lmcache.options import AdapterOptions
from kvtier.keys import Namespace
from kvtier.lookup import UNPINNED, Lookup
from kvtier.mover import OffloadResult, OnboardResult, PageMover, policy_of
from kvtier.server.http import HttpExporter, HttpOptions
from kvtier.server.page import StatusPage
from kvtier.server.probe import store_ready
from kvtier.store import TieredStore

_log = logging.getLogger(__name__)
T = TypeVar("T")

_MOST_LAYOUTS = 64
"""Layouts served at a time: each has threads of its own."""
_CLOSE_S = 1.5
_PROBE_BYTES = 1 << 16
"""What ``/readyz`` puts and gets: the size of chunks is not known before the first one."""
_UNKNOWN = plain_layout(1)
"""Stands for every chunk of which LMCache tells no shape."""


class Known(NamedTuple):
    """A chunk that is in a tier: the key that it was stored under, and its bytes there."""

    origin: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class Found:
    """A lookup of chunks: `ready[i]` says whether chunk i is verified and pinned in host memory."""

    lookup: Lookup

    @property
    def ready(self) -> list[bool]:
        return [pin != UNPINNED for pin in self.lookup.pins]


class ChunkStore:
    """See the module's docstring. on_stored, on_removed: told the chunks that came into the tiers, and those that are
    in none of them any more; in a worker's thread. rank, ranks: where
    each of several processes of a node has tiers of its own."""

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
        self._on_stored, self._on_removed = on_stored, on_removed
        self._lock = threading.Lock()
        self._movers: dict[ChunkLayout, PageMover] = {}
        self._namespaces: dict[ChunkLayout, Namespace] = {}
        self._known: dict[bytes, Known] = {}
        self._numbers = itertools.count()
        self._closed = False
        self.store: TieredStore = open_store(
            self._config, shard="lmcache", rank=rank, ranks=ranks, on_removed=self._removed
        )
        self.ledger = self.store.ledger
        self._http: HttpExporter | None = None
        try:
            for tier in self.store.lower:
                if not tier.capabilities.shared:
                    self._known |= {key: Known(meta.origin, meta.nbytes) for key, meta in tier.scan()}
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
        layout = _UNKNOWN if not layout.known else layout.whole or layout
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
                )
            self._movers[layout] = mover  # the last one used is the last one let go
            last = next(iter(self._movers)) if len(self._movers) > _MOST_LAYOUTS else None
            surplus = self._movers.pop(last) if last is not None else None
        if surplus is not None:
            surplus.close(_CLOSE_S)
        return mover

    # -- store, find, load -------------------------------------------------------------------------------------------

    def offload(
        self, hashes: Sequence[bytes], chunks: Sequence[Chunk], done: Callable[[bool, list[bool]], object]
    ) -> None:
        """Store chunks, of which a last one may be partial (`Chunk.tokens`); ``done(all went well, which were new)``
        follows, in a worker's thread. The memory must not change until then."""
        parts = _in_pools(chunks)
        movers = [self._mover(layout) for layout, _ in parts]  # what can fail comes before the first one reads
        pools = [layout.pool([chunks[i] for i in members]) for layout, members in parts]
        gather: _Gather[OffloadResult] = _Gather(
            len(parts), lambda results: self._offloaded(results, hashes, parts, done)
        )
        for n, ((layout, members), mover, (pool, ids)) in enumerate(zip(parts, movers, pools, strict=True)):
            valid = [chunks[i].tokens or layout.spec.page_tokens for i in members]
            ticket = mover.offload(pool, [hashes[i] for i in members], ids, valid_tokens=valid)
            ticket.then(partial(gather.put, n))

    def _offloaded(
        self,
        results: Sequence[OffloadResult],
        hashes: Sequence[bytes],
        parts: Sequence[tuple[ChunkLayout, list[int]]],
        done: Callable[[bool, list[bool]], object],
    ) -> None:
        fresh = [False] * len(hashes)
        stored: list[Known] = []
        for layout, members in parts:
            keys = self.keys_of(layout, [hashes[i] for i in members])
            for i, key, nbytes in zip(members, keys, self.store.host.length_many(keys), strict=True):
                with self._lock:
                    fresh[i] = nbytes >= 0 and key not in self._known
                    if fresh[i]:
                        self._known[key] = Known(hashes[i], nbytes)
                        stored.append(self._known[key])
        if stored:
            self._on_stored(stored)
        done(all(result.ok for result in results), fresh)

    def find(self, layouts: Sequence[ChunkLayout], hashes: Sequence[bytes]) -> Found:
        """Look chunks up, each of use by itself; pins what is in host memory and starts the promotion of the rest.
        `release` must follow."""
        keys: list[bytes] = [b""] * len(hashes)
        for layout, members in _by_layout([layout if layout.known else _UNKNOWN for layout in layouts]).items():
            for i, key in zip(members, self.keys_of(layout, [hashes[i] for i in members]), strict=True):
                keys[i] = key
        return Found(self.store.lookup(f"lmcache-{next(self._numbers)}", keys, sparse=True))

    def onboard(
        self, found: Found, pages: Sequence[int], chunks: Sequence[Chunk], done: Callable[[set[int]], object]
    ) -> None:
        """Load chunks `pages` (indices in `found`) into memory; ``done(those that arrived)`` follows. A chunk found bad
        leaves the tiers, and the others are loaded all the same."""
        parts = _in_pools(chunks)
        gather: _Gather[set[int]] = _Gather(len(parts), lambda arrived: done(set().union(*arrived)))
        for n, (layout, members) in enumerate(parts):
            wanted, memory = [pages[i] for i in members], [chunks[i] for i in members]
            self._onboard(found, layout, wanted, memory, partial(gather.put, n))

    def _onboard(
        self,
        found: Found,
        layout: ChunkLayout,
        pages: list[int],
        chunks: list[Chunk],
        done: Callable[[set[int]], object],
    ) -> None:
        """Always ends in `done`: whoever waits for the other parts waits for this one too."""

        def loaded(result: OnboardResult) -> None:
            if result.ok or not result.failed_pages:
                done(set(pages) if result.ok else set())
                return
            good = [i for i, page in enumerate(pages) if page not in result.failed_pages]
            self._drop(found.lookup, result.failed_pages)
            self._onboard(found, layout, [pages[i] for i in good], [chunks[i] for i in good], done)

        if not pages:
            done(set())
            return
        try:
            pool, ids = layout.pool(chunks)
            ticket = self._mover(layout).onboard(found.lookup, pool, ids, pages=pages)
        except Exception as error:  # noqa: BLE001 - counted; nothing of this part was loaded
            self._count("a load could not be started", error)
            done(set())
            return
        ticket.then(loaded)

    def _drop(self, lookup: Lookup, pages: Sequence[int]) -> None:
        """Remove chunks that are bad in host memory from below it too, so that they are stored again."""
        try:
            self.store.delete([lookup.keys[page] for page in pages])
        except Exception as error:  # noqa: BLE001 - the store is closing
            self._count("a bad chunk could not be deleted", error)

    def _count(self, what: str, error: BaseException) -> None:
        self.ledger.error("load")
        _log.error("kvtier: %s", what, exc_info=error)

    def release(self, found: Found, used: Iterable[int]) -> None:
        """The request is over, and used these of its chunks: count them and let go of the pins."""
        used = set(used)
        unused = [i for i, pin in enumerate(found.lookup.pins) if pin != UNPINNED and i not in used]
        self.store.give_back(found.lookup, unused)
        self.store.settle(found.lookup.request_id)

    def delete(self, hashes: Sequence[bytes]) -> None:
        """Remove chunks from every tier, of whatever layout they are."""
        wanted = set(hashes)
        with self._lock:
            layouts = list(self._namespaces)
            keys = {key for key, known in self._known.items() if known.origin in wanted}
        for layout in layouts:
            keys.update(self.keys_of(layout, hashes))
        self.store.delete(sorted(keys))

    # -- what is there -----------------------------------------------------------------------------------------------

    def known(self) -> list[tuple[bytes, Known]]:
        """Every chunk in a tier of this node, by key."""
        with self._lock:
            return sorted(self._known.items())

    def _removed(self, keys: Sequence[bytes], removal: Removal) -> None:
        here = self.store.host.contains_many(keys)
        below = self.store.known_below(keys)
        gone = [key for key, a, b in zip(keys, here, below, strict=True) if not (a or b)]
        with self._lock:
            lost = [known for key in gone if (known := self._known.pop(key, None)) is not None]
        if lost:
            self._on_removed(lost)

    def close(self) -> None:
        """End all copying and close every tier. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            movers = list(self._movers.values())
        give_up = time.monotonic() + _CLOSE_S
        for mover in movers:
            mover.close(max(0.05, (give_up - time.monotonic()) / 2))
        self.store.close(max(0.05, give_up - time.monotonic()))
        if self._http is not None:
            self._http.close()


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
    """Indices of the chunks that go through one pool, with its layout: those of one, and each partial one by itself."""
    whole = [i for i, chunk in enumerate(chunks) if chunk.layout.whole is None]
    parts = [
        (layout, [whole[n] for n in members])
        for layout, members in _by_layout([chunks[i].layout for i in whole]).items()
    ]
    return parts + [(chunk.layout, [i]) for i, chunk in enumerate(chunks) if chunk.layout.whole is not None]
