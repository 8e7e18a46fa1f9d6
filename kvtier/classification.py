"""What becomes of pages that a request asks for: pinned in the host tier, on their way from below, or a miss, and why.

No input or output: what only a shared tier can have is asked for by a worker, and counts as on its way until that
knows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kvtier.abc.tier import StagingTier
from kvtier.below import Below
from kvtier.breakeven import BreakEven
from kvtier.evicted import Evicted
from kvtier.ledger import MissReason
from kvtier.lookup import UNPINNED, Lookup
from kvtier.promotion import Promotions


class Classification:
    """Of one store. shared: whether a tier below is one that only a worker may ask. unpin: takes pins that are let
    go."""

    def __init__(
        self,
        host: StagingTier,
        below: Below,
        promotions: Promotions,
        break_even: BreakEven,
        evicted: Evicted,
        unpin: Callable[[Sequence[int]], None],
        *,
        shared: bool,
    ) -> None:
        self._host = host
        self._below = below
        self._promotions = promotions
        self._break_even = break_even
        self._evicted = evicted
        self._unpin = unpin
        self._shared = shared

    def classify(self, lookup: Lookup, pages: Sequence[int]) -> None:
        """Pin what the host tier has of these pages, given by index in ascending order, and start the promotion of
        others. Of a prefix, what lies behind a page that is nowhere is a miss. Called with the store's lock held."""
        if not pages:
            return
        keys = lookup.keys if len(pages) == len(lookup.keys) else [lookup.keys[i] for i in pages]
        pins = self._host.pin_many(keys)
        lookup.pin(pages, pins)
        slow = self._break_even.declines(self._host.name)
        end = len(lookup.keys)
        gap = end if lookup.sparse else min(lookup.misses, default=end)
        if UNPINNED not in pins and not slow and gap == end:
            return
        absent, gone = pages, keys
        if pins.count(UNPINNED) < len(pins):
            absent = [i for i, pin in zip(pages, pins, strict=True) if pin == UNPINNED]
            gone = [lookup.keys[i] for i in absent]
        below, down = self._below.find(absent, gone)
        maybe = self._maybe(lookup, absent, below)
        declined = self._decline(lookup, below, pages, slow)
        lost: Sequence[int] = ()
        if len(below) + len(maybe) < len(absent):
            lost = [i for i in absent if i not in below and i not in maybe] if below or maybe else absent
        if not lookup.sparse:
            gap = min([gap, *lost[:1], *declined])
            if gap < pages[-1]:
                self._give_up_behind(lookup, gap, pages, below)
        self._promote(lookup, absent, below, maybe)
        lookup.misses.update(self._why_missing(lookup, lost, down))
        lookup.misses.update(dict.fromkeys(declined, MissReason.DECLINED))

    def reasons(self, keys: Sequence[bytes], gap: MissReason | None) -> list[MissReason]:
        """Why pages are misses that nobody looked up, since they lie behind one that is missing, for `gap`: what a
        lookup would have said. Shared tiers are not asked: of what only these may have, nothing is known but that the
        tier is down, if it was. Any thread."""
        here = self._host.contains_many(keys)
        there = [i for i, has in enumerate(here) if not has]
        below, down = self._below.find(there, [keys[i] for i in there])
        rest = MissReason.TIER_DOWN if self._shared and gap is MissReason.TIER_DOWN else MissReason.ABSENT
        evicted = self._evicted.among(keys)
        return [
            MissReason.AFTER_GAP
            if here[i] or i in below
            else MissReason.TIER_DOWN
            if i in down
            else MissReason.EVICTED
            if key in evicted
            else rest
            for i, key in enumerate(keys)
        ]

    def _maybe(self, lookup: Lookup, absent: Sequence[int], below: Collection[int]) -> set[int]:
        """Pages of which a worker will know."""
        if not self._shared:
            return set()
        maybe = {i for i in absent if i not in below}
        if self._below.deleting:
            maybe = {i for i in maybe if lookup.keys[i] not in self._below.deleting}
        return maybe

    def _decline(self, lookup: Lookup, below: dict[int, str], pages: Sequence[int], slow: bool) -> list[int]:
        """Pages that are sooner computed than loaded (`slow`: all of them): taken out of `below`, and let go."""
        tiers = {name for name in set(below.values()) if slow or self._break_even.declines(name)}
        declined = [i for i, name in below.items() if name in tiers]
        for i in declined:
            del below[i]
        if slow:
            here = [i for i in pages if lookup.pins[i] != UNPINNED]
            self._unpin([pin for i in here for pin in lookup.fail(i, MissReason.DECLINED)])
            declined += here
        return declined

    def _give_up_behind(self, lookup: Lookup, gap: int, pages: Sequence[int], below: dict[int, str]) -> None:
        """What is there behind a gap is of no use."""
        released = []
        for i in pages:
            if i > gap and (lookup.pins[i] != UNPINNED or i in below):
                below.pop(i, None)
                released += lookup.fail(i, MissReason.AFTER_GAP)
        self._unpin(released)

    def _promote(self, lookup: Lookup, absent: Sequence[int], below: dict[int, str], maybe: Collection[int]) -> None:
        if not below and not maybe:
            return
        lookup.origins.update(below)
        coming = {lookup.keys[i]: i for i in absent if i in below or i in maybe}
        lookup.loading.update(coming)
        new = self._promotions.want(lookup, list(coming))
        tiers = list(dict.fromkeys(below.values()))
        if len(tiers) == 1 and not maybe:
            promote = {tiers[0]: new}
        else:
            promote = {tier: [key for key in new if below.get(coming[key]) == tier] for tier in tiers}
        ask = [key for key in new if coming[key] not in below] if maybe else []
        self._promotions.start(promote, lookup, ask)

    def _why_missing(self, lookup: Lookup, lost: Sequence[int], down: Collection[int]) -> dict[int, MissReason]:
        """Of pages that no tier can give."""
        why = dict.fromkeys(lost, MissReason.ABSENT)
        evicted = self._evicted.among(lookup.keys[i] for i in lost)
        why.update((i, MissReason.EVICTED) for i in lost if evicted and lookup.keys[i] in evicted)
        why.update((i, MissReason.TIER_DOWN) for i in lost if down and i in down)
        return why
