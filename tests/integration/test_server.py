"""The cache server with the real clients, redis-py first: commands, limits, users."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.server.app import CacheServer
from kvtier.testing.redis_servers import wait_for
from tests.cache_servers import MIB, PATIENCE_S, client_of, rss_bytes, start

redis = pytest.importorskip("redis", reason="redis-py is not installed: pip install 'kvtier[redis]'")


@pytest.fixture(params=[2, 3])
def client(server: CacheServer, request: pytest.FixtureRequest) -> Iterator[Any]:
    with client_of(server, protocol=request.param) as client:
        yield client


# ---- commands


@pytest.mark.parametrize("nbytes", [0, 1, 100, 16384, 1 << 20, 5 * MIB + 3])
def test_values_of_any_size_come_back(client: Any, nbytes: int) -> None:
    value = os.urandom(nbytes)
    assert client.set("k", value) is True
    assert client.get("k") == value
    assert client.strlen("k") == nbytes
    assert client.getrange("k", 1, 3) == value[1:4]
    assert client.getrange("k", -3, -1) == value[-3:]
    assert client.exists("k", "k", "nothing") == 2
    assert client.delete("k", "nothing") == 1
    assert client.get("k") is None


@pytest.fixture
def later_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How much later it is for the server's values than for everybody else."""
    later = [0.0]
    clock = SimpleNamespace(time=lambda: time.time() + later[0], time_ns=time.time_ns)
    monkeypatch.setattr("kvtier.server.keyspace.time", clock)
    return later


def test_set_options_and_expiry(client: Any, server: CacheServer, later_s: list[float]) -> None:
    assert client.set("k", b"1", nx=True) is True
    assert client.set("k", b"2", nx=True) is None
    assert client.get("k") == b"1"
    assert client.ttl("k") == -1 and client.ttl("nothing") == -2
    assert client.set("k", b"3", ex=9000) and 8000 <= client.ttl("k") <= 9000
    assert client.expire("k", 5000) and 4000 <= client.ttl("k") <= 5000
    assert not client.expire("nothing", 50)
    assert client.set("k", b"4") and client.ttl("k") == -1
    client.set("short", b"5", px=1_000_000)
    there = client.info("keyspace")["db0"]
    assert (there["keys"], there["expires"]) == (client.dbsize(), 1)
    assert client.get("short") == b"5"
    later_s[0] = 1001.0
    assert client.get("short") is None and client.exists("short") == 0
    assert client.set("short", b"6", nx=True), "an expired value does not count"
    later_s[0], before = 0.0, server.keyspace.expired
    client.set("shorter", b"7", px=1_000_000)
    server.keyspace.sweep()
    assert server.keyspace.expired == before
    later_s[0] = 1001.0
    server.keyspace.sweep()  # as the server does by itself every second
    wait_for(lambda: server.keyspace.expired == before + 1, "the expired value stays")
    assert client.expire("k", 0) and client.get("k") is None


def test_many_keys(client: Any) -> None:
    values = {f"key{n}": b"%d" % n * 100 for n in range(500)}
    assert client.mset(values)
    assert client.mget(["key7", "nothing", "key8"]) == [b"7" * 100, None, b"8" * 100]
    assert client.dbsize() == 500
    found = [k.decode() for k in client.scan_iter(count=20)]
    assert sorted(found) == sorted(values)
    assert len(list(client.scan_iter(match="key1?", count=1000))) == 10
    assert client.unlink(*list(values)[:100]) == 100
    assert client.flushdb() and client.dbsize() == 0
    assert list(client.scan_iter()) == []


def test_databases_are_apart(client: Any, server: CacheServer) -> None:
    client.set("k", b"0")
    with client_of(server, db=3) as other:
        assert other.get("k") is None
        other.set("k", b"3")
        other.flushdb()
        assert other.dbsize() == 0
    assert client.get("k") == b"0"
    with pytest.raises(redis.ResponseError, match="out of range"):
        client.execute_command("SELECT", 16)


def test_the_server_about_itself(client: Any, server: CacheServer) -> None:
    assert client.ping() and client.echo("hi") == b"hi"
    info = client.info()
    assert info["redis_mode"] == "standalone" and info["connected_clients"] >= 1 and info["maxmemory"] == 32 * MIB
    assert set(client.info("memory")) == {"used_memory", "used_memory_rss", "maxmemory", "maxmemory_policy"}
    assert client.config_get("max*")["maxmemory"] == str(32 * MIB)
    assert client.client_setname("me") and client.client_getname() in ("me", b"me")
    assert client.client_id() > 0 and client.command_count() > 20
    assert client.client_info()["name"] == "me"
    assert "get" in client.command()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("LPUSH", "a", "b"), "unknown command 'LPUSH'"),
        (("GET",), "wrong number of arguments for 'get'"),
        (("SET", "a", "b", "XX"), "syntax error"),
        (("SET", "a", "b", "EX", "0"), "invalid expire time"),
        (("SET", "a", "b", "EX", "x"), "not an integer"),
        (("PEXPIRE", "a", "-0"), "not an integer"),
        (("GETRANGE", "a", "007", "-1"), "not an integer"),
        (("MSET", "a", "b", "c"), "wrong number of arguments for 'mset'"),
        (("SCAN", "x"), "not an integer"),
        (("CONFIG", "SET", "maxmemory", "1"), "only CONFIG GET"),
        (("SET", "k" * 241, "v"), "the key has 241 bytes"),
        (("CLIENT", "KILL", "x"), "unknown subcommand"),
        (("HELLO", "4"), "unsupported protocol"),
    ],
)
def test_errors_are_named_and_leave_the_connection_good(client: Any, command: tuple[str, ...], message: str) -> None:
    with pytest.raises(redis.ResponseError, match=message):
        client.execute_command(*command)
    assert client.ping()


def test_a_pipeline_is_answered_in_order(client: Any) -> None:
    with client.pipeline(transaction=False) as pipeline:
        for n in range(2000):
            pipeline.set(f"k{n % 7}", b"%d" % n)
            pipeline.get(f"k{n % 7}")
        replies = pipeline.execute()
    assert replies[1::2] == [b"%d" % n for n in range(2000)]


@pytest.mark.parametrize("meets", ["pin_one", "lookup"])
def test_a_value_that_is_overwritten_while_it_is_looked_for_is_the_new_one(
    server: CacheServer, monkeypatch: pytest.MonkeyPatch, meets: str
) -> None:
    store = server.keyspace.store
    with client_of(server) as reader, client_of(server) as writer:
        writer.set("k", b"old" * 9000)
        real_pin, real_lookup, left = store.host.pin_one, store.lookup, [1]

        def overwrite() -> None:
            if left:
                left.pop()
                writer.set("k", b"new" * 9000)

        def pin_one(page: bytes) -> Any:
            if meets == "lookup" and left:
                return None
            overwrite()
            return real_pin(page)

        def lookup(*args: Any, **options: Any) -> Any:
            overwrite()
            return real_lookup(*args, **options)

        monkeypatch.setattr(store.host, "pin_one", pin_one)
        monkeypatch.setattr(store, "lookup", lookup)
        assert reader.get("k") == b"new" * 9000
        assert not left and store.open_requests() == []
    counts = store.ledger.snapshot()
    assert counts.lookups == sum(counts.hits.values()) + sum(counts.misses.values())


def test_overwriting_is_atomic(server: CacheServer) -> None:
    """A reader sees one writer's value, whole, or the other's; never nothing, never a mixture."""
    values = [bytes([n]) * MIB for n in (1, 2)]
    with client_of(server) as client:
        client.set("k", values[0])
    stop = threading.Event()
    wrong: list[str] = []

    def write(value: bytes) -> None:
        with client_of(server) as client:
            while not stop.is_set():
                client.set("k", value)

    threads = [threading.Thread(target=write, args=(v,)) for v in values]
    for thread in threads:
        thread.start()
    with client_of(server) as client:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            got = client.get("k")
            if got not in values:
                wrong.append("nothing" if got is None else "a mixture")
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert server.store is not None and server.store.host.usage().resident_pages == 1


# ---- limits


def test_values_over_the_limit_are_refused_and_the_connection_stays(tmp_path: Path) -> None:
    server = start(tmp_path, max_value="1MiB")
    with client_of(server) as client:
        with pytest.raises(redis.ResponseError, match=r"this server takes 1048576 \(max_value\)"):
            client.set("k", bytes(MIB + 1))
        assert client.set("k", bytes(MIB))
        with pytest.raises(redis.ResponseError, match="this server takes"):
            client.mset({"a": b"1", "b": bytes(2 * MIB)})
        assert client.get("a") is None
    assert server.store is not None
    assert server.store.host.usage().used_bytes == MIB
    server.stop()


def test_connections_over_the_limit_are_told_so(tmp_path: Path) -> None:
    server = start(tmp_path, max_connections=2)
    one, two = client_of(server), client_of(server)
    assert one.ping() and two.ping()
    with socket.socket(socket.AF_UNIX) as three:
        three.connect(str(server.listening[0].path))
        assert three.recv(100) == b"-ERR max number of clients reached\r\n"
        assert three.recv(100) == b""
    two.close()
    wait_for(lambda: server.stats.connections == 1, "the connection stays")
    with client_of(server) as four:
        assert four.ping()
    one.close()
    server.stop()


def test_more_values_than_room_evicts_and_forgets_the_oldest(tmp_path: Path) -> None:
    server = start(tmp_path, host="8MiB")
    with client_of(server) as client:
        for n in range(50):
            assert client.set(f"k{n}", bytes([n]) * 512 * 1024)
        assert client.dbsize() == 16
        assert client.get("k49") == bytes([49]) * 512 * 1024 and client.get("k0") is None
        assert len(list(client.scan_iter())) == 16
    server.stop()


def test_an_mset_that_does_not_fit_waits_for_room_once(tmp_path: Path) -> None:
    server = start(tmp_path, host="8MiB")
    with client_of(server) as client:
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.mset({f"k{n}": bytes(MIB) for n in range(40)})
        assert server.keyspace.refused == {"full": 1}, "it waits anew for each value"
        assert client.dbsize() == 0 and client.set("k", bytes(MIB)), "room is held for what was refused"
    server.stop()


def test_ten_thousand_connections_leak_nothing(server: CacheServer) -> None:
    """At most 256 at a time; all of them closed in the middle of something, or of nothing."""

    def open_files() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    before, threads = open_files(), threading.active_count()
    path = str(server.listening[0].path)
    made = [0]

    def make(turns: int) -> None:
        for _ in range(turns):
            sockets = []
            for n in range(250):
                s = socket.socket(socket.AF_UNIX)
                s.connect(path)
                s.sendall(
                    (b"PING\r\n", b"*2\r\n$3\r\nGET\r\n", b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$100000\r\nabc", b"")[n % 4]
                )
                sockets.append(s)
            for s in sockets:
                s.close()
            made[0] += len(sockets)
        wait_for(lambda: taken() == made[0] and server.stats.connections == 0, "connections stay open", 120.0)

    def taken() -> int:
        return server.stats.totals()["connections"] + server.stats.totals()["rejected"]

    make(10)
    grown: list[int] = []
    while min(grown, default=MIB << 10) >= 16 * MIB and len(grown) < 4:  # allocators stop to grow, a leak does not
        settled = rss_bytes(os.getpid())
        make(30)
        grown.append(rss_bytes(os.getpid()) - settled)
    assert min(grown) < 16 * MIB, f"7500 connections cost {grown} bytes of memory, each time"
    wait_for(lambda: threading.active_count() <= threads and open_files() <= before, "threads or files stay")
    assert server.store is not None and server.store.host.usage().used_bytes == 0
    assert server.store.open_requests() == []


# ---- who may do what


@pytest.fixture
def tenants(tmp_path: Path) -> Iterator[CacheServer]:
    for name in ("alice", "bob", "reader", "default"):
        (tmp_path / name).write_text(f"{name}-secret\n")
    users = [
        {"name": "alice", "password_file": str(tmp_path / "alice"), "prefixes": ["a:"], "quota": "2MiB"},
        {"name": "bob", "password_file": str(tmp_path / "bob"), "prefixes": ["b:", "shared:"]},
        {"name": "reader", "password_file": str(tmp_path / "reader"), "read_only": True},
    ]
    server = start(tmp_path, users=users, password_file=str(tmp_path / "default"), http=True)
    yield server
    server.stop()


def test_nothing_without_a_password(tenants: CacheServer) -> None:
    with client_of(tenants) as stranger:
        for command in (("GET", "a:1"), ("SET", "a:1", "x"), ("PING",), ("INFO",), ("SCAN", "0"), ("NONSENSE",)):
            with pytest.raises((redis.AuthenticationError, redis.ResponseError)):
                stranger.execute_command(*command)
    for name, password in (("alice", "wrong"), ("nobody", "x"), (None, "alice-secret")):
        with client_of(tenants, username=name, password=password) as client, pytest.raises(redis.AuthenticationError):
            client.ping()
    for protocol in (2, 3):
        with client_of(tenants, password="default-secret", protocol=protocol) as client:
            assert client.ping()


def test_who_says_nothing_of_itself_is_cut_off_however_slowly_it_speaks(tmp_path: Path) -> None:
    """A byte now and then keeps every read short, and would keep a connection for good."""
    (tmp_path / "password").write_text("secret")
    server = start(tmp_path, password_file=str(tmp_path / "password"), client_timeout="1s")
    where = server.listening[0].path
    assert where is not None
    with client_of(server, password="secret") as known, socket.socket(socket.AF_UNIX) as stranger:
        assert known.ping()
        stranger.connect(str(where))
        stranger.settimeout(0.05)
        give_up = time.monotonic() + PATIENCE_S
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while time.monotonic() < give_up:
                stranger.send(b"A")
                with contextlib.suppress(TimeoutError):  # it is not answered, and not cut off yet
                    if not stranger.recv(1):
                        break
        assert time.monotonic() < give_up, "still there"
        assert known.ping(), "who is known may be silent"
    server.stop()


def test_a_user_sees_and_touches_only_its_own(tenants: CacheServer) -> None:
    alice = client_of(tenants, username="alice", password="alice-secret")
    bob = client_of(tenants, username="bob", password="bob-secret")
    alice.mset({"a:1": b"1", "a:2": b"2"})
    bob.mset({"b:1": b"3", "shared:1": b"4"})
    for command in (
        ("GET", "b:1"), ("SET", "b:1", "x"), ("MGET", "a:1", "b:1"), ("DEL", "b:1"), ("EXISTS", "b:1"), ("TTL", "b:1"),
        ("STRLEN", "b:1"), ("MSET", "a:1", "x", "b:1", "x"), ("EXPIRE", "b:1", "1"), ("UNLINK", "a:1", "b:1"),
        ("GETRANGE", "b:1", "0", "1"),
    ):  # fmt: skip
        with pytest.raises(redis.exceptions.NoPermissionError):
            alice.execute_command(*command)
    assert alice.get("a:1") == b"1" and bob.get("b:1") == b"3"
    assert (alice.dbsize(), bob.dbsize()) == (2, 2)
    assert sorted(alice.scan_iter()) == [b"a:1", b"a:2"]
    alice.expire("a:1", 9000)
    bob.expire("b:1", 9000)
    seen = alice.info("keyspace")["db0"]
    assert (seen["keys"], seen["expires"]) == (2, 1)
    alice.flushdb()
    assert (alice.dbsize(), bob.dbsize()) == (0, 2)
    with client_of(tenants, username="reader", password="reader-secret") as reader:
        assert reader.get("b:1") == b"3"
        for write in (("SET", "b:1", "x"), ("DEL", "b:1"), ("FLUSHDB",)):
            with pytest.raises(redis.exceptions.NoPermissionError):
                reader.execute_command(*write)
    alice.close()
    bob.close()


def test_a_quota_is_an_explicit_counted_refusal(tenants: CacheServer) -> None:
    with client_of(tenants, username="alice", password="alice-secret") as alice:
        alice.set("a:1", bytes(MIB))
        alice.set("a:2", bytes(MIB))
        with pytest.raises(redis.ResponseError, match="alice has 2097152 of 2097152 bytes"):
            alice.set("a:3", b"x")
        alice.set("a:2", bytes(MIB // 2))
        alice.set("a:3", bytes(MIB // 2))
        alice.delete("a:1")
        assert alice.set("a:4", bytes(MIB))
    assert tenants.http is not None
    metrics = urllib.request.urlopen(tenants.http.url + "/metrics").read().decode()
    assert 'kvtier_server_refused_values_total{reason="quota"} 1.0' in metrics
    assert 'kvtier_server_quota_used_bytes{user="alice"} 2.097152e+06' in metrics


def test_a_quota_counts_values_that_are_on_their_way(tenants: CacheServer) -> None:
    def begin(key: str) -> socket.socket:
        """A connection on which most of a SET is still missing."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(PATIENCE_S)
        connection.connect(str(tenants.listening[0].path))
        connection.sendall(b"AUTH alice alice-secret\r\n")
        assert connection.recv(100) == b"+OK\r\n"
        connection.sendall(f"*3\r\n$3\r\nSET\r\n$3\r\n{key}\r\n${MIB}\r\nxxxx".encode())
        return connection

    def coming(nbytes: int) -> bool:
        return bool(tenants.keyspace._coming["alice"] == nbytes)

    with client_of(tenants, username="alice", password="alice-secret") as alice:
        with pytest.raises(redis.ResponseError, match="QUOTA alice"):
            alice.mset({f"a:{n}": bytes(MIB) for n in range(3)})
        assert alice.dbsize() == 0, "of a refused MSET nothing is stored"
        assert alice.mset({f"a:{n}": bytes(MIB) for n in range(2)})
        alice.flushdb()
        with begin("a:0") as whole, begin("a:1") as broken:
            wait_for(lambda: coming(2 * MIB), "the values do not begin to come", PATIENCE_S)
            with pytest.raises(redis.ResponseError, match="QUOTA alice"):
                alice.set("a:9", b"x")
            whole.sendall(bytes(MIB - 4) + b"\r\n")
            assert whole.recv(100) == b"+OK\r\n" and tenants.keyspace.used_by() == {"alice": MIB}
            broken.close()
            wait_for(lambda: coming(0), "a value that never came holds its room", PATIENCE_S)
            assert alice.set("a:9", bytes(MIB))
            assert tenants.keyspace.used_by() == {"alice": 2 * MIB}


def test_it_refuses_to_listen_to_everybody_without_a_password(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reachable from other machines"):
        start(tmp_path, listen=["tcp:0.0.0.0:0"])
