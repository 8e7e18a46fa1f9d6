"""Rotary frequencies of a model, from its configuration: every type that the model's library knows, and no guessed
default.

The core imports no engine, so the library's table of functions is passed in (transformers: ``ROPE_INIT_FUNCTIONS``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError

ROPE_STYLES = ("half", "interleaved")

_CHANGES_BEYOND_TRAINING = ("dynamic", "longrope")
"""Their frequencies depend on the sequence's length once it exceeds what the model was trained on."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """How one layer rotates a head's vector: pair f is ``(x[real[f]], x[imag[f]])``, turned by ``omega[f] * position``.

    omega, gain: fp64 ``[head_dim / 2]``; gain is the square of the embedding's scaling of cosine and sine. real,
    imag: int64 index arrays. valid_tokens: the sequence length from which on omega no longer holds, or None."""

    omega: npt.NDArray[np.float64]
    gain: npt.NDArray[np.float64]
    real: npt.NDArray[np.int64]
    imag: npt.NDArray[np.int64]
    valid_tokens: int | None = None

    def rotate(self, x: npt.NDArray[np.float64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """`x` ``[T, head_dim]`` before rotation -> as the model stores it, at `positions` ``[T]``."""
        turned = (x[:, self.real] + 1j * x[:, self.imag]) * np.exp(1j * positions[:, None] * self.omega)
        # Dimensions that are not rotated are not scaled either; their gain is the scaling itself.
        scale = np.where(self.omega != 0, np.sqrt(self.gain), 1.0)
        out = np.empty_like(x)
        out[:, self.real], out[:, self.imag] = turned.real * scale, turned.imag * scale
        return out


def rotary_of(config: Any, functions: Mapping[str, Callable[..., Any]], layer: int, *, style: str = "half") -> Rotary:
    """The rotary embedding of `layer` of a model.

    config: its transformers configuration. functions: rope type -> function(config, device, seq_len, layer_type=) that
    returns (frequencies, scaling); ``default`` is known here. style: which dimensions form a pair. Raises ConfigError
    where the type or its base is missing or unknown.
    """
    if style not in ROPE_STYLES:
        raise ConfigError(f"rope_style = {style!r}: give one of {', '.join(ROPE_STYLES)}")
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    parameters, layer_type = _parameters(text, layer)
    omega, scaling = _frequencies(text, parameters, layer_type, functions, head_dim)
    rotates = getattr(text, "no_rope_layers", None)
    if rotates and not rotates[layer]:
        omega, scaling = np.zeros_like(omega), 1.0
    rotated = 2 * len(omega)
    if rotated > head_dim:
        raise ConfigError(
            f"rope_parameters give {len(omega)} frequencies for head_dim = {head_dim}: at most {head_dim // 2}"
        )
    # What is not rotated is paired as well, with frequency 0: its product with a query is the plain dot product.
    rest = (head_dim - rotated) // 2
    return Rotary(
        omega=np.concatenate([omega, np.zeros(rest)]),
        # Stored keys carry the scaling once, so the plain dimensions weigh one factor of it less.
        gain=np.concatenate([np.full(len(omega), scaling**2), np.full(rest, scaling)]),
        real=np.concatenate([_real(rotated, style), rotated + np.arange(rest)]).astype(np.int64),
        imag=np.concatenate([_imag(rotated, style), rotated + rest + np.arange(rest)]).astype(np.int64),
        valid_tokens=_valid_tokens(text, parameters),
    )


def _real(rotated: int, style: str) -> npt.NDArray[np.int64]:
    return np.arange(rotated // 2) if style == "half" else np.arange(0, rotated, 2)


def _imag(rotated: int, style: str) -> npt.NDArray[np.int64]:
    return np.arange(rotated // 2, rotated) if style == "half" else np.arange(1, rotated, 2)


def _parameters(config: Any, layer: int) -> tuple[Mapping[str, Any], str | None]:
    """The rope parameters of `layer`, and the layer type they are listed under where there are several."""
    parameters = getattr(config, "rope_parameters", None)
    name = getattr(config, "model_type", type(config).__name__)
    if not parameters:
        raise ConfigError(
            f"{name}: the model's configuration has no rope_parameters, so its rotary frequencies are unknown; "
            "load it with a transformers version that knows the model"
        )
    layer_types = getattr(config, "layer_types", None)
    if layer_types and layer_types[layer] in parameters:
        return parameters[layer_types[layer]], layer_types[layer]
    return parameters, None


def _frequencies(
    config: Any,
    parameters: Mapping[str, Any],
    layer_type: str | None,
    functions: Mapping[str, Callable[..., Any]],
    head_dim: int,
) -> tuple[npt.NDArray[np.float64], float]:
    kind = parameters.get("rope_type")
    known = sorted({"default", *functions})
    if kind not in known:
        raise ConfigError(f"rope_parameters.rope_type = {kind!r}: not known here; known are {', '.join(known)}")
    if kind != "default":
        extra = {} if layer_type is None else {"layer_type": layer_type}
        inverse, scaling = functions[kind](config, None, None, **extra)
        return np.asarray(inverse.double().cpu().numpy(), dtype=np.float64), float(scaling)
    base = parameters.get("rope_theta")
    if not base:
        raise ConfigError("rope_parameters.rope_theta is missing: the model's configuration must say it")
    dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    # fp32, as models compute it: the phase must use the frequency that the keys were really turned by.
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return (np.float32(1) / np.power(np.float32(base), exponent)).astype(np.float64), 1.0


def _valid_tokens(config: Any, parameters: Mapping[str, Any]) -> int | None:
    if parameters.get("rope_type") not in _CHANGES_BEYOND_TRAINING:
        return None
    original = parameters.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    return int(original or config.max_position_embeddings)
