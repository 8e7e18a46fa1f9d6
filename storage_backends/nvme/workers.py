"""Threads that share out the inputs and outputs of one batched call."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable


class _Job:
    """`work(i)` for i below `count`, each taken by whoever is free next."""

    def __init__(self, count: int, work: Callable[[int], None]) -> None:
        self._count = count
        self._work = work
        self._cursor = itertools.count()
        self._left = count
        self._lock = threading.Lock()
        self.done = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        while (i := next(self._cursor)) < self._count:
            try:
                self._work(i)
            except BaseException as error:  # noqa: BLE001 - raised again where the job was started
                self.error = error
            with self._lock:
                self._left -= 1
                last = not self._left
            if last:
                self.done.set()


class Workers:
    """Up to `threads` helpers, started when first needed. The calling thread works along, so a call makes progress
    even when all helpers are busy with other calls."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._started: list[threading.Thread] = []
        self._lock = threading.Lock()

    def each(self, count: int, work: Callable[[int], None]) -> None:
        """Call ``work(i)`` for every i below `count` and wait. Raises what one of them raised."""
        job = _Job(count, work)
        helpers = min(count - 1, self._threads - 1)
        if helpers > 0:
            if not self._started:
                self._start()
            for _ in range(helpers):
                self._jobs.put(job)
        if count:
            job.run()
            job.done.wait()
        if job.error is not None:
            raise job.error

    def close(self, timeout_s: float) -> None:
        """End the helpers. To be called once nobody is inside `each`."""
        with self._lock:
            started, self._started = self._started, []
        for _ in started:
            self._jobs.put(None)
        for thread in started:
            thread.join(timeout_s)

    def _start(self) -> None:
        with self._lock:
            if self._started:
                return
            threads = [
                threading.Thread(target=self._serve, name=f"{self._name}-{i}", daemon=True)
                for i in range(self._threads - 1)
            ]
            for thread in threads:
                thread.start()
            self._started = threads

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
