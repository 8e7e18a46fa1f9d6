"""Key selection by the indexer of DeepSeek Sparse Attention: its normalised scores stand for attention weights.

A query's index scores become shares by a softmax over everything that it could choose from (the context and what came
after, in order); the block's columns of them are what HAK and OMP work on. That it is a softmax is our choice: the
method is described as normalised only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kvtier.compression.compaction.attention_block import WORKING_BYTES

_BYTES_PER_CELL = 32


def index_shares(scores: torch.Tensor, available: torch.Tensor) -> torch.Tensor:
    """``[n, rows]``: softmax of index scores over the rows that are `available` (bool) to a query."""
    return torch.softmax(scores.masked_fill(~available, -torch.inf), dim=-1)


@dataclass(frozen=True, slots=True)
class IndexPart:
    """Queries that were scored together. shares: some of these `queries` queries to their shares ``[m, T]`` of the
    whole context, on `device`. score_heads: the indexer's heads, whose scores exist at a time."""

    queries: int
    shares: Callable[[slice], torch.Tensor]
    device: torch.device
    score_heads: int = 1


class IndexRows:
    """Rows for key selection (`MassRows`): shares of the context's positions `columns`, made anew in each pass."""

    heads = 1

    def __init__(self, parts: Sequence[IndexPart], columns: slice, working_bytes: int = WORKING_BYTES) -> None:
        self._parts, self._columns, self._working_bytes = parts, columns, working_bytes

    @property
    def tokens(self) -> int:
        return int(self._columns.stop - self._columns.start)

    @property
    def device(self) -> torch.device:
        return self._parts[0].device

    def scores(self) -> torch.Tensor:
        squares, count = torch.zeros(self.tokens, dtype=torch.float64, device=self.device), 0
        for _, shares, _ in self.rows():
            squares += shares.square().sum(0)
            count += len(shares)
        return (squares / count).sqrt()

    def rows(self, columns: torch.Tensor | None = None) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        for part in self._parts:
            cell_bytes = _BYTES_PER_CELL + 8 * part.score_heads
            step = max(1, self._working_bytes // (cell_bytes * self._columns.stop))
            for first in range(0, part.queries, step):
                shares = part.shares(slice(first, min(first + step, part.queries)))[:, self._columns].double()
                yield 0, shares if columns is None else shares[:, columns], shares.sum(1)
