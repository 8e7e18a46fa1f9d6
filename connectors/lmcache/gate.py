"""Who may touch LMCache's memory: nobody any more once the gate is shut and everybody has left."""

from __future__ import annotations

import threading
import time

from kvtier.errors import ClosedError


class Gate:
    """LMCache takes its memory back after a task's result, or after `close`. A job goes through the gate before its
    first access and leaves after its last one, so that `shut` can wait for those inside. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._shut = False

    def passage(self) -> Passage:
        """For one job."""
        return Passage(self)

    def enter(self) -> None:
        """Raises ClosedError once the gate is shut."""
        with self._changed:
            if self._shut:
                raise ClosedError("the adapter is closed")
            self._inside += 1

    def leave(self) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def shut(self) -> None:
        """Nobody enters any more."""
        with self._changed:
            self._shut = True

    def wait(self, timeout_s: float) -> bool:
        """Wait until nobody is inside; False on timeout."""
        give_up = time.monotonic() + timeout_s
        with self._changed:
            return self._changed.wait_for(lambda: self._inside == 0, max(0.0, give_up - time.monotonic()))


class Passage:
    """One job's way through the gate: it may end before it has come in."""

    __slots__ = ("_gate", "_inside")

    def __init__(self, gate: Gate) -> None:
        self._gate, self._inside = gate, False

    def enter(self) -> None:
        """Raises ClosedError once the gate is shut."""
        self._gate.enter()
        self._inside = True

    def leave(self) -> None:
        """Once; harmless where the job did not come in."""
        if self._inside:
            self._inside = False
            self._gate.leave()
