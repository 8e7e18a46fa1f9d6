"""What a restart finds beside its pages: the priority that the configuration gives them, and which are pinned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier import pins
from kvtier.abc.tier import Note, PageMeta, PutItem, PutStatus, Slot
from kvtier.build import open_store as open_configured
from kvtier.config import parse_config
from kvtier.errors import SpecError
from kvtier.keys import Namespace, checksum
from kvtier.storage_backends.host.tier import HostTier
from kvtier.storage_backends.nvme.striped import open_nvme
from kvtier.storage_backends.nvme.tier import NvmeTier
from kvtier.store import TieredStore

PATIENCE_S = 60.0
SLOT = 4096
SPEC = bytes(16)
NAMESPACES = {
    name: Namespace(name, weights="00", dtype="bf16", spec=SPEC.hex(), page_tokens=16, codec='["raw",1,{}]')
    for name in ("a", "b")
}


def items(numbers: range, priority: int = 0) -> list[PutItem]:
    made = []
    for n in numbers:
        key, data = n.to_bytes(32, "big"), bytes([n % 251]) * SLOT
        made.append(PutItem(key, PageMeta(SLOT, 0, 1, checksum(data, key), SPEC, priority=priority), memoryview(data)))
    return made


def numbers_in(tier: Any) -> set[int]:
    return {int.from_bytes(key, "big") for key, _ in tier.scan()}


def priorities(tier: Any, numbers: range) -> list[int | None]:
    keys = [n.to_bytes(32, "big") for n in numbers]
    found = tier.get_many_into(keys, [memoryview(bytearray(SLOT)) for _ in keys])
    return [None if result.meta is None else result.meta.priority for result in found]


def store_of(folder: Path, priority: str, policy: str = "lru") -> TieredStore:
    tiers = [
        {"type": "host", "capacity": "64KiB"},
        {"type": "nvme", "path": str(folder), "capacity": 8 * SLOT, "policy": policy},
    ]
    return open_configured(parse_config({"tiers": tiers, "priority": priority}))


# ---- priorities


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_pages_that_are_found_have_the_priority_of_the_block(tmp_path: Path, policy: str) -> None:
    store = store_of(tmp_path, "low", policy)
    for item in items(range(4), -1):  # one by one: those of one call are written side by side
        assert store.lower[0].put_many([item]) == [PutStatus.STORED]
    store.close()
    store = store_of(tmp_path, "low", policy)
    try:
        disk = store.lower[0]
        assert priorities(disk, range(4)) == [-1] * 4
        for item in items(range(4, 10), -1):  # two more than there is room for: those used longest ago go
            assert disk.put_many([item]) == [PutStatus.STORED]
        assert numbers_in(disk) == set(range(2, 10))
        assert disk.usage().resident_pages == 8 and disk.usage().evicted_pages == 2
    finally:
        store.close()


def test_pages_of_a_high_priority_stay_after_a_restart(tmp_path: Path) -> None:
    store = store_of(tmp_path, "high")
    assert set(store.lower[0].put_many(items(range(4), 1))) == {PutStatus.STORED}
    store.close()
    store = store_of(tmp_path, "high")
    try:
        for item in items(range(4, 30)):
            assert store.lower[0].put_many([item]) == [PutStatus.STORED]
        assert numbers_in(store.lower[0]) == {0, 1, 2, 3, 26, 27, 28, 29}
    finally:
        store.close()


def test_pages_that_are_found_have_the_priority_of_their_namespace(tmp_path: Path) -> None:
    store = open_store(tmp_path, disk_slots=8)
    put(store, "b", range(4))
    put(store, "a", range(4))
    store.close()
    store = open_store(tmp_path, disk_slots=8)
    store.inventory.describe(NAMESPACES["a"], 3 * SLOT, -1)
    store.inventory.describe(NAMESPACES["b"], 3 * SLOT, 0)
    put(store, "b", range(4, 8))
    disk = store.lower[0]
    assert disk.contains_many(NAMESPACES["b"].page_keys([n.to_bytes(32, "big") for n in range(8)])) == [True] * 8
    assert not any(disk.contains_many(NAMESPACES["a"].page_keys([n.to_bytes(32, "big") for n in range(4)])))
    store.close()


@pytest.mark.parametrize("directories", [1, 2])
def test_pages_of_a_higher_rank_stay(tmp_path: Path, directories: int) -> None:
    tier = open_nvme([tmp_path / str(n) for n in range(directories)], 8 * SLOT * directories)
    try:
        put = items(range(8 * directories))
        assert set(tier.put_many(put)) == {PutStatus.STORED}
        high = [item.key for item in put[::2]]
        assert tier.rank_many([*high, bytes(32)[:-1] + b"\xff"], 1) == len(high)
        assert priorities(tier, range(8 * directories)) == [1, 0] * (4 * directories)
        for item in items(range(100, 100 + 4 * directories)):
            assert tier.put_many([item]) == [PutStatus.STORED]
        assert set(high) <= {key for key, _ in tier.scan()}, "others make room first"
        with pytest.raises(SpecError, match="priority = 2"):
            tier.rank_many(high, 2)
    finally:
        tier.close()


def test_ranking_a_pinned_page_leaves_it_where_it_is(tmp_path: Path) -> None:
    """A page that is protected can change its priority, and stays protected."""
    tier = NvmeTier(tmp_path, 4 * SLOT)
    try:
        put = items(range(4))
        tier.put_many(put)
        tier.protect_many([put[0].key], True)
        assert tier.rank_many([put[0].key], -1) == 1
        tier.put_many(items(range(10, 20)))
        assert 0 in numbers_in(tier)
    finally:
        tier.close()


# ---- pins


def open_store(
    folder: Path, directories: Sequence[str] = ("0",), host_slots: int = 64, disk_slots: int = 256
) -> TieredStore:
    disk = open_nvme([folder / name for name in directories], disk_slots * SLOT)
    return TieredStore(HostTier(host_slots * SLOT), [disk])


def put(store: TieredStore, name: str, numbers: range) -> list[bytes]:
    of = NAMESPACES[name]
    store.inventory.describe(of, 3 * SLOT)
    hashes = [n.to_bytes(32, "big") for n in numbers]
    keys = of.page_keys(hashes)
    for key, page_hash in zip(keys, hashes, strict=True):
        (slot,) = store.reserve([key], [SLOT], PATIENCE_S)
        assert isinstance(slot, Slot)
        view = store.host.view(slot)
        view[:] = page_hash * (SLOT // 32)
        store.commit([key], [slot], [PageMeta(SLOT, 0, 16, checksum(view, key), SPEC, page_hash)])
    assert store.flush(PATIENCE_S)
    return keys


def test_pinned_pages_are_pinned_after_a_restart_until_that_is_ended(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    keys = put(store, "a", range(8))
    done = store.inventory.pin("model=a")
    assert (done["pages"], done["refused_pages"], done["remembered_pages"]) == (8, 0, 8)
    store.close()
    store = open_store(tmp_path)
    assert store.protected() == set(keys)
    assert [row["pinned_pages"] for row in store.inventory.rows()] == [8]
    put(store, "b", range(300))  # more than the disk holds
    assert store.lower[0].contains_many(keys) == [True] * 8
    assert store.inventory.unpin("model=a")["pages"] == 8
    store.close()
    store = open_store(tmp_path)
    assert not store.protected()
    store.close()


def test_a_pin_ends_with_its_page(tmp_path: Path) -> None:
    """Stored again, a page that was purged is like any other."""
    store = open_store(tmp_path)
    put(store, "a", range(8))
    store.inventory.pin("model=a")
    kept = put(store, "b", range(3))
    store.inventory.pin("model=b")
    store.inventory.purge("model=a")
    put(store, "a", range(8))
    assert store.protected() == set(kept)
    store.close()
    store = open_store(tmp_path)
    assert store.protected() == set(kept)
    store.lower[0].delete_many(kept)
    store.close()
    store = open_store(tmp_path)  # a page that is gone when the tier is opened ends its pin, too
    assert not store.protected()
    put(store, "b", range(3))
    store.close()
    store = open_store(tmp_path)
    assert not store.protected()
    store.close()


def test_pages_that_a_program_protects_are_not_written_down(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    keys = put(store, "a", range(4))
    assert all(store.protect(keys))
    store.inventory.pin("model=a")
    store.inventory.unpin("model=a")
    assert all(store.protect(keys))
    store.close()
    store = open_store(tmp_path)
    assert not store.protected()
    store.close()


def test_what_a_directory_says_that_was_away_is_older(tmp_path: Path) -> None:
    store = open_store(tmp_path, ("0", "1"))
    put(store, "a", range(16))
    store.inventory.pin("model=a")
    store.close()
    store = open_store(tmp_path, ("0",))
    there = store.protected()
    assert 0 < len(there) < 16
    store.inventory.unpin("model=a")
    store.close()
    store = open_store(tmp_path, ("1", "0"))
    assert not store.protected()
    store.close()


def test_a_smaller_host_tier_keeps_fewer(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, "a", range(16))
    assert store.inventory.pin("model=a")["pages"] == 16
    store.close()
    store = open_store(tmp_path, host_slots=8)
    assert len(store.protected()) == 4
    store.close()


def test_no_more_pages_are_written_down_than_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "REMEMBERED", 5)
    store = open_store(tmp_path)
    put(store, "a", range(8))
    done = store.inventory.pin("model=a")
    assert (done["pages"], done["remembered_pages"]) == (8, 5)
    store.close()
    store = open_store(tmp_path)
    assert len(store.protected()) == 5
    store.close()


def test_without_a_disk_nothing_is_remembered() -> None:
    store = TieredStore(HostTier(64 * SLOT))
    put(store, "a", range(4))
    done = store.inventory.pin("model=a")
    assert (done["pages"], done["remembered_pages"]) == (4, 0)
    store.close()


@pytest.mark.parametrize(
    "damage",
    [
        b"", b"[" * 100_000, b"{}", b"[1]", b'{"kvtier_pins": 2, "written_ns": 1, "pages": []}',
        b'{"kvtier_pins": 1, "written_ns": "x", "pages": []}', b'{"kvtier_pins": 1, "written_ns": 1, "pages": ["ab"]}',
        b'{"kvtier_pins": 1, "written_ns": 1, "pages": [5]}', b'{"kvtier_pins": 1, "written_ns": 1, "pages": 5}',
    ],
)  # fmt: skip
def test_a_damaged_file_keeps_nothing_from_opening(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    put(store, "a", range(4))
    store.inventory.pin("model=a")
    store.close()
    (tmp_path / "0" / "pins.json").write_bytes(damage)
    store = open_store(tmp_path)
    assert not store.protected() and len(store.inventory.rows()) == 1
    assert "not readable" in caplog.text
    store.close()


def test_the_file_as_it_is_specified(tmp_path: Path) -> None:
    keys = [bytes([n]) * 32 for n in range(3)]
    written = pins.encode(keys, 17)
    assert json.loads(written) == {"kvtier_pins": 1, "written_ns": 17, "pages": [key.hex() for key in keys]}
    assert pins.latest([pins.encode(keys[:1], 16), written, b"{"]) == keys
    tier = NvmeTier(tmp_path, 1 << 20)
    tier.note(written, Note.PINS)
    assert tier.notes(Note.PINS) == [written] and tier.notes() == []
    assert (tmp_path / "pins.json").stat().st_mode & 0o777 == 0o600
    tier.close()
    tier.note(b"late", Note.PINS)
    assert (tmp_path / "pins.json").read_bytes() == written, "a closed tier's directory may be another's"
