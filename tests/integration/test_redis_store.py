"""Two stores on different "machines" share pages through the Redis tier of their configuration block."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from kvtier.abc.tier import PutStatus, Slot
from kvtier.build import open_store
from kvtier.config import parse_config
from kvtier.errors import ConfigError
from kvtier.store import TieredStore
from kvtier.testing.pages import belongs, item_of, key_of
from kvtier.testing.redis_servers import RedisServer, find_server

pytest.importorskip("redis", reason="redis-py is not installed: pip install 'kvtier[redis]'")
pytestmark = pytest.mark.skipif(find_server() is None, reason="no redis-server: apt-get install redis-server")

PAGE = 50_000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path, "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    yield server
    server.stop()


def open_one(url: str) -> TieredStore:
    return open_store(
        parse_config(
            {
                "tiers": [
                    {"type": "host", "capacity": "4MiB"},
                    {"type": "redis", "url": url, "ttl": "1h", "timeout": "60s"},
                ],
                "promote_deadline": "120s",
            }
        )
    )


def offload(store: TieredStore, numbers: range) -> None:
    for n in numbers:
        item = item_of(key_of(n), PAGE)
        (slot,) = store.reserve([item.key], [PAGE], 60.0)
        assert isinstance(slot, Slot)
        store.host.view(slot)[:] = item.data
        store.commit([item.key], [slot], [item.meta])
    assert store.flush(120.0)


def test_pages_written_here_are_found_there(server: RedisServer) -> None:
    here, there = open_one(server.url), open_one(server.url)
    offload(here, range(20))
    keys = [key_of(n) for n in range(25)]
    lookup = there.lookup("r", keys)
    assert lookup.ready_pages == 0, "the network is not asked on this thread"
    assert there.wait(lookup) == 20
    for key, (slot, meta) in zip(keys[:20], lookup.ready_slots(20), strict=True):
        assert meta == item_of(key, PAGE).meta, "form, valid tokens and origin come along"
        assert belongs(key, there.host.view(slot)[: meta.nbytes])
    there.settle("r")
    snapshot = there.ledger.snapshot()
    assert (snapshot.hits["redis"], snapshot.misses["absent"]) == (20, 5)
    offload(there, range(20, 25))
    assert there.ledger.snapshot().spills["redis"]["stored"] == 5
    again = here.lookup("r", keys)
    assert here.wait(again) == 25
    here.settle("r")
    hits = here.ledger.snapshot().hits
    assert (hits["host"], hits["redis"]) == (20, 5)
    here.close()
    there.close()


def test_a_server_that_dies_costs_hits_and_nothing_else(server: RedisServer) -> None:
    store = open_one(server.url)
    offload(store, range(5))
    server.stop()
    lookup = store.lookup("r", [key_of(n) for n in range(10)])
    assert store.wait(lookup) == 5
    store.settle("r")
    offload(store, range(100, 103))
    snapshot = store.ledger.snapshot()
    assert (snapshot.hits["host"], snapshot.misses["tier_down"]) == (5, 5)
    assert snapshot.spills["redis"][PutStatus.FAILED.value] == 3
    assert sum(snapshot.errors.values()) == 0
    metrics = generate_latest(store.ledger.registry).decode()
    assert 'kvtier_redis_nodes_up{tier="redis"} 0.0' in metrics or 'kvtier_redis_nodes_up{tier="redis"} 1.0' in metrics
    assert 'kvtier_redis_oom_rejections_total{tier="redis"} 0.0' in metrics
    store.close()


def test_wrong_options_in_the_block_are_named() -> None:
    for options, message in (
        ({"url": "http://x"}, "must look like redis://"),
        ({"url": "redis://u:hunter2@x"}, "password_file"),
        ({"url": "redis://x", "mode": "sentinel"}, "needs service"),
        ({"url": "redis://x", "capacity": "1GiB"}, "capacity"),
        ({"url": "redis://x", "ttl": "soon"}, "ttl"),
        ({"url": "redis://x", "tls_ca": "/nowhere"}, "does not use TLS"),
    ):
        with pytest.raises(ConfigError, match=message) as refusal:
            open_store(parse_config({"tiers": [{"type": "host", "capacity": "4MiB"}, {"type": "redis", **options}]}))
        assert "hunter2" not in str(refusal.value)
