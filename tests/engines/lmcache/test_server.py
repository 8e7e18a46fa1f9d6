"""Whole processes: ``lmcache server`` with kvtier behind it, driven by ``lmcache bench``; LMCache's own Redis clients
against kvtier's cache server and a real Redis."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.redis_servers import RedisServer, find_server, kept_port

from .server import LMCACHE, LMCacheServer

RAW = [{"algorithm": "quantization_for_cold_page", "quant": "none"}]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Any]:
    running: list[LMCacheServer] = []

    def start(params: dict[str, Any]) -> LMCacheServer:
        running.append(LMCacheServer(tmp_path, params))
        return running[-1]

    yield start
    for server in running:
        server.stop()


@pytest.mark.timeout(1200)
def test_a_server_gives_back_what_it_stored_after_l1_was_cleared_and_after_a_crash(serve: Any, tmp_path: Path) -> None:
    params = {
        "attention": "vllm",
        "tiers": [
            {"type": "host", "capacity": "128MiB"},
            {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": "512MiB"},
        ],
        "kv_cache_compression_config": RAW,
        "promote_deadline": "60s",
        "instance": "under-test",
    }
    server = serve(params)
    found, sums = server.bench()
    assert found == ["0/8"] * 4 and len(sums) == 4
    server.stored(32, "host")
    server.clear_l1()
    found, again = server.bench()
    assert found == ["8/8"] * 4 and again == sums
    metrics = server.metrics()
    # LMCache does not keep in L1 what it had from L2, so the bench's second look at each request is a hit here as well.
    assert metrics['kvtier_hits_total{tier="host"}'] == 64 and metrics['kvtier_misses_total{reason="absent"}'] == 32
    assert metrics["kvtier_lookups_total"] == sum(
        value for name, value in metrics.items() if name.startswith(("kvtier_hits_total", "kvtier_misses_total"))
    )
    status = json.dumps(server.get("/status"))
    assert '"instance": "under-test"' in status and '"type": "KvtierL2Adapter"' in status

    server.stored(32, "nvme")
    server.stop(signal.SIGKILL)
    second = serve(params)
    found, restored = second.bench()
    assert found == ["8/8"] * 4 and restored == sums
    assert second.metrics()['kvtier_hits_total{tier="nvme"}'] == 32


@pytest.mark.timeout(400)
def test_bench_l2_verifies_every_byte(tmp_path: Path) -> None:
    spec = {
        "type": "plugin",
        "module_path": "kvtier.connectors.lmcache",
        "class_name": "KvtierL2Adapter",
        "adapter_params": {
            "tiers": [
                {"type": "host", "capacity": "16MiB"},  # less than is stored: loads come from disk
                {"type": "nvme", "path": str(tmp_path), "capacity": "512MiB"},
            ],
            "promote_deadline": "60s",
        },
    }
    command = [
        *LMCACHE, "bench", "l2", "--l2-adapter", json.dumps(spec), "--num-keys", "8", "--in-flight", "2",
        "--data-size-kb", "512", "--rounds", "3", "--no-skip-verify", "--lookup-max-hit-rate", "0.5",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    success = [int(n) for n in re.findall(r"Total success:\s+(\d+)", done.stdout)]
    assert success == [48, 24, 48], done.stdout
    assert "mismatch" not in done.stdout.lower() + done.stderr.lower()


@pytest.fixture(params=["redis", "kvtier serve"])
def resp(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """Port of a server that speaks RESP: a real Redis, and kvtier's own."""
    if request.param == "redis":
        if find_server() is None:
            pytest.skip("no Redis server is installed: apt-get install redis-server")
        server = RedisServer(tmp_path / "redis")
        yield server.port
        server.stop()
        return
    port = kept_port()
    command = [sys.executable, "-m", "kvtier.cli", "serve", "--listen", f"tcp:127.0.0.1:{port}", "--host-capacity"]
    process = subprocess.Popen([*command, "256MiB"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        give_up = time.monotonic() + 60.0
        while True:
            import socket

            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None and time.monotonic() < give_up, process.stderr
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait(60)
        assert process.stderr is not None
        process.stderr.close()


def test_the_serde_behind_lmcache_s_resp_adapter(resp: int) -> None:
    import torch

    import kvtier.connectors.lmcache  # noqa: F401 - registers the serde

    from . import storage

    serde = {"type": "kvtier_nvfp4", "attention": "vllm", "kv_cache_compression_config": RAW}
    manager = storage.Storage({"type": "resp", "host": "127.0.0.1", "port": resp, "num_workers": 2, "serde": serde})
    try:
        asked = storage.keys(8)
        written = manager.put(asked, storage.HYBRID)
        manager.forget()
        found = manager.get(asked, storage.HYBRID)
        assert sorted(found) == list(range(8))
        assert all(torch.equal(a, b) for i in found for a, b in zip(found[i], written[i], strict=True))
    finally:
        manager.close()


def test_lmcache_s_stock_redis_connector(resp: int) -> None:
    """The older engine's ``remote_url: redis://...``, which keeps each chunk under two keys."""
    import torch
    from lmcache.v1.config import LMCacheEngineConfig

    from .test_remote import CHUNK, Engine

    url = f"redis://127.0.0.1:{resp}"
    settings = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK, remote_url=url, max_local_cpu_size=0.1)
    engine = Engine(settings, url)
    try:
        items = [engine.chunk(n) for n in range(4)]
        written = [engine.values(item) for item in items]
        for n, item in enumerate(items):
            engine.run(engine.connector.put(engine.key(n), item))
        assert engine.run(engine.connector.exists(engine.key(3)))
        assert not engine.run(engine.connector.exists(engine.key(9)))
        for n, want in enumerate(written):
            got = engine.run(engine.connector.get(engine.key(n)))
            assert torch.equal(engine.values(got), want)
            got.ref_count_down()
    finally:
        engine.close(connector=False)


def test_kvtier_with_redis_below_serves_a_second_machine(resp: int) -> None:
    """What one process stored, another with nothing of its own finds in Redis; a bad value there is found and gone."""
    import redis
    import torch

    from . import storage

    params = {
        "attention": "vllm",
        "tiers": [{"type": "host", "capacity": "64MiB"}, {"type": "redis", "url": f"redis://127.0.0.1:{resp}"}],
        "kv_cache_compression_config": RAW,
        "promote_deadline": "60s",
    }
    first = storage.Storage(storage.kvtier_adapter(**params))
    asked = storage.keys(6)
    try:
        written = first.put(asked, storage.VLLM)
        assert first.adapter._chunks.store.flush(storage.PATIENCE_S)
    finally:
        first.close()
    with redis.Redis(port=resp) as client:
        names = sorted(client.scan_iter("*"))
        assert len(names) == 6
        value = bytearray(client.get(names[0]))
        value[3000] ^= 8
        client.set(names[0], bytes(value))
    second = storage.Storage(storage.kvtier_adapter(**params))
    try:
        found = second.get(asked, storage.VLLM)
        assert len(found) < 6
        assert all(torch.equal(a, b) for i in found for a, b in zip(found[i], written[i], strict=True))
        storage.until(lambda: second.adapter.report_status()["open_lookups"] == 0)
        status = second.adapter.report_status()
        assert status["misses"]["corrupt"] == 1
        # LMCache takes what is before the bad chunk, and gives the rest back.
        assert status["hits"]["redis"] == len(found) and status["misses"]["dropped"] == 5 - len(found)
    finally:
        second.close()


def test_a_prefix_that_lies_in_three_tiers_is_found_as_one(resp: int, tmp_path: Path) -> None:
    import torch

    from kvtier.connectors.lmcache.identity import encode_key

    from . import storage

    params = {
        "attention": "vllm",
        "tiers": [
            {"type": "host", "capacity": "64MiB"},
            {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": "64MiB"},
            {"type": "redis", "url": f"redis://127.0.0.1:{resp}"},
        ],
        "kv_cache_compression_config": RAW,
        "promote_deadline": "60s",
    }
    manager = storage.Storage(storage.kvtier_adapter(**params))
    try:
        asked = storage.keys(9)
        written = manager.put(asked[:8], storage.VLLM)
        chunks = manager.adapter._chunks
        store = chunks.store
        assert store.flush(storage.PATIENCE_S)
        pages = chunks.keys_of(manager.adapter._layout_of(storage.VLLM), [encode_key(key) for key in asked[:8]])
        nvme, redis = store.lower
        assert all(nvme.contains_many(pages)) and all(redis.contains_many(pages))
        store.host.delete_many(pages[3:])
        nvme.delete_many(pages[:3] + pages[6:])
        redis.delete_many(pages[:6])
        manager.forget()
        found = manager.get(asked, storage.VLLM)
        assert sorted(found) == list(range(8))
        assert all(torch.equal(a, b) for i in found for a, b in zip(found[i], written[i], strict=True))
        storage.until(lambda: manager.adapter.report_status()["open_lookups"] == 0)
        status = manager.adapter.report_status()
        assert status["hits"] == {"host": 3, "nvme": 3, "redis": 2} and status["misses"]["absent"] == 1
        manager.adapter.delete([asked[4]])
        manager.forget()
        assert sorted(manager.get(asked, storage.VLLM)) == [0, 1, 2, 3], "what is of use ends before the gap"
    finally:
        manager.close()
