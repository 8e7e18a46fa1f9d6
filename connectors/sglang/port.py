"""The connector's HTTP port: metrics, health, the status page, and hints of tool calls."""

from __future__ import annotations

import logging
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge

from kvtier.config import Config, HttpConfig
from kvtier.connectors.sglang.ranks import Place
from kvtier.connectors.sglang.tool_calls import BODY_BYTES_MAX, PATH, Hints, Text
from kvtier.server.http import HttpExporter, HttpOptions, Post
from kvtier.server.page import StatusPage
from kvtier.server.probe import store_ready
from kvtier.store import TieredStore

_log = logging.getLogger(__name__)


def show_open_requests(registry: CollectorRegistry, count: Callable[[], int]) -> None:
    text = "Requests looked up and not yet started or dropped, or loading"
    Gauge("kvtier_open_requests", text, registry=registry).set_function(count)


def show_pending_offloads(registry: CollectorRegistry, count: Callable[[], int]) -> None:
    text = "Offloads whose result the engine has not taken"
    Gauge("kvtier_pending_offloads", text, registry=registry).set_function(count)


def open_port(
    config: Config,
    http: HttpConfig,
    place: Place,
    store: TieredStore,
    page_bytes: int,
    keys_of: Callable[[Text], list[list[bytes]]],
) -> tuple[HttpExporter, Hints]:
    """Listen on the port of this rank. page_bytes: of a stored page, which must fit where one asks for readiness."""
    options = HttpOptions.of(http)
    first = place.node_rank == 0 and options.port
    others = [options.port_of(rank) for rank in range(1, place.node_ranks)] if first else ()
    registry = store.ledger.registry
    hints = Hints(store, keys_of, registry, lease_s=config.lease, others=others)
    exporter = HttpExporter(
        registry,
        options,
        rank=place.node_rank,
        ready=lambda: store_ready(store, page_bytes),
        page=StatusPage(registry, config, lambda: store.observer),
        posts={PATH: Post(hints.handle, BODY_BYTES_MAX)},
    )
    _log.info("kvtier metrics on %s/metrics", exporter.url)
    return exporter, hints
