"""TriAttention: eviction of generated tokens between decode steps, from query statistics collected once per model."""

from __future__ import annotations

from kvtier.compression.triattention.calibration import Calibration, load_calibration
from kvtier.compression.triattention.manager import TriAttention
from kvtier.compression.triattention.rotary import Rotary, rotary_of

__all__ = ["Calibration", "Rotary", "TriAttention", "load_calibration", "rotary_of"]
