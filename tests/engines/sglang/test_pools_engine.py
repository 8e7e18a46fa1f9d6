"""Whole engines with other caches than a plain one: the same tokens from a cold start and from what was stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .engine_process import EngineProcess

PAGE = 16


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("KVTIER_TEST_POOLS", "1")
    running: list[EngineProcess] = []

    def start(model: Path, **options: Any) -> EngineProcess:
        block = {
            "tiers": [
                {"type": "host", "capacity": "64MiB"},
                {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": "256MiB"},
            ],
            "kv_cache_compression_config": [{"algorithm": "quantization_for_cold_page", "quant": "none"}],
            "promote_deadline": "60s",
            "break_even": False,
        }
        running.append(EngineProcess(model, block, tmp_path / "run", page_size=PAGE, dtype="float32", **options))
        return running[-1]

    yield start
    for engine in running:
        engine.kill()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["latent", "windowed"])
def test_tokens_are_the_same_from_what_was_stored(run: Any, tmp_path: Path, kind: str) -> None:
    """A prompt of 200 tokens, in chunks of 64 of which a window leaves the device, and a second turn behind it."""
    from . import tiny_hybrids

    write = {"latent": tiny_hybrids.write_latent, "windowed": tiny_hybrids.write_windowed}[kind]
    engine = run(write(tmp_path / "model"), chunked_prefill_size=64)
    asked = [(37 + i * 4) % 500 + 5 for i in range(200)]
    cold = engine.one("cold", asked, tokens=12)
    assert cold["cached"] == 0 and len(set(cold["ids"])) > 1
    again = engine.one("device", asked, tokens=12)
    assert again["ids"] == cold["ids"] and again["details"]["host"] == 0 < again["details"]["device"]
    engine.stored(12)
    assert engine.flush()
    warm = engine.one("warm", asked, tokens=12)
    assert warm["ids"] == cold["ids"] and warm["details"] == {"device": 0, "host": 192}
    turn = [*asked, *cold["ids"], *(asked[n] for n in range(61))]
    there = engine.one("there", turn, tokens=12)
    assert there["details"]["device"] >= 192
    pages = len(turn) // PAGE
    engine.stored(pages)
    assert engine.flush()
    second = engine.one("second", turn, tokens=12)
    assert second["ids"] == there["ids"] and second["details"] == {"device": 0, "host": pages * PAGE}
    metrics = engine.metrics()
    assert metrics['kvtier_errors_total{site="engine"}'] == metrics["kvtier_load_failures_total"] == 0
    assert metrics["kvtier_open_requests"] == 0
    hits = sum(n for name, n in metrics.items() if name.startswith("kvtier_hits_total"))
    misses = sum(n for name, n in metrics.items() if name.startswith("kvtier_misses_total"))
    assert metrics["kvtier_lookups_total"] == hits + misses
    assert hits == 12 + pages
