"""What the ranks of an engine answer for the requests that wait: the same on each, whatever one of them has lost.

SGLang takes the smallest of the ranks' answers for every single lookup, but not the decision to hold a request, nor
what a rank does between a lookup and the load; and the stages of a pipeline are not asked at all. So requests are
settled together, step by step, in the order of the queue. A request is open from its first lookup until every rank has
what it can get, or the deadline of one has passed; then the ranks freeze what they have, take what all of them have in
common, and keep to it, pinned, until the request starts or asks for other pages. Nothing here depends on a clock or an
error of one rank alone: what fails on a rank is an answer of nothing.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from enum import Enum, auto

import numpy as np
import numpy.typing as npt
import torch

from kvtier.connectors.sglang.ranks import Minimum, RankGroup

_STEP_PAGES = 4096
"""Pages of requests that are settled in one step."""


class Progress(Enum):
    """How far a request's pages are on this rank."""

    UNDER_WAY = auto()
    COMPLETE = auto()
    EXPIRED = auto()


class _State(Enum):
    """Where a request is. Ranks are asked whether they are ready for it, then what they have."""

    OPEN = auto()
    ASKED = auto()
    READY = auto()
    AGREED = auto()


class _Asked:
    __slots__ = ("key", "lengths", "pages", "rid", "state")

    def __init__(self, rid: str, key: Hashable, pages: int) -> None:
        self.rid = rid
        self.key = key
        self.pages = pages
        self.state = _State.OPEN
        self.lengths: Sequence[int] = ()


class _Question:
    """Asked of all ranks: which requests are ready, or, frozen, what can be restored of them."""

    __slots__ = ("about", "answers", "frozen")

    def __init__(self, about: list[_Asked], answers: Minimum, frozen: bool) -> None:
        self.about = about
        self.answers = answers
        self.frozen = frozen


class Agreement:
    """Used on the scheduler's thread. `asks` and `step` take the same arguments on every rank."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._asked: dict[str, _Asked] = {}
        self._steps: deque[list[_Question]] = deque()

    def asks(self, rid: str, key: Hashable, pages: int) -> Sequence[int]:
        """The agreed answer to a lookup of `pages` pages, of which `key` says which they are: every length of a prefix
        that all ranks can restore. Empty while the request is open, as it is when it asks for other pages."""
        asked = self._asked.get(rid)
        if asked is None or asked.key != key:
            asked = self._asked[rid] = _Asked(rid, key, pages)
        return asked.lengths

    def is_open(self, rid: str) -> bool:
        asked = self._asked.get(rid)
        return asked is not None and asked.state is not _State.AGREED

    def reaches(self, rid: str, pages: int) -> bool:
        """Whether a load of so many pages was agreed on."""
        asked = self._asked.get(rid)
        return asked is not None and pages in asked.lengths

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
        """Go on with every open request of the queue. `progress`, `freeze` and `use` ask this rank: how far it is; what
        it can restore of a request from now on; and to keep no more than so many pages of it.

        Called at every step in which the queue is not empty, and with a pipeline at every other, too."""
        found = [asked for rid in waiting if (asked := self._asked.get(rid)) is not None]
        if self._ranks.lag:
            while len(self._steps) >= self._ranks.lag:
                for question in self._steps.popleft():
                    self._apply(question, use)
            self._steps.append(self._ask(found, progress, freeze))
            return
        for _ in range(2):
            for question in self._ask(found, progress, freeze):
                self._apply(question, use)

    def _ask(
        self, found: Sequence[_Asked], progress: Callable[[str], Progress], freeze: Callable[[str], Sequence[int]]
    ) -> list[_Question]:
        questions = []
        ready = _some([asked for asked in found if asked.state is _State.READY])
        if ready:
            masks = [_mask(freeze(asked.rid), asked.pages) for asked in ready]
            mask = torch.from_numpy(np.concatenate(masks))
            questions.append(_Question(ready, self._ranks.least(mask), frozen=True))
        opened = [asked for asked in found if asked.state is _State.OPEN]
        if opened:
            here = [progress(asked.rid) for asked in opened]
            flags = [(state is not Progress.UNDER_WAY, state is not Progress.EXPIRED) for state in here]
            questions.append(_Question(opened, self._ranks.least(torch.tensor(flags, dtype=torch.int32)), frozen=False))
        for question in questions:
            for asked in question.about:
                asked.state = _State.ASKED
        return questions

    def _apply(self, question: _Question, use: Callable[[str, int], None]) -> None:
        """Requests that left the queue, or ask for other pages by now, are left out on every rank alike."""
        answers = question.answers.values()
        at = 0
        for i, asked in enumerate(question.about):
            current = self._asked.get(asked.rid) is asked
            if not question.frozen:
                all_done, none_late = answers[i].tolist()
                asked.state = _State.READY if all_done or not none_late else _State.OPEN
                continue
            lengths = np.flatnonzero(answers[at : at + asked.pages + 1]).tolist()
            at += asked.pages + 1
            if current:
                asked.state, asked.lengths = _State.AGREED, lengths
                use(asked.rid, max(lengths, default=0))


def _some(ready: Sequence[_Asked]) -> list[_Asked]:
    """As many of them, the first ones, as are settled in one step: at least one."""
    ends = itertools.accumulate(asked.pages for asked in ready)
    return [asked for n, (asked, end) in enumerate(zip(ready, ends, strict=True)) if not n or end <= _STEP_PAGES]


def _mask(lengths: Sequence[int], pages: int) -> npt.NDArray[np.uint8]:
    """uint8 ``[pages + 1]``: 1 at every length of a prefix that can be restored."""
    mask = np.zeros(pages + 1, np.uint8)
    if isinstance(lengths, range):
        mask[lengths.start : lengths.stop] = 1
    else:
        mask[[n for n in lengths if n <= pages]] = 1
    mask[0] = 0
    return mask
