"""The staged path in whole engines: command line to token, detached and attached meanwhile, killed and restarted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .engine_process import EngineProcess, prompt

RAW = {"algorithm": "quantization_for_cold_page", "quant": "none"}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    """Starts engines, one at a time, and ends the last."""
    running: list[EngineProcess] = []

    def start(model: Path, block: dict[str, Any], layout: str) -> EngineProcess:
        for engine in running:
            engine.kill()
        options: dict[str, Any] = {
            "dtype": "float32",
            "kv_connector": "kvtier-hicache",
            "hicache_io_backend": "direct",
            "hicache_mem_layout": layout,
        }
        running.append(EngineProcess(model, block, tmp_path / "run", page_size=16, **options))
        return running[-1]

    yield start
    for engine in running:
        engine.kill()


def flush(engine: EngineProcess) -> None:
    """Forget the device cache, once everything that is on its way to storage has arrived there."""
    assert any(engine.flush() for _ in range(6)), "the engine never became idle"


def settled(engine: EngineProcess) -> dict[str, float]:
    """The metrics, which must add up, with nobody left."""
    metrics = engine.metrics()
    hits = sum(v for k, v in metrics.items() if k.startswith("kvtier_hits_total{"))
    misses = sum(v for k, v in metrics.items() if k.startswith("kvtier_misses_total{"))
    assert metrics["kvtier_lookups_total"] == hits + misses
    assert metrics["kvtier_open_requests"] == 0 and metrics['kvtier_errors_total{site="engine"}'] == 0
    return metrics


@pytest.mark.timeout(1500)
def test_flush_detach_attach_crash_and_restart(run: Any, tiny: Path, tmp_path: Path) -> None:
    """One engine and its successor, since a start costs half a minute."""
    nvme = tmp_path / "kv"
    block = {
        "tiers": [
            {"type": "host", "capacity": "64MiB"},
            {"type": "nvme", "path": str(nvme), "capacity": "256MiB"},
        ],
        "kv_cache_compression_config": [RAW],
        "promote_deadline": "60s",
        "break_even": False,
    }
    engine = run(tiny, block, "layer_first")
    asked = prompt(1)

    # From the engine's own view the prefix comes from storage, and raw pages give the same tokens.
    cold = engine.one("cold", asked)
    assert cold["cached"] == 0 and len(cold["ids"]) == 8
    engine.stored(12)
    flush(engine)
    warm = engine.one("warm", asked)
    assert warm["ids"] == cold["ids"]
    assert warm["cached"] == 192 and warm["details"]["storage"] == 192 and warm["details"]["device"] == 0
    metrics = settled(engine)
    assert metrics['kvtier_hits_total{tier="host"}'] == 12 and metrics['kvtier_misses_total{reason="absent"}'] == 12

    # Another salt finds nothing; the same one again finds its own.
    salted = engine.one("salted", asked, more={"cache_salt": "tenant"})
    assert salted["cached"] == 0 and salted["ids"] == cold["ids"]
    engine.stored(24)
    flush(engine)
    assert engine.one("salted2", asked, more={"cache_salt": "tenant"})["cached"] == 192

    # Requests that share prefixes, a third of them aborted; then nothing is left, and nothing is wrong.
    requests = [
        {"rid": f"many{n}", "ids": prompt(n % 5), "tokens": 4}
        | ({"abort_after_s": 0.05 * (n % 7)} if n % 3 == 0 else {})
        for n in range(40)
    ]
    answers = engine.generate(*requests, limit_s=600)
    whole = [a for a in answers if len(a["ids"]) == 4]
    assert len(whole) >= 20 and all(a["ids"] == cold["ids"][:4] for a in whole if a["rid"] in ("many1", "many11"))
    flush(engine)
    assert engine.one("after", asked)["ids"] == cold["ids"]
    settled(engine)
    assert "leak" not in engine.log.read_text(errors="replace").lower()  # SGLang's own check, when it is idle

    # Storage is detached while the engine runs, which goes on alone; attached again, it finds what is on NVMe.
    flush(engine)
    assert engine.storage(None) == {"success": True, "message": "Detached HiCache storage backend successfully."}
    alone = engine.one("alone", asked)
    assert alone["cached"] == 0 and alone["ids"] == cold["ids"]
    flush(engine)
    extra = {
        "backend_name": "kvtier-hicache",
        "module_path": "kvtier.connectors.sglang.hicache",
        "class_name": "KVTierStorage",
        "prefetch_threshold": 16,
        "prefetch_timeout_base": 60,
        "config": {**block, "http": {"port": engine.port}},
    }
    attach = {"hicache_storage_backend": "dynamic", "hicache_storage_backend_extra_config_json": json.dumps(extra)}
    refused = engine.storage(attach)
    assert not refused["success"] and "interface_v1" in refused["message"]
    attach["hicache_storage_backend_extra_config_json"] = json.dumps({**extra, "interface_v1": 1})
    assert engine.storage(attach)["success"]
    again = engine.one("again", asked)
    assert again["cached"] == 192 and again["ids"] == cold["ids"]
    assert settled(engine)['kvtier_hits_total{tier="nvme"}'] == 12

    # Killed; a successor with another layout of host memory restores what the first one stored.
    engine.kill()
    second = run(tiny, block, "page_first_direct")
    restored = second.one("restored", asked)
    assert restored["cached"] == 192 and restored["ids"] == cold["ids"]
    assert settled(second)['kvtier_hits_total{tier="nvme"}'] == 12
    second.stop()
    assert second.left_behind() == []
