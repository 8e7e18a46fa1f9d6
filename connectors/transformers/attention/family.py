"""What compaction needs from a transformers model, one shape for every attention family.

A family reads and writes the rows of a cache layer, captures the queries of a forward pass, and computes attention from
both as the model does. Latent attention (MLA) is seen in its absorbed form: one KV head whose key is the latent
followed by the shared rotary key, and whose value is the latent; `head_outputs` leads from there to the heads' values.
So whatever works on queries, keys and values works for all.

Batch size is 1 everywhere; tensors are on the model's device. Nothing here is thread-safe: the thread that runs the
model calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from transformers import DynamicCache

from kvtier.errors import ConfigError, SpecError
from kvtier.kernels.compaction import attention


class FamilyKind(str, Enum):
    """How a model's attention keeps its past."""

    DENSE = "dense"
    """Keys and values per KV head: MHA, MQA, GQA."""
    LATENT = "latent"
    """MLA: one latent and one rotary key per token."""
    SPARSE = "sparse"
    """MLA whose queries attend to the rows that an indexer chooses (DSA)."""


@dataclass(frozen=True, slots=True)
class AttentionGeometry:
    """Shapes of one model's attention.

    kv_heads: sets of rows per layer (1 for MLA). key_dim: of a cached row as the queries see it (MLA: latent + rotary).
    rotary_dim: trailing columns of an MLA key that carry the position; for dense keys the columns that are rotated,
    from the first on. scales, windows: per layer; a window (tokens) marks a layer that keeps only its latest rows and
    is left alone by compaction. softcap: see `kernels.compaction.attention.logits`. index_groups: layers that share one
    choice of rows, in order, covering all layers; one layer each where nothing is shared. index_topk: rows that a query
    may attend to."""

    kind: FamilyKind
    architecture: str
    layers: int
    query_heads: int
    kv_heads: int
    key_dim: int
    rotary_dim: int
    scales: tuple[float, ...]
    windows: tuple[int | None, ...]
    index_groups: tuple[tuple[int, ...], ...]
    softcap: float | None = None
    index_topk: int | None = None

    @property
    def group_heads(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // self.kv_heads

    @property
    def compactable_layers(self) -> tuple[int, ...]:
        """Layers that keep every token's row."""
        return tuple(layer for layer, window in enumerate(self.windows) if window is None)

    def query_heads_of(self, kv_head: int) -> slice:
        """The query heads that read `kv_head`."""
        return slice(kv_head * self.group_heads, (kv_head + 1) * self.group_heads)


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Rows of one layer's cache, in the cache's dtype.

    keys: ``[kv_heads, rows, key_dim]``, rotated. values: ``[kv_heads, rows, value_dim]``; for MLA a view of the keys'
    latent part. positions: int64 ``[rows]``, the tokens' positions in the text. index_keys: ``[rows, index_dim]``,
    rotated; only in layers that run an indexer."""

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    index_keys: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return int(self.keys.shape[1])

    def take(self, kept: Sequence[torch.Tensor]) -> LayerRows:
        """The rows at `kept`: ascending int64 ordinals, one tensor per KV head, all of one length. `positions` and
        `index_keys` are those of the first. Raises SpecError where lengths differ."""
        if len({len(k) for k in kept}) != 1 or len(kept) != self.keys.shape[0]:
            lengths = [len(k) for k in kept]
            raise SpecError(
                f"{self.keys.shape[0]} KV heads with one number of rows are needed, got {lengths}: such sets do not "
                "fit one tensor; serve them through a mask, or choose the same number per head"
            )
        heads = torch.arange(len(kept), device=self.keys.device)[:, None]
        rows = torch.stack(list(kept)).to(self.keys.device)
        return LayerRows(
            self.keys[heads, rows],
            self.values[heads, rows],
            self.positions[rows[0]],
            None if self.index_keys is None else self.index_keys[rows[0]],
        )


@dataclass(frozen=True, slots=True)
class LayerQueries:
    """Queries that one layer made in a forward pass, after their rotation and before the scale.

    queries: ``[query_heads, n, key_dim]``, in the model's dtype (MLA: absorbed, fp32 or fp64). positions: int64
    ``[n]``. first_row: row of the cache that the first of these tokens was written to. index_queries: ``[n,
    index_heads, index_dim]`` and index_weights: fp32 ``[n, index_heads]``, in layers that run an indexer. selected:
    int64 ``[n, k]``, cache rows that the indexer let each query attend to (rows behind the query are masked all the
    same); also in layers that reuse another's choice."""

    queries: torch.Tensor
    positions: torch.Tensor
    first_row: int
    index_queries: torch.Tensor | None = None
    index_weights: torch.Tensor | None = None
    selected: torch.Tensor | None = None


Consumer = Callable[[int, LayerQueries], None]
"""Called with (layer, its queries) when the layer's attention has run and its cache holds the new rows."""


class Captured(Mapping[int, LayerQueries]):
    """Queries per layer, of all forward passes since the capture began (or `clear`), put together in order. `selected`
    is dropped where passes saw different numbers of rows: take the passes one by one for it."""

    def __init__(self) -> None:
        self._parts: dict[int, list[LayerQueries]] = {}

    def add(self, layer: int, queries: LayerQueries) -> None:
        self._parts.setdefault(layer, []).append(queries)

    def clear(self) -> None:
        self._parts.clear()

    def passes(self, layer: int) -> list[LayerQueries]:
        """One entry per forward pass."""
        return list(self._parts[layer])

    def __getitem__(self, layer: int) -> LayerQueries:
        parts = self._parts[layer]
        return parts[0] if len(parts) == 1 else _joined(parts)

    def __iter__(self) -> Iterator[int]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def _joined(parts: list[LayerQueries]) -> LayerQueries:
    def joined(name: str) -> torch.Tensor | None:
        tensors = [getattr(part, name) for part in parts]
        if any(t is None for t in tensors) or (name == "selected" and len({t.shape[1] for t in tensors}) > 1):
            return None
        return torch.cat(tensors)

    return LayerQueries(
        torch.cat([part.queries for part in parts], dim=1),
        torch.cat([part.positions for part in parts]),
        parts[0].first_row,
        joined("index_queries"),
        joined("index_weights"),
        joined("selected"),
    )


class Family(ABC):
    """One model, seen through its attention. Made by `family_of`."""

    geometry: AttentionGeometry

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.layers: list[Any] = [layer.self_attn for layer in model.get_decoder().layers]

    # Rows of a cache.

    def new_cache(self) -> DynamicCache:
        """An empty cache for this model."""
        return DynamicCache(config=self.config)

    @abstractmethod
    def read(self, cache: DynamicCache, layer: int) -> LayerRows:
        """The rows of `layer`, as views where possible. Positions are counted as in a cache that was never compacted;
        replace them where it was. Raises SpecError for batches and for layers that hold nothing."""

    @abstractmethod
    def write(self, cache: DynamicCache, layer: int, rows: LayerRows) -> None:
        """Make `rows` the content of `layer`. For MLA the latent is taken from `keys`: fitted values have no place in
        its cache, and a `values` that is not the keys' latent is a SpecError."""

    # Queries of a forward pass.

    @contextmanager
    def capture(self, layers: Sequence[int] | None = None, consume: Consumer | None = None) -> Iterator[Captured]:
        """Captures the queries of `layers` (None: all) in the model's forward passes within the block, which must use a
        cache. With `consume` they are handed over layer by layer and nothing is kept, so that no more than one layer's
        queries are in memory. Hooks are removed at the end, whatever happened."""
        captured = Captured()
        with ExitStack() as hooks:
            for layer in range(self.geometry.layers) if layers is None else layers:
                self._hook(layer, consume or captured.add, hooks)
            yield captured

    @abstractmethod
    def _hook(self, layer: int, consume: Consumer, hooks: ExitStack) -> None:
        """Register the hooks of one layer; `hooks` removes them."""

    def dense_attention(self) -> AbstractContextManager[None]:
        """Within the block every query attends to all rows, whatever an indexer would choose."""
        return nullcontext()

    # Attention as the model computes it.

    def sinks(self, layer: int) -> torch.Tensor | None:
        """``[query_heads]`` logits that take a share of every softmax and give no value, or None."""
        return None

    def logits(self, layer: int, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """``[query_heads, n, rows]``, scaled (and soft-capped), from queries ``[query_heads, n, key_dim]`` and keys
        ``[kv_heads, rows, key_dim]``."""
        return attention.logits(queries, keys, scale=self.geometry.scales[layer], softcap=self.geometry.softcap)

    def visible(self, layer: int, queries: LayerQueries, rows: LayerRows) -> torch.Tensor:
        """Bool ``[n, rows]``: what each query may attend to, by order, window and the indexer's choice. `rows` must be
        the whole layer where an indexer has chosen."""
        behind = queries.positions[:, None] - rows.positions[None, :]
        seen = behind >= 0
        window = self.geometry.windows[layer]
        if window is not None:
            seen &= behind < window
        if queries.selected is not None:
            chosen = torch.zeros_like(seen)
            seen &= chosen.scatter_(1, queries.selected, True)
        return seen

    def attention(self, layer: int, queries: LayerQueries, rows: LayerRows) -> torch.Tensor:
        """Outputs ``[query_heads, n, value_dim]`` of `queries` over `rows`, in slices of bounded memory."""
        visible = self.visible(layer, queries, rows)
        outputs = []
        for part in attention.query_slices(queries.queries.shape[1], q_heads=self.geometry.query_heads, rows=rows.rows):
            z = self.logits(layer, queries.queries[:, part], rows.keys)
            outputs.append(attention.mix(attention.probabilities(z, visible[part], self.sinks(layer)), rows.values))
        return torch.cat(outputs, dim=1)

    def head_outputs(self, layer: int, outputs: torch.Tensor) -> torch.Tensor:
        """``[query_heads, n, output_dim]``, what the output projection reads, from ``[query_heads, n, value_dim]``."""
        return outputs


def with_positions(rows: LayerRows, positions: torch.Tensor) -> LayerRows:
    """`rows` of a compacted cache, with the positions that they really have."""
    return replace(rows, positions=positions)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a cache held; the tensors are shared, not copied, which is right for caches that never write in place."""

    layers: tuple[dict[str, Any], ...]


_STATE = ("keys", "values", "is_initialized", "cumulative_length", "indexer_keys", "is_indexer_initialized")


def snapshot(cache: DynamicCache) -> Snapshot:
    """Remember the content of `cache`, to return to it after a pass whose rows are not wanted."""
    return Snapshot(tuple({n: getattr(layer, n) for n in _STATE if hasattr(layer, n)} for layer in cache.layers))


def restore(cache: DynamicCache, content: Snapshot) -> None:
    """Return `cache` to `content`."""
    for layer, state in zip(cache.layers, content.layers, strict=True):
        for name, value in state.items():
            setattr(layer, name, value)


def single(tensor: torch.Tensor) -> torch.Tensor:
    """The one sequence of a batch. Raises SpecError for more."""
    if tensor.shape[0] != 1:
        raise SpecError(f"the batch has {tensor.shape[0]} sequences: compaction works on one at a time")
    return tensor[0]


def filled(cache: DynamicCache, layer: int) -> Any:
    """Layer `layer` of `cache`. Raises SpecError where it holds nothing."""
    found = cache.layers[layer] if layer < len(cache.layers) else None
    if found is None or not found.is_initialized or found.keys.numel() == 0:
        raise SpecError(f"layer {layer} of the cache is empty: run the context first")
    return found


def require(attn: Any, architecture: str, *names: str) -> None:
    """Raises ConfigError where an attention module lacks one of its parts."""
    for name in names:
        if getattr(attn, name, None) is None:
            raise ConfigError(f"{architecture}: its attention has no {name}, which this version of kvtier reads")
