"""One small adapter per attention family: rows, queries and attention of a transformers model.

family = family_of(model)
cache = family.new_cache()
with torch.no_grad(), family.capture() as captured:
    model(input_ids, use_cache=True, **{cache_argument(model): cache})
outputs = family.attention(0, captured[0], family.read(cache, 0))     # [query_heads, tokens, value_dim]
"""

from __future__ import annotations

from typing import Any

from kvtier.connectors.transformers.attention import dense, latent, sparse
from kvtier.connectors.transformers.attention.dense import DenseFamily
from kvtier.connectors.transformers.attention.family import (
    AttentionGeometry,
    Captured,
    Family,
    FamilyKind,
    LayerQueries,
    LayerRows,
    Snapshot,
    restore,
    snapshot,
    with_positions,
)
from kvtier.connectors.transformers.attention.latent import LatentFamily
from kvtier.connectors.transformers.attention.sparse import SparseFamily
from kvtier.errors import ConfigError

FAMILIES: dict[str, type[Family]] = {
    **dict.fromkeys(dense.ARCHITECTURES, DenseFamily),
    **dict.fromkeys(latent.ARCHITECTURES, LatentFamily),
    **dict.fromkeys(sparse.ARCHITECTURES, SparseFamily),
}
"""Model type -> its family."""


def family_of(model: Any) -> Family:
    """The family of `model` (a PreTrainedModel with a decoder). Raises ConfigError, naming the architecture and the
    supported ones, for a model whose attention is not known."""
    return FAMILIES[check_known(model.config, type(model).__name__)](model)


def check_known(config: Any, what: str = "") -> str:
    """The model type of `config` (a PreTrainedConfig). what: the model's class, for the message. Raises ConfigError as
    `family_of` does, without a model."""
    text = config.get_text_config(decoder=True)
    name = str(getattr(text, "model_type", type(text).__name__))
    if getattr(config, "is_encoder_decoder", False) or name not in FAMILIES:
        raise ConfigError(
            f"model type {name!r} ({what or type(config).__name__}): its attention is not one that compaction knows; "
            f"use one of {', '.join(sorted(FAMILIES))}"
        )
    return name


__all__ = [
    "FAMILIES",
    "AttentionGeometry",
    "Captured",
    "Family",
    "FamilyKind",
    "LatentFamily",
    "LayerQueries",
    "LayerRows",
    "Snapshot",
    "SparseFamily",
    "check_known",
    "family_of",
    "restore",
    "snapshot",
    "with_positions",
]
