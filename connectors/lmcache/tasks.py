"""Results of asynchronous tasks, each given out exactly once, and the event by which LMCache hears of them."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from lmcache.v1.platform import create_event_notifier

T = TypeVar("T")


class TaskBoard(Generic[T]):
    """Of one kind of task. Thread-safe."""

    def __init__(self) -> None:
        self._event = create_event_notifier()
        self._lock = threading.Lock()
        self._open: dict[int, T] = {}
        self._results: dict[int, T] = {}
        self._closed = False

    def fileno(self) -> int:
        """Readable once a result is there."""
        number: int = self._event.fileno()
        return number

    def begin(self, task: int, nothing: T) -> None:
        """A task whose result follows; `nothing` is its result if it comes to nothing."""
        with self._lock:
            self._open[task] = nothing

    def finish(self, task: int, result: T) -> None:
        """Post the result of a task that is open; its first one counts."""
        with self._lock:
            if self._open.pop(task, None) is not None:
                self._post(task, result)

    def fail(self, task: int) -> None:
        """The task came to nothing."""
        with self._lock:
            nothing = self._open.pop(task, None)
            if nothing is not None:
                self._post(task, nothing)

    def _post(self, task: int, result: T) -> None:
        self._results[task] = result
        if not self._closed:
            self._event.notify()

    def pop(self, task: int) -> T | None:
        """The result of `task`, once."""
        with self._lock:
            return self._results.pop(task, None)

    def pop_all(self) -> dict[int, T]:
        """Every result that is there."""
        with self._lock:
            results, self._results = self._results, {}
            return results

    def close(self) -> None:
        """What is still open came to nothing; results can be asked for as before, without an event. Safe to call
        twice."""
        with self._lock:
            while self._open:
                self._post(*self._open.popitem())
            if not self._closed:
                self._closed = True
                self._event.close()
