"""What all descriptions of a device pool have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtier.errors import EngineError
from kvtier.hot import HotLayout
from kvtier.spec import BufferSpec, Role

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Told:
    """What a model's configuration and checkpoint say about the numbers in its pools.

    rotary_dim: leading columns of K with a rotary position, where they are a part of it. fp8_scales: of an FP8 cache,
    by role and the model's layer, where they are not 1."""

    rotary_dim: int = 0
    fp8_scales: Mapping[Role, Mapping[int, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rows:
    """Buffers of a pool, by its own layers, and where they lie. replicated: every tensor-parallel rank has the same."""

    buffers: tuple[BufferSpec, ...]
    arrays: tuple[Any, ...]
    layout: HotLayout = HotLayout.NHD
    replicated: bool = False


def check_device(array: Any, what: str) -> None:
    """EngineError where no codec can reach `array`."""
    device = array.device.type
    if device not in DEVICES:
        raise EngineError(
            f"the {what} lies on {device!r}: kvtier serves pools in CPU memory and on CUDA devices. "
            "Start without --kv-connector"
        )


def check_page(pool: Any, page_tokens: int, what: str) -> None:
    if pool.page_size != page_tokens:
        raise EngineError(f"the {what} has pages of {pool.page_size} tokens and the cache of {page_tokens}")
