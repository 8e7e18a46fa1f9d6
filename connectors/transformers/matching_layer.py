"""One layer of Attention Matching on a transformers model: its captured queries become blocks, and these are fitted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvtier.compression.compaction.attention_block import AttentionBlock, MeasuredBlock, block_errors
from kvtier.compression.compaction.matching import BlockFit, MatchingOptions, fit_block, thinned
from kvtier.compression.compaction.matching_latent import IndexPart, IndexRows, index_shares
from kvtier.compression.compaction.prefix import LayerSelection
from kvtier.compression.compaction.recipe import budget_tokens
from kvtier.connectors.transformers.attention import Family, FamilyKind, LayerQueries, LayerRows, SparseFamily
from kvtier.connectors.transformers.fitting_queries import taken
from kvtier.errors import ConfigError

FIGURES = ("mass_error", "output_error", "held_out_mass_error", "held_out_output_error", "select_s", "fit_s")
"""What is measured of a layer: means over its sets of rows, and seconds."""
NO_FIGURES = (math.nan,) * 4 + (0.0, 0.0)
_CHOICE_QUERIES = 256


@dataclass(frozen=True, slots=True)
class Fitted:
    """One layer's selection, and its FIGURES."""

    selection: LayerSelection
    figures: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TextQueries:
    """A layer's queries of one text behind the context, those from `first_query` on counting, and the layer's rows
    with the text's own."""

    queries: LayerQueries
    rows: LayerRows
    first_query: int


@dataclass(frozen=True, slots=True)
class _Seen:
    """Queries of several texts in one list. queries: ``[query_heads, n, key_dim]``, scaled. visible: bool ``[n, T]``,
    or None. index: their shares by the indexer, where it selects."""

    queries: torch.Tensor
    visible: torch.Tensor | None
    index: tuple[IndexPart, ...]


class LayerFits:
    """Fits layers of one context of `tokens` tokens. context: the queries of reading the context, per layer, if they
    are fitted to."""

    def __init__(
        self,
        family: Family,
        tokens: int,
        ratio: float,
        options: MatchingOptions,
        *,
        block_tokens: int,
        protected: int,
        context: Mapping[int, LayerQueries],
    ) -> None:
        self._family, self._geometry = family, family.geometry
        self._dense = self._geometry.kind is FamilyKind.DENSE
        self._tokens, self._options, self._protected = tokens, options, protected
        self._blocks = blocks_of(tokens, ratio, block_tokens)
        self._context = context

    @property
    def most_queries(self) -> int:
        """Tokens whose queries are fitted to at a time."""
        return most_queries(self._family, self._options)

    def fit(
        self,
        layer: int,
        rows: LayerRows,
        texts: Sequence[TextQueries],
        held_out: Sequence[TextQueries],
        kept: tuple[torch.Tensor, ...] | None,
        index_rows: LayerRows,
    ) -> Fitted:
        """rows: the context's. kept: sets that were chosen for this layer before, per KV head. index_rows: the
        context's rows of the layer whose indexer chooses for this one (without an indexer: `rows`)."""
        fitting = self._seen(layer, texts, self._context.get(layer), index_rows)
        apart = self._seen(layer, held_out, None, index_rows) if held_out else None
        heads = [
            self._head(layer, head, rows, fitting, apart, None if kept is None else kept[head])
            for head in range(self._geometry.kv_heads)
        ]
        group = self._geometry.group_heads if self._dense else 1
        selection = LayerSelection(
            tuple(h.kept for h in heads),
            tuple(row for h in heads for row in h.bias for _ in range(group)) if self._options.bias else None,
            tuple(h.values for h in heads if h.values is not None) if self._options.values else None,
        )
        errors = torch.tensor([h.errors for h in heads], dtype=torch.float64).mean(dim=0).tolist()
        return Fitted(selection, (*errors, sum(h.select_s for h in heads), sum(h.fit_s for h in heads)))

    def _head(
        self,
        layer: int,
        head: int,
        rows: LayerRows,
        fitting: _Seen,
        apart: _Seen | None,
        chosen: torch.Tensor | None,
    ) -> _Head:
        """One set of rows, block by block."""
        label, device = f"layer {layer}, KV head {head}", rows.keys.device
        parts: list[_Part] = []
        for block, budget in self._blocks:
            protected = torch.arange(max(0, min(self._protected, block.stop) - block.start), device=device)
            kept = None
            if chosen is not None:
                kept = (chosen[(chosen >= block.start) & (chosen < block.stop)] - block.start).to(device)
            fit = fit_block(
                self._block(rows, head, block, fitting),
                budget,
                self._options,
                protected=protected[:budget],
                source=IndexRows(fitting.index, block) if self._options.by_index else None,
                kept=kept,
                label=label,
            )
            away = (math.nan, math.nan)
            if apart is not None:
                measured = MeasuredBlock(self._block(rows, head, block, apart))
                errors = block_errors(measured, fit.kept, fit.bias, fit.values)
                away = (errors.mass, errors.output)
            parts.append(_Part(block, fit, away))
        return _together(parts)

    def _block(self, rows: LayerRows, head: int, block: slice, seen: _Seen) -> AttentionBlock:
        queries = seen.queries
        if self._dense:
            queries = queries[self._geometry.query_heads_of(head)].reshape(1, -1, self._geometry.key_dim)
        keys, values = (t[head, block].to(queries.dtype) for t in (rows.keys, rows.values))
        visible = None if seen.visible is None else seen.visible[:, block]
        return AttentionBlock(queries, keys, values, visible, float(self._geometry.softcap or 0.0))

    # -- queries -------------------------------------------------------------------------------------------------------

    def _seen(
        self, layer: int, texts: Sequence[TextQueries], context: LayerQueries | None, index_rows: LayerRows
    ) -> _Seen:
        """The queries of some texts, no more than are wanted: an even subset of each."""
        counts = [t.queries.queries.shape[1] - t.first_query for t in texts]
        most = self.most_queries - (0 if context is None else context.queries.shape[1])
        queries, visible, index = [], [], []
        for text, count in zip(texts, counts, strict=True):
            share = max(1, most * count // sum(counts)) if sum(counts) > most else count
            some = taken(text.queries, text.first_query + thinned(count, share))
            queries.append(some.queries)
            if some.selected is not None:
                visible.append(self._family.visible(layer, some, text.rows)[:, : self._tokens])
            if self._options.by_index and some.index_queries is not None:
                index.append(self._index_part(layer, some, text.rows))
        if context is not None:
            queries.append(context.queries)
            if self._geometry.kind is FamilyKind.SPARSE:
                visible.append(self._context_choice(layer, index_rows))
                if self._options.by_index and context.index_queries is not None:
                    index.append(self._index_part(layer, context, index_rows, everything=True))
        together = torch.cat(queries, dim=1)
        dtype = torch.float64 if together.dtype == torch.float64 else torch.float32
        mask = torch.cat(visible) if visible else None
        if mask is not None and bool(mask.all()):
            mask = None
        return _Seen(together.to(dtype) * self._geometry.scales[layer], mask, tuple(index))

    def _index_part(self, layer: int, queries: LayerQueries, rows: LayerRows, *, everything: bool = False) -> IndexPart:
        """everything: as if all rows were before the queries."""
        family, index_keys = self._sparse(), rows.index_keys
        if index_keys is None or queries.index_queries is None:
            raise ConfigError(f"layer {layer} runs no indexer: it takes the choice of another layer")
        positions = rows.positions

        def shares(part: slice) -> torch.Tensor:
            some = taken(queries, torch.arange(part.start, part.stop))
            scores = family.index_scores(layer, some, index_keys)
            behind = positions[None, :] <= some.positions[:, None]
            return index_shares(scores, torch.ones_like(behind) if everything else behind)[:, : self._tokens]

        count, heads = int(queries.queries.shape[1]), int(queries.index_queries.shape[1])
        return IndexPart(count, shares, index_keys.device, heads)

    def _context_choice(self, layer: int, index_rows: LayerRows) -> torch.Tensor:
        """Bool ``[n, T]``: what the indexer would choose for the context's own queries if all of it were before
        them."""
        family = self._sparse()
        leader = family.leader_of(layer)
        queries, keys, topk = self._context[leader], index_rows.index_keys, self._geometry.index_topk or self._tokens
        if keys is None:
            raise ConfigError(f"layer {leader} runs no indexer: it takes the choice of another layer")
        n = queries.queries.shape[1]
        if topk >= self._tokens:
            return torch.ones(n, self._tokens, dtype=torch.bool, device=keys.device)
        chosen = torch.zeros(n, self._tokens, dtype=torch.bool, device=keys.device)
        for rows in torch.arange(n, device=keys.device).split(_CHOICE_QUERIES):
            best = family.index_scores(leader, taken(queries, rows), keys).topk(topk, dim=1).indices
            chosen[rows] = chosen[rows].scatter(1, best, True)
        return chosen

    def _sparse(self) -> SparseFamily:
        if not isinstance(self._family, SparseFamily):
            raise ConfigError(f"{self._geometry.architecture} has no indexer: use the selector hak or omp")
        return self._family


@dataclass(frozen=True, slots=True)
class _Part:
    block: slice
    fit: BlockFit
    held_out: tuple[float, float]


@dataclass(frozen=True, slots=True)
class _Head:
    """One set of rows. bias: fp32 ``[heads, B]``. errors: mass and output, of the fit and held out."""

    kept: torch.Tensor
    bias: torch.Tensor
    values: torch.Tensor | None
    errors: tuple[float, ...]
    select_s: float
    fit_s: float


def _together(parts: list[_Part]) -> _Head:
    values = [p.fit.values for p in parts if p.fit.values is not None]
    rows = [(p.fit.mass_error, p.fit.output_error, *p.held_out) for p in parts]
    return _Head(
        torch.cat([p.fit.kept + p.block.start for p in parts]).cpu(),
        torch.cat([p.fit.bias for p in parts], dim=1).cpu(),
        torch.cat(values).cpu() if values else None,
        tuple(torch.tensor(rows, dtype=torch.float64).mean(dim=0).tolist()),
        sum(p.fit.select_s for p in parts),
        sum(p.fit.fit_s for p in parts),
    )


def most_queries(family: Family, options: MatchingOptions) -> int:
    """Tokens whose queries are fitted to at a time: a dense fit has those of a whole group in one list."""
    dense = family.geometry.kind is FamilyKind.DENSE
    return max(1, options.max_queries // (family.geometry.group_heads if dense else 1))


def blocks_of(tokens: int, ratio: float, block_tokens: int) -> list[tuple[slice, int]]:
    """Blocks of a context, about equally long, and how many of their tokens stay: `budget_tokens` in all, and at least
    one of each."""
    left, budget = tokens, budget_tokens(tokens, ratio)
    count = min(math.ceil(tokens / block_tokens), budget)
    edges = [tokens * n // count for n in range(count + 1)]
    found = []
    for n in range(count):
        size = edges[n + 1] - edges[n]
        least = max(1, budget - (left - size))
        share = min(max(round(budget * size / left), least), size, budget - (count - n - 1))
        found.append((slice(edges[n], edges[n + 1]), share))
        left, budget = left - size, budget - share
    return found
