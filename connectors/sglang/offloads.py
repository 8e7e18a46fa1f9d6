"""Offloads whose results the engine has not taken: in the order in which it submitted them, on every rank alike."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvtier.connectors.sglang.movers import Offloading
from kvtier.connectors.sglang.stages import Stages
from kvtier.errors import EngineError
from kvtier.ledger import OffloadOutcome
from kvtier.tickets import OffloadResult, Ticket


class Offloads:
    """Used on the scheduler's thread. stages: those of a pipeline, which take results together."""

    def __init__(self, stages: Stages | None, failed: Callable[[], None]) -> None:
        """failed: hears of an offload that could not be begun, while its exception is handled."""
        self._stages = stages
        self._failed = failed
        self._queue: deque[Offloading] = deque()
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._queue)

    def submit(self, pages: int, begin: Callable[[Callable[[], None]], Offloading]) -> None:
        """Queue what `begin` begins, of so many pages. It is given a check for the worker that is about to copy them,
        which raises EngineError once they are given up."""
        epoch = self._epoch

        def check() -> None:
            if epoch != self._epoch:
                raise EngineError("the engine's cache was flushed before these pages were copied")

        try:
            self._queue.append(begin(check))
        except Exception:  # noqa: BLE001 - results pair with submissions, on every rank alike
            self._failed()
            failed: Ticket[OffloadResult] = Ticket()
            failed.finish(OffloadResult({OffloadOutcome.FAILED: pages}))
            self._queue.append(Offloading((failed,)))

    def completed(self) -> int:
        """How many results can be popped now, the oldest first."""
        if self._stages is not None:
            return self._stages.ended
        done = 0
        for node in self._queue:
            if not node.done():
                break
            done += 1
        return done

    def pop(self) -> bool:
        """The oldest result: whether all pages of the node are in a tier."""
        if not self._queue:
            return False
        oldest = self._queue.popleft()
        return self._stages.take() if self._stages is not None else oldest.result().ok

    def step(self) -> None:
        """With a pipeline, whose stages all call this before they choose a batch: what has ended on all of them."""
        if self._stages is not None:
            self._stages.step(self._queue)

    def give_up(self) -> None:
        """Those whose copying has not begun fail."""
        self._epoch += 1

    def clear(self) -> None:
        self._queue.clear()
