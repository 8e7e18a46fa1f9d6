"""What requests ask for: the pages of a prefix, in every pool of the engine, and what of it can be restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.connectors.sglang.boundaries import Beside, Boundaries, lookup_name
from kvtier.connectors.sglang.movers import Part, Stored
from kvtier.connectors.sglang.pools import KV, page_hashes
from kvtier.errors import EngineError
from kvtier.lookup import Lookup
from kvtier.store import TieredStore


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a request last asked for: the engine's hashes of the first and the last page and their number say it all,
    because hashes are chained. boundaries: where the model's cache is more than KV pages."""

    first: str
    last: str
    pages: int
    lookup: Lookup
    boundaries: Boundaries | None

    def same(self, hashes: Sequence[str]) -> bool:
        return (self.first, self.last, self.pages) == (hashes[0], hashes[-1], len(hashes))

    def lengths(self) -> list[int]:
        """Lengths in pages, ascending, that can be restored now: verified, in host memory, and pinned. Asks for what
        more is needed."""
        if self.boundaries is None:
            return list(range(1, self.lookup.ready_pages + 1))
        return self.boundaries.restorable()

    @property
    def pending(self) -> bool:
        """Whether a page that would extend the prefix is on its way and its deadline has not passed."""
        return self.lookup.pending if self.boundaries is None else self.boundaries.pending

    def under_way(self) -> bool:
        """Whether any page is on its way that this prefix can use. Asks for what more is needed."""
        if self.boundaries is not None:
            self.boundaries.restorable()
        return bool(self.lookup.loading) or (self.boundaries is not None and self.boundaries.loading)


class Prefixes:
    """Looks prefixes up in one store. Used on the scheduler's thread."""

    def __init__(
        self,
        store: TieredStore,
        stored: Sequence[Stored],
        *,
        several: bool = False,
        renamed: Mapping[bytes, bytes] | None = None,
    ) -> None:
        """stored: the KV pool first. several: ranks, which start with what all of them have. renamed: keys of pages by
        the engine's hashes, where those are not in its own namespace."""
        self._renamed = renamed or {}
        self._store = store
        self._several = several
        self._kv, self._beside = stored[0], {s.pool.name: s for s in stored[1:]}

    def look_up(self, rid: str, transfers: Sequence[Any], known: Prefix | None) -> Prefix:
        """The pages that `transfers` name, SGLang's `PoolTransfer` by pool, the KV pool first. known: what the request
        asked for before."""
        hashes: list[str] = transfers[0].keys
        if known is not None and known.same(hashes):
            keys, digests = known.lookup.keys, known.lookup.hashes
        else:
            digests = page_hashes(hashes)
            keys = self._kv.namespace.page_keys(digests)
            if self._renamed:
                keys = [self._renamed.get(digest, key) for digest, key in zip(digests, keys, strict=True)]
        lookup = self._store.lookup(rid, keys, hashes=digests)  # another object if the lease of the last one has ended
        if known is not None and known.same(hashes) and known.lookup is lookup:
            return known
        return Prefix(hashes[0], hashes[-1], len(hashes), lookup, self._boundaries(rid, transfers, digests, lookup))

    def _boundaries(
        self, rid: str, transfers: Sequence[Any], digests: Sequence[bytes], lookup: Lookup
    ) -> Boundaries | None:
        if not self._beside:
            return None
        named = {str(transfer.name): transfer for transfer in transfers[1:]}
        if named.keys() != self._beside.keys():
            raise EngineError(f"the radix cache asks for pools {list(named)} beside KV, not {list(self._beside)}")
        beside = {}
        for name, stored in self._beside.items():
            # The engine asks for the pages that the longest prefix would need: their number is the window's.
            window = len(named[name].keys)
            keys = stored.namespace.page_keys(digests)
            beside[name] = Beside(self._store, lookup_name(rid, name), keys, window, spare=self._several)
        return Boundaries(self._store, lookup, beside)

    def parts(self, prefix: Prefix, transfers: Sequence[Any]) -> list[Part] | None:
        """What a load of `transfers` moves; None if not all of it is ready. Its pages beside KV are held from now on,
        and those that it does not need let go; KV pages are the caller's to hold. EngineError for slots that are no
        pages."""
        pages = len(transfers[0].keys)
        if prefix.first != transfers[0].keys[0] or prefix.lookup.ready_pages < pages:
            return None
        parts = [Part(KV, prefix.lookup, range(pages), self._kv.pool.page_ids(transfers[0].device_indices, pages))]
        for transfer in transfers[1:]:
            name, count = str(transfer.name), len(transfer.keys)
            ids = self._beside[name].pool.page_ids(transfer.device_indices, count)
            beside = None if prefix.boundaries is None else prefix.boundaries.beside[name]
            places = None if beside is None else beside.take(pages - count, pages)
            if beside is None or beside.lookup is None or places is None:
                return None
            parts.append(Part(name, beside.lookup, places, ids))
        return parts

    def freeze(self, prefix: Prefix) -> list[int]:
        """As `Prefix.lengths`, held from now on: what arrives later is not used."""
        pages = self._store.freeze(prefix.lookup)
        return list(range(1, pages + 1)) if prefix.boundaries is None else prefix.boundaries.freeze(pages)

    def settle(self, rid: str, *, loaded: bool) -> None:
        """The request started and its loads ended, or it was dropped. Idempotent."""
        for name in self._beside:
            self._store.settle(lookup_name(rid, name), loaded=loaded)
        self._store.settle(rid, loaded=loaded)
