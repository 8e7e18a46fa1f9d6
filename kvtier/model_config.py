"""What a model's own configuration says about the values in its KV cache, for connectors that describe pages."""

from __future__ import annotations

from typing import Any

from kvtier.spec import GROUP


def rotary_dim_of(config: Any, head_dim: int) -> int:
    """Leading columns of each key that carry a rotary position, where they are a part that can be stored apart: fewer
    than `head_dim`, and a multiple of 16. Else 0. `config`: a text model's PreTrainedConfig, or one like it.

    Models name it as a share (``partial_rotary_factor``, ``rotary_pct``) or as a number (``rotary_dim``)."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # By layer type where layers differ; then no one number describes the page.
    shares = {
        p["partial_rotary_factor"]
        for p in (parameters, *(p for p in parameters.values() if isinstance(p, dict)))
        if p.get("partial_rotary_factor") is not None
    }
    for name in ("partial_rotary_factor", "rotary_pct"):
        if not shares and getattr(config, name, None) is not None:
            shares = {getattr(config, name)}
    if len(shares) > 1:
        return 0
    columns = int(head_dim * float(shares.pop())) if shares else int(getattr(config, "rotary_dim", None) or 0)
    return columns if 0 < columns < head_dim and columns % GROUP == 0 else 0
