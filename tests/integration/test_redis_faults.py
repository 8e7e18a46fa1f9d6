"""The Redis tier against real servers that are full, frozen, restarted, protected, replaced, or part of a cluster."""

from __future__ import annotations

import errno
import logging
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.abc.tier import LENGTH_UNKNOWN, GetStatus, PutItem, PutStatus
from kvtier.kernels import _native
from kvtier.storage_backends.redis import node as node_module
from kvtier.storage_backends.redis import tier as tier_module
from kvtier.storage_backends.redis.options import RedisOptions, TlsOptions
from kvtier.storage_backends.redis.tier import RedisTier
from kvtier.storage_backends.redis.topology import slot_of
from kvtier.testing import redis_servers
from kvtier.testing.pages import aligned_buffer, belongs, item_of, key_of
from kvtier.testing.redis_servers import RedisCluster, RedisServer, ask, find_server, kept_port, kinds, wait_for

redis = pytest.importorskip("redis", reason="redis-py is not installed: pip install 'kvtier[redis]'")
pytestmark = pytest.mark.skipif(find_server() is None, reason="no redis-server: apt-get install redis-server")

PAGE = 30_000
PATIENCE_S = 60.0
"""How long is waited for what must happen: long, since it says nothing about speed."""
DOCUMENTED_RULES = [
    "~kvtier:1:*",
    "+get",
    "+set",
    "+getrange",
    "+unlink",
    "+del",
    "+info",
    "+cluster|slots",
    "+config|get",
    "+asking",
    "+select",
    "+ping",
]
"""From docs/redis.md."""
LRU = ("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")


@pytest.fixture(scope="module", autouse=True, params=kinds("redis", "valkey"))
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test here runs against Redis and against Valkey, where both are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_servers, "default_kind", request.param)
        # What a server says of itself at the start is asked for once, and a busy machine may take its time.
        patch.setattr(tier_module, "_START_S", PATIENCE_S)
        yield request.param


def put(tier: RedisTier, numbers: range, nbytes: int = PAGE) -> list[PutStatus]:
    return tier.put_many([item_of(key_of(n), nbytes) for n in numbers])


def get(tier: RedisTier, numbers: range, nbytes: int = PAGE, deadline_s: float | None = None) -> list[GetStatus]:
    """Statuses, after every hit's bytes were found right."""
    keys = [key_of(n) for n in numbers]
    outs = [aligned_buffer(nbytes) for _ in keys]
    results = tier.get_many_into(keys, outs, deadline_s)
    for key, out, result in zip(keys, outs, results, strict=True):
        if result.status is GetStatus.HIT:
            assert belongs(key, out)
    return [r.status for r in results]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path, *LRU)
    yield server
    server.stop()


@pytest.fixture
def tier(server: RedisServer) -> Iterator[RedisTier]:
    tier = RedisTier(RedisOptions.of(server.url, timeout_s=PATIENCE_S))
    yield tier
    tier.close()


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def client_of(server: RedisServer):  # type: ignore[no-untyped-def]
    return redis.Redis(port=server.port)


# ---- what is stored


def test_names_and_ttl_and_database(server: RedisServer) -> None:
    tier = RedisTier(
        RedisOptions.of(f"redis://127.0.0.1:{server.port}/3", prefix="mine:", ttl_s=10_000.0, timeout_s=PATIENCE_S)
    )
    assert put(tier, range(1)) == [PutStatus.STORED]
    tier.close()
    with redis.Redis(port=server.port, db=3) as client:
        (name,) = client.keys()
        assert name == b"mine:" + key_of(0).hex().encode()
        assert 9_000_000 < client.pttl(name) <= 10_000_000


@pytest.mark.parametrize(
    "value", [b"", b"x", b"x" * 96, b"x" * 5000, "list"], ids=["empty", "short", "header", "long", "list"]
)
def test_a_foreign_value_is_a_miss_and_gives_way(server: RedisServer, tier: RedisTier, value: bytes | str) -> None:
    name = tier._name(key_of(0))
    with client_of(server) as client:
        if isinstance(value, str):
            client.lpush(name, "x")
        else:
            client.set(name, value)
    assert tier.contains_many([key_of(0)]) == [False]
    assert put(tier, range(1)) == [PutStatus.STORED]
    assert get(tier, range(1)) == [GetStatus.HIT]
    assert tier.counters().healed == 1


@pytest.mark.parametrize("damage", ["truncated", "longer", "empty", "other key", "list"])
def test_a_damaged_value_is_corrupt_once_and_then_absent(server: RedisServer, tier: RedisTier, damage: str) -> None:
    put(tier, range(3))
    with client_of(server) as client:
        name = tier._name(key_of(1))
        value = client.get(name)
        client.delete(name)
        if damage == "list":
            client.lpush(name, "x")
        else:
            other = client.get(tier._name(key_of(2)))
            client.set(
                name, {"truncated": value[:-1], "longer": value + b"x", "empty": b"", "other key": other}[damage]
            )
    assert get(tier, range(3)) == [GetStatus.HIT, GetStatus.CORRUPT, GetStatus.HIT]
    assert get(tier, range(3)) == [GetStatus.HIT, GetStatus.ABSENT, GetStatus.HIT]
    assert tier.usage().quarantined_pages == 1
    assert put(tier, range(1, 2)) == [PutStatus.STORED]


def test_a_page_that_went_bad_before_it_was_put_is_not_blessed(tier: RedisTier) -> None:
    item = item_of(key_of(1), PAGE)
    assert tier.put_many([PutItem(key_of(2), item.meta, item.data)]) == [PutStatus.FAILED]
    assert tier.contains_many([key_of(2)]) == [False]
    assert tier.counters().bad_puts == 1


def test_another_spec_is_refused(server: RedisServer, tier: RedisTier) -> None:
    put(tier, range(2))
    picky = RedisTier(RedisOptions.of(server.url, timeout_s=PATIENCE_S), spec=item_of(key_of(0), PAGE).meta.spec)
    assert get(picky, range(2)) == [GetStatus.HIT, GetStatus.CORRUPT]
    picky.close()


# ---- full


def test_a_full_server_is_an_explicit_counted_outcome(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = RedisServer(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    try:
        with caplog.at_level(logging.WARNING):
            tier = RedisTier(RedisOptions.of(server.url, timeout_s=PATIENCE_S))
        assert "maxmemory-policy is noeviction" in caplog.text
        statuses = put(tier, range(100))
        assert set(statuses) == {PutStatus.STORED, PutStatus.FULL}
        assert tier.counters().oom_rejections == statuses.count(PutStatus.FULL)
        assert tier.usage().stored_pages == statuses.count(PutStatus.STORED)
        stored = [n for n, s in enumerate(statuses) if s is PutStatus.STORED]
        assert get(tier, range(stored[0], stored[0] + 1)) == [GetStatus.HIT]
        tier.delete_many([key_of(n) for n in stored])
        assert put(tier, range(200, 202)) == [PutStatus.STORED] * 2
        tier.close()
    finally:
        server.stop()


def test_values_over_the_servers_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = RedisServer(tmp_path, *LRU, "--proto-max-bulk-len", "1mb")
    try:
        with caplog.at_level(logging.WARNING):
            tier = RedisTier(RedisOptions.of(server.url, timeout_s=PATIENCE_S), record_bytes=2 << 20)
        assert "proto-max-bulk-len" in caplog.text
        assert put(tier, range(1), 2 << 20) == [PutStatus.TOO_LARGE]
        assert put(tier, range(1), (1 << 20) - 200) == [PutStatus.STORED]
        tier.close()
    finally:
        server.stop()


# ---- not there


def test_a_server_that_is_not_there_yet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    port = kept_port()
    with caplog.at_level(logging.WARNING):
        tier = RedisTier(RedisOptions.of(f"redis://127.0.0.1:{port}", timeout_s=PATIENCE_S))
    assert "no server answers" in caplog.text
    assert put(tier, range(2)) == [PutStatus.FAILED] * 2
    assert get(tier, range(2)) == [GetStatus.FAILED] * 2
    assert tier.length_many([key_of(0)]) == [LENGTH_UNKNOWN]
    server = RedisServer(tmp_path, *LRU, port=port)
    try:
        wait_for(lambda: put(tier, range(1)) == [PutStatus.STORED], "the server is not found", PATIENCE_S)
        assert get(tier, range(1)) == [GetStatus.HIT]
    finally:
        tier.close()
        server.stop()


def test_a_restarted_server_costs_no_page(server: RedisServer, tier: RedisTier) -> None:
    put(tier, range(4))
    assert get(tier, range(4)) == [GetStatus.HIT] * 4
    server.stop()
    server.start()
    assert get(tier, range(4)) == [GetStatus.ABSENT] * 4, "stale connections are replaced within the call"
    assert put(tier, range(4)) == [PutStatus.STORED] * 4


def test_a_frozen_server_costs_a_deadline_then_nothing_then_comes_back(server: RedisServer, tier: RedisTier) -> None:
    put(tier, range(4))
    server.freeze()
    try:
        start = time.monotonic()
        assert get(tier, range(4), deadline_s=0.3) == [GetStatus.DEADLINE] * 4
        assert 0.25 < time.monotonic() - start < PATIENCE_S / 2, "the tier's own timeout instead of the caller's"
        for _ in range(4):
            get(tier, range(4), deadline_s=0.2)
        answers = [set(get(tier, range(4), deadline_s=0.2)) for _ in range(20)]
        assert set().union(*answers) <= {GetStatus.DEADLINE, GetStatus.FAILED}
        # Whom the breaker lets through waits for the deadline: one try at the end of each pause, which doubles.
        assert answers.count({GetStatus.FAILED}) > 10, "the breaker answers at once"
        assert tier.counters().breaker_opened >= 1
        assert tier.counters().nodes_up == 0
    finally:
        server.thaw()
    wait_for(lambda: get(tier, range(4)) == [GetStatus.HIT] * 4, "the server is not used again", PATIENCE_S)
    assert tier.counters().nodes_up == 1


def test_a_hurried_caller_does_not_open_the_breaker(tier: RedisTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "_FAIR_WAIT_S", PATIENCE_S)  # which a call takes where the machine stands still
    put(tier, range(4))
    for _ in range(10):
        get(tier, range(4), deadline_s=1e-6)
    assert tier.counters().breaker_opened == 0
    assert get(tier, range(4)) == [GetStatus.HIT] * 4


def test_closing_is_quick_beside_a_frozen_server(server: RedisServer) -> None:
    tier = RedisTier(RedisOptions.of(server.url, timeout_s=10 * PATIENCE_S))
    put(tier, range(1))
    (node,) = tier._topology.nodes()
    server.freeze()
    try:
        answers: list[GetStatus] = []
        thread = threading.Thread(target=lambda: answers.extend(get(tier, range(1))))
        thread.start()
        wait_for(lambda: bool(node._busy), "the call did not begin")
        start = time.monotonic()
        tier.close()
        assert time.monotonic() - start < PATIENCE_S / 2, "closing is to take 2 s, and waited for the server"
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert answers == [GetStatus.FAILED]
    finally:
        server.thaw()


def test_connections_do_not_leak(server: RedisServer) -> None:
    tier = RedisTier(RedisOptions.of(server.url, connections=3, timeout_s=PATIENCE_S))
    descriptors = open_files()
    for turn in range(20):
        threads = [threading.Thread(target=put, args=(tier, range(n * 1000, n * 1000 + 3))) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if turn % 5 == 0:
            ask(server.port, "CLIENT", "KILL", "TYPE", "normal")
    assert tier.counters().open_connections <= 3
    assert open_files() <= descriptors + 3
    tier.close()
    assert tier.counters().open_connections == 0


@pytest.mark.parametrize(
    "error", [0, errno.EINVAL, errno.ENOSYS, errno.EFAULT], ids=["sent", "inval", "nosys", "fault"]
)
def test_large_pages_go_by_reference_where_that_can_be_done(
    server: RedisServer, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    send_pages = _native.send_pages

    def sometimes(*arguments: Any) -> tuple[int, int]:
        calls.append(len(arguments[4]))
        return (0, error) if error else send_pages(*arguments)

    monkeypatch.setattr(_native, "send_pages", sometimes)
    descriptors = open_files()
    tier = RedisTier(RedisOptions.of(server.url, timeout_s=PATIENCE_S, connections=1))
    nbytes = (1 << 20) + 77
    assert put(tier, range(4), nbytes) == [PutStatus.STORED] * 4
    assert get(tier, range(4), nbytes) == [GetStatus.HIT] * 4
    assert calls == [nbytes] * (1 if error else 4), "what failed once is not tried again"
    tier.close()
    assert open_files() <= descriptors


def test_a_frozen_server_does_not_hold_up_pages_sent_by_reference(server: RedisServer, tier: RedisTier) -> None:
    assert put(tier, range(1)) == [PutStatus.STORED]
    items = [item_of(key_of(n), 8 << 20) for n in range(9, 12)]
    server.freeze()
    try:
        start = time.monotonic()
        statuses = tier.put_many(items, 0.5)
        assert PutStatus.STORED not in statuses and PutStatus.DEADLINE in statuses
        assert time.monotonic() - start < PATIENCE_S / 2, "the tier's own timeout instead of the caller's"
    finally:
        server.thaw()
    wait_for(lambda: get(tier, range(1)) == [GetStatus.HIT], "the server is not used again", PATIENCE_S)


# ---- protected


def test_acl_users_and_wrong_passwords(server: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ask(server.port, "ACL", "SETUSER", "kv", "on", ">hunter2", *DOCUMENTED_RULES)
    secret = tmp_path / "secret"
    secret.write_text("hunter2\n")
    url = f"redis://kv@127.0.0.1:{server.port}"
    tier = RedisTier(RedisOptions.of(url, password_file=secret, timeout_s=PATIENCE_S))
    assert put(tier, range(2)) == [PutStatus.STORED] * 2
    assert get(tier, range(2)) == [GetStatus.HIT] * 2
    tier.close()
    other = RedisTier(RedisOptions.of(url, password_file=secret, prefix="other:", timeout_s=PATIENCE_S))
    assert put(other, range(2)) == [PutStatus.FAILED] * 2
    assert other.counters().error_replies > 0
    other.close()
    secret.write_text("hunter3\n")
    with caplog.at_level(logging.WARNING):
        wrong = RedisTier(RedisOptions.of(url, password_file=secret, mode="standalone", timeout_s=PATIENCE_S))
        assert put(wrong, range(2)) == [PutStatus.FAILED] * 2
        wrong.close()
    assert "check the user name and the password file" in caplog.text
    assert "hunter" not in caplog.text


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl: apt-get install openssl")
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new = ("-newkey", "rsa:2048", "-nodes", "-days", "2")
    openssl("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test ca")
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1")
    for name in ("server", "client"):
        openssl("req", *new[:3], "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
            "-days", "2", "-out", f"{name}.pem", "-extfile", "san",
        )  # fmt: skip
    return folder


def test_tls_with_client_certificates(certificates: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    port = kept_port()
    files = {f"--tls-{n}-file": certificates / p for n, p in (("cert", "server.pem"), ("key", "server.key"))}
    options = [x for k, v in files.items() for x in (k, str(v))]
    socket_path = tmp_path / "plain.sock"
    try:
        server = RedisServer(
            tmp_path, *LRU, "--tls-port", str(port), *options, "--tls-ca-cert-file", str(certificates / "ca.pem"),
            socket_path=socket_path,
        )  # fmt: skip
    except RuntimeError as e:
        if "TLS support" not in str(e):
            raise
        pytest.skip("this server was built without TLS")
    url = f"rediss://127.0.0.1:{port}"
    mine = TlsOptions(certificates / "ca.pem", certificates / "client.pem", certificates / "client.key")
    try:
        tier = RedisTier(RedisOptions.of(url, tls=mine, timeout_s=PATIENCE_S))
        assert put(tier, range(4), 1 << 20) == [PutStatus.STORED] * 4
        assert get(tier, range(5), 1 << 20) == [GetStatus.HIT] * 4 + [GetStatus.ABSENT]
        tier.close()
        with caplog.at_level(logging.WARNING):
            for untrusted in (TlsOptions(), TlsOptions(certificates / "ca.pem")):
                stranger = RedisTier(RedisOptions.of(url, tls=untrusted, mode="standalone", timeout_s=PATIENCE_S))
                assert put(stranger, range(9, 10)) == [PutStatus.FAILED]
                stranger.close()
        assert "certificate" in caplog.text.lower()
    finally:
        server.stop()


# ---- more than one server


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
