"""The adapter's contract with LMCache's two controller threads: descriptors, results once, faults, leases."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest


def test_the_three_descriptors_differ_and_every_result_comes_once(drive: Any) -> None:
    from .storage import keys

    driver = drive()
    fds = {
        driver.adapter.get_store_event_fd(),
        driver.adapter.get_lookup_and_lock_event_fd(),
        driver.adapter.get_load_event_fd(),
    }
    assert len(fds) == 3
    written = driver.objects(4, fill=1)
    result = driver.store(keys(4), written)
    assert result.is_successful() and result.bytes_transferred() == 4 * written[0].get_size()
    assert driver.lookup(keys(6)) == [0, 1, 2, 3]
    out = driver.objects(4)
    assert driver.load(keys(4), out) == [0, 1, 2, 3]
    assert all((a.raw_data == b.raw_data).all() for a, b in zip(out, written, strict=True))
    # Stored again: nothing is written twice, and nothing is counted twice.
    again = driver.store(keys(4), written)
    assert again.is_successful() and again.bytes_transferred() == 0
    assert driver.adapter.report_status()["hits"] == {"host": 4}
    assert driver.adapter.report_status()["misses"]["absent"] == 2


def test_an_adapter_goes_by_its_name_in_status_and_metrics(drive: Any) -> None:
    adapter = drive(instance="under-test").adapter
    assert adapter.report_status()["instance"] == "under-test"
    registry = adapter._chunks.ledger.registry
    assert registry.get_sample_value("kvtier_adapter_info", {"adapter": "under-test"}) == 1


def test_the_time_of_encoding_and_decoding_is_told(drive: Any) -> None:
    from .storage import keys

    driver = drive()
    driver.store(keys(2), driver.objects(2, fill=3))
    assert driver.load(keys(2), driver.objects(2)) == [0, 1]
    told = driver.adapter.report_status()["codec_seconds"]
    registry = driver.adapter._chunks.ledger.registry
    assert told["encode"] > 0 and told["decode"] > 0
    for op, seconds in told.items():
        assert registry.get_sample_value("kvtier_codec_seconds_sum", {"op": op}) == pytest.approx(seconds)


def test_no_keys_and_no_lookup_before_a_load(drive: Any) -> None:
    from .storage import keys

    driver = drive()
    assert driver.store([], []).is_successful()
    assert driver.lookup([]) == [] and driver.load([], []) == []
    written = driver.objects(3, fill=5)
    driver.store(keys(3), written)
    out = driver.objects(5)
    assert driver.load(keys(5), out) == [0, 1, 2]
    assert (out[2].raw_data == written[2].raw_data).all() and not out[4].raw_data.any()


def test_listeners_hear_of_chunks_and_a_prefix_is_one_lookup(drive: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from .storage import keys, until

    heard: list[tuple[str, list[Any]]] = []

    class Listener:
        def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
            assert len(keys) == len(sizes) and min(sizes) > 0
            heard.append(("stored", sorted(key.chunk_hash for key in keys)))

        def on_l2_keys_accessed(self, keys: list[Any]) -> None:
            heard.append(("accessed", sorted(key.chunk_hash for key in keys)))

        def on_l2_keys_deleted(self, keys: list[Any]) -> None:
            heard.append(("deleted", sorted(key.chunk_hash for key in keys)))

    driver = drive()
    driver.adapter.register_listener(Listener())
    store = driver.adapter._chunks.store
    asked: list[int] = []
    real = store.lookup

    def lookup(name: str, pages: list[bytes], **options: Any) -> Any:
        asked.append(len(pages))
        return real(name, pages, **options)

    monkeypatch.setattr(store, "lookup", lookup)
    driver.store(keys(4), driver.objects(4, fill=1))
    driver.store(keys(4), driver.objects(4, fill=1))  # no news
    assert driver.lookup(keys(5)) == [0, 1, 2, 3] and asked == [5]
    driver.adapter.submit_unlock(keys(4)[2:])
    assert driver.load(keys(2), driver.objects(2)) == [0, 1]
    driver.adapter.delete(keys(3)[1:])
    until(lambda: len(heard) >= 3)
    names = [key.chunk_hash for key in keys(4)]
    assert heard == [("stored", names), ("accessed", names[:2]), ("deleted", names[1:3])]


def test_who_listens_late_hears_what_comes_then_and_tenants_are_counted_all_along(
    drive: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from .storage import keys, until

    stored, accessed, deleted = list[Any](), list[Any](), list[Any]()

    class Listener:
        def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
            stored.extend(keys)

        def on_l2_keys_accessed(self, keys: list[Any]) -> None:
            accessed.extend(keys)

        def on_l2_keys_deleted(self, keys: list[Any]) -> None:
            deleted.extend(keys)

    driver = drive()
    adapter = driver.adapter
    early, late = keys(2, salt="early"), keys(1, salt="late")
    driver.store(early, driver.objects(2, fill=1))
    nbytes = sum(entry.size_bytes for entry in adapter.list_l2_keys().entries)
    assert adapter.get_usage().bytes_by_cache_salt == {"early": nbytes}
    adapter.register_listener(Listener())
    driver.store(late, driver.objects(1, fill=9))
    assert adapter.get_usage().bytes_by_cache_salt == {"early": nbytes, "late": nbytes // 2}
    assert driver.load(early, driver.objects(2)) == [0, 1]
    adapter.delete([*early, *late])
    until(lambda: len(deleted) == 3)
    assert stored == late and accessed == early and set(deleted) == {*early, *late}
    assert not adapter.get_usage().bytes_by_cache_salt
    assert not [r for r in caplog.records if "underflow" in r.getMessage()]


def test_pages_have_the_priority_of_the_configuration(drive: Any) -> None:
    from .storage import keys

    driver = drive(priority="low")
    assert driver.store(keys(2), driver.objects(2, fill=1)).is_successful()
    host = driver.adapter._chunks.store.host
    pins = host.pin_many([key for key, _ in host.scan()])
    assert [meta.priority for _, meta in host.pinned_many(pins)] == [-1, -1]
    host.unpin_many(pins)


def test_what_is_unlocked_is_evictable_and_no_hit(drive: Any) -> None:
    from .storage import keys

    driver = drive(tiers=[{"type": "host", "capacity": "1MiB"}], offload_wait="200ms")  # ten chunks of 98 304 bytes
    driver.store(keys(10), driver.objects(10, fill=1))
    assert driver.lookup(keys(10)) == list(range(10))
    assert not driver.store(keys(1, base=100), driver.objects(1, fill=50)).is_successful(), "all of it is pinned"
    driver.adapter.submit_unlock(keys(10))
    assert driver.adapter.report_status()["open_lookups"] == 0
    assert driver.store(keys(1, base=100), driver.objects(1, fill=50)).is_successful()
    status = driver.adapter.report_status()
    assert status["hits"] == {"host": 0} and status["misses"]["dropped"] == 10


def test_two_lookups_of_the_same_chunks_are_two_leases(drive: Any) -> None:
    from .storage import keys

    driver = drive()
    driver.store(keys(2), driver.objects(2, fill=1))
    assert driver.lookup(keys(2)) == driver.lookup(keys(2)) == [0, 1]
    assert driver.load(keys(2), driver.objects(2)) == [0, 1]
    assert driver.adapter.report_status()["open_lookups"] == 1
    driver.adapter.submit_unlock(keys(2))
    driver.adapter.submit_unlock(keys(2))  # nothing is held any more: harmless
    status = driver.adapter.report_status()
    assert status["open_lookups"] == 0 and status["hits"] == {"host": 2} and status["misses"]["dropped"] == 2


def test_the_unlock_behind_a_load_leaves_the_holds_of_other_requests(drive: Any) -> None:
    """As LMCache does it: what was loaded is unlocked too."""
    from .storage import keys

    driver = drive()
    driver.store(keys(4), driver.objects(4, fill=1))
    assert driver.lookup(keys(2)) == [0, 1] and driver.lookup(keys(4)) == [0, 1, 2, 3]
    assert driver.load(keys(2), driver.objects(2)) == [0, 1]
    driver.adapter.submit_unlock(keys(2))
    assert driver.load(keys(4), driver.objects(4)) == [0, 1, 2, 3]
    driver.adapter.submit_unlock(keys(4))
    status = driver.adapter.report_status()
    assert status["open_lookups"] == 0 and status["hits"] == {"host": 6} and sum(status["misses"].values()) == 0


def test_an_unlock_that_never_comes_is_not_waited_for_longer_than_a_lease() -> None:
    from kvtier.connectors.lmcache.leases import Leases

    from .storage import keys

    for lease_s, left in ((0.0, []), (1e9, [(2, 1), (1, 1), (0, 1)])):
        leases = Leases(lease_s, lambda found, used: None)
        asked = keys(4)
        leases.load(asked)
        leases.load([asked[1], asked[0]])
        leases.unlock([asked[0], asked[1], asked[3]])
        leases.expire()
        assert [(asked.index(key), loads) for key, (loads, _) in leases._loaded.items()] == left


def test_objects_that_were_freed_fail_alone(drive: Any) -> None:
    from .storage import keys

    driver = drive()
    written = driver.objects(3, fill=1)
    written[1].invalidate()
    assert not driver.store(keys(3), written).is_successful()
    assert driver.lookup(keys(3)) == [0, 2]
    out = driver.objects(2)
    out[0].invalidate()
    assert driver.load([keys(3)[0], keys(3)[2]], out) == [1]
    assert driver.adapter.report_status()["open_lookups"] == 0


def test_a_tier_that_hangs_costs_its_deadline_and_no_other_task(
    drive: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from .storage import keys, until

    tiers = [{"type": "host", "capacity": "1MiB"}, {"type": "nvme", "path": str(tmp_path), "capacity": "64MiB"}]
    driver = drive(tiers=tiers, promote_deadline="500ms")
    store = driver.adapter._chunks.store
    driver.store(keys(4), driver.objects(4, fill=1))
    assert store.flush(60.0)
    driver.store(keys(10, base=50), driver.objects(10, fill=20))  # pushes the first ones out of host memory
    assert store.flush(60.0)
    until(lambda: not any(store.host.contains_many(driver.adapter._chunks.keys_of(_layout(driver), _hashes(keys(4))))))

    go = threading.Event()
    disk = store.lower[0]
    real = disk.get_many_into
    monkeypatch.setattr(disk, "get_many_into", lambda *a, **k: (go.wait(120.0), real(*a, **k))[1])
    begin = time.monotonic()
    assert driver.lookup(keys(4)) == []
    assert 0.3 < time.monotonic() - begin < 60.0
    assert driver.lookup(keys(10, base=50)[5:]) == [0, 1, 2, 3, 4], "chunks in host memory are served meanwhile"
    go.set()
    until(lambda: driver.lookup(keys(4)) == [0, 1, 2, 3])


def test_a_lookup_is_answered_when_its_own_chunks_are_there(
    drive: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when those of one that was asked before it are, nor at the deadline of either."""
    from .storage import keys, until

    tiers = [{"type": "host", "capacity": "1MiB"}, {"type": "nvme", "path": str(tmp_path), "capacity": "64MiB"}]
    monkeypatch.setattr("kvtier.connectors.lmcache.adapter._EXPIRE_EVERY_S", 600.0)
    driver = drive(tiers=tiers, promote_deadline="240s", lease="1h")  # nobody looks before the test has failed
    adapter, store = driver.adapter, driver.adapter._chunks.store
    driver.store(keys(6), driver.objects(6, fill=1))
    assert store.flush(60.0)
    pages = adapter._chunks.keys_of(_layout(driver), _hashes(keys(6)))
    store.host.delete_many(pages)
    go, disk = threading.Event(), store.lower[0]
    real = disk.get_many_into

    def get(asked: Sequence[bytes], *args: Any, **options: Any) -> Any:
        if pages[0] in asked:
            assert go.wait(120.0)
        return real(asked, *args, **options)

    monkeypatch.setattr(disk, "get_many_into", get)
    first = adapter.submit_lookup_and_lock_task(keys(3), {0: driver.desc})
    second = driver.lookup(keys(3, base=3))
    held_up = adapter.query_lookup_and_lock_result(first)
    go.set()
    assert second == [0, 1, 2] and held_up is None
    until(lambda: (found := adapter.query_lookup_and_lock_result(first)) is not None and found.popcount() == 3)


def test_an_error_in_the_waiting_thread_is_a_miss_and_the_thread_goes_on(
    drive: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from .storage import keys, until

    tiers = [{"type": "host", "capacity": "1MiB"}, {"type": "nvme", "path": str(tmp_path), "capacity": "64MiB"}]
    driver = drive(tiers=tiers, promote_deadline="60s", lease="400ms")  # the thread looks ten times a second
    adapter, store = driver.adapter, driver.adapter._chunks.store
    driver.store(keys(4), driver.objects(4, fill=1))
    assert store.flush(60.0)
    store.host.delete_many(adapter._chunks.keys_of(_layout(driver), _hashes(keys(4))))
    go, disk = threading.Event(), store.lower[0]
    real, wait = disk.get_many_into, adapter._arrival.wait

    def broken(timeout_s: float) -> Any:
        if adapter._waiting:
            raise RuntimeError("broken")
        return wait(timeout_s)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "get_many_into", lambda *a, **k: (go.wait(120.0), real(*a, **k))[1])
        patch.setattr(adapter._arrival, "wait", broken)
        assert driver.lookup(keys(4)) == [], "what has not come by then is not waited for"
        go.set()
    assert adapter.report_status()["errors"]["engine"] == 1
    until(lambda: driver.lookup(keys(4)) == [0, 1, 2, 3])


def test_errors_inside_are_counted_and_answered(drive: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from .storage import keys

    driver = drive()
    driver.store(keys(2), driver.objects(2, fill=1))

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(driver.adapter._chunks, "find", broken)
    assert driver.lookup(keys(2)) == [] and driver.load(keys(2), driver.objects(2)) == []
    monkeypatch.setattr(driver.adapter._chunks, "offload", broken)
    assert not driver.store(keys(2), driver.objects(2, fill=1)).is_successful()
    assert driver.adapter.report_status()["errors"]["engine"] == 3


def test_many_threads_at_once_leak_nothing(drive: Any, tmp_path: Path) -> None:
    """Stores and prefetches of overlapping chunks, as several engines cause them; the tiers are too small for all."""
    import random

    from .storage import keys

    tiers = [{"type": "host", "capacity": "2MiB"}, {"type": "nvme", "path": str(tmp_path), "capacity": "4MiB"}]
    driver = drive(tiers=tiers, promote_deadline="60s")
    failures: list[BaseException] = []
    lock = threading.Lock()  # one controller waits for one descriptor
    universe = keys(60)

    def storing() -> None:
        draw = random.Random(1)
        try:
            for _ in range(60):
                some = sorted(draw.sample(range(60), 5))
                objects = [driver.objects(1, fill=i)[0] for i in some]
                driver.store([universe[i] for i in some], objects)
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    def prefetching() -> None:
        draw = random.Random(2)
        try:
            for _ in range(120):
                some = sorted(draw.sample(range(60), 8))
                asked = [universe[i] for i in some]
                with lock:
                    found = driver.lookup(asked)
                    dropped = [i for i in found if draw.random() < 0.3]
                    driver.adapter.submit_unlock([asked[i] for i in dropped])
                    wanted = [i for i in found if i not in dropped]
                    out = driver.objects(len(wanted))
                    loaded = driver.load([asked[i] for i in wanted], out)
                    driver.adapter.submit_unlock([asked[i] for i in wanted])
                assert loaded == list(range(len(wanted)))
                for n, i in enumerate(wanted):
                    assert (out[n].raw_data == driver.objects(1, fill=some[i])[0].raw_data).all()
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=storing), threading.Thread(target=prefetching)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240.0)
    assert not failures and not any(thread.is_alive() for thread in threads)
    status = driver.adapter.report_status()
    assert status["open_lookups"] == 0 and len(driver.adapter._leases) == 0
    assert status["lookups"] == sum(status["hits"].values()) + sum(status["misses"].values()) > 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"attention": "yes"}, "attention = 'yes': give one of vllm, sglang, mla, none"),
        ({"rope_dim": 10}, "rope_dim = 10: give a multiple of 16"),
        ({"rope_dim": 64, "attention": "vllm"}, "rope_dim = 64: only rows of MLA"),
        ({"rope_dim": 64}, "leave rope_dim out, or set attention to mla"),
        ({"config": "/etc/x.yaml", "tiers": []}, "write them into the file"),
        ({"config": "/nowhere/x.yaml"}, "cannot be read"),
        ({"capacity": "1GiB"}, "unknown option 'capacity'"),
        ({"atention": "vllm"}, "unknown option 'atention' (value 'vllm'); did you mean 'attention'?"),
        ({"instance": 3}, "instance = 3: give text"),
    ],
)
def test_a_mistake_in_the_parameters_is_named(params: dict[str, Any], message: str) -> None:
    import re

    from kvtier.connectors.lmcache import KvtierL2AdapterConfig

    with pytest.raises(ValueError, match=re.escape(message)):
        KvtierL2AdapterConfig.from_dict(params)
    assert "attention" in KvtierL2AdapterConfig.help()


def test_an_option_of_the_adapter_in_the_file_is_told_where_it_belongs(tmp_path: Path) -> None:
    from kvtier.connectors.lmcache import KvtierL2AdapterConfig

    file = tmp_path / "kvtier.yaml"
    file.write_text("attention: vllm\ntiers:\n  - {type: host, capacity: 1MiB}\n")
    with pytest.raises(ValueError, match=r"holds attention = 'vllm', .* write it beside config"):
        KvtierL2AdapterConfig.from_dict({"config": str(file)})


def test_a_checkpoint_without_scales_is_told_before_the_first_chunk(drive: Any, tmp_path: Path) -> None:
    method = {"quant": "nvfp4", "global_scale": "checkpoint", "scale_checkpoint_path": str(tmp_path)}
    with pytest.raises(ValueError, match=r"scale_checkpoint_path = .* there is no safetensors file"):
        drive(kv_cache_compression_config=[{"algorithm": "quantization_for_cold_page", **method}])


def test_the_serde_refuses_pages_of_unknown_size_before_the_first_chunk() -> None:
    from kvtier.connectors.lmcache.serde import make_serde

    lossless = [{"algorithm": "quantization_for_cold_page", "quant": "lossless"}]
    with pytest.raises(ValueError, match="quant: the serde kvtier_nvfp4 needs pages of a size that is known before"):
        make_serde({"type": "kvtier_nvfp4", "attention": "vllm", "kv_cache_compression_config": lossless})


def test_chunks_that_the_host_tier_has_no_room_for_are_told_once(drive: Any, caplog: pytest.LogCaptureFixture) -> None:
    from .storage import keys

    driver = drive(tiers=[{"type": "host", "capacity": "64KiB"}])
    for base in (0, 10):
        assert not driver.store(keys(2, base=base), driver.objects(2, fill=1)).is_successful()
    (told,) = (r.getMessage() for r in caplog.records if "chunk of" in r.getMessage())
    assert "98304 bytes is not stored" in told and "tiers[0].capacity = 65536 bytes; give that more" in told
    assert driver.adapter.report_status()["offloads"]["too_large"] == 4


def test_keys_are_told_apart_and_can_be_read_back() -> None:
    import random

    from lmcache.v1.distributed.api import ObjectKey

    from kvtier.connectors.lmcache.identity import decode_key, encode_key, salt_of

    draw = random.Random(0)

    def text(longest: int) -> str:
        return "".join(draw.choice("ab0:._é界") for _ in range(draw.randrange(longest)))

    seen: dict[bytes, Any] = {}
    for _ in range(20_000):
        longest = draw.choice((2, 3, 80))
        parts = (draw.randbytes(draw.randrange(3)), text(longest), draw.randrange(3), draw.randrange(3), text(longest))
        encoded = encode_key(ObjectKey(*parts))
        assert len(encoded) <= 255 and seen.setdefault(encoded, parts) == parts
        decoded = decode_key(encoded)
        assert decoded == parts or len(encoded) == 33
        assert salt_of(encoded) == (decoded[-1] if decoded else None)
    assert 33 in {len(encoded) for encoded in seen}, "long ones were among them"
    assert decode_key(b"") is None and decode_key(b"\x01" * 19) is None
    assert salt_of(b"") is None and salt_of(b"\x02" * 33) is None


def _layout(driver: Any) -> Any:
    return driver.adapter._layout_of(driver.desc)


def _hashes(keys: Sequence[Any]) -> list[bytes]:
    from kvtier.connectors.lmcache.identity import encode_key

    return [encode_key(key) for key in keys]


def test_our_deadlines_end_before_those_of_lmcache() -> None:
    """Read from LMCache as it is installed: its locks on memory that we copy from and into, and the patience of those
    who ask its server. A stored chunk waits for room, a chunk to be loaded for its tiers."""
    from lmcache.integration.vllm.vllm_multi_process_adapter import DEFAULT_MQ_TIMEOUT
    from lmcache.v1.distributed.config import L1ManagerConfig

    from kvtier.config import Config, RedisTierConfig

    ours = Config.model_validate({"tiers": [{"type": "host", "capacity": "1GiB"}]})
    redis = RedisTierConfig.model_fields["timeout"].default
    theirs: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(L1ManagerConfig)}
    assert ours.offload_wait + ours.promote_deadline < theirs["read_ttl_seconds"], "memory that is being stored"
    assert ours.promote_deadline + ours.lease < theirs["write_ttl_seconds"], "memory that is being loaded into"
    assert ours.promote_deadline + redis < DEFAULT_MQ_TIMEOUT, "an engine that waits for a lookup"
