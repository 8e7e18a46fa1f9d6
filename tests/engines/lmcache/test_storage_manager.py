"""Store, forget L1, load: LMCache's real StorageManager with kvtier behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

RAW = [{"algorithm": "quantization_for_cold_page", "quant": "none"}]
NVFP4 = [{"algorithm": "quantization_for_cold_page", "quant": "nvfp4"}]


def tiers(folder: Path | None = None, host: str = "64MiB") -> list[dict[str, Any]]:
    lower = [] if folder is None else [{"type": "nvme", "path": str(folder), "capacity": "512MiB"}]
    return [{"type": "host", "capacity": host}, *lower]


LAYOUTS = [
    ("VLLM", "vllm"),
    ("SGLANG", "sglang"),
    ("MLA", "mla"),
    ("MLA_FLAT", "mla"),
    ("HYBRID", "vllm"),
    ("THREE", "vllm"),
    ("ODD", "vllm"),
    ("VLLM", "none"),
]


def assert_as_written(found: dict[int, Any], written: list[Any], *, quantized: bool) -> None:
    """Floating point within the bound of NVFP4 (of a normal distribution: an error of about 0.095) where it is
    quantized, and everything else bit for bit."""
    import torch

    for i, chunk in found.items():
        for got, want in zip(chunk, written[i], strict=True):
            if want.dtype is torch.uint8 or not quantized:
                assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
            else:
                assert 0.02 < (got.float() - want.float()).norm() / want.float().norm() < 0.12


@pytest.mark.parametrize(("name", "attention"), LAYOUTS)
def test_every_layout_comes_back_bit_for_bit_when_stored_raw(start: Any, name: str, attention: str) -> None:
    import torch

    from . import storage

    desc = getattr(storage, name)
    manager = start(storage.kvtier_adapter(tiers=tiers(), attention=attention, kv_cache_compression_config=RAW))
    asked = storage.keys(8)
    written = manager.put(asked, desc)
    manager.forget()
    found = manager.get(asked, desc)
    assert sorted(found) == list(range(8))
    for i, chunk in found.items():
        assert all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(chunk, written[i], strict=True)
        )
    assert manager.adapter.report_status()["hits"] == {"host": 8}


@pytest.mark.parametrize(("name", "attention"), LAYOUTS)
def test_attention_comes_back_within_the_form_s_bound_and_the_rest_unchanged(
    start: Any, name: str, attention: str
) -> None:

    from . import storage

    desc = getattr(storage, name)
    manager = start(storage.kvtier_adapter(tiers=tiers(), attention=attention, kv_cache_compression_config=NVFP4))
    asked = storage.keys(4)
    written = manager.put(asked, desc)
    manager.forget()
    found = manager.get(asked, desc)
    assert sorted(found) == list(range(4))
    quantized = attention != "none" and name != "ODD"
    assert_as_written(found, written, quantized=quantized)
    sizes = manager.adapter.list_l2_keys().entries
    hot = sum(s.numel() * d.itemsize for s, d in zip(desc.shapes, desc.dtypes, strict=True))
    if name in ("VLLM", "SGLANG", "MLA") and quantized:
        assert all(hot / entry.size_bytes > 3.5 for entry in sizes)


def test_several_object_groups_and_tenants_do_not_meet(start: Any) -> None:
    import torch

    from . import storage

    manager = start(storage.kvtier_adapter(tiers=tiers(), attention="vllm", kv_cache_compression_config=RAW))
    one = manager.put(storage.keys(3), storage.VLLM, seed=1)
    two = manager.put(storage.keys(3, group=1), storage.HYBRID, seed=2)
    other = manager.put(storage.keys(3, salt="tenant"), storage.VLLM, seed=3)
    manager.forget()
    assert manager.get(storage.keys(3, model="another"), storage.VLLM) == {}
    for asked, desc, written in (
        (storage.keys(3), storage.VLLM, one),
        (storage.keys(3, group=1), storage.HYBRID, two),
        (storage.keys(3, salt="tenant"), storage.VLLM, other),
    ):
        found = manager.get(asked, desc)
        assert sorted(found) == [0, 1, 2]
        assert all(torch.equal(a, b) for i in found for a, b in zip(found[i], written[i], strict=True))


def test_another_layout_under_the_same_key_is_another_chunk(start: Any) -> None:
    from . import storage

    manager = start(storage.kvtier_adapter(tiers=tiers(), attention="vllm", kv_cache_compression_config=RAW))
    manager.put(storage.keys(2), storage.VLLM)
    manager.forget()
    half = storage.layout(((2, 3, 32, 128), storage.BF16))
    assert manager.get(storage.keys(2), half) == {}
    assert sorted(manager.get(storage.keys(2), storage.VLLM)) == [0, 1]


def test_a_prefix_on_disk_is_promoted_and_survives_a_restart(start: Any, tmp_path: Path) -> None:
    import torch

    from . import storage

    spec = storage.kvtier_adapter(
        tiers=tiers(tmp_path, host="1MiB"), attention="vllm", kv_cache_compression_config=RAW, promote_deadline="60s"
    )
    first = start(spec)
    asked = storage.keys(12)  # of 98 kB each: not all of them fit into host memory
    written = first.put(asked, storage.VLLM)
    first.forget()
    part = first.get(asked, storage.VLLM)
    assert len(part) > 0
    first.close()
    second = start(spec)
    found = second.get(asked[:6], storage.VLLM)
    assert sorted(found) == list(range(6))
    assert all(torch.equal(a, b) for i in found for a, b in zip(found[i], written[i], strict=True))
    assert second.adapter.report_status()["hits"] == {"host": 0, "nvme": 6}
    listed = second.adapter.list_l2_keys().entries
    assert len(listed) == 12 and {e.key.model_name for e in listed} == {"m"}
    assert second.adapter.get_usage().bytes_by_cache_salt[""] == sum(e.size_bytes for e in listed)


def test_a_flipped_bit_costs_one_chunk_which_is_then_stored_again(start: Any) -> None:
    import torch

    from . import storage

    manager = start(storage.kvtier_adapter(tiers=tiers(), attention="vllm", kv_cache_compression_config=RAW))
    asked = storage.keys(8)
    written = manager.put(asked, storage.VLLM)
    manager.forget()
    host = manager.adapter._chunks.store.host
    key = next(k for k, known in manager.adapter._chunks.known() if known.origin[19:35] == asked[3].chunk_hash)
    (pin,) = host.pin_many([key])
    ((slot, _),) = host.pinned_many([pin])
    host.view(slot)[500] ^= 1
    host.unpin_many([pin])
    found = manager.get(asked, storage.VLLM)
    assert sorted(found) == [0, 1, 2], "a prefix ends before the bad chunk"
    assert all(torch.equal(a, b) for i in found for a, b in zip(found[i], written[i], strict=True))
    status = manager.adapter.report_status()
    assert status["misses"]["corrupt"] == 1 and status["hits"] == {"host": 7}
    manager.forget()
    again = manager.put(asked, storage.VLLM)
    manager.forget()
    found = manager.get(asked, storage.VLLM)
    assert sorted(found) == list(range(8))
    assert all(torch.equal(a, b) for i in found for a, b in zip(found[i], again[i], strict=True))
    assert manager.adapter.report_status()["open_lookups"] == 0


def test_deleted_chunks_are_gone_and_listeners_hear_of_it(start: Any, tmp_path: Path) -> None:
    from . import storage

    manager = start(storage.kvtier_adapter(tiers=tiers(tmp_path), attention="vllm", kv_cache_compression_config=RAW))
    asked = storage.keys(5)
    manager.put(asked, storage.VLLM)
    manager.forget()
    manager.adapter.delete(asked[:2])
    storage.until(lambda: len(manager.adapter.list_l2_keys().entries) == 3)
    assert manager.get(asked[:2], storage.VLLM) == {}
    assert sorted(manager.get(asked[2:], storage.VLLM)) == [0, 1, 2]
    usage = manager.adapter.get_usage()
    assert usage.bytes_by_cache_salt[""] == sum(e.size_bytes for e in manager.adapter.list_l2_keys().entries)


def test_keys_are_listed_by_pages_and_by_model(start: Any) -> None:
    from . import storage

    manager = start(storage.kvtier_adapter(tiers=tiers(), attention="vllm", kv_cache_compression_config=RAW))
    manager.put(storage.keys(5), storage.VLLM)
    manager.put(storage.keys(2, model="other"), storage.VLLM)
    seen, cursor = [], None
    while True:
        page = manager.adapter.list_l2_keys(page_size=3, cursor=cursor)
        seen += [entry.key for entry in page.entries]
        cursor = page.next_page_token
        if cursor is None:
            break
    assert len(seen) == 7 == len({(k.model_name, k.chunk_hash_hex) for k in seen})
    assert len(manager.adapter.list_l2_keys(model_name="other").entries) == 2
    with pytest.raises(ValueError, match="page_size"):
        manager.adapter.list_l2_keys(page_size=0)
    with pytest.raises(ValueError, match="hexadecimal"):
        manager.adapter.list_l2_keys(cursor="no cursor")


@pytest.mark.parametrize("inner", ["fs"])
@pytest.mark.parametrize(("name", "attention"), LAYOUTS)
def test_the_serde_serves_lmcache_s_own_adapters(
    start: Any, tmp_path: Path, inner: str, name: str, attention: str
) -> None:
    import torch

    import kvtier.connectors.lmcache  # noqa: F401 - registers the serde

    from . import storage

    desc = getattr(storage, name)
    serde = {"type": "kvtier_nvfp4", "attention": attention, "kv_cache_compression_config": NVFP4}
    manager = start({"type": inner, "base_path": str(tmp_path), "serde": serde})
    asked = storage.keys(8)
    written = manager.put(asked, desc)
    manager.forget()
    found = manager.get(asked, desc)
    assert sorted(found) == list(range(8))
    quantized = attention != "none" and name != "ODD"
    assert_as_written(found, written, quantized=quantized)
    # A flipped bit is found: LMCache fails the batch, and no wrong byte arrives.
    (path, *_) = sorted(p for p in tmp_path.rglob("*") if p.is_file())
    blob = bytearray(path.read_bytes())
    blob[200] ^= 0x40
    path.write_bytes(blob)
    manager.forget()
    bad = manager.get(asked, desc)
    assert all(torch.equal(a, b) for i in bad for a, b in zip(bad[i], found[i], strict=True)) and len(bad) < 8
