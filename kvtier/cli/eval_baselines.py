"""Eviction methods to compare TriAttention with: the same rounds and budget, another rule for what stays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvtier.abc.compression import CompressionManager, KeepSet, LiveCache, LiveRequest
from kvtier.compression import RoundSchedule
from kvtier.kernels.triattention.fast import select


class _Baseline(CompressionManager):
    """Keeps the `budget` generated rows with the best scores, in all layers and heads."""

    def __init__(self, budget: int, beta: int) -> None:
        self.schedule = RoundSchedule(budget, beta)

    def on_request_init(self, requests: Sequence[LiveRequest], **kwargs: Any) -> None:
        self.schedule.start(requests)

    def on_request_finish(self, requests: Sequence[LiveRequest], **kwargs: Any) -> None:
        self.schedule.finish(requests)

    def on_generation_step_end(self, requests: Sequence[LiveRequest], cache: LiveCache, **kwargs: Any) -> None:
        due = {request.request_id for request in self.schedule.due(requests)}
        if not due:
            return
        packed = [(n, request) for n, request in enumerate(requests) if request.request_id in due]
        keep = []
        for n, request in packed:
            scores = self.scores(n, request, kwargs.get("attentions"))
            chosen = select(scores[None, None, request.prompt_tokens :], self.schedule.budget)
            keep.append(KeepSet(request.prompt_tokens, chosen))
        cache.compact([request for _, request in packed], keep)

    def scores(self, row: int, request: LiveRequest, attentions: Any) -> torch.Tensor:
        """``[length]`` of the sequence in row `row` of the batch."""
        raise NotImplementedError


class RecentWindow(_Baseline):
    """The latest rows stay."""

    algorithm = "recent_window"

    def scores(self, row: int, request: LiveRequest, attentions: Any) -> torch.Tensor:
        return torch.arange(request.length, dtype=torch.float32)


class RandomRows(_Baseline):
    """Any rows stay."""

    algorithm = "random"

    def __init__(self, budget: int, beta: int) -> None:
        super().__init__(budget, beta)
        self._generator = torch.Generator().manual_seed(0)

    def scores(self, row: int, request: LiveRequest, attentions: Any) -> torch.Tensor:
        return torch.rand(request.length, generator=self._generator)


class AttentionScore(_Baseline):
    """Rows stay that got the most attention from the queries of the last step, per query that could see them; mean over
    layers and heads. Fed one stretch of `beta` tokens at a time, those are all queries since the last round."""

    algorithm = "attention"

    def scores(self, row: int, request: LiveRequest, attentions: Any) -> torch.Tensor:
        total = torch.zeros(request.length)
        for layer in attentions:
            total += layer[row].sum(dim=(0, 1))
        queries = attentions[0].shape[2]
        seen = torch.full((request.length,), float(queries))
        seen[-queries:] = torch.arange(queries, 0, -1)
        return total / seen
