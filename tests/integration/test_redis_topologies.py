"""The Redis tier on more than one server: a sentinel's failover, a cluster whose slots move and whose nodes die."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.abc.tier import GetStatus, PutStatus
from kvtier.storage_backends.redis import tier as tier_module
from kvtier.storage_backends.redis.options import RedisOptions
from kvtier.storage_backends.redis.tier import RedisTier
from kvtier.storage_backends.redis.topology import slot_of
from kvtier.testing import redis_servers
from kvtier.testing.pages import aligned_buffer, belongs, key_of
from kvtier.testing.redis_servers import RedisCluster, RedisServer, ask, find_server, kept_port, kinds, wait_for
from tests.redis_pages import LRU, PATIENCE_S, get, put

redis = pytest.importorskip("redis", reason="redis-py is not installed: pip install 'kvtier[redis]'")
pytestmark = pytest.mark.skipif(find_server() is None, reason="no redis-server: apt-get install redis-server")


@pytest.fixture(scope="module", autouse=True, params=kinds("redis", "valkey"))
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test here runs against Redis and against Valkey, where both are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_servers, "default_kind", request.param)
        # What a server says of itself at the start is asked for once, and a busy machine may take its time.
        patch.setattr(tier_module, "_START_S", PATIENCE_S)
        yield request.param


def test_sentinel_failover_is_followed(tmp_path: Path) -> None:
    servers = [RedisServer(tmp_path / "a", *LRU)]
    try:
        first = servers[0]
        servers.append(RedisServer(tmp_path / "b", *LRU, "--replicaof", "127.0.0.1", str(first.port)))
        config = tmp_path / "sentinel.conf"
        config.write_text(
            f"sentinel monitor pages 127.0.0.1 {first.port} 1\nsentinel down-after-milliseconds pages 60000\n"
            f"sentinel known-replica pages 127.0.0.1 {servers[1].port}\n"
        )
        sentinel_folder = tmp_path / "s"
        sentinel_folder.mkdir()
        port = kept_port()
        binary = find_server()
        assert binary is not None
        log = (sentinel_folder / "log").open("wb")
        sentinel = subprocess.Popen(
            [binary, str(config), "--sentinel", "--port", str(port), "--bind", "127.0.0.1"], stdout=log, stderr=log
        )
        try:
            wait_for(lambda: _connects(port), "the sentinel does not listen")
            wait_for(lambda: "slaves=1" in ask(port, "INFO", "sentinel"), "the sentinel sees no replica", PATIENCE_S)
            tier = RedisTier(RedisOptions.of(f"redis://127.0.0.1:{port}", service="pages", timeout_s=PATIENCE_S))
            assert put(tier, range(3)) == [PutStatus.STORED] * 3
            wait_for(lambda: ask(servers[1].port, "DBSIZE") == "3", "the replica does not follow")
            wait_for(lambda: _takes(port, "SENTINEL", "FAILOVER", "pages"), "the sentinel knows no replica to promote")
            wait_for(lambda: _is_master(servers[1].port), "no failover", PATIENCE_S)
            follow = ("REPLICAOF", "127.0.0.1", str(servers[1].port))  # the sentinel would take ten seconds
            wait_for(lambda: _takes(first.port, *follow), "the old master does not follow the new one")
            wait_for(
                lambda: PutStatus.STORED in put(tier, range(10, 12)) or PutStatus.EXISTS in put(tier, range(10, 12)),
                "the new master is not found",
                PATIENCE_S,
            )
            assert get(tier, range(3)) == [GetStatus.HIT] * 3
            assert ask(servers[1].port, "EXISTS", tier._name(key_of(10)).decode()) == "1"
            tier.close()
        finally:
            sentinel.kill()
            sentinel.wait()
            log.close()
    finally:
        for server in servers:
            server.stop()


def _is_master(port: int) -> bool:
    try:
        return "role:master" in ask(port, "INFO", "replication")
    except OSError:  # a server cuts its clients off when its role changes
        return False


def _takes(port: int, *command: str) -> bool:
    """Whether a command is answered with OK; not while servers change their parts, or do not know each other yet."""
    try:
        return ask(port, *command) == "OK"
    except (OSError, RuntimeError):
        return False


def _connects(port: int) -> bool:
    try:
        return ask(port, "PING") == "PONG"
    except OSError:
        return False


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RedisCluster]:
    cluster = RedisCluster(tmp_path, 3, LRU)
    yield cluster
    cluster.stop()


def test_cluster_slot_migrated_and_node_killed_during_traffic(cluster: RedisCluster) -> None:
    """Readers and writers run while one slot moves and one node dies: no wrong byte, no call that hangs, and every page
    of the nodes that stay is a hit at the end."""
    tier = RedisTier(RedisOptions.of(cluster.url, timeout_s=PATIENCE_S))
    assert tier.counters().nodes == 3
    pages = range(60)
    assert put(tier, pages) == [PutStatus.STORED] * 60
    assert get(tier, pages) == [GetStatus.HIT] * 60
    owners = {n: cluster.owner(slot_of(tier._name(key_of(n)))) for n in pages}
    assert set(owners.values()) == {0, 1, 2}

    stop = threading.Event()
    failures: list[str] = []
    rounds = [0, 0]

    def traffic(number: int) -> None:
        while not stop.is_set():
            n = 1000 * (number + 1) + 5 * (rounds[number] % 40)  # no more than the servers have room for
            try:
                statuses = get(tier, pages)  # verifies every hit's bytes
            except AssertionError:
                failures.append("wrong bytes")
                return
            put(tier, range(n, n + 5))
            rounds[number] += 1
            if GetStatus.CORRUPT in statuses:
                failures.append("corrupt")

    threads = [threading.Thread(target=traffic, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    try:
        moved = next(n for n in pages if owners[n] == 0)
        slot = slot_of(tier._name(key_of(moved)))
        migrate(cluster, slot, 0, 1)
        wait_for(lambda: tier.counters().redirects > 0, "no redirection was followed", PATIENCE_S)
        assert get(tier, range(moved, moved + 1)) == [GetStatus.HIT]
        cluster.nodes[2].stop()
        before = list(rounds)
        wait_for(
            lambda: bool(failures) or all(now >= then + 5 for now, then in zip(rounds, before, strict=True)),
            "calls hang since a node is gone",
            PATIENCE_S / 2,
        )
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures
    statuses = get(tier, pages)
    for n, status in zip(pages, statuses, strict=True):
        assert (status is GetStatus.HIT) == (owners[n] != 2), (n, owners[n], status)
    cluster.nodes[2].start()
    lost = next(n for n in pages if owners[n] == 2)
    wait_for(lambda: put(tier, range(lost, lost + 1)) == [PutStatus.STORED], "the node is not used again", PATIENCE_S)
    assert get(tier, range(lost, lost + 1)) == [GetStatus.HIT]
    tier.close()


def test_cluster_ask_is_followed_without_changing_the_picture(cluster: RedisCluster) -> None:
    tier = RedisTier(RedisOptions.of(cluster.url, timeout_s=PATIENCE_S))
    n = next(n for n in range(100) if cluster.owner(slot_of(tier._name(key_of(n)))) == 0)
    slot = slot_of(tier._name(key_of(n)))
    ids = [cluster.ask(i, "CLUSTER", "MYID") for i in range(2)]
    cluster.ask(1, "CLUSTER", "SETSLOT", str(slot), "IMPORTING", ids[0])
    cluster.ask(0, "CLUSTER", "SETSLOT", str(slot), "MIGRATING", ids[1])
    refreshes = tier.counters().refreshes
    assert put(tier, range(n, n + 1)) == [PutStatus.STORED]
    assert get(tier, range(n, n + 1)) == [GetStatus.HIT]
    assert tier.counters().redirects >= 2
    assert tier.counters().refreshes == refreshes
    assert cluster.ask(1, "CLUSTER", "COUNTKEYSINSLOT", str(slot)) == "1"
    tier.close()


LARGE = 1 << 20
SHARE = 10
"""Pages of each node in one batch: more than are asked for ahead."""


@pytest.fixture
def batch(cluster: RedisCluster) -> Iterator[tuple[RedisTier, list[list[int]]]]:
    """A tier, and large pages that are in it, by the node that has them."""
    tier = RedisTier(RedisOptions.of(cluster.url, timeout_s=PATIENCE_S))
    shares: list[list[int]] = [[], [], []]
    n = 0
    while min(map(len, shares)) < SHARE:
        share = shares[slot_of(tier._name(key_of(n))) * 3 // 16384]
        if len(share) < SHARE:
            share.append(n)
            assert put(tier, range(n, n + 1), LARGE) == [PutStatus.STORED]
        n += 1
    assert [cluster.owner(slot_of(tier._name(key_of(share[0])))) for share in shares] == [0, 1, 2]
    yield tier, shares
    tier.close()


def get_numbers(tier: RedisTier, numbers: list[int], before_reading: Callable[[int], None]) -> dict[int, GetStatus]:
    """One batch, its hits' bytes found right; before_reading: called with the number of each page that is due."""
    keys = [key_of(n) for n in numbers]
    outs = [aligned_buffer(LARGE) for _ in keys]
    read = tier._incoming.read
    number_of = dict(zip(keys, numbers, strict=True))

    def reading(connection: Any, key: bytes, out: memoryview) -> Any:
        before_reading(number_of[key])
        return read(connection, key, out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier._incoming, "read", reading)
        results = tier.get_many_into(keys, outs)
    for key, out, result in zip(keys, outs, results, strict=True):
        assert result.status is not GetStatus.HIT or belongs(key, out)
    return {n: result.status for n, result in zip(numbers, results, strict=True)}


def test_a_node_killed_in_the_middle_of_a_batch(
    cluster: RedisCluster, batch: tuple[RedisTier, list[list[int]]]
) -> None:
    """Every page of the other nodes is a hit; of its own, what it had sent, and a failure for each of the rest."""
    tier, shares = batch
    read: list[int] = []

    def before_reading(n: int) -> None:
        read.append(n)
        if len(read) == 2:
            cluster.nodes[2].stop()

    statuses = get_numbers(tier, [n for ns in zip(*shares, strict=True) for n in ns], before_reading)
    assert {statuses[n] for n in shares[0] + shares[1]} == {GetStatus.HIT}
    lost = [statuses[n] for n in shares[2]]
    assert set(lost) <= {GetStatus.HIT, GetStatus.FAILED}
    assert lost.count(GetStatus.FAILED) >= SHARE - 5, "it was asked for three more than were read"
    assert lost == sorted(lost, key=lambda status: status is GetStatus.FAILED)
    assert sorted(node.breaker._failures for node in tier._topology.nodes()) == [0, 0, 1]


def test_a_node_that_hangs_keeps_nobody_from_the_pages_of_the_others(
    cluster: RedisCluster, batch: tuple[RedisTier, list[list[int]]]
) -> None:
    """It goes on once every page of theirs was read, and its own are read then."""
    tier, shares = batch
    left = set(shares[0] + shares[1])
    frozen = cluster.nodes[2]

    def before_reading(n: int) -> None:
        left.discard(n)
        if not left:
            frozen.thaw()

    frozen.freeze()
    try:
        statuses = get_numbers(tier, shares[2] + shares[1] + shares[0], before_reading)
    finally:
        frozen.thaw()
    assert set(statuses.values()) == {GetStatus.HIT}
    assert tier.counters().breaker_opened == 0


def test_a_slot_that_moves_in_the_middle_of_a_batch(
    cluster: RedisCluster, batch: tuple[RedisTier, list[list[int]]]
) -> None:
    tier, shares = batch
    read: list[int] = []

    def before_reading(n: int) -> None:
        read.append(n)
        if len(read) == 2:
            migrate(cluster, slot_of(tier._name(key_of(shares[0][-1]))), 0, 1)

    statuses = get_numbers(tier, [*shares[0], *shares[1], *shares[2]], before_reading)
    assert set(statuses.values()) == {GetStatus.HIT}
    assert tier.counters().redirects == 1
    assert read.count(shares[0][-1]) == 2, "sent on, and found"


def migrate(cluster: RedisCluster, slot: int, source: int, target: int) -> None:
    """Move a slot with its keys, as `redis-cli --cluster reshard` does."""
    ids = [cluster.ask(i, "CLUSTER", "MYID") for i in range(len(cluster.nodes))]
    cluster.ask(target, "CLUSTER", "SETSLOT", str(slot), "IMPORTING", ids[source])
    cluster.ask(source, "CLUSTER", "SETSLOT", str(slot), "MIGRATING", ids[target])
    time.sleep(0.2)  # for traffic to meet a slot between two nodes, not a wait for anything
    with redis.Redis(port=cluster.nodes[source].port) as client:
        names = client.execute_command("CLUSTER GETKEYSINSLOT", slot, 100)
        for name in names:
            client.execute_command("MIGRATE", "127.0.0.1", cluster.nodes[target].port, name, 0, 60_000)
    for i in (target, source):
        cluster.ask(i, "CLUSTER", "SETSLOT", str(slot), "NODE", ids[target])
