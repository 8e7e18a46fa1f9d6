"""Whether the rotary embedding that scores rest on is the one that SGLang's model turns its keys with."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from kvtier.compression.triattention.rotary import Rotary
from kvtier.connectors.sglang.compression_options import FLAG
from kvtier.errors import EngineError

_log = logging.getLogger(__name__)

_POSITIONS = (1, 7, 100, 1000)
"""Low enough for an engine's fp32 phases, and for tables in BF16 within the tolerance."""
_TOLERANCE = 1e-2


def check_rotary(model: Any, rotary: Rotary, layer: int, style: str) -> None:
    """EngineError unless one of the rotary embeddings of `model` pairs the dimensions as `style` and has the
    frequencies of `rotary`, which came from the model's configuration."""
    tables = [m for m in model.modules() if hasattr(m, "cos_sin_cache") and hasattr(m, "is_neox_style")]
    if not tables:
        _log.warning("kvtier: the model has no table of rotary embeddings to compare with its configuration")
        return
    if not any(_agrees(table, rotary, style) for table in tables):
        raise EngineError(
            f"{FLAG}: SGLang's rotary embedding of this model is not that of its configuration in layer {layer} (pairs "
            f"of style {style!r}): scores would be wrong. Start this model without it"
        )


def _agrees(table: Any, rotary: Rotary, style: str) -> bool:
    rotated = int(np.count_nonzero(rotary.omega))
    cached = table.cos_sin_cache
    if bool(table.is_neox_style) != (style == "half") or cached.shape[-1] != 2 * rotated:
        return False
    positions = np.array([p for p in _POSITIONS if p < len(cached)])
    phases = positions[:, None] * rotary.omega[:rotated]
    expected = np.concatenate([np.cos(phases), np.sin(phases)], axis=1) * np.sqrt(np.tile(rotary.gain[:rotated], 2))
    found = cached[torch.from_numpy(positions).to(cached.device)].double().cpu().numpy()
    return bool(np.allclose(found, expected, atol=_TOLERANCE))
