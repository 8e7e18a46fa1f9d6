"""The readiness check puts and gets real records in every tier, tells which tier failed, and leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.abc.tier import (
    FINGERPRINT_BYTES,
    KEY_BYTES,
    SLOT_ALIGN,
    GetResult,
    GetStatus,
    PageMeta,
    PutItem,
    PutStatus,
)
from kvtier.keys import checksum
from kvtier.server.probe import store_ready
from kvtier.storage_backends.host.tier import HostTier
from kvtier.storage_backends.nvme.tier import NvmeTier
from kvtier.store import TieredStore

NBYTES = 5000


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.server.probe.TIER_DEADLINE_S", 60.0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    store = TieredStore(HostTier(1 << 20), [NvmeTier(tmp_path / "pages", 4 << 20)])
    yield store
    store.close()


def test_a_working_store_is_ready_and_unchanged(store: TieredStore) -> None:
    before = store.ledger.snapshot()
    for _ in range(3):
        assert store_ready(store, NBYTES) is None
    for tier in (store.host, *store.lower):
        usage = tier.usage()
        assert (usage.stored_pages, usage.deleted_pages, usage.resident_pages) == (0, 0, 0), tier.name
        assert usage.used_bytes == 0
    assert store.ledger.snapshot() == before


def test_a_host_tier_whose_pages_are_all_in_use_is_ready(tmp_path: Path) -> None:
    host = HostTier(2 * SLOT_ALIGN)
    store = TieredStore(host, [NvmeTier(tmp_path / "pages", 4 << 20)])
    keys = [bytes([n]) * KEY_BYTES for n in range(2)]
    for key in keys:
        put_page(host, key)
    pins = store.host.pin_many(keys)
    assert store_ready(store, NBYTES) is None
    assert store.host.usage().evicted_pages == 0
    store.host.unpin_many(pins)
    store.close()


def put_page(tier: HostTier, key: bytes) -> None:
    data = bytes(100)
    meta = PageMeta(len(data), 1, 1, checksum(data, key), bytes(FINGERPRINT_BYTES))
    assert tier.put_many([PutItem(key, meta, memoryview(data))]) == [PutStatus.STORED]


def test_every_failing_tier_is_named(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    (disk,) = store.lower
    monkeypatch.setattr(store.host, "put_many", lambda *_: [PutStatus.FULL])
    monkeypatch.setattr(disk, "get_many_into", lambda *_: [GetResult(GetStatus.FAILED)])
    assert store_ready(store, NBYTES) == "host tier: put answered full; nvme tier: get answered failed"
    assert disk.usage().resident_pages == 0


def test_wrong_bytes_are_noticed(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    (disk,) = store.lower
    get = disk.get_many_into

    def flipped(keys: Any, outs: Any, deadline_s: Any) -> Any:
        answer = get(keys, outs, deadline_s)
        outs[0][NBYTES - 1] ^= 1
        return answer

    monkeypatch.setattr(disk, "get_many_into", flipped)
    assert store_ready(store, NBYTES) == "nvme tier: get answered other bytes"
