"""What the stages of a pipeline decide alike, where SGLang's cache asks the ranks of one stage only: which offloads
have ended, since their nodes stay locked until then, and which loads have failed, since their requests end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import IntEnum

import torch

from kvtier.connectors.sglang.movers import Offloading
from kvtier.connectors.sglang.ranks import RankGroup


class _State(IntEnum):
    """The smallest one counts for all ranks."""

    RUNS = 0
    FAILED = 1
    DONE = 2


class Stages:
    """Used on the scheduler's thread; `step` is collective. A stage runs its batches in the order of the others and is
    behind the one before it by less than one batch, so that before a batch is chosen all of them know of the same
    offloads and loads."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._ended: deque[bool] = deque()
        self._loads: list[tuple[tuple[str, ...], bool]] = []

    @property
    def ended(self) -> int:
        """Offloads, the oldest first, whose results can be taken on every rank."""
        return len(self._ended)

    def take(self) -> bool:
        """The result of the oldest: whether it is stored on every rank."""
        return self._ended.popleft()

    def landed(self, rids: tuple[str, ...], ok: bool) -> None:
        """The loads of a batch have ended on this rank."""
        self._loads.append((rids, ok))

    def clear(self) -> None:
        self._ended.clear()
        self._loads.clear()

    def step(self, offloads: Sequence[Offloading]) -> list[str]:
        """The requests whose loads failed somewhere. `offloads`: those under way, of which `ended` are known."""
        running = [_state(ticket) for ticket in list(offloads)[len(self._ended) :]]
        loads, self._loads = self._loads, []
        if not running and not loads:
            return []
        states = running + [_State.DONE if ok else _State.FAILED for _, ok in loads]
        agreed = self._ranks.least(torch.tensor(states, dtype=torch.int32)).tolist()
        for state in agreed[: len(running)]:
            if state == _State.RUNS:
                break
            self._ended.append(state == _State.DONE)
        verdicts = zip(loads, agreed[len(running) :], strict=True)
        return [rid for (rids, _), state in verdicts if state != _State.DONE for rid in rids]


def _state(ticket: Offloading) -> _State:
    if not ticket.done():
        return _State.RUNS
    return _State.DONE if ticket.result().ok else _State.FAILED
