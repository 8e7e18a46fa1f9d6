"""The cache server: a store of its own process, served over the Redis protocol, with metrics and health over HTTP."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvtier.config import Config, NvmeTierConfig
from kvtier.inventory import Inventory
from kvtier.server.away import give_up_what_was_away
from kvtier.server.commands import NAMES, execute
from kvtier.server.http import HttpExporter, HttpOptions
from kvtier.server.keyspace import Keyspace, label_of
from kvtier.server.listener import Clients, Listener
from kvtier.server.options import Listen, ServerOptions
from kvtier.server.page import StatusPage
from kvtier.server.probe import store_ready
from kvtier.server.session import Shared
from kvtier.server.stats import ServerStats
from kvtier.server.voided import Voided
from kvtier.store import TieredStore

if TYPE_CHECKING:
    from kvtier.storage_backends.nvme.tier import NvmeTier

_log = logging.getLogger(__name__)

_SWEEP_EVERY_S = 1.0
_PROBE_BYTES = 4096
_SHARD = "server"


class _StoreMetrics(Collector):
    """The store's metrics, once there is a store."""

    def __init__(self, server: CacheServer) -> None:
        self._server = server

    def collect(self) -> Iterable[Metric]:
        store = self._server.store
        return () if store is None else store.ledger.registry.collect()


class CacheServer:
    """Listens from the constructor on: live at once, ready after a put and a get. Ends with `stop`.

    Raises ConfigError, and errors of the tiers, where it cannot start; nothing is left open then.
    """

    def __init__(self, config: Config, options: ServerOptions, http: HttpOptions | None = None) -> None:
        from kvtier.build import open_store

        options.check_block(config)
        options.check()
        tls = None if options.tls is None else options.tls.context()
        self._stopping = threading.Event()
        self._options = options
        users = options.users
        self.keyspace = Keyspace(
            users.owner if users.have_quotas else None,
            users.quota,
            options.max_value_bytes,
            users.priority if users.rank_values else None,
        )
        self.stats = ServerStats(
            NAMES,
            lambda: self.keyspace.refused,
            self.keyspace.used_by,
            lambda: 0 if self._voided is None else self._voided.errors,
        )
        self.store: TieredStore | None = None
        self.http: HttpExporter | None = None
        self._voided: Voided | None = None
        self._listeners: list[Listener] = []
        self._sweeper = threading.Thread(target=self._sweep, name="kvtier-sweep", daemon=True)
        shared = Shared(self.keyspace, options.users, self.stats, options, time.time(), execute)
        self._clients = Clients(shared, options.max_connections)
        try:
            if http is not None:  # first: memory takes long to be had, and whoever probes us must see that we live
                registry = CollectorRegistry()
                registry.register(self.stats)
                registry.register(_StoreMetrics(self))
                page = StatusPage(registry, config, lambda: None if self.store is None else self.store.observer)
                self.http = HttpExporter(registry, http, ready=self._not_ready, page=page)
            store = open_store(config, shard=_SHARD, on_removed=self.keyspace.removed, origins=False)
            store.observer.inventory = None  # until it is known which value a page is, and who may ask
            self.store = store
            disk = next((tier for tier in config.tiers if isinstance(tier, NvmeTierConfig)), None)
            if disk is not None:  # behind the tier, which makes sure that it is the only one in its directory
                give_up_what_was_away(_directories(store))
                self._voided = Voided(
                    [path.expanduser() / _SHARD / "voided.log" for path in disk.path],
                    lambda: {page for directory in _directories(store) for page in directory.unlogged()},
                )
            self.keyspace.attach(self.store, self._voided)
            self._rank_found(store, config)
            self.store.inventory = Inventory(self.store, delete=self.keyspace.purge, label=label_of)
            # Who knows no password must not delete by another door.
            guarded = http is not None and http.token() is not None
            self.store.observer.inventory = self.store.inventory if options.users.open_to_all or guarded else None
            for listen in options.listen:
                self._listeners.append(Listener(listen, self._clients, tls))
        except BaseException:
            self.stop(0.0)
            raise
        self._sweeper.start()

    @property
    def listening(self) -> list[Listen]:
        """Where it listens, with the ports in use."""
        return [listener.where for listener in self._listeners]

    def stop(self, drain_s: float | None = None) -> None:
        """Take no more connections, let clients finish for `drain_s`, write what is not on disk yet, close. Safe to
        call twice."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        give_up = time.monotonic() + (self._options.drain_s if drain_s is None else drain_s)
        for listener in self._listeners:
            listener.close()
        cut = self._clients.drain(max(0.0, give_up - time.monotonic()))
        if cut:
            _log.warning("%d clients had not finished and were cut off", cut)
        if self._sweeper.is_alive():
            self._sweeper.join(2.0)
        if self.store is not None:
            if not self.store.flush(max(0.1, give_up - time.monotonic())):
                _log.warning("stopped before every value was written to the lower tiers")
            self.store.close()
        if self._voided is not None:
            self._voided.close()
        if self.http is not None:
            self.http.close()

    def _rank_found(self, store: TieredStore, config: Config) -> None:
        """Give the values that a restart found the priority of their users: a tier does not keep it."""
        users = self._options.users
        if not users.rank_values and config.priority == "normal":
            return
        ranks = {entry.page: users.priority(entry.key) for entry in self.keyspace.entries()}
        for tier in store.lower:
            by_rank: dict[int, list[bytes]] = {}
            for page, _ in tier.scan():  # in the order in which they were used
                by_rank.setdefault(ranks.get(page, 0), []).append(page)
            for rank, pages in by_rank.items():
                tier.rank_many(pages, rank)

    def _not_ready(self) -> str | None:
        if self._stopping.is_set():
            return "the server is shutting down"
        if self.store is None or len(self._listeners) < len(self._options.listen):
            return "the server is starting"
        return store_ready(self.store, _PROBE_BYTES)

    def _sweep(self) -> None:
        while not self._stopping.wait(_SWEEP_EVERY_S):
            self._sweep_once()

    def _sweep_once(self) -> None:
        self._clients.cut_strangers(self._options.client_timeout_s)
        try:
            self.keyspace.sweep()
        except Exception:  # noqa: BLE001 - logged; the next round tries again, and expired values are not served
            _log.exception("removing expired values failed")


def _directories(store: TieredStore) -> list[NvmeTier]:
    """Those of the NVMe tier that are open."""
    return [directory for tier in store.lower for directory in getattr(tier, "members", ())]
