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
from kvtier.testing import redis_servers
from kvtier.testing.pages import item_of, key_of
from kvtier.testing.redis_servers import RedisServer, ask, find_server, kept_port, kinds, wait_for
from tests.redis_pages import DOCUMENTED_RULES, LRU, PAGE, PATIENCE_S, get, put

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
@pytest.mark.parametrize("asked", [True, False], ids=["asked first", "sent at once"])
def test_a_foreign_value_is_a_miss_and_gives_way(
    server: RedisServer, tier: RedisTier, value: bytes | str, asked: bool
) -> None:
    if not asked:
        assert put(tier, range(1, 2)) == [PutStatus.STORED]
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


def test_pages_are_sent_at_once_after_a_batch_that_was_new(server: RedisServer, tier: RedisTier) -> None:
    def calls() -> tuple[int, int]:
        with client_of(server) as client:
            told = client.info("commandstats")
        exists, sets = (int(told.get(f"cmdstat_{name}", {"calls": 0})["calls"]) for name in ("exists", "set"))
        return exists, sets

    new, there = [PutStatus.STORED] * 3, [PutStatus.EXISTS] * 3
    assert put(tier, range(3)) == new and calls() == (1, 3)
    assert put(tier, range(3, 6)) == new and calls() == (1, 6)
    assert put(tier, range(3)) == there and calls() == (1, 9)  # in vain, once
    assert put(tier, range(3, 6)) == there and calls() == (2, 9)
    assert put(tier, range(6, 9)) == new and calls() == (3, 12)
    assert get(tier, range(9)) == [GetStatus.HIT] * 9


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


@pytest.mark.parametrize("over", ["tcp", "unix"])
def test_a_server_killed_in_the_middle_of_a_batch(
    server: RedisServer, tmp_path: Path, over: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that need several windows: those that were read are right, and each of the others is a failure."""
    nbytes, count = 1152 << 10, range(12)
    used = server if over == "tcp" else RedisServer(tmp_path / "unix", *LRU, socket_path=tmp_path / "r.sock")
    tier = RedisTier(RedisOptions.of(used.url, timeout_s=PATIENCE_S))
    try:
        assert put(tier, count, nbytes) == [PutStatus.STORED] * 12
        assert get(tier, count, nbytes) == [GetStatus.HIT] * 12
        read, calls = tier._incoming.read, []

        def reading(connection: Any, key: bytes, out: memoryview) -> Any:
            calls.append(key)
            if len(calls) == 3:
                used.stop()
            return read(connection, key, out)

        monkeypatch.setattr(tier._incoming, "read", reading)
        statuses = get(tier, count, nbytes)
        hits = statuses.count(GetStatus.HIT)
        assert 2 <= hits <= 6 and statuses == [GetStatus.HIT] * hits + [GetStatus.FAILED] * (12 - hits)
        assert tier.counters().open_connections == 0
        used.start()
        assert get(tier, count, nbytes) == [GetStatus.ABSENT] * 12
    finally:
        tier.close()
        used.stop()


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


@pytest.fixture
def tls_server(certificates: Path, tmp_path: Path) -> Iterator[tuple[RedisServer, str]]:
    """A server that wants client certificates, and its address."""
    port = kept_port()
    files = {f"--tls-{n}-file": certificates / p for n, p in (("cert", "server.pem"), ("key", "server.key"))}
    options = [x for k, v in files.items() for x in (k, str(v))]
    try:
        server = RedisServer(
            tmp_path, *LRU, "--tls-port", str(port), *options, "--tls-ca-cert-file", str(certificates / "ca.pem"),
            socket_path=tmp_path / "plain.sock",
        )  # fmt: skip
    except RuntimeError as e:
        if "TLS support" not in str(e):
            raise
        pytest.skip("this server was built without TLS")
    yield server, f"rediss://127.0.0.1:{port}"
    server.stop()


def client_certificate(folder: Path) -> TlsOptions:
    return TlsOptions(folder / "ca.pem", folder / "client.pem", folder / "client.key")


def test_tls_with_client_certificates(
    certificates: Path, tls_server: tuple[RedisServer, str], caplog: pytest.LogCaptureFixture
) -> None:
    _, url = tls_server
    tier = RedisTier(RedisOptions.of(url, tls=client_certificate(certificates), timeout_s=PATIENCE_S))
    assert put(tier, range(4), 1 << 20) == [PutStatus.STORED] * 4
    assert get(tier, range(5), 1 << 20) == [GetStatus.HIT] * 4 + [GetStatus.ABSENT]
    tier.close()
    with caplog.at_level(logging.WARNING):
        for untrusted in (TlsOptions(), TlsOptions(certificates / "ca.pem")):
            stranger = RedisTier(RedisOptions.of(url, tls=untrusted, mode="standalone", timeout_s=PATIENCE_S))
            assert put(stranger, range(9, 10)) == [PutStatus.FAILED]
            stranger.close()
    assert "certificate" in caplog.text.lower()


def test_a_frozen_server_behind_tls_costs_the_deadline(certificates: Path, tls_server: tuple[RedisServer, str]) -> None:
    server, url = tls_server
    tier = RedisTier(RedisOptions.of(url, tls=client_certificate(certificates), timeout_s=PATIENCE_S))
    assert put(tier, range(2), 1 << 20) == [PutStatus.STORED] * 2
    items = [item_of(key_of(n), 8 << 20) for n in range(2, 4)]  # more than sockets hold
    seen: list[Any] = []

    def use() -> None:
        seen.append(get(tier, range(2), 1 << 20, deadline_s=0.3))
        seen.append(tier.put_many(items, deadline_s=0.3))

    user = threading.Thread(target=use, daemon=True)
    server.freeze()
    try:
        user.start()
        user.join(PATIENCE_S)
        late = user.is_alive()
    finally:
        server.thaw()
    user.join(PATIENCE_S)
    assert not late, "a call went on for as long as the server was frozen"
    assert seen == [[GetStatus.DEADLINE] * 2, [PutStatus.DEADLINE] * 2]
    tier.close()
