"""Loads: promised one by one, started together, joined to the counter on which the engine's forward waits layer by
layer, and ended with the forward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.connectors.sglang.movers import Movers, Part
from kvtier.errors import EngineError
from kvtier.tickets import OnboardResult, Ticket
from kvtier.workers import WorkerPool


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


@dataclass(frozen=True, slots=True)
class _Batch:
    request_ids: tuple[str, ...]
    tickets: tuple[Ticket[OnboardResult], ...]
    started: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """A batch of which nothing is being written any more. ok: every layer of every load arrived."""

    request_ids: tuple[str, ...]
    ok: bool


class Loads:
    """Used on the scheduler's thread. `failed` hears of errors, also from the thread that watches the loads."""

    def __init__(self, counter: Any, layers: int, failed: Callable[[BaseException | None], None]) -> None:
        """counter: SGLang's `LayerWiseLoadCounter`, of so many `layers`."""
        self._counter = counter
        self._layers = layers
        self._failed = failed
        self._queued: dict[str, tuple[Part, ...]] = {}
        self._batches: dict[int, _Batch] = {}
        self._watchers = WorkerPool("kvtier-load-watch", 1, failed)

    def queue(self, rid: str, parts: Iterable[Part]) -> None:
        """A request was promised its pages, of all pools. Without parts its load cannot be started, which fails its
        batch."""
        self._queued[rid] = tuple(parts)

    def queued(self, rid: str) -> bool:
        return rid in self._queued

    def cancel(self, rid: str) -> bool:
        """Forget a load that was not started; True if there was one."""
        return self._queued.pop(rid, None) is not None

    def loads(self, rid: str) -> bool:
        """Whether the request is in a batch that loads pages of it."""
        return any(rid in batch.request_ids for batch in self._batches.values())

    def requests(self) -> set[str]:
        """Those whose loads have not ended."""
        return {*self._queued, *(rid for batch in self._batches.values() for rid in batch.request_ids)}

    def batches(self) -> list[int]:
        """Indices of those that have not ended."""
        return list(self._batches)

    @property
    def any_queued(self) -> bool:
        return bool(self._queued)

    def start(self, movers: Movers, ready: Callable[[], Sequence[Any]]) -> int:
        """Start every queued load; the forward waits for them under the index returned. `ready` takes the events that
        must be reached before a pool is written.

        A load that cannot be started fails the batch: its requests were promised their pages."""
        queued, self._queued = self._queued, {}
        index: int = self._counter.update_producer()
        parts = [part for load in queued.values() for part in load]
        batch = BatchLoad(self._counter, index, movers.writes_by_layer(parts, self._layers))
        tickets: list[Ticket[OnboardResult]] = []
        started = False
        try:
            events = ready()
            if not all(queued.values()):
                raise EngineError("pages that all ranks had agreed on are not there any more")
            # One by one: those before a failure have started, and must be waited for.
            tickets.extend(movers.onboard(part, events, batch.layer_done) for part in parts)
            if not self._watchers.submit(lambda: batch.watch(tickets)):
                raise EngineError("kvtier was closed")
            started = True
        except Exception as error:  # noqa: BLE001 - the forward must not wait for ever
            self._failed(None)
            batch.fail(error)
        self._batches[index] = _Batch(tuple(queued), tuple(tickets), started)
        return index

    def finish(self, index: int) -> Ended | None:
        """Wait until nothing of the batch is being written any more; None if it could not even be started."""
        batch = self._batches.pop(index, None)
        if batch is None:
            return None
        try:
            ok: bool = self._counter.finish(index) and batch.started
            ok &= all(result.ok for result in [ticket.result() for ticket in batch.tickets])
        except Exception:  # noqa: BLE001 - the stages of a pipeline wait for the verdict
            self._failed(None)
            ok = False
        return Ended(batch.request_ids, ok)

    def forget_queued(self) -> None:
        self._queued.clear()

    def drain(self) -> None:
        """Wait until every load that was started has been seen to end."""
        self._watchers.drain()

    def close(self) -> None:
        self._watchers.close(0.05)
