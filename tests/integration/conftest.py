"""Fixtures that several files share. A file that needs another `server` or `store` has its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.server.app import CacheServer
from kvtier.server.http import TOKEN_VARIABLE, HttpExporter, HttpOptions
from kvtier.server.page import StatusPage
from kvtier.store import TieredStore
from tests import cache_servers, named_pages


@pytest.fixture(autouse=True)
def no_http_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


@pytest.fixture(autouse=True)
def no_cache_server_left_running() -> Iterator[None]:
    yield
    while cache_servers.STARTED:
        cache_servers.STARTED.pop().stop(0.5)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CacheServer]:
    """A cache server over host memory, in this process."""
    server = cache_servers.start(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    """A store over a real NVMe directory, for pages of `named_pages`."""
    store = named_pages.open_store(tmp_path / "pages")
    yield store
    store.close()


@pytest.fixture
def url(store: TieredStore) -> Iterator[str]:
    """Of the HTTP port of `store`."""
    registry = store.ledger.registry
    with HttpExporter(registry, HttpOptions(), page=StatusPage(registry, None, lambda: store.observer)) as exporter:
        yield exporter.url
