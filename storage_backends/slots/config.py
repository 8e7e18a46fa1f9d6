"""Checks of the options that both local tiers take."""

from __future__ import annotations

from kvtier.abc.tier import SLOT_ALIGN
from kvtier.errors import ConfigError

_CAPACITY_MAX = 1 << 60


def check_capacity(tier: str, capacity_bytes: int) -> int:
    """The capacity rounded down to whole slots' granularity; ConfigError where not even one slot fits."""
    if isinstance(capacity_bytes, bool) or not isinstance(capacity_bytes, int):
        raise ConfigError(f"{tier} tier: capacity = {capacity_bytes!r} is no whole number of bytes; give an int")
    if capacity_bytes < SLOT_ALIGN:
        raise ConfigError(
            f"{tier} tier: capacity = {capacity_bytes} bytes is less than one slot; set at least {SLOT_ALIGN} bytes, "
            "or leave the tier out"
        )
    if capacity_bytes > _CAPACITY_MAX:
        raise ConfigError(
            f"{tier} tier: capacity = {capacity_bytes} bytes cannot be addressed; set at most {_CAPACITY_MAX} bytes"
        )
    return capacity_bytes // SLOT_ALIGN * SLOT_ALIGN


def check_max_record(tier: str, max_record_bytes: int | None, limit_bytes: int) -> int:
    """The largest record: `max_record_bytes`, by default the limit; ConfigError where it cannot be kept."""
    if max_record_bytes is None:
        return limit_bytes
    if not 1 <= max_record_bytes <= limit_bytes:
        raise ConfigError(
            f"{tier} tier: max_record_bytes = {max_record_bytes} must be between 1 and {limit_bytes}, the longest "
            "stretch of the tier's space; set it lower, or the capacity (for nvme, segment_bytes) higher"
        )
    return max_record_bytes
