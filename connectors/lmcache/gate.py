"""Who may touch LMCache's memory: nobody any more once the gate is shut and everybody has left."""

from __future__ import annotations

import math
import threading
import time

from kvtier.errors import ClosedError, KVTierError


class Gate:
    """LMCache takes its memory back after a task's result, or after `close`. A job goes through the gate before its
    first access and leaves after its last one, so that `shut` can wait for those inside. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._shut = False

    def passage(self, until: float = math.inf) -> Passage:
        """For one job, whose memory is LMCache's again from `until` on, seconds of the monotonic clock."""
        return Passage(self, until)

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

    __slots__ = ("_gate", "_inside", "_until")

    def __init__(self, gate: Gate, until: float) -> None:
        self._gate, self._until, self._inside = gate, until, False

    def enter(self) -> None:
        """Raises ClosedError once the gate is shut, KVTierError for a job that waited for too long."""
        if time.monotonic() >= self._until:
            raise KVTierError("a chunk waited so long that LMCache may have given its memory to another one")
        self._gate.enter()
        self._inside = True

    def leave(self) -> None:
        """Once; harmless where the job did not come in."""
        if self._inside:
            self._inside = False
            self._gate.leave()
