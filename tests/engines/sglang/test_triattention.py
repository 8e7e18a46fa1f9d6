"""TriAttention on the real engine with the overlapped schedule: token for token against a masked fp32 reference, beside
cold pages, under memory pressure, and with two ranks. SGLang checks its pools for leaks at every step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .engine_process import EngineProcess, cores_of, prompt
from .masked_reference import MaskedReference, statistics

BUDGET, BETA = 24, 8
PROMPTS = ((4, 50), (2, 64), (0, 97), (1, 33), (5, 128))
"""Of prompts that decode side by side, number and length: their rounds fall into different steps, and begin at every
place of a page. Under every rule tested, no choice of a token is closer than 0.004, nor one of a row than 0.0002 of its
score: sums in another order change far less in fp32."""


def method(folder: Path, **options: Any) -> dict[str, Any]:
    path = folder / "stats.safetensors"
    if not path.exists():
        statistics().save(path)
    return {"algorithm": "triattention", "calibration_path": str(path), "budget": BUDGET, "beta": BETA, **options}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Starts engines in fp32, one at a time, with SGLang's own checks for leaks on, and ends the last."""
    for check in ("STRICT_MEM_CHECK_DURING_BUSY", "STRICT_MEM_CHECK_DURING_IDLE"):
        monkeypatch.setenv(f"SGLANG_ENABLE_{check}", "1")
    monkeypatch.setenv("SGLANG_CHECK_KV_PAGE_INVARIANTS", "1")
    running: list[EngineProcess] = []

    def start(model: Path, block: dict[str, Any] | None, **arguments: Any) -> EngineProcess:
        for engine in running:
            engine.kill()
        running.append(EngineProcess(model, block, tmp_path / "run", **{"dtype": "float32", **arguments}))
        return running[-1]

    yield start
    for engine in running:
        engine.kill()


def evicted(engine: EngineProcess, rank: int = 0) -> tuple[int, int]:
    """Tokens and rounds so far."""
    metrics = engine.metrics(rank)
    names = ("evicted_tokens", "eviction_rounds")
    return tuple(int(metrics[f'kvtier_{name}_total{{method="triattention"}}']) for name in names)  # type: ignore[return-value]


def assert_as_reference(
    engine: EngineProcess,
    model: Path,
    mode: str,
    *,
    budget: int = BUDGET,
    beta: int = BETA,
    tokens: int = 60,
    ranks: int = 1,
) -> None:
    """All tokens of several requests at once, 60 of 60 if not told otherwise, and as many evicted."""
    reference = MaskedReference(model, statistics(), mode, budget, beta)
    wanted = [reference.generate(prompt(*which), tokens) for which in PROMPTS]
    before = [evicted(engine, rank) for rank in range(ranks)]
    answers = engine.generate(*({"rid": f"r{which[0]}", "ids": prompt(*which), "tokens": tokens} for which in PROMPTS))
    for answer, want in zip(answers, wanted, strict=True):
        assert answer.get("ids") == want.tokens, (answer, want.margin)
    rounds = range(budget // beta * beta + beta, tokens, beta)
    for rank in range(ranks):
        counted = evicted(engine, rank)
        assert counted[0] - before[rank][0] == sum(want.evicted for want in wanted) > 0
        assert counted[1] - before[rank][1] == len(PROMPTS) * len(rounds)


def assert_idle(engine: EngineProcess) -> None:
    """Nothing is remembered of requests that ended; flushing runs SGLang's check of an idle engine."""
    assert engine.flush()
    metrics = engine.metrics()
    assert metrics["kvtier_live_requests"] == 0
    assert metrics['kvtier_errors_total{site="engine"}'] == 0


@pytest.mark.timeout(1200)
def test_single_tokens_as_pages_and_nothing_changes_below_the_budget(run: Any, tiny: Path, tmp_path: Path) -> None:
    def short(engine: EngineProcess) -> list[dict[str, Any]]:
        """One by one: side by side, the last bits of a matrix product depend on who shares the batch."""
        return [engine.one(f"s{n}", prompt(n, 40 + n), tokens=60, more={"return_logprob": True}) for n in (1, 2)]

    dense = short(run(tiny, None, page_size=1))
    engine = run(tiny, None, page_size=1, methods=[method(tmp_path, budget=64, beta=64)])

    # A budget larger than what is generated: tokens and log probabilities bit for bit as without the plugin.
    same = short(engine)
    assert [(a["ids"], a["logprobs"]) for a in same] == [(a["ids"], a["logprobs"]) for a in dense]
    assert all(len(a["logprobs"]) == 60 for a in same) and evicted(engine) == (0, 0)

    # Budget 64, beta 64: with 256 rows of generated tokens written, rounds at 128, 192 and 256 have evicted 192. The
    # last of 257 tokens is not written; that of 256 leaves 255 rows, and of 258 reads what the third round left.
    want = MaskedReference(tiny, statistics(), "union", 64, 64).generate(prompt(3, 50), 258)
    assert want.evicted == 192
    before = (0, 0)
    for tokens, rounds in ((256, 2), (257, 3), (258, 3)):
        assert engine.one(f"long-{tokens}", prompt(3, 50), tokens=tokens)["ids"] == want.tokens[:tokens]
        after = evicted(engine)
        assert after == (before[0] + 64 * rounds, before[1] + rounds)
        before = after
    metrics = engine.metrics()
    assert metrics['kvtier_eviction_kept_tokens_sum{method="triattention"}'] == 8 * (50 + 64)
    assert metrics['kvtier_eviction_round_seconds_count{method="triattention"}'] == 8

    assert_as_reference(engine, tiny, "union", budget=64, beta=64, tokens=200)

    refused = engine.one("beams", prompt(5, 50), more={"sampling": {"beam_width": 2}})
    assert "beam_width = 2" in str(refused) and "cannot be searched by beams" in str(refused)
    assert_idle(engine)


@pytest.mark.timeout(1200)
def test_pages_of_64_tokens(run: Any, tiny: Path, tmp_path: Path) -> None:
    """A kept set per KV head, the same in all layers; prompts in chunks."""
    engine = run(
        tiny, None, page_size=64, chunked_prefill_size=64, methods=[method(tmp_path, eviction_mode="per_head")]
    )
    assert_as_reference(engine, tiny, "per_head")
    assert_idle(engine)
    engine.stop()
    assert engine.left_behind() == []


@pytest.mark.timeout(1800)
def test_beside_cold_pages_and_two_hundred_random_requests(run: Any, tiny: Path, tmp_path: Path) -> None:
    """Both plugins from one file, pages of 16 tokens, a kept set of its own per layer and head; a pool so small that
    requests are retracted."""
    block = {
        "tiers": [{"type": "host", "capacity": "64MiB"}, {"type": "nvme", "path": str(tmp_path), "capacity": "256MiB"}],
        "kv_cache_compression_config": [
            {"algorithm": "quantization_for_cold_page", "quant": "none"},
            method(tmp_path, eviction_mode="per_layer_perhead", budget=40, beta=32),
        ],
    }
    engine = run(
        tiny,
        block,
        page_size=16,
        max_total_tokens=1024,
        max_running_requests=16,
        chunked_prefill_size=128,
        schedule_conservativeness=0.01,
    )
    as_reference: dict[str, Any] = {"mode": "per_layer_perhead", "budget": 40, "beta": 32, "tokens": 100}
    assert_as_reference(engine, tiny, **as_reference)

    # Rows behind evictions are in no cache: of the whole conversation only the pages of its prompt are found, on the
    # device and, after a flush, in the tiers; and what is decoded behind either is the same.
    first = engine.one("first", prompt(4, 100), tokens=100)
    warm = engine.one("warm", prompt(4, 100) + first["ids"], tokens=20)
    assert warm["cached"] == 96 == warm["details"]["device"]
    engine.stored(6, tier="host")
    assert engine.flush()
    onboarded = engine.one("onboarded", prompt(4, 100), tokens=100)
    assert onboarded["cached"] == 96 == onboarded["details"]["host"] and onboarded["ids"] == first["ids"]
    # Without evictions everything that was computed is published as ever.
    brief = engine.one("brief", prompt(5, 40), tokens=10)
    assert engine.one("longer", prompt(5, 40) + brief["ids"] + [9] * 16)["cached"] == 48
    assert_idle(engine)

    # A quarter of the clients go away, at any moment. The engine admits requests that do not ignore the end of a text
    # as if they were to end at once, so that it runs out of room and retracts some.
    draw = random.Random(7)
    requests = [
        {
            "rid": f"many{n:03}",
            "ids": prompt(n if n % 2 else n % 11, draw.randint(20, 150)),
            "tokens": draw.randint(1, 150),
            "abort_after_s": draw.uniform(0.0, 8.0) if n % 4 == 0 else None,
            "more": {"sampling": {"ignore_eos": n % 3 == 0}},
        }
        for n in range(200)
    ]
    answers = engine.generate(*requests, limit_s=900.0)
    stayed = [(a, r) for n, (a, r) in enumerate(zip(answers, requests, strict=True)) if n % 4]
    assert [a for a, _ in stayed if "error" in a or a["finish"]["type"] not in ("length", "stop")] == []
    assert [a for a, r in stayed if a["finish"]["type"] == "length" and len(a["ids"]) != r["tokens"]] == []
    assert "Retract requests" in engine.log.read_text(errors="replace")
    assert_idle(engine)
    assert_as_reference(engine, tiny, **as_reference)
    metrics = engine.metrics()
    assert metrics["kvtier_open_requests"] == metrics["kvtier_pending_offloads"] == 0
    hits = sum(v for k, v in metrics.items() if k.startswith("kvtier_hits_total"))
    misses = sum(v for k, v in metrics.items() if k.startswith("kvtier_misses_total"))
    assert metrics["kvtier_lookups_total"] == hits + misses > 0
    engine.stop()
    assert "leak" not in engine.log.read_text(errors="replace").lower()


@pytest.mark.timeout(1200)
def test_two_ranks_keep_the_same_rows(run: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor parallelism over gloo, one KV head on each rank: `union` needs the best score over both."""
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", cores_of(2))
    engine = run(tiny, None, page_size=16, methods=[method(tmp_path)], tp_size=2)
    assert_as_reference(engine, tiny, "union", ranks=2)
    assert_idle(engine)
