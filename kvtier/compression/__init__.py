"""Methods that act on a live KV cache: their order, their factory, their metrics. The contract is
kvtier.abc.compression."""

from __future__ import annotations

from kvtier.compression.factory import build_compression
from kvtier.compression.metrics import EvictionMetrics
from kvtier.compression.pipeline import CompressionPipeline
from kvtier.compression.rounds import RoundSchedule

__all__ = ["CompressionPipeline", "EvictionMetrics", "RoundSchedule", "build_compression"]
