"""One page mover for each pool of the engine, used as one: a node's pages are stored when those of all pools are, and
so are a request's loaded."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.abc.codec import Codec
from kvtier.build import open_codec
from kvtier.codecs import registry
from kvtier.config import PRIORITIES, Config, RedisTierConfig
from kvtier.connectors.sglang.pools import DevicePool, page_hashes
from kvtier.keys import Namespace
from kvtier.ledger import OffloadOutcome
from kvtier.lookup import Lookup
from kvtier.mover import PageMover
from kvtier.store import TieredStore
from kvtier.tickets import OffloadResult, OnboardResult, Ticket


def codec_for(config: Config, pool: DevicePool) -> Codec:
    """What new pages of `pool` are written with; states and packed rows are copied, or compressed without loss."""
    if pool.compressible:
        return open_codec(config, pool.spec)
    lossless = config.cold_page is not None and config.cold_page.quant == "lossless"
    return registry.codec("lossless" if lossless else "raw")


def check_device(codec: Codec, pool: DevicePool) -> None:
    """Raises where `codec` cannot reach the pool's device, or not in that form: before a worker finds out."""
    if pool.hot.device != "cpu":
        from kvtier.codecs import device

        device.check(codec.layout(pool.spec), pool.hot)


def shared_by_one(config: Config, tp_rank: int) -> Config:
    """The configuration of a rank whose pages all other tensor-parallel ranks have too: tiers that they share are
    written by the first rank alone. What is local to a rank, each writes."""
    if tp_rank == 0:
        return config
    tiers = [t.model_copy(update={"write": "none"}) if isinstance(t, RedisTierConfig) else t for t in config.tiers]
    return config.model_copy(update={"tiers": tiers})


@dataclass(frozen=True, slots=True)
class Stored:
    """A pool, and how its pages are named and written."""

    pool: DevicePool
    namespace: Namespace
    codec: Codec


@dataclass(frozen=True, slots=True)
class Part:
    """Pages of one pool that a request loads: `pages` by their places in `lookup`, into pool pages `page_ids`."""

    pool: str
    lookup: Lookup
    pages: Sequence[int]
    page_ids: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Offloading:
    """The pages of one node, on their way out of all pools."""

    tickets: tuple[Ticket[OffloadResult], ...]

    def done(self) -> bool:
        return all(ticket.done() for ticket in self.tickets)

    def result(self) -> OffloadResult:
        """Of all of its pages; waits for it."""
        outcomes: Counter[OffloadOutcome] = Counter()
        for ticket in self.tickets:
            outcomes.update(ticket.result().outcomes)
        return OffloadResult(dict(outcomes))


class Movers:
    """Closed before the store. Thread-safe, as page movers are."""

    def __init__(self, store: TieredStore, stored: Sequence[Stored], config: Config) -> None:
        """stored: the KV pool first."""
        self._store = store
        self._pools = {s.pool.name: s.pool for s in stored}
        self._movers = {
            s.pool.name: PageMover(
                store,
                s.pool.spec,
                s.namespace,
                s.codec,
                workers=config.workers,
                offload_wait_s=config.offload_wait,
                priority=PRIORITIES[config.priority],
                beside=n > 0,
            )
            for n, s in enumerate(stored)
        }
        self.kv = self._movers[stored[0].pool.name]

    def offload(self, transfers: Sequence[Any], events: Sequence[Any], check: Callable[[], None]) -> Offloading:
        """Queue a node's pages: of each pool, `keys` of SGLang's `PoolTransfer` say which pages its `device_indices`
        are. A worker waits for `events`, then calls `check`, which may raise, before anything of a pool is read, the
        indices included: where they lie on a device, they may be on their way too."""
        return Offloading(tuple(self._offload(transfer, events, check) for transfer in transfers))

    def _offload(self, transfer: Any, events: Sequence[Any], check: Callable[[], None]) -> Ticket[OffloadResult]:
        pool = self._pools[str(transfer.name)]
        ids = np.zeros(len(transfer.keys), dtype=np.int64)
        hashes = [b""] * len(transfer.keys)

        def ready() -> None:
            check()
            self._store.wait_counted()
            hashes[:] = page_hashes(transfer.keys)
            wait_for(events)
            ids[:] = pool.page_ids(transfer.device_indices, len(transfer.keys))

        return self._movers[pool.name].offload(pool.hot, hashes, ids, ready=ready)

    def onboard(self, part: Part, events: Sequence[Any], on_layer: Callable[[int], None]) -> Ticket[OnboardResult]:
        """Queue the load of `part`; pools are not written before `events`, since the work of an earlier batch may still
        use their pages. `on_layer` hears of layers by their number in the engine's counter, in the pool's order."""
        pool = self._pools[part.pool]
        return self._movers[part.pool].onboard(
            part.lookup,
            pool.hot,
            part.page_ids,
            pages=part.pages,
            on_layer=lambda layer: on_layer(pool.counted_as[layer]),
            ready=lambda: wait_for(events),
        )

    def writes_by_layer(self, parts: Sequence[Part], layers: int) -> list[int]:
        """How many of `parts` write each of the counter's `layers`."""
        writes = [0] * layers
        for part in parts:
            for layer in self._pools[part.pool].counted_as:
                writes[layer] += 1
        return writes

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until everything queued has ended; False on timeout."""
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        left = [m.drain(None if give_up is None else max(0.0, give_up - time.monotonic())) for m in self._all()]
        return all(left)

    def close(self, timeout_s: float = 1.5) -> None:
        give_up = time.monotonic() + timeout_s
        for mover in self._all():
            mover.close(max(0.05, give_up - time.monotonic()))

    def _all(self) -> list[PageMover]:
        return list(self._movers.values())


def wait_for(events: Sequence[Any]) -> None:
    """Block this thread, which is a worker's, until each event is reached on its stream."""
    for event in events:
        event.synchronize()
