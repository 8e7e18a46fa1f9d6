"""From a model and a context to a compacted prefix: the context's cache, and the rows of it that a method chose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from kvtier.checkpoint import fingerprint_checkpoint
from kvtier.compression.compaction.artefact import CompactPrefix, ModelIdentity
from kvtier.compression.compaction.prefix import Compaction, LayerSelection, Progress, Recipe
from kvtier.connectors.transformers.compat import cache_argument
from kvtier.connectors.transformers.identity import check_model_name, weights_fingerprint_of
from kvtier.errors import ConfigError, SpecError

PREFILL_CHUNK_TOKENS = 512


def identity_of(model: Any, name: str, *, folder: Path | None = None) -> ModelIdentity:
    """Who `model` is. Reads 4 KiB of every weight. folder: what it was loaded from. Raises ConfigError for a name that
    is a path."""
    latent = getattr(model.config.get_text_config(decoder=True), "kv_lora_rank", None) is not None
    checkpoint = None if folder is None else fingerprint_checkpoint(folder)
    family = "mla" if latent else "dense"
    return ModelIdentity(family, check_model_name(name), weights_fingerprint_of(model), checkpoint or "")


def prefill(
    model: Any,
    token_ids: Sequence[int],
    *,
    chunk_tokens: int = PREFILL_CHUNK_TOKENS,
    progress: Progress | None = None,
) -> DynamicCache:
    """The cache of `token_ids`, computed chunk by chunk. Raises ConfigError for a context that is empty or longer than
    the model's positions."""
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    if not token_ids or (limit is not None and len(token_ids) >= limit):
        raise ConfigError(f"a context of {len(token_ids)} tokens: give 1 to {(limit or 1 << 31) - 1}, as the model has")
    cache = DynamicCache(config=config)
    ids = torch.tensor([list(token_ids)], device=next(model.parameters()).device)
    with torch.no_grad():
        for start in range(0, ids.shape[1], chunk_tokens):
            chunk = ids[:, start : start + chunk_tokens]
            model(chunk, use_cache=True, logits_to_keep=1, **{cache_argument(model): cache})
            if progress is not None:
                progress(min(start + chunk_tokens, ids.shape[1]), ids.shape[1], "reading the context")
    return cache


def heads_of(cache: DynamicCache) -> list[int]:
    """Physical heads of each layer of a cache that holds a context."""
    return [int(_filled(cache, n).keys.shape[1]) for n in range(len(cache.layers))]


def held_positions(cache: DynamicCache, layer: int, tokens: int) -> torch.Tensor:
    """Positions of the rows that a layer holds: all, or with a sliding window the latest."""
    rows = int(_filled(cache, layer).keys.shape[-2])
    return torch.arange(tokens - rows, tokens)


def whole(recipe: Recipe, cache: DynamicCache, tokens: int) -> Compaction:
    """Everything stays: what ratio 0 means, whatever the method."""
    return Compaction(
        recipe,
        tokens,
        tuple(LayerSelection((held_positions(cache, n, tokens),) * heads) for n, heads in enumerate(heads_of(cache))),
    )


def keep_windows(compaction: Compaction, cache: DynamicCache) -> Compaction:
    """`compaction`, with layers that hold only their window left as they are."""
    layers = []
    for n, selection in enumerate(compaction.layers):
        held = held_positions(cache, n, compaction.tokens)
        windowed = bool(getattr(cache.layers[n], "is_sliding", False)) or len(held) < compaction.tokens
        layers.append(LayerSelection((held,) * len(selection.kept)) if windowed else selection)
    return Compaction(compaction.recipe, compaction.tokens, tuple(layers), compaction.figures, compaction.layer_figures)


def compacted(
    identity: ModelIdentity, token_ids: Sequence[int], cache: DynamicCache, compaction: Compaction
) -> CompactPrefix:
    """The object that stands for `token_ids`, whose plain cache is `cache`, by a method's answer. Seconds that it took
    are left out, so that equal runs give equal bytes. Raises ConfigError or SpecError where the three do not belong
    together."""
    if len(cache.layers) != len(compaction.layers):
        raise SpecError(f"a cache of {len(cache.layers)} layers for sets of {len(compaction.layers)} layers")
    rows: list[Mapping[str, tuple[torch.Tensor, ...]]] = []
    original = 0
    for n, selection in enumerate(compaction.layers):
        layer = _filled(cache, n)
        held = int(layer.keys.shape[-2])
        first = compaction.tokens - held
        if first < 0 or len(selection.kept) != layer.keys.shape[1]:
            raise SpecError(
                f"layer {n}: sets of {len(selection.kept)} heads and {compaction.tokens} tokens for a cache of "
                f"{layer.keys.shape[1]} heads and {held} rows"
            )
        if any(int(kept[0]) < first for kept in selection.kept):
            raise SpecError(f"layer {n} holds only the last {held} of {compaction.tokens} tokens: keep those")
        names = ("latent", "rotary_key") if identity.family == "mla" else ("keys", "values")
        index = [kept.to(layer.keys.device) - first for kept in selection.kept]
        found = {
            name: tuple(tensor[0, h, at] for h, at in enumerate(index))
            for name, tensor in zip(names, (layer.keys, layer.values), strict=True)
        }
        original += _nbytes(layer.keys) + _nbytes(layer.values)
        if getattr(layer, "is_indexer_initialized", False):
            found["index_keys"] = (layer.indexer_keys[0, index[0]].to(layer.keys.dtype),)
            original += _nbytes(layer.indexer_keys)
        rows.append(found)
    figures = {name: v for name, v in compaction.figures.items() if not name.endswith("_s") and name != "seconds"}
    return CompactPrefix.of(identity, token_ids, replace(compaction, figures=figures), rows, original_bytes=original)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _filled(cache: DynamicCache, layer: int) -> Any:
    found = cache.layers[layer]
    if not getattr(found, "is_initialized", False) or found.keys.shape[0] != 1:
        raise SpecError(f"layer {layer} of the cache does not hold one sequence: run one context into it first")
    return found
