"""Whether this process can serve, for ``/readyz``: a real put and get, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

READY_TIMEOUT_S = 5.0
READY_CACHE_S = 1.0
"""A check writes and reads real pages: callers cannot make it run more often than this."""

ReadyCheck = Callable[[], str | None]
"""Does a real put and get; returns None, or the reason why not. May raise; the error is then the reason."""


class Readiness:
    """Runs the check in one thread of its own, at most once at a time and once per READY_CACHE_S: a check that
    hangs is the reason, not a hung probe."""

    def __init__(self, check: ReadyCheck | None) -> None:
        self._check = check
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._checked_at = float("-inf")
        self._running: threading.Thread | None = None
        self._started_at = 0.0

    def reason(self) -> str | None:
        if self._check is None:
            return None
        with self._lock:
            if self._running is None:
                if time.monotonic() - self._checked_at < READY_CACHE_S:
                    return self._reason
                self._started_at = time.monotonic()
                self._running = threading.Thread(
                    target=self._run, args=(self._check,), name="kvtier-ready", daemon=True
                )
                self._running.start()
            running, started_at = self._running, self._started_at
        running.join(max(0.0, started_at + READY_TIMEOUT_S - time.monotonic()))
        with self._lock:
            if running.is_alive():
                return f"the readiness check has not ended for {time.monotonic() - started_at:.1f} s"
            return self._reason

    def _run(self, check: ReadyCheck) -> None:
        try:
            reason = check()
        except Exception as e:  # noqa: BLE001 - whatever it raises is why we are not ready
            reason = f"{type(e).__name__}: {e}"
        with self._lock:
            self._reason, self._checked_at, self._running = reason, time.monotonic(), None
