"""Threads that do a store's work behind its callers, and that never keep a process from ending."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable


class WorkerPool:
    """Daemon threads that run submitted jobs in order of submission. A job must not raise; `on_error` hears of one
    that did. Unlike `concurrent.futures`, a job stuck in a dead backend cannot hang the interpreter's exit."""

    def __init__(self, name: str, threads: int, on_error: Callable[[BaseException], None]) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._on_error = on_error
        self._idle = threading.Condition()
        self._unfinished = 0
        self._closed = False
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None]) -> bool:
        """Queue a job; False when the pool was closed. Never blocks."""
        with self._idle:
            if self._closed:
                return False
            self._unfinished += 1
            self._jobs.put(job)
            return True

    @property
    def idle(self) -> bool:
        """Whether every submitted job has ended."""
        return self._unfinished == 0

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until every submitted job has ended; False on timeout."""
        with self._idle:
            return self._idle.wait_for(lambda: self._unfinished == 0, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Take no more jobs, let the queued ones run for at most `timeout_s`, then stop. False if some did not end."""
        deadline = time.monotonic() + timeout_s
        with self._idle:
            first = not self._closed
            self._closed = True
        if first:
            for _ in self._threads:
                self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._attempt(job)
            finally:
                del job
                with self._idle:
                    self._unfinished -= 1
                    if self._unfinished == 0:
                        self._idle.notify_all()

    def _attempt(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # noqa: BLE001 - a worker outlives its jobs; the owner counts the error
            self._on_error(error)
