"""Loads of one batch, joined to the counter on which the engine's forward waits, layer by layer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from kvtier.tickets import OnboardResult, Ticket


class BatchLoad:
    """Several requests' loads under one index of a `LayerWiseLoadCounter`.

    loads: for each layer of the counter, how many loads write it. A layer is complete when it is in all of these.
    Thread-safe: loads report from the mover's workers."""

    def __init__(self, counter: Any, index: int, loads: Sequence[int]) -> None:
        self._counter = counter
        self._index = index
        self._left = list(loads)
        self._failed = False
        self._lock = threading.Lock()
        for layer, count in enumerate(loads):
            if not count:
                counter.complete(index, layer)

    def layer_done(self, layer: int) -> None:
        """One load has written `layer`."""
        with self._lock:
            self._left[layer] -= 1
            if self._left[layer] == 0 and not self._failed:
                self._counter.complete(self._index, layer)

    def fail(self, error: BaseException) -> None:
        """Release whoever waits for a layer; the engine then aborts the requests of the batch. First call counts."""
        with self._lock:
            if not self._failed:
                self._failed = True
                self._counter.fail(self._index, error)

    def watch(self, tickets: Sequence[Ticket[OnboardResult]]) -> None:
        """Wait for the loads, and fail the batch as soon as one of them is known to have failed."""
        for ticket in tickets:
            result = ticket.result()
            if not result.ok:
                self.fail(RuntimeError(result.error or f"{len(result.failed_pages)} pages could not be used"))
