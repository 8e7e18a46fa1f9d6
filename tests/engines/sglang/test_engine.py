"""The whole engine: command line to token, with a random model and, where it says so, the real SmolLM2-135M."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .engine_process import EngineProcess, prompt

RAW = {"algorithm": "quantization_for_cold_page", "quant": "none"}


def block(nvme: Path, **more: Any) -> dict[str, Any]:
    tiers = [
        {"type": "host", "capacity": "64MiB"},
        {"type": "nvme", "path": str(nvme), "capacity": "256MiB"},
    ]
    # No test here is about what is worth loading and in time: a slow machine must not look like a lost page.
    patient = {"promote_deadline": "60s", "break_even": False}
    return {"tiers": tiers, "kv_cache_compression_config": [RAW], "debug": True, **patient, **more}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    """Starts engines, one at a time, and ends the last."""
    running: list[EngineProcess] = []

    def start(model: Path, config: dict[str, Any] | None, **arguments: Any) -> EngineProcess:
        for engine in running:
            engine.kill()
        running.append(EngineProcess(model, config, tmp_path / "run", dtype="float32", **arguments))
        return running[-1]

    yield start
    for engine in running:
        engine.kill()


@pytest.mark.timeout(1500)
def test_flush_crash_faults_and_aborts(run: Any, tiny: Path, tmp_path: Path) -> None:
    """One engine and its successor, since a start costs half a minute."""
    nvme = tmp_path / "kv"
    # Chunks of prompts, and a device cache from which prefixes are evicted and requests retracted.
    small = {"chunked_prefill_size": 128, "max_total_tokens": 2048, "schedule_conservativeness": 0.1}
    engine = run(tiny, block(nvme), page_size=16, **small)
    asked = prompt(1)

    # The prefix comes from kvtier after a flush, and raw pages give the same tokens.
    cold = engine.one("cold", asked)
    assert cold["cached"] == 0 and len(cold["ids"]) == 8
    engine.stored(12)
    assert engine.flush()
    warm = engine.one("warm", asked)
    assert warm["ids"] == cold["ids"]
    assert warm["cached"] == 192 and warm["details"]["host"] == 192 and warm["details"]["device"] == 0
    assert engine.metrics()['kvtier_hits_total{tier="host"}'] == 12

    # Another salt finds nothing; the same one again finds its own.
    salted = engine.one("salted", asked, more={"cache_salt": "tenant"})
    assert salted["cached"] == 0 and salted["ids"] == cold["ids"]
    assert engine.flush()
    assert engine.one("salted2", asked, more={"cache_salt": "tenant"})["cached"] == 192

    # A load that fails after its start: 503 for its batch, nothing inserted, the next request is right.
    assert engine.flush()
    engine.fail_next_load.touch()
    failed = engine.one("failed", asked)
    assert (failed.get("finish") or {}).get("status_code", failed.get("status")) == 503, failed
    assert not engine.fail_next_load.exists()
    after = engine.one("after", asked)
    assert after["ids"] == cold["ids"] and after["details"]["device"] == 0

    # Requests that outgrow the device together: SGLang retracts some of them, which are queued, and looked up, again.
    unsure = {"sampling": {"ignore_eos": False}}  # otherwise SGLang keeps room for every token of a request
    growing = [{"rid": f"grows{n}", "ids": prompt(20 + n, 160), "tokens": 160, "more": unsure} for n in range(8)]
    for answer in engine.generate(*growing):
        assert "error" not in answer and (answer.get("finish") or {}).get("type") in ("length", "stop"), answer
    assert "Retract requests" in engine.log.read_text(errors="replace")

    # 200 concurrent requests, a third of them aborted at various moments, with prefixes in every state and flushes
    # between. Names of one length: SGLang aborts every request whose name begins with the one it is given.
    requests = [
        {"rid": f"many{n:03}", "ids": prompt(n % 7, 150 + n % 100), "abort_after_s": 0.03 * n if n % 3 == 0 else None}
        for n in range(200)
    ]
    answers = engine.generate(*requests, limit_s=600.0, flush_every_s=0.2)
    done = [a for a in answers if "error" not in a and (a.get("finish") or {}).get("type") == "length"]
    assert len(done) >= 133
    assert engine.flush()
    metrics = engine.metrics()
    assert metrics["kvtier_open_requests"] == metrics["kvtier_pending_offloads"] == 0
    hits = sum(v for k, v in metrics.items() if k.startswith("kvtier_hits_total"))
    misses = sum(v for k, v in metrics.items() if k.startswith("kvtier_misses_total"))
    assert metrics["kvtier_lookups_total"] == hits + misses
    assert metrics["kvtier_accounting_violations_total"] == 0
    assert 0 < json.loads(engine.get("/api/status"))["ghosts"]["lookups"] <= metrics["kvtier_lookups_total"]
    assert metrics['kvtier_errors_total{site="engine"}'] == 0
    assert engine.one("still", asked)["ids"] == cold["ids"]

    assert "leak" not in engine.log.read_text(errors="replace").lower()  # SGLang's own check, when it is idle

    # A crash; the next engine restores from the same directory.
    engine.kill()
    second = run(tiny, block(nvme), page_size=16)
    restored = second.one("restored", asked)
    assert restored["ids"] == cold["ids"] and restored["cached"] == 192
    assert second.metrics()['kvtier_hits_total{tier="nvme"}'] == 12


@pytest.mark.timeout(1200)
def test_a_default_page_size_an_orderly_end_and_new_weights(run: Any, tiny: Path, other: Path, tmp_path: Path) -> None:
    engine = run(tiny, block(tmp_path / "kv"))
    cold = engine.one("cold", prompt(2))
    assert engine.flush()
    warm = engine.one("warm", prompt(2))
    assert warm["cached"] == 192 == 3 * 64 and warm["ids"] == cold["ids"]
    assert engine.metrics()['kvtier_hits_total{tier="host"}'] == 3
    assert engine.ready()
    engine.stop()
    assert engine.left_behind() == []
    second = run(tiny, block(tmp_path / "kv"))
    assert second.one("restored", prompt(2))["cached"] == 192
    assert second.metrics()['kvtier_hits_total{tier="nvme"}'] == 3

    # Weights that change in place: nothing that was stored is found again, and the new ones are right.
    assert second.do("update_from_disk", path=str(other))
    others = second.one("others", prompt(2))
    assert others["cached"] == 0 and others["ids"] != cold["ids"]
    assert second.flush()
    again = second.one("others again", prompt(2))
    assert again["cached"] == 192 and again["ids"] == others["ids"]
    assert second.do("update_from_tensors", path=str(tiny)) == [True, True, True]
    assert second.flush()  # the session was ended after its last flush
    back = second.one("back", prompt(2))
    assert back["cached"] == 0 and back["ids"] == cold["ids"]
    assert second.flush()
    assert second.one("back again", prompt(2))["cached"] == 192
    assert second.do("memory")
    resumed = second.one("resumed", prompt(2))
    assert resumed["cached"] == 0 and resumed["ids"] == cold["ids"]


def flip_one_stored_bit(nvme: Path, slot: int) -> None:
    """Damage one page behind the tier's back: pages of the random model take one 4 KiB slot each, from the first on."""
    (segment,) = [path for path in nvme.rglob("*") if path.is_file() and path.stat().st_size >= 64 << 20]
    with segment.open("r+b") as file:
        file.seek(slot * 4096 + 100)
        byte = file.read(1)[0]
        assert any(file.read(400)), "nothing is stored here"
        file.seek(slot * 4096 + 100)
        file.write(bytes([byte ^ 1]))


@pytest.mark.timeout(1200)
def test_pages_of_one_token_a_bad_page_on_disk_and_another_model(
    run: Any, tiny: Path, other: Path, tmp_path: Path
) -> None:
    nvme = tmp_path / "kv"
    engine = run(tiny, block(nvme), page_size=1)
    cold = engine.one("cold", prompt(3))
    engine.stored(200)
    assert engine.flush()
    warm = engine.one("warm", prompt(3))
    assert warm["cached"] == 199 and warm["ids"] == cold["ids"]

    # Found bad while it is promoted: what comes before it is used, the rest recomputed, and the page counted.
    engine.kill()
    flip_one_stored_bit(nvme, 50)
    second = run(tiny, block(nvme), page_size=1)
    mended = second.one("mended", prompt(3))
    assert 0 < mended["cached"] < 199 and mended["ids"] == cold["ids"]
    metrics = second.metrics()
    counted = {name: value for name, value in metrics.items() if value and "es_total" in name}
    assert metrics['kvtier_misses_total{reason="corrupt"}'] == 1, (mended["cached"], counted)
    assert metrics['kvtier_tier_quarantined_pages_total{tier="nvme"}'] == 1
    assert metrics['kvtier_hits_total{tier="nvme"}'] == mended["cached"]

    # The same prompt, the same directory, other weights: nothing is found.
    second.kill()
    third = run(other, block(nvme), page_size=1)
    assert third.one("other", prompt(3))["cached"] == 0
    metrics = third.metrics()
    assert metrics['kvtier_hits_total{tier="nvme"}'] == 0 and metrics['kvtier_misses_total{reason="namespace"}'] > 0


@pytest.mark.timeout(1200)
def test_a_real_model_gives_the_same_tokens_from_restored_pages(run: Any, tmp_path: Path) -> None:
    from kvtier.cli.demo_model import ensure_model

    engine = run(ensure_model(), block(tmp_path / "kv"), skip_tokenizer_init=False, max_total_tokens=4096)
    text = "The tide had gone out before anyone noticed that the boat was missing. " * 24
    ids = engine.encode(text)[:260]
    cold = engine.one("cold", ids, tokens=12)
    assert engine.flush()
    warm = engine.one("warm", ids, tokens=12)
    assert warm["cached"] == 256 and warm["ids"] == cold["ids"]
