"""What LMCache makes of a fault in an adapter (nothing stored, a whole request missed, a hang, wrong data), and what
it gets from kvtier instead, through LMCache's real StorageManager."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.redis_servers import RedisServer, find_server

from .conftest import RAW


def equal(got: Any, want: Any) -> bool:
    import torch

    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, want, strict=True))


def kvtier(folder: Path | None = None, **params: Any) -> dict[str, Any]:
    from .storage import kvtier_adapter

    lower = [] if folder is None else [{"type": "nvme", "path": str(folder), "capacity": "64MiB"}]
    tiers = [{"type": "host", "capacity": "16MiB"}, *lower]
    return kvtier_adapter(**{"tiers": tiers, "attention": "vllm", "kv_cache_compression_config": RAW, **params})


def only_on_disk(manager: Any) -> None:
    """Everything out of L1 and out of kvtier's host memory."""
    store = manager.adapter._chunks.store
    assert store.flush(60.0)
    manager.forget()
    manager.adapter._chunks.store.host.delete_many([key for key, _ in manager.adapter._chunks.known()])


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("broken")


def test_a_store_or_a_lookup_that_raises_leaves_the_other_adapter_its_hits(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from . import storage

    manager = start(kvtier(), {"type": "fs", "base_path": str(tmp_path)})
    chunks = manager.adapter._chunks
    with monkeypatch.context() as patch:
        patch.setattr(chunks, "offload", fail)
        written = manager.put(storage.keys(8), storage.VLLM)
    assert manager.adapter.list_l2_keys().entries == ()
    with monkeypatch.context() as patch:
        patch.setattr(chunks, "find", fail)
        manager.forget()
        found = manager.get(storage.keys(8), storage.VLLM)
    assert sorted(found) == list(range(8)) and all(equal(found[i], written[i]) for i in found)
    assert manager.adapter.report_status()["errors"]["engine"] == 2


@pytest.mark.parametrize("where", ["get_many_into"])
def test_a_tier_that_hangs_is_a_miss_after_the_deadline_and_blocks_no_other_adapter(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    from . import storage

    manager = start(kvtier(tmp_path / "a", promote_deadline="500ms"), {"type": "fs", "base_path": str(tmp_path / "b")})
    written = manager.put(storage.keys(8), storage.VLLM)
    only_on_disk(manager)
    go, disk = threading.Event(), manager.adapter._chunks.store.lower[0]
    real = getattr(disk, where)
    monkeypatch.setattr(disk, where, lambda *a, **k: (go.wait(120.0), real(*a, **k))[1])
    begin = time.monotonic()
    found = manager.get(storage.keys(8), storage.VLLM)
    assert time.monotonic() - begin < 60.0  # half a second, but for a busy machine
    go.set()
    assert sorted(found) == list(range(8)) and all(equal(found[i], written[i]) for i in found)


@pytest.mark.parametrize("damage", ["flipped", "zeroed", "truncated"])
def test_one_bad_blob_of_eight_on_disk_costs_itself_and_is_replaced(start: Any, tmp_path: Path, damage: str) -> None:
    """LMCache serves flipped and zeroed blobs as hits, loses what it reads behind a truncated one, and never replaces
    any of them."""
    from . import storage

    manager = start(kvtier(tmp_path, promote_deadline="60s"))
    asked = storage.keys(8)
    written = manager.put(asked, storage.VLLM)
    only_on_disk(manager)
    # Where a chunk lies in the segments: its bytes are found by their contents.
    needle = written[5][0].view(storage.U8).reshape(-1)[:64].numpy().tobytes()
    hurt = 0
    for path in (p for p in tmp_path.rglob("*") if p.is_file()):
        blob = path.read_bytes()
        if (at := blob.find(needle)) >= 0:
            size = written[5][0].numel() * 2
            with path.open("r+b") as file:
                file.seek(at + (0 if damage == "zeroed" else size // 2))
                if damage == "flipped":
                    file.write(bytes([blob[at + size // 2] ^ 4]))
                else:
                    file.write(bytes(size if damage == "zeroed" else size - size // 2))
            hurt += 1
    assert hurt == 1
    found = manager.get(asked, storage.VLLM)
    assert sorted(found) == [0, 1, 2, 3, 4], "the usable prefix ends before the bad chunk, and only there"
    assert all(equal(found[i], written[i]) for i in found)
    assert manager.adapter.report_status()["misses"]["corrupt"] == 1
    manager.forget()
    again = manager.put(asked, storage.VLLM)  # what is gone is stored again
    only_on_disk(manager)
    found = manager.get(asked, storage.VLLM)
    assert sorted(found) == list(range(8)) and all(equal(found[i], again[i]) for i in found)


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_one_prefetch_of_several_object_groups(start: Any, tmp_path: Path, groups: int) -> None:
    from . import storage

    manager = start(kvtier(tmp_path, promote_deadline="60s"))
    descs = [storage.VLLM, storage.HYBRID, storage.layout(((5, 1000), storage.U8))][:groups]
    rows = [(storage.keys(5, group=n), desc) for n, desc in enumerate(descs)]
    written = [manager.put(asked, desc, seed=n) for n, (asked, desc) in enumerate(rows)]
    only_on_disk(manager)
    for row, want in zip(manager.get_rows(rows), written, strict=True):
        assert sorted(row) == list(range(5)) and all(equal(row[i], want[i]) for i in row)
    manager.forget()
    manager.adapter.delete([rows[-1][0][2]])  # one chunk of the last group is gone: the prefix ends there for all
    for row, want in zip(manager.get_rows(rows), written, strict=True):
        assert sorted(row) == [0, 1]
        assert all(equal(row[i], want[i]) for i in row)
    assert manager.adapter.report_status()["open_lookups"] == 0


@pytest.mark.parametrize(
    ("name", "quant", "exact"),
    [
        ("fp8", {"quant": "nvfp4"}, False),
        ("odd", {"quant": "nvfp4"}, True),
        ("empty group", {"quant": "nvfp4"}, False),
        ("bf16", {"quant": "lossless"}, True),
        ("bf16", {"quant": "nvfp4", "max_relative_error": 0.001}, True),
        ("nan", {"quant": "nvfp4"}, True),
    ],
)
def test_unusual_chunks_come_back(start: Any, name: str, quant: dict[str, Any], exact: bool) -> None:
    import torch

    from . import storage

    bf16 = ((2, 2, 32, 64), storage.BF16)
    desc = {
        "fp8": storage.layout(((2, 2, 32, 64), torch.float8_e4m3fn)),
        "odd": storage.layout(((2, 2, 32, 72), storage.BF16)),
        "empty group": storage.layout(bf16, ((0, 4), storage.U8)),
    }.get(name, storage.layout(bf16))
    config = [{"algorithm": "quantization_for_cold_page", **quant}]
    manager = start(kvtier(kv_cache_compression_config=config))
    asked = storage.keys(3)
    if name == "nan":
        randn = torch.randn
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "randn", lambda *a, **k: randn(*a, **k).fill_(float("nan")))
            written = manager.put(asked, desc)
    else:
        written = manager.put(asked, desc)
    manager.forget()
    found = manager.get(asked, desc)
    assert sorted(found) == [0, 1, 2]
    for i in found:
        if exact:
            assert equal(found[i], written[i])
        else:
            got, want = found[i][0].float(), written[i][0].float()
            assert (got - want).norm() / want.norm() < 0.15


def test_a_host_tier_smaller_than_one_chunk_and_a_disk_that_is_full(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import os

    from . import storage

    big = storage.layout(((2, 3, 1024, 128), storage.BF16))  # 1.5 MiB
    manager = start(kvtier(tiers=[{"type": "host", "capacity": "1MiB"}]))
    manager.put(storage.keys(2), big)
    manager.forget()
    assert manager.get(storage.keys(2), big) == {}
    assert manager.adapter.report_status()["open_lookups"] == 0

    other = start(kvtier(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda *a: (_ for _ in ()).throw(OSError(errno.ENOSPC, "disk full")))
        patch.setattr(os, "pwrite", lambda *a: (_ for _ in ()).throw(OSError(errno.ENOSPC, "disk full")))
        written = other.put(storage.keys(4), storage.VLLM)
        other.forget()
        found = other.get(storage.keys(4), storage.VLLM)
        assert other.adapter._chunks.store.flush(60.0)
    assert sorted(found) == [0, 1, 2, 3] and all(equal(found[i], written[i]) for i in found)
    assert other.adapter._chunks.store.lower[0].usage().resident_pages == 0, "nothing was written"


@pytest.mark.skipif(find_server() is None, reason="no Redis server is installed: apt-get install redis-server")
def test_a_redis_that_is_frozen_or_killed_costs_its_deadline_and_nothing_in_host_memory(
    start: Any, tmp_path: Path
) -> None:
    from . import storage

    server = RedisServer(tmp_path)
    try:
        tiers = [{"type": "host", "capacity": "16MiB"}, {"type": "redis", "url": f"redis://127.0.0.1:{server.port}"}]
        manager = start(kvtier(tiers=tiers, promote_deadline="500ms"))
        written = manager.put(storage.keys(4), storage.VLLM)
        assert manager.adapter._chunks.store.flush(60.0)
        for end in (server.freeze, server.stop):
            end()
            manager.adapter.submit_lookup_and_lock_task(storage.keys(3, base=900), {0: storage.VLLM})
            manager.forget()
            begin = time.monotonic()
            found = manager.get(storage.keys(4), storage.VLLM)
            assert sorted(found) == [0, 1, 2, 3] and all(equal(found[i], written[i]) for i in found)
            assert manager.get(storage.keys(3, base=500), storage.VLLM) == {}
            assert time.monotonic() - begin < 60.0  # some seconds, but for a busy machine
            storage.until(lambda: manager.adapter.report_status()["open_lookups"] == 0)
        manager.put(storage.keys(2, base=700), storage.VLLM)
    finally:
        server.stop()


def test_two_adapters_on_one_directory_are_told_apart_at_the_start(start: Any, tmp_path: Path) -> None:
    start(kvtier(tmp_path))
    with pytest.raises(Exception, match=r"(?i)in use|another process|already"):
        start(kvtier(tmp_path))
