"""What the ranks of an engine answer for the requests that wait: the same on each, whatever one of them has lost.

SGLang takes the smallest of the ranks' answers for every single lookup, but not the decision to hold a request, nor
what a rank does between a lookup and the load; and the stages of a pipeline are not asked at all. So requests are
settled once per scheduling step, in the order of the queue. A request is open from its first lookup until every rank
has what it can get, or the deadline of one has passed; then the ranks freeze what they have, take what all of them have
in common, and keep to it, pinned, until the request starts or asks for other pages. Nothing here depends on a clock or
an error of one rank alone: what fails on a rank is an answer of nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from enum import Enum, auto

import torch

from kvtier.connectors.sglang.ranks import RankGroup


class Progress(Enum):
    """How far a request's pages are on this rank."""

    UNDER_WAY = auto()
    COMPLETE = auto()
    EXPIRED = auto()


class _Asked:
    __slots__ = ("key", "lengths", "pages")

    def __init__(self, key: Hashable, pages: int) -> None:
        self.key = key
        self.pages = pages
        self.lengths: list[int] | None = None


class Agreement:
    """Used on the scheduler's thread. `open` and `step` take the same arguments on every rank."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._asked: dict[str, _Asked] = {}

    def asks(self, rid: str, key: Hashable, pages: int) -> list[int]:
        """The agreed answer to a lookup of `pages` pages, of which `key` says which they are: every length of a prefix
        that all ranks can restore. Empty while the request is open, as it is when it asks for other pages."""
        asked = self._asked.get(rid)
        if asked is None or asked.key != key:
            asked = self._asked[rid] = _Asked(key, pages)
        return asked.lengths or []

    def is_open(self, rid: str) -> bool:
        asked = self._asked.get(rid)
        return asked is not None and asked.lengths is None

    def reaches(self, rid: str, pages: int) -> bool:
        """Whether a load of so many pages was agreed on."""
        asked = self._asked.get(rid)
        return asked is not None and asked.lengths is not None and pages in asked.lengths

    def forget(self, rid: str) -> None:
        self._asked.pop(rid, None)

    def keep(self, rids: Collection[str]) -> None:
        """Forget all but these."""
        for rid in [rid for rid in self._asked if rid not in rids]:
            del self._asked[rid]

    def step(
        self,
        waiting: Iterable[str],
        progress: Callable[[str], Progress],
        freeze: Callable[[str], Sequence[int]],
        use: Callable[[str, int], None],
    ) -> None:
        """Agree on every open request of the queue that is ready for it. `progress`, `freeze` and `use` ask this rank:
        how far it is; what it can restore of a request from now on; and to keep no more than so many pages of it."""
        opened = [rid for rid in waiting if self.is_open(rid)]
        if not opened:
            return
        here = [progress(rid) for rid in opened]
        flags = torch.tensor(
            [[state is not Progress.UNDER_WAY, state is not Progress.EXPIRED] for state in here], dtype=torch.int32
        )
        ready = [
            rid
            for rid, (all_done, none_late) in zip(opened, self._ranks.least(flags).tolist(), strict=True)
            if all_done or not none_late
        ]
        if not ready:
            return
        widths = [self._asked[rid].pages + 1 for rid in ready]
        mask = torch.zeros(sum(widths), dtype=torch.uint8)
        at = 0
        for rid, width in zip(ready, widths, strict=True):
            lengths = [n for n in freeze(rid) if 0 < n < width]
            mask[[at + n for n in lengths]] = 1
            at += width
        self._ranks.least(mask)
        at = 0
        for rid, width in zip(ready, widths, strict=True):
            lengths = mask[at : at + width].nonzero().flatten().tolist()
            self._asked[rid].lengths = lengths
            use(rid, max(lengths, default=0))
            at += width
