"""What the stages of a pipeline decide alike, where SGLang's cache asks the ranks of one stage only: which offloads
have ended, since their nodes stay locked until then, and which loads have failed, since their requests end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import IntEnum

import torch

from kvtier.connectors.sglang.movers import Offloading
from kvtier.connectors.sglang.ranks import Minimum, RankGroup


class _State(IntEnum):
    """The smallest one counts for all ranks."""

    RUNS = 0
    FAILED = 1
    DONE = 2


class Stages:
    """Used on the scheduler's thread. Every stage makes these calls in the same order."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._ended: deque[bool] = deque()
        self._taken = 0
        self._steps: deque[tuple[int, Minimum] | None] = deque()
        self._loads: dict[tuple[str, ...], Minimum] = {}

    @property
    def ended(self) -> int:
        """Offloads, the oldest first, whose results can be taken on every rank."""
        return len(self._ended)

    def take(self) -> bool:
        """The result of the oldest: whether it is stored on every rank."""
        self._taken += 1
        return self._ended.popleft()

    def landed(self, rids: tuple[str, ...], ok: bool) -> None:
        """The loads of a batch have ended on this rank."""
        self._loads[rids] = self._ranks.least(torch.tensor([ok], dtype=torch.int32))

    def failed(self, rids: Sequence[str]) -> list[str]:
        """Of a batch whose results have come out of the pipeline, so that all stages have run it: the requests whose
        loads failed somewhere. Those of other batches are not asked for."""
        found: list[str] = []
        for loaded in [loaded for loaded in self._loads if not set(loaded).isdisjoint(rids)]:
            if not self._loads.pop(loaded).result()[0]:
                found += loaded
        return found

    def clear(self) -> None:
        """The engine, idle, forgets its cache."""
        self._ended.clear()
        self._taken = 0
        self._steps = deque(None for _ in self._steps)
        self._loads.clear()

    def step(self, offloads: Sequence[Offloading]) -> None:
        """Called at each scheduling step. `offloads`: those whose results were not taken, the oldest first."""
        while len(self._steps) >= self._ranks.lag:
            if (asked := self._steps.popleft()) is not None:
                self._apply(*asked)
        if not offloads:
            self._steps.append(None)
            return
        states = torch.tensor([_state(node) for node in offloads], dtype=torch.int32)
        self._steps.append((self._taken, self._ranks.least(states)))

    def _apply(self, taken: int, states: Minimum) -> None:
        """taken: how many had been when it was asked: `states` begins with the next one."""
        known = self._taken + len(self._ended)
        for state in states.result()[known - taken :]:
            if state == _State.RUNS:
                return
            self._ended.append(state == _State.DONE)


def _state(node: Offloading) -> _State:
    if not node.done():
        return _State.RUNS
    return _State.DONE if node.result().ok else _State.FAILED
