"""What happens to chunks while they are being loaded, tasks of very many chunks, and two adapters side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.redis_servers import kept_port

from .conftest import RAW
from .test_lifetime import LIMIT_S, Slow, finished


def test_chunks_that_are_deleted_and_unlocked_while_they_are_loaded_arrive_whole(
    drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from .storage import keys

    driver = drive(tiers=[{"type": "host", "capacity": "1MiB"}], offload_wait="60s")  # ten chunks
    adapter = driver.adapter
    written = driver.objects(8, fill=1)
    driver.store(keys(8), written)
    assert driver.lookup(keys(8)) == list(range(8))
    slow = Slow(monkeypatch, "decode")
    out = driver.objects(8)
    task = adapter.submit_load_task(keys(8), out)
    assert slow.begun.wait(LIMIT_S)
    adapter.delete(keys(8))
    adapter.submit_unlock(keys(8))  # of chunks that are taken: harmless
    overwriting = [adapter.submit_store_task(keys(1, base=100 + i), driver.objects(1, fill=90)) for i in range(8)]
    assert adapter.query_load_result(task) is None
    slow.go.set()
    bitmap = finished(adapter.query_load_result, task)
    arrived = [i for i in range(8) if bitmap.test(i)]
    assert arrived == list(range(8)), "what was pinned stays as it was until it is loaded"
    assert all((out[i].raw_data == written[i].raw_data).all() for i in arrived)
    results: dict[int, Any] = {}
    while len(results) < len(overwriting):
        driver._wait(adapter.get_store_event_fd())
        results |= adapter.pop_completed_store_tasks()
    assert all(result.is_successful() for result in results.values())
    assert driver.lookup(keys(8)) == [], "deleted all the same"
    assert adapter.report_status()["open_lookups"] == 0 and len(adapter._leases) == 0


@pytest.mark.parametrize(("chunks", "lower"), [(10_000, False), (3_000, True)])
def test_thousands_of_chunks_in_one_task(drive: Any, tmp_path: Path, chunks: int, lower: bool) -> None:
    """Of a host tier that cannot hold them all, as many as it has room for."""
    import torch

    from . import storage

    disk = {"type": "nvme", "path": str(tmp_path), "capacity": "128MiB"}
    tiers = [{"type": "host", "capacity": "4MiB"}, disk] if lower else [{"type": "host", "capacity": "64MiB"}]
    driver = drive(tiers=tiers, promote_deadline="120s", lease="1d")
    driver.desc = storage.layout(((2, 1, 16, 16), storage.BF16))
    asked, written = storage.keys(chunks), driver.objects(chunks)
    for i, item in enumerate(written):
        item.raw_data.view(torch.int32).fill_(i)
    assert driver.store(asked, written).is_successful()
    assert driver.adapter.flush(4 * LIMIT_S)
    found = driver.lookup(asked)
    assert 0 < len(found) <= 1024 if lower else found == list(range(chunks))
    out = driver.objects(len(found))
    assert driver.load([asked[i] for i in found], out) == list(range(len(found)))
    assert all((out[n].raw_data == written[i].raw_data).all() for n, i in enumerate(found))
    status = driver.adapter.report_status()
    assert status["lookups"] == chunks == sum(status["hits"].values()) + sum(status["misses"].values())
    assert status["open_lookups"] == 0 and not any(status["errors"].values())


def test_two_adapters_of_one_server_have_what_each_was_given(start: Any, tmp_path: Path) -> None:
    from . import storage

    def spec(name: str, **params: Any) -> dict[str, Any]:
        tiers = [
            {"type": "host", "capacity": "16MiB"},
            {"type": "nvme", "path": str(tmp_path / name), "capacity": "64MiB"},
        ]
        given = {"attention": "vllm", "instance": name, "tiers": tiers, "kv_cache_compression_config": RAW, **params}
        return storage.kvtier_adapter(**given)

    port = kept_port()
    manager = start(spec("one", http={"port": port}), spec("two"))
    one, two = manager.manager._l2_adapters.values()
    assert [a.report_status()["instance"] for a in (one, two)] == ["one", "two"]
    asked = storage.keys(6)
    written = manager.put(asked, storage.VLLM)
    manager.forget()
    one.delete(asked[2:])
    found = manager.get(asked, storage.VLLM)
    assert sorted(found) == list(range(6)), "what one has no more, the other has"
    assert all((found[i][0] == written[i][0]).all() for i in found)
    with pytest.raises(ValueError, match=rf"http port {port} on '127.0.0.1' is taken .* choose another port"):
        start(spec("three", http={"port": port}))
    start(spec("three"))  # the one that could not start has left its directory
