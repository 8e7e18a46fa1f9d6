"""Slots of the host tier for those who fill them, and the wait for room where all of it is in use."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from kvtier.abc.tier import PutStatus, Slot, StagingTier

_LOOK_AGAIN_S = 0.05


class Room:
    """make_evictable: asked to let pages become evictable, whenever there is no room; must not block. `waiting`: how
    many wait for room. counts: whether `filling` is kept."""

    def __init__(self, host: StagingTier, make_evictable: Callable[[], None], *, counts: bool = True) -> None:
        self._host = host
        self._make_evictable = make_evictable
        self._lock = threading.Lock()  # entered as it is: a Condition's own __enter__ is Python
        self._changed = threading.Condition(self._lock)
        self.waiting = 0
        self._closed = False
        self._counts = counts
        self.filling = 0
        """Slots reserved, and neither committed nor given back."""

    def reserve(
        self, keys: Sequence[bytes], nbytes: Sequence[int], wait_s: float, hope: Callable[[], bool] = lambda: True
    ) -> list[Slot | PutStatus]:
        """As `TieredStore.reserve`, but waits no longer than there is `hope` for room."""
        answers = self._host.reserve_many(keys, nbytes)
        give_up = time.monotonic() + wait_s
        hopeless = False
        while not self._closed and PutStatus.FULL in answers:
            self._make_evictable()
            full = [i for i, a in enumerate(answers) if a is PutStatus.FULL]
            for i, answer in zip(
                full, self._host.reserve_many([keys[i] for i in full], [nbytes[i] for i in full]), strict=True
            ):
                answers[i] = answer
            left = give_up - time.monotonic()
            if left <= 0 or hopeless:
                break
            if PutStatus.FULL in answers:
                if any(isinstance(a, Slot) for a in answers):
                    break  # two writers that hold slots and wait for more would starve each other
                hopeless = not hope()
                if hopeless:
                    continue  # what was under way may have ended, and left room, since the last look
                with self._lock:
                    self.waiting += 1
                    try:
                        self._changed.wait(min(left, _LOOK_AGAIN_S))
                    finally:
                        self.waiting -= 1
        if self._counts:
            with self._lock:
                self.filling += sum(isinstance(a, Slot) for a in answers)
        return answers

    def abort(self, keys: Sequence[bytes], slots: Sequence[Slot]) -> None:
        """Give reserved slots back."""
        self._host.abort_many(keys, slots)
        self._filled(len(slots))
        self.freed()

    def filled(self, slots: Sequence[Slot]) -> None:
        """Let go of slots whose pages are committed."""
        self._filled(len(slots))
        self.unpin([slot.id for slot in slots])

    def _filled(self, slots: int) -> None:
        if self._counts:
            with self._lock:
                self.filling -= slots

    def unpin(self, pins: Sequence[int]) -> None:
        if pins:
            self._host.unpin_many(pins)
            self.freed()

    def freed(self) -> None:
        """Pages became evictable."""
        if self.waiting:  # whoever begins to wait right now looks again soon
            with self._lock:
                self._changed.notify_all()

    def close(self) -> None:
        """Nobody waits any longer."""
        self._closed = True
        self.freed()
