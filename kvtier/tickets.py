"""Results of work that a page mover was given: a ticket now, the result once it is there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvtier.ledger import OffloadOutcome

T = TypeVar("T")


class Ticket(Generic[T]):
    """The result of queued work, once it is there. Unlike a Future it cannot be cancelled: its memory is in use."""

    def __init__(self) -> None:
        self.began_s = time.monotonic()
        self._done = threading.Event()
        self._value: T | None = None
        self._then: list[Callable[[T], object]] = []
        self._lock = threading.Lock()

    def done(self) -> bool:
        return self._done.is_set()

    def result(self, timeout_s: float | None = None) -> T:
        """The result; TimeoutError if it is not there in time."""
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"not finished within {timeout_s} s")
        return self._value  # type: ignore[return-value]  # set before the event is

    def then(self, call: Callable[[T], object]) -> None:
        """`call(result)` once it is there: in the thread that finishes the work, or at once. It must not raise."""
        with self._lock:
            if not self._done.is_set():
                self._then.append(call)
                return
        call(self._value)  # type: ignore[arg-type]

    def finish(self, value: T) -> None:
        with self._lock:
            self._value = value
            self._done.set()
            calls, self._then = self._then, []
        for call in calls:
            call(value)


@dataclass(frozen=True, slots=True)
class OffloadResult:
    """Pages by outcome; `ok` if every page is in a tier now."""

    outcomes: dict[OffloadOutcome, int]

    @property
    def ok(self) -> bool:
        good = (
            OffloadOutcome.STORED,
            OffloadOutcome.STORED_RAW,
            OffloadOutcome.STORED_OVER_BUDGET,
            OffloadOutcome.EXISTS,
        )
        return all(outcome in good for outcome in self.outcomes)


@dataclass(frozen=True, slots=True)
class OnboardResult:
    """`failed_pages`: indices that were found bad after the load had started; empty when all is well. When it is not
    empty, or `error` is set, the hot pages hold garbage and must not be used."""

    failed_pages: tuple[int, ...]
    error: str | None = None

    @property
    def ok(self) -> bool:
        return not self.failed_pages and self.error is None
