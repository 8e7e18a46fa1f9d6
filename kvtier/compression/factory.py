"""From `kv_cache_compression_config` to the active methods. An unsupported combination is refused here, by option."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvtier.abc.compression import CompressionManager, Platform
from kvtier.compression.cold_page import ColdPage
from kvtier.compression.metrics import EvictionMetrics
from kvtier.compression.pipeline import CompressionPipeline
from kvtier.compression.triattention.calibration import load_calibration
from kvtier.compression.triattention.manager import TriAttention
from kvtier.compression.triattention.rotary import Rotary
from kvtier.config import CompressionConfig, TriAttentionConfig
from kvtier.errors import ConfigError

logger = logging.getLogger(__name__)

RotaryOf = Callable[[int, str], Rotary]
"""(layer, rope style) -> the rotary embedding of the adapter's model."""


def build_compression(
    configs: Sequence[CompressionConfig],
    platform: Platform,
    *,
    rotary: RotaryOf | None = None,
    registry: CollectorRegistry | None = None,
    reduce_max: Callable[..., object] | None = None,
) -> CompressionPipeline:
    """The methods of `configs`, in their order. `rotary` is needed by methods that score keys. Metrics go to
    `registry`. Raises ConfigError for a file that cannot be used, and for what the methods cannot do on
    `platform`."""
    managers: list[CompressionManager] = []
    for config in configs:
        if isinstance(config, TriAttentionConfig):
            managers.append(_triattention(config, rotary, registry, reduce_max))
        else:
            managers.append(ColdPage())
    return CompressionPipeline(managers, platform)


def _triattention(
    config: TriAttentionConfig,
    rotary: RotaryOf | None,
    registry: CollectorRegistry | None,
    reduce_max: Callable[..., object] | None,
) -> TriAttention:
    if rotary is None:
        raise ConfigError(
            "algorithm 'triattention': this adapter cannot tell the model's rotary frequencies; remove it"
        )
    if config.eviction_mode == "union" and not config.normalize_scores:
        logger.warning("option 'normalize_scores' = False has no effect: eviction_mode 'union' always normalises")
    calibration = load_calibration(Path(config.calibration_path).expanduser())
    of_layer: dict[int, Rotary] = {}

    def layer_rotary(layer: int) -> Rotary:
        if layer not in of_layer:
            of_layer[layer] = rotary(layer, calibration.rope_style)
        return of_layer[layer]

    return TriAttention(
        calibration,
        layer_rotary,
        budget=config.budget,
        beta=config.beta,
        eviction_mode=config.eviction_mode,
        normalize_scores=config.normalize_scores,
        metrics=EvictionMetrics([TriAttention.algorithm], registry),
        reduce_max=reduce_max,  # type: ignore[arg-type]  # torch is not imported here
    )
