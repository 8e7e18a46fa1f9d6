"""A circuit breaker: after repeated failures a server is left alone for a while, then tried by one call at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import Enum


class BreakerState(Enum):
    """CLOSED: calls pass. OPEN: they fail at once. HALF_OPEN: one probe is under way, the others fail at once."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Opens after `threshold` failures in a row, for `pause_s`, which doubles with every failed probe up to
    `max_pause_s`. Every admitted call must end in `succeeded`, `failed` or `abandoned`. Thread-safe."""

    def __init__(
        self,
        *,
        threshold: int = 3,
        pause_s: float = 0.5,
        max_pause_s: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._threshold = threshold
        self._first_pause_s = pause_s
        self._max_pause_s = max_pause_s
        self._clock = clock
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._pause_s = pause_s
        self._open_until = 0.0
        self.opened = 0
        """How often it opened, failed probes included."""

    @property
    def state(self) -> BreakerState:
        with self._lock:
            return self._state

    def admit(self) -> bool:
        """Whether a call may be made now. Turns OPEN into HALF_OPEN once the pause is over: the caller is the probe."""
        with self._lock:
            if self._state is BreakerState.CLOSED:
                return True
            if self._state is BreakerState.OPEN and self._clock() >= self._open_until:
                self._state = BreakerState.HALF_OPEN
                return True
            return False

    def succeeded(self) -> bool:
        """The server answered; True if it had been given up before."""
        with self._lock:
            back = self._state is not BreakerState.CLOSED
            self._state = BreakerState.CLOSED
            self._failures = 0
            self._pause_s = self._first_pause_s
            return back

    def failed(self) -> bool:
        """The server did not answer; True if it was given up now and was not before."""
        with self._lock:
            self._failures += 1
            if self._state is BreakerState.HALF_OPEN:
                self._pause_s = min(2 * self._pause_s, self._max_pause_s)
                self._open()
                return False
            if self._state is BreakerState.CLOSED and self._failures >= self._threshold:
                self._open()
                return True
            return False

    def abandoned(self) -> None:
        """The call ended without a verdict on the server, such as for its own short deadline."""
        with self._lock:
            if self._state is BreakerState.HALF_OPEN:
                self._open()

    def _open(self) -> None:
        self._state = BreakerState.OPEN
        self._open_until = self._clock() + self._pause_s
        self.opened += 1
