"""Calibration of TriAttention: one pass of a model over plain text, capturing queries before their rotation.

Queries are read where every decoder of transformers makes them: at the output of ``q_norm`` where the attention has
one, else of ``q_proj`` (or of a fused ``qkv_proj``). The keys of the first chunk, captured the same way, are rotated
as the configuration says and compared with the cache, so that a wrong rotary embedding is an error and never a wrong
file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from kvtier.compression.triattention.calibration import Calibration
from kvtier.compression.triattention.rotary import ROPE_STYLES, Rotary
from kvtier.connectors.transformers.eviction import cache_argument, platform_of, rotary_reader
from kvtier.errors import ConfigError, SpecError

_CHECKED_TOKENS = 64
_ROTATION_TOLERANCE = 0.02
"""Relative: the model may compute in bf16."""


@dataclass(slots=True)
class _Layer:
    """What one attention layer showed of itself. queries, keys: ``[tokens, heads, head_dim]`` of the last chunk."""

    heads: int
    kv_heads: int
    head_dim: int
    queries: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    mean: torch.Tensor = field(init=False)
    absolute: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.mean = torch.zeros(self.heads, self.head_dim, dtype=torch.float64)
        self.absolute = torch.zeros(self.heads, self.head_dim // 2, dtype=torch.float64)

    def take_query(self, _: Any, args: Any, output: torch.Tensor) -> None:
        self.queries = self._heads_of(output, self.heads)

    def take_key(self, _: Any, args: Any, output: torch.Tensor) -> None:
        self.keys = self._heads_of(output, self.kv_heads)

    def take_fused(self, _: Any, args: Any, output: torch.Tensor) -> None:
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.queries = self._heads_of(output[..., :query], self.heads)
        self.keys = self._heads_of(output[..., query : query + key], self.kv_heads)

    def _heads_of(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        if x.ndim == 4 and x.shape[1] == heads and x.shape[2] != heads:
            x = x.transpose(1, 2)  # some models norm behind the transpose
        return x.detach().reshape(-1, heads, self.head_dim)

    def add(self, rotary: Rotary) -> None:
        """Add the last chunk's queries to the sums."""
        if self.queries is None:
            raise SpecError("an attention layer made no query in a forward pass: its module is not one we know")
        x = self.queries.double().cpu()
        self.mean += x.sum(dim=0)
        real, imag = torch.from_numpy(rotary.real), torch.from_numpy(rotary.imag)
        self.absolute += torch.hypot(x[..., real], x[..., imag]).sum(dim=0)


def calibrate(
    model: Any,
    input_ids: torch.Tensor,
    *,
    model_name: str = "",
    chunk_tokens: int = 1024,
    progress: Callable[[int], None] | None = None,
) -> Calibration:
    """Query statistics of `model` over ``input_ids`` ``[tokens]``; about one prefill. `progress` is told the tokens
    of each chunk when it is done. Raises ConfigError where the rotary type is unknown or not as the configuration
    says, SpecError for a model whose attention is built in a way not known here."""
    if input_ids.ndim != 1 or len(input_ids) < _CHECKED_TOKENS:
        raise ConfigError(f"the text has {input_ids.numel()} tokens: give at least {_CHECKED_TOKENS}")
    geometry = platform_of(model).geometry
    layers = [_Layer(geometry.query_heads, geometry.kv_heads, geometry.head_dim) for _ in range(geometry.layers)]
    read_rotary = rotary_reader(model.config)
    rotaries: list[Rotary] = []
    style = ROPE_STYLES[0]
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    with _captured(model, layers), torch.no_grad():
        for chunk in torch.split(input_ids, chunk_tokens):
            ids = chunk[None].to(model.device)
            model(ids, use_cache=True, logits_to_keep=1, **{cache_argument(model): cache})
            if not rotaries:
                style = _style_of(read_rotary, layers, cache)
                rotaries = [read_rotary(n, style) for n in range(len(layers))]
            for layer, rotary in zip(layers, rotaries, strict=True):
                layer.add(rotary)
            if progress is not None:
                progress(len(chunk))
    shape = (len(layers), geometry.query_heads, geometry.head_dim // 2)
    q_mean, q_abs = np.empty(shape, np.complex64), np.empty(shape, np.float32)
    for n, (layer, rotary) in enumerate(zip(layers, rotaries, strict=True)):
        mean: npt.NDArray[np.float64] = (layer.mean / len(input_ids)).numpy()
        q_mean[n] = mean[:, rotary.real] + 1j * mean[:, rotary.imag]
        q_abs[n] = (layer.absolute / len(input_ids)).numpy()
    return Calibration(q_mean, q_abs, np.ones(shape[:2], np.bool_), rope_style=style, model_name=model_name)


def _style_of(read_rotary: Callable[[int, str], Rotary], layers: list[_Layer], cache: DynamicCache) -> str:
    """The rope style that turns the captured keys into the cached ones, in every layer."""
    worst = {style: _rotation_errors(read_rotary, style, layers, cache) for style in ROPE_STYLES}
    style = min(ROPE_STYLES, key=lambda s: max(worst[s]))
    error = max(worst[style])
    if error > _ROTATION_TOLERANCE:
        layer = worst[style].index(error)
        raise ConfigError(
            f"layer {layer}: the model rotates its keys in another way than rope_parameters say (off by {error:.0%}); "
            "this model cannot be calibrated"
        )
    return style


def _rotation_errors(
    read_rotary: Callable[[int, str], Rotary], style: str, layers: list[_Layer], cache: DynamicCache
) -> list[float]:
    """Per layer, how far the captured keys, rotated, are from the cached ones, relative to the largest."""
    errors = []
    for n, layer in enumerate(layers):
        if layer.keys is None:
            raise SpecError(f"layer {n}: no key was captured: its attention module is not one we know")
        # The last rows: a layer with a sliding window has no others.
        stored = cache.layers[n].keys[0, :, -_CHECKED_TOKENS:].double().cpu().numpy()
        rows = stored.shape[1]
        before = layer.keys[-rows:].double().cpu().numpy()
        rotary = read_rotary(n, style)
        positions = np.arange(len(layer.keys) - rows, len(layer.keys))
        turned = np.stack([rotary.rotate(before[:, head], positions) for head in range(layer.kv_heads)])
        errors.append(float(np.abs(turned - stored).max() / max(float(np.abs(stored).max()), 1e-30)))
    return errors


@contextmanager
def _captured(model: Any, layers: list[_Layer]) -> Iterator[None]:
    """Hooks on every attention layer while the block runs."""
    handles = []
    try:
        for n, module in enumerate(_attention_modules(model, len(layers))):
            if hasattr(module, "qkv_proj"):
                handles.append(module.qkv_proj.register_forward_hook(layers[n].take_fused))
                continue
            query, key = (_last_of(module, names, n) for names in (("q_norm", "q_proj"), ("k_norm", "k_proj")))
            handles.append(query.register_forward_hook(layers[n].take_query))
            handles.append(key.register_forward_hook(layers[n].take_key))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _attention_modules(model: Any, layers: int) -> list[Any]:
    found = {
        int(module.layer_idx): module
        for module in model.modules()
        if hasattr(module, "layer_idx") and (hasattr(module, "q_proj") or hasattr(module, "qkv_proj"))
    }
    if sorted(found) != list(range(layers)):
        raise SpecError(
            f"{type(model).__name__}: attention modules with q_proj or qkv_proj were found for layers {sorted(found)} "
            f"of {layers}; this model cannot be calibrated"
        )
    return [found[n] for n in range(layers)]


def _last_of(module: Any, names: tuple[str, ...], layer: int) -> Any:
    """The first of `names` that the module has: a norm comes after the projection."""
    for name in names:
        child = getattr(module, name, None)
        if isinstance(child, torch.nn.Module):
            return child
    raise SpecError(f"layer {layer}: the attention module has none of {', '.join(names)}")
