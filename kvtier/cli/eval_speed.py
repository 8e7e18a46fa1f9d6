"""What eviction gains: decode steps per second against dense at the same logical length, measured in one run.

Caches are filled with noise, since their values do not change the time. Dense and evicted steps take turns, so that a
noisy machine slows both, and medians are compared. A round's time is measured apart and spread over its `beta` steps.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from kvtier.compression import CompressionPipeline
from kvtier.compression.triattention import TriAttention
from kvtier.connectors.transformers.eviction import BatchCache, EvictingGeneration, platform_of


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one batch of sequences. round_s: one round of the whole batch, 0 for dense."""

    step_s: float
    round_s: float
    beta: int
    batch: int
    kv_bytes: int

    @property
    def tokens_per_s(self) -> float:
        return self.batch / (self.step_s + self.round_s / self.beta)


class _Sequences:
    """A batch in the middle of its generation, with `rows` generated rows of noise behind its prompt."""

    def __init__(
        self, model: Any, method: TriAttention | None, batch: int, prompt: int, generated: int, rows: int
    ) -> None:
        managers = [] if method is None else [method]
        self.generation = EvictingGeneration(model, CompressionPipeline(managers, platform_of(model)))
        self.cache = self.generation.begin(batch, prompt)
        self.batch = batch
        config = model.config
        shape = (batch, config.num_key_value_heads, prompt + rows, config.head_dim)
        for layer in self.cache.layers:
            layer.update(torch.randn(shape, dtype=model.dtype), torch.randn(shape, dtype=model.dtype))
        for request in self.cache.requests:
            request.length, request.generated_tokens = prompt + rows, generated
        self.generation.compression.call("on_request_init", self.cache.requests)

    def step(self) -> float:
        start = time.perf_counter()
        self.generation.step(torch.zeros(self.batch, 1, dtype=torch.int64))
        return time.perf_counter() - start


def fitting(model: Any, rows: int, pool_bytes: int) -> int:
    """Sequences of `rows` rows that fit into a pool."""
    return pool_bytes // (rows * row_bytes(model))


def row_bytes(model: Any) -> int:
    """Keys and values of one token."""
    config = model.config
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize)


def compare(
    model: Any,
    method: TriAttention,
    *,
    beta: int,
    batches: tuple[int | None, int],
    prompt: int,
    context: int,
    steps: int,
) -> tuple[Speed | None, Speed]:
    """Dense and evicted at `context` generated tokens. batches: of each; None: dense is not run."""
    budget = method.budget
    context -= context % beta
    dense = _Sequences(model, None, batches[0], prompt, context, context) if batches[0] is not None else None
    # Half way between two rounds: the mean length of the evicted cache.
    evicted = _Sequences(model, method, batches[1], prompt, context, budget + beta // 2)
    times: tuple[list[float], list[float]] = ([], [])
    for n in range(steps + 1):
        for sequences, taken in ((dense, times[0]), (evicted, times[1])):
            if sequences is not None:
                seconds = sequences.step()
                if n > 0:
                    taken.append(seconds)
    rounds = _round_s(evicted, method, budget + beta)
    return (
        Speed(statistics.median(times[0]), 0.0, beta, dense.batch, _kv_bytes(dense.cache)) if dense else None,
        Speed(statistics.median(times[1]), rounds, beta, evicted.batch, _kv_bytes(evicted.cache)),
    )


def _round_s(sequences: _Sequences, method: TriAttention, rows: int) -> float:
    """Time of one round of a batch whose sequences hold `rows` generated rows."""
    cache = sequences.cache
    requests = cache.requests
    missing = requests[0].prompt_tokens + rows - requests[0].length
    for layer in cache.layers:
        shape = (*layer.keys.shape[:2], missing, layer.keys.shape[3])
        layer.update(torch.randn(shape, dtype=layer.keys.dtype), torch.randn(shape, dtype=layer.keys.dtype))
    for request in requests:
        request.length += missing
    start = time.perf_counter()
    cache.compact(requests, [method.keep_set(request, cache) for request in requests])
    return time.perf_counter() - start


def _kv_bytes(cache: BatchCache) -> int:
    return cache.rows_bytes() // len(cache.requests)
