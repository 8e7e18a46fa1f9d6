"""KVzip on one model and context: the time that kvpress takes, and kvtier.

    python -m tests.benchmarks.compare.kvzip TOKENS ROUNDS

prints rows as JSON. ``prefill`` is the context's forward pass alone; ``scored`` is prefill, scoring passes and the
choice of what stays, half of the pairs of token and KV head. Both run SmolLM2 in float32 in the same process, each its
own copy, with kvpress's default chunk. ``agreement`` is the share of pairs about which both say the same; half of it
is what two that know nothing of each other would have."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers

from kvtier.cli.demo_model import ensure_model
from kvtier.cli.eval_cold_page import ColdPageEval
from kvtier.compression.compaction.recipe import Recipe
from kvtier.connectors.transformers.attention import family_of
from kvtier.connectors.transformers.kvzip import compact_kvzip, repeat_prompts
from tests.benchmarks.compare.samples import Row, Samples

RATIO = 0.5


class Bench:
    """Both, on `tokens` tokens of the shipped agent sessions."""

    def __init__(self, tokens: int) -> None:
        path = ensure_model()
        ours = ColdPageEval.load(path)
        self._model, self._tokenizer = ours.model, ours.tokenizer
        self._ids = ours.windows(1, tokens)
        kvpress = importlib.import_module("kvpress")
        self._theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._theirs.config.name_or_path = str(path)  # kvpress loads the tokenizer from there
        self._press = kvpress.KVzipPress(compression_ratio=RATIO)
        self._family, self._prompts = family_of(self._model), repeat_prompts(self._tokenizer)

    def prefill(self) -> Any:
        cache = transformers.DynamicCache(config=self._model.config)
        self._model.model(input_ids=self._ids, past_key_values=cache)
        return cache

    def kvtier(self) -> torch.Tensor:
        """What goes, ``[layers, kv_heads, tokens]``."""
        ids = self._ids[0].tolist()
        done = compact_kvzip(self._family, self.prefill(), ids, Recipe("kvzip", RATIO, "pair"), self._prompts)
        gone = torch.ones(len(done.layers), len(done.layers[0].kept), len(ids), dtype=torch.bool)
        for layer, chosen in enumerate(done.layers):
            for head, kept in enumerate(chosen.kept):
                gone[layer, head, kept] = False
        return gone

    def kvpress(self) -> torch.Tensor:
        """The same."""
        cache = transformers.DynamicCache()
        with self._press(self._theirs):
            self._theirs.model(input_ids=self._ids, past_key_values=cache)
        gone = []
        for layer in self._theirs.model.layers:
            mask = torch.zeros(self._model.config.num_key_value_heads, self._ids.shape[1], dtype=torch.bool)
            _, heads, positions = layer.self_attn.masked_key_indices
            mask[heads, positions] = True
            layer.self_attn.masked_key_indices = None  # else the next pass would leave them out
            gone.append(mask)
        return torch.stack(gone)


def run(tokens: int, rounds: int) -> list[Row]:
    """``{"system", "op", "seconds_p50", ..., "tokens", "agreement"}``."""
    with torch.inference_mode():
        bench = Bench(tokens)
        works: dict[tuple[str, str], Callable[[], Any]] = {
            ("transformers", "prefill"): bench.prefill,
            ("kvtier", "scored"): bench.kvtier,
            ("kvpress", "scored"): bench.kvpress,
        }
        samples = {key: Samples(1) for key in works}
        results: dict[str, Any] = {}
        for n in range(rounds + 1):
            for key, work in works.items():
                with (samples[key] if n else Samples(1)).one():
                    results[key[0]] = work()
    same = float((results["kvtier"] == results["kvpress"]).float().mean())
    return [
        {
            "system": system,
            "op": op,
            "seconds": round(sorted(taken.seconds)[len(taken.seconds) // 2], 3),
            "least_s": round(min(taken.seconds), 3),
            "most_s": round(max(taken.seconds), 3),
            "samples": len(taken.seconds),
            "tokens": tokens,
            "agreement": round(same, 4),
        }
        for (system, op), taken in samples.items()
    ]


def main() -> None:
    sys.stdout.write(json.dumps(run(int(sys.argv[1]), int(sys.argv[2]))) + "\n")


if __name__ == "__main__":
    main()
