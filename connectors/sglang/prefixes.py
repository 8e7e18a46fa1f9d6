"""What requests ask for: the pages of a prefix, in every pool of the engine, and what of it can be restored."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvtier.connectors.sglang.boundaries import Beside, Boundaries, lookup_name
from kvtier.connectors.sglang.movers import Part, Stored
from kvtier.connectors.sglang.pools import KV
from kvtier.connectors.sglang.steps import StepBudget
from kvtier.errors import EngineError
from kvtier.lookup import Lookup
from kvtier.store import TieredStore


class Prefix:
    """What a request last asked for, and how much of it was looked up. Used on the scheduler's thread.

    hashes: the engine's, of all of its pages: the first, the last and their number say it all, because hashes are
    chained. boundaries: where the model's cache is more than KV pages."""

    __slots__ = ("boundaries", "frozen", "hashes", "lookup")

    def __init__(self, hashes: Sequence[str], lookup: Lookup, boundaries: Boundaries | None) -> None:
        self.hashes = hashes
        self.lookup = lookup
        self.boundaries = boundaries
        self.frozen = False  # it starts with what was found until then

    def same(self, hashes: Sequence[str]) -> bool:
        mine = self.hashes
        return mine is hashes or (mine[0], mine[-1], len(mine)) == (hashes[0], hashes[-1], len(hashes))

    @property
    def left(self) -> int:
        """Pages that were not looked up."""
        return len(self.hashes) - len(self.lookup.keys)

    @property
    def grows(self) -> bool:
        """Whether more of its pages are to be looked up: so far there is no gap, and its deadline has not passed."""
        lookup = self.lookup
        if self.frozen or lookup.misses or len(lookup.keys) == len(self.hashes):
            return False
        return time.monotonic() < lookup.deadline

    def lengths(self) -> Sequence[int]:
        """Lengths in pages, ascending, that can be restored now: verified, in host memory, and pinned; none while it
        grows. Asks for what more is needed."""
        if self.grows:
            return ()
        if self.boundaries is None:
            return range(1, self.lookup.ready_pages + 1)
        return self.boundaries.restorable()

    @property
    def pending(self) -> bool:
        """Whether a page that would extend the prefix is on its way, or is to be looked up, and its deadline has not
        passed."""
        if self.grows:
            return True
        return self.lookup.pending if self.boundaries is None else self.boundaries.pending

    def under_way(self) -> bool:
        """Whether any page is on its way that this prefix can use. Asks for what more is needed."""
        if self.grows:
            return True
        if self.boundaries is not None:
            self.boundaries.restorable()
        return bool(self.lookup.loading) or (self.boundaries is not None and self.boundaries.loading)


class Prefixes:
    """Looks prefixes up in one store. Used on the scheduler's thread."""

    def __init__(
        self,
        store: TieredStore,
        stored: Sequence[Stored],
        budget: StepBudget,
        *,
        several: bool = False,
        renamed: Mapping[bytes, bytes] | None = None,
    ) -> None:
        """stored: the KV pool first. several: ranks, which start with what all of them have. renamed: keys of pages by
        the engine's hashes, where those are not in its own namespace."""
        self._renamed = renamed or {}
        self._store = store
        self._budget = budget
        self._several = several
        self._kv, self._beside = stored[0], {s.pool.name: s for s in stored[1:]}

    def look_up(self, rid: str, transfers: Sequence[Any], known: Prefix | None) -> Prefix:
        """The pages that `transfers` name, SGLang's `PoolTransfer` by pool, the KV pool first: as many of them as the
        step still has time for. known: what the request asked for before."""
        hashes: list[str] = transfers[0].keys
        if known is not None and known.same(hashes) and self._store.poll(known.lookup):
            return known
        skipped = 0 if known is None else len(known.hashes) - len(hashes)
        if known is not None and 0 < skipped < len(known.lookup.keys) and known.hashes[skipped] == hashes[0]:
            self._budget.next(len(known.lookup.keys) - skipped)  # the device has the first ones by now
            digests, keys = known.lookup.hashes[skipped:], known.lookup.keys[skipped:]
        else:
            digests, keys = self._names(hashes[: self._budget.first(len(hashes))])
        lookup = self._store.lookup(rid, keys, hashes=digests)  # another object if the lease of the last one has ended
        self._tell_rest(lookup, hashes)
        return Prefix(hashes, lookup, self._boundaries(rid, transfers, digests, lookup))

    def look_on(self, prefix: Prefix) -> bool:
        """Look up more of its pages, as many as the step still has time for; False if its lease has ended."""
        start = len(prefix.lookup.keys)
        digests, keys = self._names(prefix.hashes[start : start + self._budget.next(prefix.left)])
        if not self._store.extend(prefix.lookup, keys, hashes=digests):
            return False
        self._tell_rest(prefix.lookup, prefix.hashes)
        if prefix.boundaries is not None:
            for name, beside in prefix.boundaries.beside.items():
                beside.keys += self._beside[name].namespace.page_keys(digests)
        return True

    def _names(self, hashes: Sequence[str]) -> tuple[list[bytes], list[bytes]]:
        """Of KV pages: the engine's hashes as bytes, and their keys."""
        digests, keys = self._kv.namespace.page_names(hashes)
        if self._renamed:
            keys = [self._renamed.get(digest, key) for digest, key in zip(digests, keys, strict=True)]
        return digests, keys

    def _tell_rest(self, lookup: Lookup, hashes: Sequence[str]) -> None:
        """What was not looked up is counted with the rest when the request ends."""
        asked = len(lookup.keys)

        def names(start: int, stop: int) -> tuple[list[bytes], list[bytes]]:
            digests, keys = self._names(hashes[asked + start : asked + stop])
            return keys, digests

        lookup.behind, lookup.behind_pages = names, len(hashes) - asked

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
        if prefix.hashes[0] != transfers[0].keys[0] or prefix.lookup.ready_pages < pages:
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

    def freeze(self, prefix: Prefix) -> Sequence[int]:
        """As `Prefix.lengths`, held from now on: what arrives later is not used."""
        prefix.frozen = True
        pages = self._store.freeze(prefix.lookup)
        return range(1, pages + 1) if prefix.boundaries is None else prefix.boundaries.freeze(pages)

    def settle(self, rid: str, *, loaded: bool, pages: int) -> None:
        """The request started and its loads ended, or it was dropped. Idempotent. pages: that it asked for."""
        for name in self._beside:
            self._store.settle(lookup_name(rid, name), loaded=loaded)
        self._store.settle(rid, loaded=loaded, later=not self._budget.counts(pages))
