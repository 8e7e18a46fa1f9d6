"""A release of today and a later one, whose records have another version, on one Redis; and on one NVMe directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.abc.tier import GetStatus, PutStatus, Slot
from kvtier.build import open_store
from kvtier.config import parse_config
from kvtier.errors import TierPathError
from kvtier.storage_backends.nvme import directory
from kvtier.storage_backends.nvme.tier import NvmeTier
from kvtier.storage_backends.redis import record
from kvtier.storage_backends.redis.options import DEFAULT_PREFIX, RedisOptions
from kvtier.storage_backends.redis.tier import RedisTier
from kvtier.store import TieredStore
from kvtier.testing.pages import aligned_buffer, belongs, item_of, key_of
from kvtier.testing.redis_servers import RedisServer, find_server

PAGE = 20_000
with_redis = pytest.mark.skipif(find_server() is None, reason="no redis-server: apt-get install redis-server")


@contextmanager
def later_release() -> Iterator[None]:
    """What is packed and read inside has the next version."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "VERSION", record.VERSION + 1)
        yield


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    pytest.importorskip("redis", reason="redis-py is not installed: pip install 'kvtier[redis]'")
    server = RedisServer(tmp_path, "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    yield server
    server.stop()


@pytest.fixture
def tiers(server: RedisServer) -> Iterator[tuple[RedisTier, RedisTier]]:
    """Of the release of today and of the later one, which meet under a prefix of the operator's own."""
    opened = [RedisTier(RedisOptions.of(server.url, prefix="mine:", timeout_s=60.0)) for _ in range(2)]
    yield opened[0], opened[1]
    for tier in opened:
        tier.close()


def hits(tier: RedisTier, numbers: range) -> list[GetStatus]:
    keys = [key_of(n) for n in numbers]
    outs = [aligned_buffer(PAGE) for _ in keys]
    results = tier.get_many_into(keys, outs)
    assert all(r.status is not GetStatus.HIT or belongs(k, o) for k, o, r in zip(keys, outs, results, strict=True))
    return [r.status for r in results]


def test_the_default_prefix_says_the_version() -> None:
    """So releases with different records do not even look at each other's pages."""
    assert f"kvtier:{record.VERSION}:" == DEFAULT_PREFIX


@with_redis
def test_a_later_record_is_a_miss_and_stays(tiers: tuple[RedisTier, RedisTier]) -> None:
    today, later = tiers
    with later_release():
        assert later.put_many([item_of(key_of(n), PAGE) for n in range(4)]) == [PutStatus.STORED] * 4
    keys = [key_of(n) for n in range(5)]
    assert today.contains_many(keys) == [False] * 5
    assert hits(today, range(5)) == [GetStatus.ABSENT] * 5
    assert today.put_many([item_of(key, PAGE) for key in keys]) == [PutStatus.FAILED] * 4 + [PutStatus.STORED]
    assert today.delete_many(keys[:4]) == 0
    counters, usage = today.counters(), today.usage()
    assert counters.newer_records == 4 * 4, "asked for, got, put over and deleted: each meeting counts"
    assert (counters.healed, usage.quarantined_pages, usage.deleted_pages, usage.resident_pages) == (0, 0, 0, 1)
    with later_release():
        assert hits(later, range(4)) == [GetStatus.HIT] * 4, "nothing of the later release was lost"


@with_redis
def test_the_later_release_may_replace_what_is_older(tiers: tuple[RedisTier, RedisTier]) -> None:
    today, later = tiers
    today.put_many([item_of(key_of(0), PAGE)])
    with later_release():
        assert hits(later, range(1)) == [GetStatus.CORRUPT]
        assert later.put_many([item_of(key_of(0), PAGE)]) == [PutStatus.STORED]
        assert hits(later, range(1)) == [GetStatus.HIT]
    assert hits(today, range(1)) == [GetStatus.ABSENT]


@with_redis
def test_a_store_counts_a_miss_and_goes_on(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    def open_one() -> TieredStore:
        redis = {"type": "redis", "url": server.url, "prefix": "mine:", "timeout": "60s"}
        tiers = [{"type": "host", "capacity": "1MiB"}, redis]
        return open_store(parse_config({"tiers": tiers, "promote_deadline": "120s"}))

    def offload(store: TieredStore, n: int) -> None:
        item = item_of(key_of(n), PAGE)
        (slot,) = store.reserve([item.key], [PAGE], 60.0)
        assert isinstance(slot, Slot)
        store.host.view(slot)[:] = item.data
        store.commit([item.key], [slot], [item.meta])
        assert store.flush(120.0)

    with later_release():
        later = open_one()
        offload(later, 0)
    today = open_one()
    lookup = today.lookup("r", [key_of(0)])
    assert today.wait(lookup) == 0
    today.settle("r")
    offload(today, 0)
    snapshot = today.ledger.snapshot()
    assert (snapshot.lookups, snapshot.misses["absent"], sum(snapshot.errors.values())) == (1, 1, 0)
    assert snapshot.spills["redis"] == snapshot.spills["redis"] | {"stored": 0, "failed": 1}
    again = today.lookup("r2", [key_of(0)])
    assert today.wait(again) == 1, "its own copy, in host memory"
    today.settle("r2")
    assert sum("later release" in r.message or "of version 2" in r.message for r in caplog.records) == 1
    today.close()
    later.close()


def test_a_directory_of_a_later_release_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory, "FORMAT_VERSION", directory.FORMAT_VERSION + 1)
        later = NvmeTier(tmp_path / "d", 1 << 20)
        assert later.put_many([item_of(key_of(0), PAGE)]) == [PutStatus.STORED]
        later.close()
    before = {p.name: p.read_bytes() for p in (tmp_path / "d").iterdir() if p.name != "LOCK"}
    with pytest.raises(TierPathError, match="name another directory, or delete this one"):
        NvmeTier(tmp_path / "d", 1 << 20)
    assert before == {p.name: p.read_bytes() for p in (tmp_path / "d").iterdir() if p.name != "LOCK"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory, "FORMAT_VERSION", directory.FORMAT_VERSION + 1)
        later = NvmeTier(tmp_path / "d", 1 << 20)
        assert later.contains_many([key_of(0)]) == [True]
        later.close()
