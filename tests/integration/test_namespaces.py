"""kvtier ls and what namespaces are told apart by: a store with a real NVMe directory, behind its port and closed."""

from __future__ import annotations

import dataclasses
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvtier.abc.tier import PageMeta
from kvtier.cli.ls import table
from kvtier.errors import ConfigError, KVTierError, TierPathError
from kvtier.inventory import REMEMBERED, Description, chosen, decode, encode, group
from kvtier.server.keyspace import label_of
from kvtier.storage_backends.nvme.tier import NvmeTier
from kvtier.store import TieredStore
from tests.named_pages import HOT_BYTES, NBYTES, PATIENCE_S, SPECS, cli, listed, namespace, open_store, put, there


def test_pages_are_told_apart_by_what_they_were_stored_under(store: TieredStore, url: str) -> None:
    llama, qwen = namespace("llama"), namespace("qwen")
    put(store, llama, range(5))
    put(store, qwen, range(3))
    assert store.flush(PATIENCE_S)
    rows = listed(url)
    assert {name: row["pages"] for name, row in rows.items()} == {
        ("llama", "host"): 5, ("llama", "nvme"): 5, ("qwen", "host"): 3, ("qwen", "nvme"): 3,
    }  # fmt: skip
    row = rows["llama", "nvme"]
    assert (row["cold_bytes"], row["hot_bytes"]) == (5 * NBYTES, 5 * HOT_BYTES)
    assert llama.digest.hex().startswith(row["namespace"])
    shown = cli("ls", url).stdout
    assert row["namespace"] in shown and "llama, nvfp4, bf16, 16 tokens" in " ".join(shown.split())


def test_one_text_under_two_salts_is_two_namespaces_and_no_salt_is_told(store: TieredStore, url: str) -> None:
    plain, salted = namespace("llama"), namespace("llama", salt="tenant-secret")
    put(store, plain, range(4))
    keys = put(store, salted, range(2))
    answer = cli("ls", url, "--json").stdout
    assert "tenant-secret" not in answer
    pages = {
        row["description"]["salted"]: row["pages"] for row in json.loads(answer)["namespaces"] if row["tier"] == "host"
    }
    assert pages == {False: 4, True: 2}
    cli("purge", url, salted.digest.hex()[:8], "--yes")
    assert there(store, keys) == [False, False] and there(store, plain.page_keys([bytes(32)])) == [True]


def test_a_closed_directory_is_listed_and_purged_without_its_capacity(tmp_path: Path) -> None:
    folder = tmp_path / "pages" / "shard" / "rank0"
    store = open_store(folder)
    gone, kept = put(store, namespace("llama"), range(6)), put(store, namespace("qwen"), range(4))
    put(store, namespace("llama", lora="unknown"), range(2), describe=False)
    assert store.flush(PATIENCE_S)
    with pytest.raises(TierPathError, match=f"in use by process {os.getpid()}.*URL of its HTTP port.*9404"):
        cli("ls", str(tmp_path / "pages"))
    store.close()
    rows = listed(tmp_path / "pages")
    assert {name: row["pages"] for name, row in rows.items()} == {
        ("llama", "rank0"): 6, ("qwen", "rank0"): 4, (f"geometry {SPECS['llama'].hex()[:8]}", "rank0"): 2,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="HTTP port"):
        cli("pin", str(tmp_path / "pages"), "model=llama")
    cli("purge", str(tmp_path / "pages"), "model=llama", "--yes")
    store = open_store(folder)
    try:
        assert there(store, gone) == [False] * 6 and there(store, kept) == [True] * 4
        assert {row["namespace"] for row in store.inventory.rows()} >= {namespace("qwen").digest.hex()[:12]}
    finally:
        store.close()


def test_names_that_mean_nothing_or_too_much_are_refused(store: TieredStore, url: str) -> None:
    with pytest.raises(ConfigError, match="is no directory"):
        cli("ls", "nowhere")
    with pytest.raises(ConfigError, match="redis-cli"):
        cli("ls", "redis://127.0.0.1")
    put(store, namespace("llama"), range(1))
    with pytest.raises(KVTierError, match="model=NAME"):
        cli("purge", url, "model=mistral", "--yes")
    meta = PageMeta(1, 0, 1, bytes(16), bytes(16))
    groups = group([(bytes([n]) * 32, meta) for n in range(2)], (), lambda m: "same")
    assert [len(g.pages) for g in groups] == [2]
    two = [*group([(bytes(32), meta)], (), lambda m: "team-a"), *group([(bytes(32), meta)], (), lambda m: "team-b")]
    with pytest.raises(ConfigError, match="the beginning of several"):
        chosen(two, "team-")
    assert chosen(two, "team-a") == [two[0]] and chosen(two, "all") == two


def test_directories_without_a_tier_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(TierPathError, match="holds no tier"):
        cli("purge", str(tmp_path), "all", "--yes")
    assert [p.name for p in tmp_path.iterdir()] == ["photos"]


def test_descriptions_survive_and_damaged_ones_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    described = [Description.of(namespace("llama", generation=f"{n:032x}"), n) for n in range(300)]
    assert decode(encode(described)) == described[-256:]
    for bad in (b"", b"{}", b'{"kvtier_namespaces": 2, "namespaces": []}', encode(described)[:-9], b"[1]"):
        assert decode(bad) == []
    assert "not readable" in caplog.text


def test_the_oldest_descriptions_make_room_those_without_pages_first(store: TieredStore, tmp_path: Path) -> None:
    def describe(numbers: range) -> None:
        for n in numbers:
            store.inventory.describe(namespace("llama", generation=f"{n:032x}"), HOT_BYTES)

    def kept() -> list[str]:
        known = list(store.inventory._described.values())
        assert decode((tmp_path / "pages" / "namespaces.json").read_bytes()) == known
        return [one.generation.lstrip("0") for one in known]

    def named() -> set[str]:
        return {(row["description"] or {}).get("model", row["label"]) for row in store.inventory.rows()}

    put(store, namespace("llama"), range(3))
    describe(range(1, REMEMBERED))
    assert kept() == ["", *(f"{n:x}" for n in range(1, REMEMBERED))] and named() == {"llama"}
    describe(range(REMEMBERED, 3 * REMEMBERED))
    assert kept() == ["", *(f"{n:x}" for n in range(2 * REMEMBERED + 1, 3 * REMEMBERED))]
    store.inventory.purge("all")
    assert named() == set()  # somebody looked
    put(store, namespace("llama"), range(3), describe=False)
    describe(range(3 * REMEMBERED, 3 * REMEMBERED + 1))
    assert kept()[0] == f"{2 * REMEMBERED + 1:x}" and len(kept()) == REMEMBERED
    assert named() == {f"geometry {SPECS['llama'].hex()[:8]}"}


def test_the_oldest_goes_where_all_have_pages(store: TieredStore) -> None:
    for n in range(REMEMBERED + 5):
        put(store, namespace("llama", generation=f"{n:032x}"), range(1))
        if n == REMEMBERED - 1:
            assert store.flush(PATIENCE_S) and len(store.inventory.rows()) >= REMEMBERED
    described = [int(one.generation, 16) for one in store.inventory._described.values()]
    assert described == list(range(5, REMEMBERED + 5))


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": 5}, {"digest": "ab"}, {"digest": None}, {"spec": None}, {"hot_page_bytes": "x"},
        {"hot_page_bytes": -1}, {"hot_page_bytes": True}, {"generation": []}, {"salted": "yes"}, {"more": 1},
    ],
)  # fmt: skip
def test_descriptions_with_a_wrong_field_are_left_out(wrong: dict[str, Any]) -> None:
    stated = json.loads(encode([Description.of(namespace("llama"), HOT_BYTES)]))
    assert len(decode(json.dumps(stated).encode())) == 1
    stated["namespaces"][0] |= wrong
    assert decode(json.dumps(stated).encode()) == []


def _pipe(note: Path) -> None:
    os.mkfifo(note)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda note: note.write_bytes(b"[" * 100_000),
        lambda note: note.write_bytes(b'{"kvtier_namespaces": 1, "namespaces": "' + b" " * (8 << 20) + b'"}'),
        lambda note: note.mkdir(),
        lambda note: note.symlink_to("/dev/zero"),
        _pipe,
    ],
    ids=["nested", "huge", "folder", "endless", "pipe"],
)
def test_no_file_of_descriptions_keeps_a_tier_from_opening(tmp_path: Path, spoil: Any) -> None:
    store = open_store(tmp_path / "pages")
    put(store, namespace("llama"), range(3))
    assert store.flush(PATIENCE_S)
    store.close()
    note = tmp_path / "pages" / "namespaces.json"
    note.unlink()
    spoil(note)
    assert [row["pages"] for row in listed(tmp_path / "pages").values()] == [3]
    store = open_store(tmp_path / "pages")
    try:
        assert [row["pages"] for row in store.inventory.rows()] == [3]
    finally:
        store.close()


def test_a_link_beside_the_descriptions_is_not_written_through(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("not ours")
    store = open_store(tmp_path / "pages")
    try:
        (tmp_path / "pages" / "namespaces.json.new").symlink_to(other)
        put(store, namespace("llama"), range(1))
    finally:
        store.close()
    assert other.read_text() == "not ours"
    assert decode((tmp_path / "pages" / "namespaces.json").read_bytes())


def test_names_drive_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60000")
    evil = "\x1b]0;title\x07\x1b[2J[/x][red]\u202egnp"
    described = Description.of(namespace("llama"), HOT_BYTES)
    store = open_store(tmp_path / "pages")
    put(store, namespace("llama"), range(1), describe=False)
    assert store.flush(PATIENCE_S)
    store.close()
    for codec in ("", "{}", "[", '["nvfp4"]', "[" * 20_000):
        named = dataclasses.replace(described, model=evil, codec=codec)
        (tmp_path / "pages" / "namespaces.json").write_bytes(encode([named]))
        shown = "".join(cli("ls", str(tmp_path / "pages")).stdout.split())
        assert r"\x1b]0;title\x07\x1b[2J[/x][red]\u202egnp" in shown
        assert not [c for c in shown if not c.isprintable()]
    row: dict[str, Any] = {
        "tier": evil, "namespace": evil, "pages": 1, "cold_bytes": 1, "hot_bytes": None, "pinned_pages": 0,
        "description": None,
    }  # fmt: skip
    out = io.StringIO()
    Console(file=out, width=200).print(table([row]))
    assert "\x1b" not in out.getvalue() and "[red]" in out.getvalue()


def test_columns_that_are_empty_are_left_out_and_figures_stay_whole() -> None:
    row: dict[str, Any] = {
        "tier": "host", "namespace": "db0:a-long-name-of-somebody:", "pages": 12_345, "cold_bytes": 5 << 30,
        "hot_bytes": None, "pinned_pages": 0, "description": None,
    }  # fmt: skip
    out = io.StringIO()
    Console(file=out, width=40).print(table([row]))
    assert "12,345" in out.getvalue() and "5.0 GiB" in out.getvalue()
    assert "pinned" not in out.getvalue() and "device" not in out.getvalue() and "what" not in out.getvalue()
    out = io.StringIO()
    Console(file=out, width=120).print(table([row, row | {"pinned_pages": 7, "hot_bytes": 16 << 30}]))
    assert "pinned" in out.getvalue() and "16.0 GiB" in out.getvalue()


def test_labels_of_keys_are_printable_and_different_keys_have_different_ones() -> None:
    keys = [b"\x1b[2J:1", rb"\x1b[2J:1", b"\xff:1", rb"\xff:1", b"a\nb:1", "\u202e:1".encode(), b"plain:1"]
    heads = [label_of(PageMeta(1, 0, 0, bytes(16), b"kvtier-server-1\0", bytes(9) + key)) for key in keys]
    assert len(set(heads)) == len(keys) and all(head.isprintable() for head in heads)
    assert heads[-1] == "db0:plain:" and heads[0] == r"db0:\x1b[2J:"


def test_a_folder_of_another_program_is_not_touched(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    folder.chmod(0o755)
    for name in ("FORMAT", "PROBE"):
        (folder / name).write_text("theirs")
    for command in (["ls", str(folder)], ["purge", str(folder), "all", "--yes"]):
        with pytest.raises(TierPathError, match="has format"):
            cli(*command)
    with pytest.raises(TierPathError, match="has format"):
        NvmeTier(folder, 8 << 20)
    assert folder.stat().st_mode & 0o777 == 0o755
    assert {p.name: p.read_text() for p in folder.iterdir()} == {"FORMAT": "theirs", "PROBE": "theirs"}
