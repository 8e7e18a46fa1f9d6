"""Runs a model's decoder layers one at a time on a text behind a context, so that what a layer reads may change before
the next one runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from kvtier.connectors.transformers.attention import Family, restore, snapshot
from kvtier.connectors.transformers.compat import cache_argument

_SHARED_CHOICE = "prev_topk_indices"
"""Argument of a layer that reuses the rows that an indexer before it chose; such models' layers return them too."""


@dataclass(frozen=True, slots=True)
class Activations:
    """What one layer gives the next. hidden: ``[1, n, hidden_size]``. chosen: rows that the last indexer chose, ``[1,
    n, k]``, as numbered in the cache that it saw; None for models without."""

    hidden: torch.Tensor
    chosen: torch.Tensor | None = None


class LayerSteps:
    """One text behind a context. Recorded in one forward pass over `cache`, which is as before afterwards."""

    def __init__(self, family: Family, cache: DynamicCache, token_ids: Sequence[int]) -> None:
        model = family.model
        self._layers: list[Any] = list(model.get_decoder().layers)[: family.geometry.layers]
        self._arguments: list[dict[str, Any]] = []
        self._first: torch.Tensor | None = None
        self._shares = False
        ids = torch.tensor([list(token_ids)], device=next(model.parameters()).device)
        before = snapshot(cache)
        try:
            with ExitStack() as hooks, torch.no_grad():
                for layer in self._layers:
                    hooks.callback(layer.register_forward_pre_hook(self._record, with_kwargs=True).remove)
                model(ids, use_cache=True, logits_to_keep=1, **{cache_argument(model): cache})
        finally:
            restore(cache, before)
        self._cache_name = next(name for name, value in self._arguments[0].items() if value is cache)
        for arguments in self._arguments:
            arguments.pop(self._cache_name)

    def _record(self, _: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if self._first is None:
            self._first = args[0].detach()
        self._arguments.append({name: value for name, value in kwargs.items() if name != _SHARED_CHOICE})
        self._shares = _SHARED_CHOICE in kwargs

    def first(self) -> Activations:
        """What the first layer reads."""
        if self._first is None:
            raise RuntimeError("no layer has run")
        return Activations(self._first)

    def run(self, layer: int, given: Activations, cache: DynamicCache) -> Activations:
        """`layer` on `given`, with `cache` as its past. The text's rows are appended to the cache."""
        arguments = {**self._arguments[layer], self._cache_name: cache}
        if self._shares:
            arguments[_SHARED_CHOICE] = given.chosen
        with torch.no_grad():
            out = self._layers[layer](given.hidden, **arguments)
        if isinstance(out, tuple):
            return Activations(out[0], out[1] if self._shares else None)
        return Activations(out)
