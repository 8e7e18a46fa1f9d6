"""TriAttention on the real engine with the overlapped schedule, token for token against a masked fp32 reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .engine_process import EngineProcess
from .masked_reference import MaskedReference, statistics

BUDGET, BETA = 24, 8


def method(folder: Path, **options: Any) -> dict[str, Any]:
    path = folder / "stats.safetensors"
    if not path.exists():
        statistics().save(path)
    return {
        "algorithm": "triattention",
        "calibration_path": str(path),
        "budget": BUDGET,
        "beta": BETA,
        **options,
    }


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Starts engines in fp32, one at a time, with SGLang's own checks for leaks on, and ends the last."""
    for check in ("STRICT_MEM_CHECK_DURING_BUSY", "STRICT_MEM_CHECK_DURING_IDLE"):
        monkeypatch.setenv(f"SGLANG_ENABLE_{check}", "1")
    monkeypatch.setenv("SGLANG_CHECK_KV_PAGE_INVARIANTS", "1")
    running: list[EngineProcess] = []

    def start(model: Path, methods: list[dict[str, Any]] | None, **arguments: Any) -> EngineProcess:
        for engine in running:
            engine.kill()
        running.append(EngineProcess(model, None, tmp_path / "run", methods=methods, dtype="float32", **arguments))
        return running[-1]

    yield start
    for engine in running:
        engine.kill()


def prompt(n: int, length: int = 50) -> list[int]:
    return [(n * 37 + i * (n + 3)) % 500 + 5 for i in range(length)]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("page", "mode"), [(1, "union"), (16, "per_layer_perhead"), (64, "per_head")])
def test_tokens_are_those_of_a_masked_reference(run: Any, tiny: Path, tmp_path: Path, page: int, mode: str) -> None:
    engine = run(tiny, [method(tmp_path, eviction_mode=mode)], page_size=page)
    reference = MaskedReference(tiny, statistics(), mode, BUDGET, BETA)
    # Of different lengths, so that their rounds fall into different steps and pages.
    lengths = (50, 64, 97, 33, 128)
    wanted = [reference.generate(prompt(n, length), 60) for n, length in enumerate(lengths)]
    answers = engine.generate(
        *({"rid": f"r{n}", "ids": prompt(n, length), "tokens": 60} for n, length in enumerate(lengths))
    )
    for answer, want in zip(answers, wanted, strict=True):
        print(want.margin, want.evicted)
        assert answer["ids"] == want.tokens
    metrics = engine.metrics()
    assert metrics['kvtier_evicted_tokens_total{method="triattention"}'] == sum(w.evicted for w in wanted)
    print({k: v for k, v in metrics.items() if "evict" in k and "bucket" not in k})
