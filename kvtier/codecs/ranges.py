"""NVTX ranges around work on a device, so that a profile (Nsight Systems) shows what kvtier queues and waits for."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

_NOTHING = nullcontext()


def device_range(on_device: bool, what: str, pages: int) -> AbstractContextManager[object]:
    """``kvtier WHAT, N pages`` on the calling thread, while the context lasts. Nothing at all for pools in host
    memory, and where torch has no CUDA."""
    nvtx = _nvtx() if on_device else None
    return _NOTHING if nvtx is None else _Range(nvtx, f"kvtier {what}, {pages} pages")


class _Range:
    def __init__(self, nvtx: Any, name: str) -> None:
        self._nvtx, self._name = nvtx, name

    def __enter__(self) -> None:
        self._nvtx.range_push(self._name)

    def __exit__(self, *_: object) -> None:
        self._nvtx.range_pop()


@cache
def _nvtx() -> Any:
    import torch

    return torch.cuda.nvtx if torch.cuda.is_available() else None
