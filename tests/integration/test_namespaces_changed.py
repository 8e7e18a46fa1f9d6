"""kvtier purge and kvtier pin: what goes, what stays, who may, and what is said of it."""

from __future__ import annotations

import errno
import http.client
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from email.message import Message
from pathlib import Path

import pytest

from kvtier.abc.tier import PageMeta, Removal, Slot
from kvtier.below import Deletion
from kvtier.errors import ConfigError, KVTierError
from kvtier.keys import Namespace, checksum
from kvtier.ledger import MissReason
from kvtier.server.http import HttpExporter, HttpOptions
from kvtier.server.page import StatusPage
from kvtier.storage_backends.nvme.log import IndexLog
from kvtier.store import TieredStore
from tests.named_pages import NBYTES, PATIENCE_S, cli, listed, namespace, open_store, put, there


def test_purge_says_what_would_go_asks_and_deletes_no_more(store: TieredStore, url: str) -> None:
    gone, kept = put(store, namespace("llama"), range(6)), put(store, namespace("qwen"), range(6))
    assert "would delete 6 pages" in cli("purge", url, "model=llama", "--dry-run").stdout
    with pytest.raises(ConfigError, match="--yes"):
        cli("purge", url, "model=llama")
    assert there(store, gone) == [True] * 6
    done = json.loads(cli("purge", url, "model=llama", "--yes", "--json").stdout)
    assert (done["pages"], done["cold_bytes"]) == (6, 6 * NBYTES)
    assert there(store, gone) == [False] * 6 and there(store, kept) == [True] * 6


def test_pinned_pages_stay_and_end_again(store: TieredStore, url: str) -> None:
    keys = put(store, namespace("llama"), range(8))
    assert store.flush(PATIENCE_S)
    assert "8 pages" in cli("pin", url, "model=llama").stdout
    assert listed(url)["llama", "host"]["pinned_pages"] == 8
    for start in range(1000, 1600, 50):  # twice the host tier
        put(store, namespace("qwen"), range(start, start + 50))
        assert store.flush(PATIENCE_S)
    assert store.host.contains_many(keys) == [True] * 8
    assert "8 pages" in cli("pin", url, "model=llama", "--end").stdout
    assert not store.protected() and listed(url)["llama", "host"]["pinned_pages"] == 0


def test_no_more_than_half_of_the_host_tier_can_be_pinned(store: TieredStore, url: str) -> None:
    put(store, namespace("llama"), range(200))
    done = json.loads(cli("pin", url, "all", "--json").stdout)
    assert done["pages"] == 128 and done["refused_pages"] == 72
    assert len(store.protected()) == 128


def test_a_purge_that_cannot_be_written_says_how_much_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in ("rank0", "rank1"):
        store = open_store(tmp_path / rank)
        put(store, namespace("llama", shard=rank), range(3))
        assert store.flush(PATIENCE_S)
        store.close()
    flush = IndexLog.flush

    def full(log: IndexLog, up_to: int) -> None:
        if log._path.parent.name == "rank1":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(log, up_to)

    monkeypatch.setattr(IndexLog, "flush", full)
    with pytest.raises(KVTierError, match=r"rank1.*No space left.*3 of 6 pages were deleted"):
        cli("purge", str(tmp_path), "all", "--yes")


def test_a_purge_ends_when_the_pages_are_gone_from_the_disk_too(store: TieredStore, url: str, tmp_path: Path) -> None:
    """Else whoever then kills the process finds them again."""
    put(store, namespace("llama"), range(100))
    assert store.flush(PATIENCE_S)
    done = json.loads(cli("purge", url, "all", "--yes", "--json").stdout)
    assert (done["pages"], done["pending_pages"]) == (100, 0)
    shutil.copytree(tmp_path / "pages", tmp_path / "killed", ignore=shutil.ignore_patterns("LOCK"))
    assert listed(tmp_path / "killed") == {}


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_purge_says_what_a_slow_tier_still_has(
    store: TieredStore, url: str, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    keys = put(store, namespace("llama"), range(200))
    assert store.flush(PATIENCE_S)
    go_on, delete_many = threading.Event(), store.lower[0].delete_many

    def slow(keys: Sequence[bytes], removal: Removal = Removal.DELETED) -> int:
        assert go_on.wait(PATIENCE_S)
        return delete_many(keys, removal)

    monkeypatch.setattr(store.lower[0], "delete_many", slow)
    monkeypatch.setattr(store.inventory, "_wait_s", 0.01)
    try:
        answer = cli("purge", url, "all", "--yes", *options)
        assert answer.exit_code == 1
        if options:
            assert json.loads(answer.stdout)["pending_pages"] == 200
        else:
            assert "deleted 200 pages" in answer.stdout
        assert "200 pages are found no longer, but a lower tier still has them" in answer.stderr
        assert store.lookup("r", keys[:3]).ready_pages == 0 and not store.lookup("r", keys[:3]).pending
        store.settle("r")
    finally:
        go_on.set()
    assert there(store, keys) == [False] * 200 and store.ledger.snapshot().misses[MissReason.ABSENT] == 3


def test_a_purge_while_the_store_closes_claims_nothing(store: TieredStore) -> None:
    put(store, namespace("llama"), range(10))
    store.close()
    with pytest.raises(KVTierError, match="closed"):
        store.inventory.purge("all")
    page = StatusPage(store.ledger.registry, None, lambda: store.observer)
    status, answer = page.manage(b'{"action": "purge", "namespace": "all"}', Message())
    assert status == 503 and "is closed" in json.loads(answer)["error"]
    listing = page.answer("/api/namespaces")
    assert listing is not None and listing.status == 503
    assert page.manage(b"[" * 4096, Message())[0] == 400


def test_a_purge_that_the_closing_overtakes_says_how_far_it_came(
    store: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, namespace("llama"), range(256))
    assert store.flush(PATIENCE_S)
    put(store, namespace("llama"), range(256, 300))
    assert store.flush(PATIENCE_S)
    delete = store.delete

    def then_close(keys: Sequence[bytes]) -> Deletion:
        done = delete(keys)
        assert done.wait(PATIENCE_S)
        store.close()
        return done

    monkeypatch.setattr(store, "delete", then_close)
    with pytest.raises(KVTierError, match=r"256 of 300 pages were deleted, then: .*closed"):
        store.inventory.purge("all")


def test_what_the_closing_kept_a_tier_from_deleting_counts_as_pending(store: TieredStore) -> None:
    put(store, namespace("llama"), range(10))
    assert store.flush(PATIENCE_S)
    for spiller in store._spillers.values():  # as it is a moment before the host tier is closed
        assert spiller.close(PATIENCE_S)
    assert store.inventory.purge("all")["pending_pages"] == 10


def test_a_purge_beside_everything_else(tmp_path: Path) -> None:
    """Pages that are being written, read, promoted and evicted; afterwards nothing is left, here or on the disk."""
    folder = tmp_path / "pages"
    store = open_store(folder)
    llama, qwen = namespace("llama"), namespace("qwen")
    stop = threading.Event()

    def work(of: Namespace) -> None:
        chance = random.Random(of.model)
        for turn in range(100_000):
            if stop.is_set():
                return
            hashes = [n.to_bytes(32, "big") for n in chance.sample(range(600), 16)]
            keys = of.page_keys(hashes)
            if turn % 3:
                store.wait(store.lookup(f"{of.model} {turn}", keys, sparse=True), PATIENCE_S)
                store.settle(f"{of.model} {turn}")
                continue
            found = [
                (key, page_hash, slot)
                for key, page_hash, slot in zip(
                    keys, hashes, store.reserve(keys, [NBYTES] * 16, PATIENCE_S), strict=True
                )
                if isinstance(slot, Slot)
            ]
            spec = bytes.fromhex(of.spec)
            metas = [PageMeta(NBYTES, 0, 16, checksum(store.host.view(s), k), spec, h) for k, h, s in found]
            store.commit([k for k, _, _ in found], [s for _, _, s in found], metas)

    try:
        for of in (llama, qwen):
            put(store, of, range(100))
        threads = [threading.Thread(target=work, args=(of,)) for of in (llama, qwen)]
        for thread in threads:
            thread.start()
        purged = sum(store.inventory.purge("model=llama")["pages"] for _ in range(20) if _has(store, "llama"))
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), f"still at work after {PATIENCE_S} s"
        assert purged >= 100
        if _has(store, "llama"):  # stored after the last purge
            assert store.inventory.purge("model=llama")["pending_pages"] == 0
        assert store.drain(PATIENCE_S)
        assert not _has(store, "llama") and _has(store, "qwen")
        counts = store.ledger.snapshot()
        assert sum(counts.hits.values()) + sum(counts.misses.values()) == counts.lookups
        assert not counts.errors or not any(counts.errors.values()), counts.errors
        rows = {row["tier"]: row for row in store.inventory.rows()}
        for tier in (store.host, *store.lower):
            usage = tier.usage()
            assert rows[tier.name]["pages"] == usage.resident_pages
            assert usage.used_bytes == usage.resident_pages * NBYTES
    finally:
        stop.set()
        store.close()
    assert {name for name, _ in listed(folder)} == {"qwen"}


def _has(store: TieredStore, model: str) -> bool:
    return any((row["description"] or {}).get("model") == model for row in store.inventory.rows())


def test_a_dry_run_of_pin_keeps_to_the_limit(store: TieredStore, url: str) -> None:
    put(store, namespace("llama"), range(200))
    would = json.loads(cli("pin", url, "all", "--dry-run", "--json").stdout)
    assert not store.protected()
    done = json.loads(cli("pin", url, "all", "--json").stdout)
    assert {**would, "dry_run": False} == done and done["refused_pages"] == 72
    again = json.loads(cli("pin", url, "all", "--dry-run", "--json").stdout)
    assert again["pages"] == 128
    for pages in (128, 0, 0):  # ended twice
        assert json.loads(cli("pin", url, "all", "--end", "--json").stdout)["pages"] == pages


def test_writes_need_the_token_where_there_is_one(
    store: TieredStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = put(store, namespace("llama"), range(3))
    token = tmp_path / "token"
    token.write_text("right")
    registry = store.ledger.registry
    page = StatusPage(registry, None, lambda: store.observer)
    with HttpExporter(registry, HttpOptions(token_file=token), page=page) as exporter:
        for command in (["ls", exporter.url], ["purge", exporter.url, "all", "--yes"]):
            with pytest.raises(KVTierError, match="needs a token"):
                cli(*command)
        assert there(store, keys) == [True] * 3
        cli("purge", exporter.url, "all", "--yes", "--token-file", str(token))
    assert there(store, keys) == [False] * 3


def serve(folder: Path, *more: str) -> tuple[subprocess.Popen[str], str, str]:
    """A server in a process of its own, the socket it listens on, and its HTTP port's URL."""
    command = [sys.executable, "-m", "kvtier.cli", "serve", "--listen", f"unix:{folder}/s", "--http", "127.0.0.1:0"]
    command += ["--host-capacity", "16MiB", "--nvme", f"{folder}/pages:64MiB", *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = [process.stdout.readline(), process.stdout.readline()]
    assert "metrics and health on " in said[1], said
    return process, f"{folder}/s", said[1].split()[-1]


def end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.communicate(timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Content-Type": "text/plain"}, None, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, None, 415),
        ({"Content-Type": "multipart/form-data; boundary=x"}, None, 415),
        ({"Content-Type": "text/plain; application/json"}, None, 415),
        ({}, None, 415),
        ({"Content-Type": "application/json", "Host": "evil.example"}, None, 403),
        ({"Content-Type": "application/json", "Host": "127.0.0.1.evil.example"}, None, 403),
        ({"Content-Type": "application/json", "Transfer-Encoding": "chunked"}, None, 411),
        ({"Content-Type": "application/json"}, b" " * 5000, 413),
        ({"Content-Type": "application/json"}, b"[" * 4000, 400),
        ({"Content-Type": "application/json"}, b'{"action": "purge", "namespace": ["all"]}', 400),
        ({"Content-Type": "application/json"}, b'{"action": "delete", "namespace": "all"}', 400),
        ({"Content-Type": "application/json"}, b'{"action": "purge", "namespace": "all", "dry_run": "no"}', 400),
        ({"Content-Type": "application/json"}, b'{"action": "purge", "namespace": ""}', 404),
    ],
)
def test_what_a_page_in_a_browser_can_send_deletes_nothing(
    store: TieredStore, url: str, headers: dict[str, str], body: bytes | None, status: int
) -> None:
    keys = put(store, namespace("llama"), range(3))
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE_S)
    try:
        connection.putrequest("POST", "/api/namespaces", skip_host="Host" in headers)
        sent = b'{"action": "purge", "namespace": "all"}' if body is None else body
        for name, value in {"Content-Length": str(len(sent)), **headers}.items():
            if not (name == "Content-Length" and "Transfer-Encoding" in headers):
                connection.putheader(name, value)
        connection.endheaders(sent)
        assert connection.getresponse().status == status
    finally:
        connection.close()
    assert there(store, keys) == [True] * 3


def test_a_purge_ends_pins_and_gives_their_room_back(store: TieredStore, url: str) -> None:
    for turn in range(3):  # each as much as may be pinned
        put(store, namespace("llama"), range(turn * 128, turn * 128 + 128))
        assert store.flush(PATIENCE_S)
        assert json.loads(cli("pin", url, "all", "--json").stdout)["pages"] == 128
        cli("purge", url, "all", "--yes")
        assert not store.protected() and listed(url) == {}
        assert [tier.usage().used_bytes for tier in (store.host, *store.lower)] == [0, 0]


def test_room_that_a_purge_of_a_closed_directory_made_is_used_again(tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    for turn in range(3):
        store = open_store(folder)
        try:
            assert store.lower[0].usage().used_bytes == 0
            for start in range(0, 2000, 200):
                put(store, namespace("llama"), range(turn * 2000 + start, turn * 2000 + start + 200))
                assert store.flush(PATIENCE_S)
            assert store.lower[0].usage().resident_pages == 2000
        finally:
            store.close()
        assert "deleted 2000 pages" in cli("purge", str(folder), "all", "--yes").stdout
    assert sum(file.stat().st_size for file in folder.glob("segment-*")) <= 8 << 20


def test_values_of_a_server_go_for_good(tmp_path: Path) -> None:
    redis = pytest.importorskip("redis", reason="redis-py is not installed: pip install 'kvtier[redis]'")
    process, socket, url = serve(tmp_path)
    try:
        with redis.Redis(unix_socket_path=socket) as client:
            for n in range(5):
                client.set(f"team-a:{n}", b"x" * 9000)
                client.set(f"team-b:{n}", b"y" * 9000)
            assert listed(url)["db0:team-a:", "host"]["pages"] == 5
            assert "deleted 5 pages" in cli("purge", url, "db0:team-a:", "--yes").stdout
            assert client.dbsize() == 5 and client.get("team-a:1") is None
            assert client.get("team-b:1") == b"y" * 9000
    finally:
        end(process)
    assert [name for name, _ in listed(tmp_path / "pages")] == ["db0:team-b:"]
    process, socket, url = serve(tmp_path)
    try:
        with redis.Redis(unix_socket_path=socket) as client:
            assert client.dbsize() == 5 and client.get("team-a:1") is None
    finally:
        end(process)


def test_no_door_besides_the_passwords_of_a_server(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("secret")
    process, _, url = serve(tmp_path, "--password-file", str(tmp_path / "password"))
    try:
        for command in (["ls", url], ["purge", url, "all", "--yes"]):
            with pytest.raises(KVTierError, match="token_file"):
                cli(*command)
    finally:
        end(process)
