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
        self._results: dict[int, T] = {}
        self._closed = False

    def fileno(self) -> int:
        """Readable once a result is there."""
        number: int = self._event.fileno()
        return number

    def finish(self, task: int, result: T) -> None:
        """Post a result."""
        with self._lock:
            if self._closed:
                return
            self._results[task] = result
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
        """Give the event's descriptor back. Safe to call twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._event.close()
