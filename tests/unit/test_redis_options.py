"""What the Redis tier's options say: URLs taken apart, secrets kept out of messages, mistakes named."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.config import parse_config
from kvtier.errors import ConfigError
from kvtier.storage_backends.redis.breaker import Breaker
from kvtier.storage_backends.redis.options import Address, RedisOptions, TlsOptions, mask_url
from kvtier.storage_backends.redis.topology import slot_of


@pytest.mark.parametrize(
    ("url", "seeds", "database", "username"),
    [
        ("redis://cache", (Address("cache", 6379),), 0, ""),
        ("redis://cache:7000/3", (Address("cache", 7000),), 3, ""),
        ("redis://a:1,b:2,c/0", (Address("a", 1), Address("b", 2), Address("c", 6379)), 0, ""),
        ("redis://[::1]:7000/1", (Address("::1", 7000),), 1, ""),
        ("redis://kv%40tier@cache:7000", (Address("cache", 7000),), 0, "kv@tier"),
        ("rediss://cache:7000", (Address("cache", 7000),), 0, ""),
        ("unix:///run/redis.sock?db=2", (Address(path="/run/redis.sock"),), 2, ""),
    ],
)
def test_urls(url: str, seeds: tuple[Address, ...], database: int, username: str) -> None:
    options = RedisOptions.of(url)
    assert (options.seeds, options.database, options.username) == (seeds, database, username)
    assert (options.tls is not None) == url.startswith("rediss")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://cache", "must look like redis://"),
        ("redis://", "must look like redis://"),
        ("redis://cache:port", "must be host:port"),
        ("redis://cache:70000", "must be host:port"),
        ("redis://cache/x", "must be a number"),
        ("unix:///s?dbx=1", "unknown parameter 'dbx'"),
        ("unix://s", "absolute path"),
    ],
)
def test_bad_urls_are_explained(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RedisOptions.of(url)


@pytest.mark.parametrize(
    "url",
    ["redis://:hunter2@cache", "redis://u:hunter2@cache:1", "redis://u:hun/t@er2@cache", "unix:///s?password=hunter2"],
)
def test_a_password_in_a_url_is_refused_and_never_shown(url: str) -> None:
    with pytest.raises(ConfigError, match="password_file") as refusal:
        RedisOptions.of(url)
    assert "er2" not in str(refusal.value)
    assert "er2" not in mask_url(url)


def test_a_password_never_shows_in_messages_of_the_configuration_block() -> None:
    block = {
        "tiers": [{"type": "host", "capacity": 1 << 20}, {"type": "redis", "url": "redis://u:hunter2@h", "ttll": 1}]
    }
    with pytest.raises(ConfigError, match="ttll") as refusal:
        parse_config(block)
    assert "hunter2" not in str(refusal.value)
    block["tiers"][1] = {"type": "rediss", "url": "redis://u:hunter2@h"}
    with pytest.raises(ConfigError) as refusal:
        parse_config(block)
    assert "hunter2" not in str(refusal.value)


def test_secrets_come_from_files_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2\n")
    options = RedisOptions.of("redis://u@h", password_file=secret)
    assert options.password == "hunter2"
    assert "hunter2" not in repr(options)
    monkeypatch.setenv("KVTIER_REDIS_PASSWORD", "from-env")
    assert RedisOptions.of("redis://u@h").password == "from-env"
    secret.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        RedisOptions.of("redis://u@h", password_file=secret)
    with pytest.raises(ConfigError, match=r"cannot be read: No such file or directory; name a file"):
        RedisOptions.of("redis://u@h", password_file=tmp_path / "nowhere")


def test_impossible_combinations_are_refused(tmp_path: Path) -> None:
    for arguments, message in (
        ({"mode": "sentinel"}, "needs service"),
        ({"mode": "clustered"}, "mode = 'clustered' is unknown"),
        ({"tls": TlsOptions(ca=tmp_path / "ca.pem")}, "does not use TLS"),
        ({"connections": 0}, "connections = 0"),
        ({"timeout_s": 0}, "timeout = 0"),
        ({"ttl_s": 0.0001}, "ttl"),
        ({"prefix": "a b"}, "prefix"),
    ):
        with pytest.raises(ConfigError, match=message):
            RedisOptions.of("redis://h", **arguments)
    with pytest.raises(ConfigError, match="database 0 only"):
        RedisOptions.of("redis://h/1", mode="cluster")
    with pytest.raises(ConfigError, match="tls_ca"):
        RedisOptions.of("rediss://h", tls=TlsOptions(ca=tmp_path / "ca.pem"))
    with pytest.raises(ConfigError, match="belong together"):
        RedisOptions.of("rediss://h", tls=TlsOptions(cert=tmp_path / "c.pem"))


def test_slots_are_those_of_the_cluster_specification() -> None:
    assert slot_of(b"123456789") == 0x31C3 % 16384
    assert slot_of(b"{user1000}.following") == slot_of(b"user1000")
    assert slot_of(b"foo{}{bar}") != slot_of(b"bar")
    assert slot_of(b"foo{{bar}}zap") == slot_of(b"{bar")


def state_of(breaker: Breaker) -> str:
    return breaker.state.value


def test_breaker_opens_probes_and_closes() -> None:
    now = 0.0
    breaker = Breaker(threshold=2, pause_s=1.0, max_pause_s=3.0, clock=lambda: now)
    assert breaker.admit()
    assert not breaker.failed()
    assert breaker.admit()
    assert breaker.failed()
    assert state_of(breaker) == "open"
    assert not breaker.admit()
    pauses = []
    for _ in range(4):
        start = now
        while not breaker.admit():
            now += 0.25
        pauses.append(now - start)
        assert state_of(breaker) == "half_open"
        assert not breaker.admit(), "one probe at a time"
        breaker.failed()
    assert pauses == [1.0, 2.0, 3.0, 3.0]
    now += 3.0
    assert breaker.admit()
    breaker.abandoned()
    assert state_of(breaker) == "open"
    now += 3.0
    assert breaker.admit()
    assert breaker.succeeded()
    assert state_of(breaker) == "closed"
    breaker.failed()
    assert breaker.admit(), "failures in a row count, from the last success on"
