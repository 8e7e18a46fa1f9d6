"""Decoding with and without TriAttention in the real engine, at a batch that fits its pool dense and at one that does
not. About 5 minutes on two idle cores. From the root of a checkout:

    env=$(tools/env-engine.sh sglang | tail -n 1)
    $env/bin/python -m tests.engines.sglang.measure_eviction [--generated 300] [--batches 8,32]

The model is a random Llama whose keys and values are large beside its weights (8 layers, 8 query and 4 KV heads of 64,
FP32: 32 KiB a token), so that at the contexts here attention dominates, as it does in large models at long ones. What
it writes means nothing; its speed does not depend on that. One line of JSON per measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LAYERS, HEADS, KV_HEADS, DIM, VOCABULARY = 8, 8, 4, 64, 512
PROMPT_TOKENS, GENERATED_TOKENS = 64, 1472
POOL_TOKENS = 12_800
"""Room for eight requests dense, and for some more than thirty with eviction."""
BATCHES = (8, 32)
BUDGET, BETA = 256, 64
PAGE_TOKENS = 16
LIMIT_S = 1200.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generated", type=int, default=GENERATED_TOKENS, help="tokens of each answer")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="requests at a time")
    given = parser.parse_args()
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with tempfile.TemporaryDirectory(prefix="kvtier-measure-") as name:
        folder = Path(name)
        write_model(folder / "model")
        write_statistics(folder / "stats.safetensors")
        method = {
            "algorithm": "triattention",
            "calibration_path": str(folder / "stats.safetensors"),
            "budget": BUDGET,
            "beta": BETA,
        }
        for label, methods in (("dense", None), ("triattention", [method])):
            measure(label, folder, methods, given.generated, [int(n) for n in given.batches.split(",")])


def measure(label: str, folder: Path, methods: list[dict[str, Any]] | None, generated: int, batches: list[int]) -> None:
    from .engine_process import EngineProcess

    engine = EngineProcess(
        folder / "model",
        None,
        folder / label,
        methods=methods,
        dtype="float32",
        page_size=PAGE_TOKENS,
        max_total_tokens=POOL_TOKENS,
        max_running_requests=max(batches),
        log_level="warning",
    )
    try:
        engine.one("warm-up", prompt(99), tokens=4)
        for batch in batches:
            requests = [{"rid": f"{batch}-{n:02}", "ids": prompt(n), "tokens": generated} for n in range(batch)]
            start = time.perf_counter()
            answers = engine.generate(*requests, limit_s=LIMIT_S)
            seconds = time.perf_counter() - start
            if not all(len(a["ids"]) == generated for a in answers):
                raise SystemExit(f"{label}: not every request of {batch} was answered: {answers}")
            record = {
                "method": label,
                "budget": BUDGET if methods else None,
                "batch": batch,
                "decode_tok_per_s": round(batch * generated / seconds, 1),
                "seconds": round(seconds, 1),
                "retractions": engine.log.read_text(errors="replace").count("Retract requests"),
            }
            if methods:
                metrics = engine.metrics()
                rounds = metrics['kvtier_eviction_round_seconds_count{method="triattention"}']
                record["evicted_tokens"] = int(metrics['kvtier_evicted_tokens_total{method="triattention"}'])
                record["round_ms"] = round(
                    1e3 * metrics['kvtier_eviction_round_seconds_sum{method="triattention"}'] / max(rounds, 1), 2
                )
            sys.stdout.write(json.dumps(record) + "\n")
            sys.stdout.flush()
            engine.flush()
    finally:
        engine.kill()


def prompt(n: int) -> list[int]:
    return [(n * 37 + i * (2 * n + 3)) % 500 + 5 for i in range(PROMPT_TOKENS)]


def write_model(folder: Path) -> None:
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HEADS * DIM,
        intermediate_size=HEADS * DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        max_position_embeddings=8192,
        rope_theta=10000.0,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def write_statistics(path: Path) -> None:
    import numpy as np

    from kvtier.compression.triattention import Calibration

    draw = np.random.default_rng(0)
    shape = (LAYERS, HEADS, DIM // 2)
    mean = (draw.standard_normal(shape) + 1j * draw.standard_normal(shape)).astype(np.complex64)
    Calibration(mean, np.abs(mean) + np.float32(0.5), np.ones(shape[:2], np.bool_)).save(path)


if __name__ == "__main__":
    main()
