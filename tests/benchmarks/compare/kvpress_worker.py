"""kvpress's KVzip in a process of its own, since it needs an older transformers than kvtier.

Reads JSON lines from standard input: first ``{"model", "ids", "ratio"}``; then ``{"run": FILE}``, answered with
``{"seconds", "cpu_s", "prefix_tokens"}`` once FILE holds what goes: bool ``[layers, kv_heads, tokens]`` in numpy's
format. prefix_tokens: those at the beginning that it takes for the chat template's, which it does not score."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

import numpy as np
import torch
import transformers


class Worker:
    def __init__(self, model: str, ids: list[int], ratio: float) -> None:
        transformers.utils.logging.disable_progress_bar()
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._model.config.name_or_path = model  # kvpress loads the tokenizer from there
        self._prefix_tokens = 0
        self._press = importlib.import_module("kvpress").KVzipPress(compression_ratio=ratio)
        prepare = self._press.prepare

        def noting(*arguments: Any, **named: Any) -> Any:
            self._prefix_tokens = self._press.prefix_length  # it is reset at the end
            return prepare(*arguments, **named)

        self._press.prepare = noting
        self._ids = torch.tensor([ids])

    def run(self, path: str) -> dict[str, float]:
        cpu, start = time.process_time(), time.perf_counter()
        with torch.no_grad(), self._press(self._model):
            self._model.model(input_ids=self._ids, past_key_values=transformers.DynamicCache())
        seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
        gone: Any = np.zeros(
            (len(self._model.model.layers), self._model.config.num_key_value_heads, self._ids.shape[1]), np.bool_
        )
        for n, layer in enumerate(self._model.model.layers):
            _, heads, positions = layer.self_attn.masked_key_indices
            gone[n, heads.numpy(), positions.numpy()] = True
            layer.self_attn.masked_key_indices = None  # else the next pass would leave them out
        np.save(path, gone)
        return {"seconds": seconds, "cpu_s": cpu_s, "prefix_tokens": self._prefix_tokens}


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to standard error
    worker = Worker(**json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        out.write(json.dumps(worker.run(json.loads(line)["run"])) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
