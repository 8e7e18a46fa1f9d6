"""KVzip on one model and context: the time that kvpress takes, and kvtier.

    python -m tests.benchmarks.compare.kvzip TOKENS ROUNDS PYTHON

prints rows as JSON. PYTHON is that of an environment with kvpress. ``prefill`` is the context's forward pass alone;
``scored`` is prefill, scoring passes and the choice of what goes: half of the pairs of token and KV head. Both run
SmolLM2 in float32, with kvpress's default chunk, in turns. ``agreement`` is the share of pairs about which both say
the same; half of them is what two would have that know nothing of each other. It leaves out the prefix that the chat
template would put there: kvtier keeps it, kvpress does not score it and so removes it first, but for four tokens."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from kvtier.cli.demo_model import ensure_model
from kvtier.cli.eval_cold_page import ColdPageEval
from kvtier.compression.compaction.recipe import Recipe
from kvtier.connectors.transformers.attention import family_of
from kvtier.connectors.transformers.compat import cache_argument
from kvtier.connectors.transformers.kvzip import compact_kvzip, repeat_prompts
from tests.benchmarks.compare.samples import Row, Samples

RATIO = 0.5
Gone = npt.NDArray[np.bool_]
"""``[layers, kv_heads, tokens]``"""


class Kvtier:
    """On `tokens` tokens of the shipped agent sessions."""

    def __init__(self, tokens: int) -> None:
        bench = ColdPageEval.load(ensure_model())
        self._model, self._ids = bench.model, bench.windows(1, tokens)
        self._family, self._prompts = family_of(bench.model), repeat_prompts(bench.tokenizer)

    @property
    def ids(self) -> list[int]:
        ids: list[int] = self._ids[0].tolist()
        return ids

    def prefill(self) -> Any:
        cache = transformers.DynamicCache(config=self._model.config)
        self._model.model(input_ids=self._ids, **{cache_argument(self._model): cache})
        return cache

    def run(self, system_tokens: int) -> Gone:
        recipe = Recipe("kvzip", RATIO, "pair")
        done = compact_kvzip(self._family, self.prefill(), self.ids, recipe, self._prompts, system_tokens=system_tokens)
        gone = np.ones((len(done.layers), len(done.layers[0].kept), len(self.ids)), np.bool_)
        for layer, chosen in enumerate(done.layers):
            for head, kept in enumerate(chosen.kept):
                gone[layer, head, kept.numpy()] = False
        return gone


class Kvpress:
    """`kvpress_worker`, running."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self._path = process, folder / "gone.npy"
        self.prefix_tokens = 0

    def run(self, into: Samples) -> Gone:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("kvpress's process has no pipes")
        stdin.write(json.dumps({"run": str(self._path)}) + "\n")
        stdin.flush()
        answer = json.loads(stdout.readline() or "{}")
        if not answer:
            raise RuntimeError("kvpress's process ended; the lines above say why")
        into.seconds.append(answer["seconds"])
        into.cpu_s.append(answer["cpu_s"])
        self.prefix_tokens = answer["prefix_tokens"]
        gone: Gone = np.load(self._path)
        return gone


@contextmanager
def kvpress(python: str, ids: list[int]) -> Iterator[Kvpress]:
    command = [python, "-m", "tests.benchmarks.compare.kvpress_worker"]
    with (
        tempfile.TemporaryDirectory(prefix="kvpress-") as folder,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
    ):
        try:
            if process.stdin is not None:
                process.stdin.write(json.dumps({"model": str(ensure_model()), "ids": ids, "ratio": RATIO}) + "\n")
            yield Kvpress(process, Path(folder))
        finally:
            process.kill()


def run(tokens: int, rounds: int, python: str) -> list[Row]:
    """``{"system", "op", "seconds", "least_s", "most_s", "samples", "cpu_s", "tokens", "agreement"}``."""
    names = (("transformers", "prefill"), ("kvtier", "scored"), ("kvpress", "scored"))
    samples = {name: Samples(1) for name in names}
    ours = Kvtier(tokens)
    same = 0.0
    with torch.inference_mode(), kvpress(python, ours.ids) as theirs:
        for n in range(rounds + 1):
            prefill, scored, their = (samples[name] if n else Samples(1) for name in names)
            with prefill.one():
                ours.prefill()
            gone = theirs.run(their)
            with scored.one():
                ours_gone = ours.run(theirs.prefix_tokens)  # the same for both
            same = float((gone == ours_gone)[:, :, theirs.prefix_tokens :].mean())
    return [
        {
            "system": system,
            "op": op,
            "seconds": round(statistics.median(taken.seconds), 3),
            "least_s": round(min(taken.seconds), 3),
            "most_s": round(max(taken.seconds), 3),
            "samples": len(taken.seconds),
            "cpu_s": round(statistics.median(taken.cpu_s), 3),
            "tokens": tokens,
            "agreement": round(same, 4),
        }
        for (system, op), taken in samples.items()
    ]


def main() -> None:
    sys.stdout.write(json.dumps(run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])) + "\n")


if __name__ == "__main__":
    main()
