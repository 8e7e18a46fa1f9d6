"""The cache server over several directories, some of which come and go: what clients overwrote or deleted stays gone,
priorities and pins come back."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.abc.tier import PageMeta, PutItem, PutStatus
from kvtier.config import parse_config
from kvtier.keys import checksum
from kvtier.server.app import CacheServer
from kvtier.server.away import RUN, give_up_what_was_away
from kvtier.server.options import ServerOptions
from kvtier.storage_backends.nvme.tier import NvmeTier
from kvtier.testing.faulty_device import NO_SPACE, FaultyDevice

redis = pytest.importorskip("redis", reason="redis-py is not installed: pip install 'kvtier[redis]'")

PATIENCE_S = 60.0
KEYS = [f"k{n}" for n in range(40)]
STARTED: list[CacheServer] = []


@pytest.fixture(autouse=True)
def none_left_running() -> Iterator[None]:
    yield
    while STARTED:
        STARTED.pop().stop(0.5)


def start(
    folder: Path,
    directories: Sequence[str],
    *,
    share: int = 16 << 20,
    host: str = "16MiB",
    password: str | None = None,
    **server: Any,
) -> tuple[CacheServer, Any]:
    paths = [str(folder / name) for name in directories]
    block = parse_config(
        {
            "tiers": [
                {"type": "host", "capacity": host},
                {"type": "nvme", "path": paths, "capacity": share * len(paths)},
            ],
            "promote_deadline": "120s",
            "server": {"listen": [f"unix:{folder}/k.sock"], "drain": "60s", **server},
        }
    )
    assert block.server is not None
    started = CacheServer(block, ServerOptions.of(block.server))
    STARTED.append(started)
    client = redis.Redis(
        unix_socket_path=f"{folder}/k.sock", password=password, retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0)
    )
    return started, client


def stop(server: CacheServer, client: Any) -> None:
    assert server.store is not None and server.store.flush(PATIENCE_S)
    client.close()
    server.stop()


def filled(folder: Path) -> None:
    """Values in two directories, each with some of them."""
    server, client = start(folder, ("d0", "d1"))
    client.mset({key: b"old " + key.encode() for key in KEYS})
    stop(server, client)


@pytest.mark.parametrize("gone", ["deleted", "flushed", "overwritten"])
@pytest.mark.parametrize("away", ["left out", "moved away"])
def test_what_goes_while_a_directory_is_away_does_not_come_back_with_it(tmp_path: Path, gone: str, away: str) -> None:
    filled(tmp_path)
    if away == "moved away":  # as when a disk is not mounted: an empty folder takes its place
        shutil.move(tmp_path / "d1", tmp_path / "elsewhere")
    server, client = start(tmp_path, ("d0", "d1") if away == "moved away" else ("d0",))
    here = [key for key in KEYS if client.exists(key)]
    assert 0 < len(here) < len(KEYS)
    if gone == "deleted":
        assert client.delete(*KEYS) == len(here)
    elif gone == "flushed":
        client.flushdb()
    else:
        client.mset(dict.fromkeys(KEYS, b"new"))
        client.delete(*KEYS[::2])
    stop(server, client)
    if away == "moved away":
        shutil.rmtree(tmp_path / "d1")
        shutil.move(tmp_path / "elsewhere", tmp_path / "d1")
    server, client = start(tmp_path, ("d1", "d0"))
    found = {key: value for key, value in zip(KEYS, client.mget(KEYS), strict=True) if value is not None}
    left = dict.fromkeys(KEYS[1::2], b"new") if gone == "overwritten" else {}
    if away == "moved away":  # what went to the folder in its place is not there any more
        assert found.items() <= left.items()
    else:
        assert found == left
    assert client.dbsize() == len(found)
    stop(server, client)


def test_values_written_after_the_clock_was_set_back_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead_ns = 7200 * 10**9
    clock = SimpleNamespace(time=time.time, time_ns=lambda: time.time_ns() + ahead_ns)
    monkeypatch.setattr("kvtier.server.keyspace.time", clock)
    server, client = start(tmp_path, ("d0",))
    client.mset({"deleted": b"1", "overwritten": b"1"})
    client.delete("deleted")
    client.set("overwritten", b"2")
    client.delete("overwritten")
    stop(server, client)
    ahead_ns = 0
    server, client = start(tmp_path, ("d0",))
    assert client.mget("deleted", "overwritten") == [None, None]
    client.mset({"deleted": b"3", "overwritten": b"3"})
    stop(server, client)
    server, client = start(tmp_path, ("d0",))
    assert client.mget("deleted", "overwritten") == [b"3", b"3"]
    stop(server, client)


def test_a_value_that_made_room_while_a_directory_was_away_leaves_no_older_one(tmp_path: Path) -> None:
    """The new value is evicted: nothing is left of it that would say that the old one is old."""
    filled(tmp_path)
    server, client = start(tmp_path, ("d0",), share=32 * 4096, host="128KiB")
    client.mset(dict.fromkeys(KEYS[:8], b"new"))
    for n in range(200):
        client.set(f"other{n}", b"x")
    assert not any(client.mget(KEYS[:8]))
    stop(server, client)
    server, client = start(tmp_path, ("d0", "d1"))
    assert not any(client.mget(KEYS[:8]))
    stop(server, client)


def test_directories_that_were_there_all_the_while_keep_their_values(tmp_path: Path) -> None:
    filled(tmp_path)
    for directories in (("d1", "d0"), ("d0", "d1", "d2"), ("d2", "d1", "d0")):
        server, client = start(tmp_path, directories)
        assert client.mget(KEYS) == [b"old " + key.encode() for key in KEYS], directories
        stop(server, client)


def test_directories_of_a_release_that_noted_no_runs_keep_their_values(tmp_path: Path) -> None:
    filled(tmp_path)
    for name in ("d0", "d1"):
        (tmp_path / name / "server" / RUN).unlink()
    server, client = start(tmp_path, ("d0", "d1"))
    assert all(client.mget(KEYS))
    stop(server, client)


@pytest.mark.parametrize("damage", [b"", b"[" * 5000, b"{}", b"[]", b'{"kvtier_server_run": 1, "number": true}'])
def test_a_directory_that_cannot_say_gives_its_values_up(tmp_path: Path, damage: bytes) -> None:
    filled(tmp_path)
    (tmp_path / "d1" / "server" / RUN).write_bytes(damage)
    server, client = start(tmp_path, ("d0", "d1"))
    there = sum(value is not None for value in client.mget(KEYS))
    assert 0 < there < len(KEYS)
    client.mset(dict.fromkeys(KEYS, b"new"))
    stop(server, client)
    server, client = start(tmp_path, ("d0", "d1"))
    assert client.mget(KEYS) == [b"new"] * len(KEYS), "it takes part again"
    stop(server, client)


def test_a_directory_that_could_not_write_that_its_values_went_loses_them_again(tmp_path: Path) -> None:
    device = FaultyDevice()
    data = bytes(4096)
    for name in ("d0", "d1"):
        tier = NvmeTier(tmp_path / name / "rank0", 1 << 20)
        key = name.encode().ljust(32, b"k")
        item = PutItem(key, PageMeta(4096, 0, 1, checksum(data, key), bytes(16)), memoryview(data))
        assert tier.put_many([item]) == [PutStatus.STORED]
        if name == "d0":
            give_up_what_was_away([tier])
        tier.close()
    run = json.loads((tmp_path / "d0" / RUN).read_text())["number"]
    for fails in (True, False):
        tiers = [
            NvmeTier(tmp_path / "d0" / "rank0", 1 << 20),
            NvmeTier(tmp_path / "d1" / "rank0", 1 << 20, device=device, retry_s=PATIENCE_S),
        ]
        if fails:
            device.set(NO_SPACE)
        assert give_up_what_was_away(tiers) == 1
        assert [tier.usage().resident_pages for tier in tiers] == [1, 0]
        assert (tmp_path / "d1" / RUN).exists() is not fails
        for tier in tiers:
            tier.close()
        device.set()
    last = [json.loads((tmp_path / name / RUN).read_text())["number"] for name in ("d0", "d1")]
    assert last[0] == last[1] > run


# ---- what the configuration and people said of values


def test_values_that_are_found_have_the_priority_of_their_users(tmp_path: Path) -> None:
    for name in ("batch", "chat", "rest"):
        (tmp_path / name).write_text(name)
    users = [
        {"name": "batch", "password_file": str(tmp_path / "batch"), "prefixes": ["batch:"], "priority": "low"},
        {"name": "chat", "password_file": str(tmp_path / "chat"), "prefixes": ["chat:"], "priority": "high"},
    ]
    options: dict[str, Any] = {"share": 16 * 4096, "host": "128KiB", "users": users, "password": "rest"}
    options["password_file"] = str(tmp_path / "rest")
    server, client = start(tmp_path, ("d0",), **options)
    chat, batch = [f"chat:{n}" for n in range(4)], [f"batch:{n}" for n in range(4)]
    for key in (*chat, *batch):
        client.set(key, b"x")
    stop(server, client)
    server, client = start(tmp_path, ("d0",), **options)
    for n in range(12):  # four more than there is room for
        client.set(f"other:{n}", b"x")
        assert server.store is not None and server.store.flush(PATIENCE_S)
    assert client.exists(*chat) == 4 and client.exists(*batch) == 0
    stop(server, client)


def test_pinned_values_are_pinned_after_a_restart(tmp_path: Path) -> None:
    server, client = start(tmp_path, ("d0",), share=16 * 4096, host="128KiB")
    for n in range(4):
        client.set(f"keep:{n}", b"x")
    assert server.store is not None and server.store.flush(PATIENCE_S)
    assert server.store.inventory.pin("db0:keep:")["remembered_pages"] == 4
    client.delete("keep:3")
    stop(server, client)
    server, client = start(tmp_path, ("d0",), share=16 * 4096, host="128KiB")
    for n in range(100):
        client.set(f"other:{n}", b"x")
        assert server.store is not None and server.store.flush(PATIENCE_S)
    assert client.exists(*(f"keep:{n}" for n in range(4))) == 3
    stop(server, client)
