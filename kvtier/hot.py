"""Where hot pages lie: addresses and strides of an engine's KV buffers, so that kernels can read them in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from kvtier.errors import SpecError
from kvtier.spec import BufferSpec, DType, PageSpec


class HotLayout(str, Enum):
    """Order of a buffer's axes. Always named by the caller, never inferred from a shape.

    NHD: ``[slots, heads, dim]``, page p holds slots ``[p * page_tokens, (p + 1) * page_tokens)``.
    HND: ``[pages, heads, page_tokens, dim]``.
    SEQ: ``[heads, tokens, dim]``, one sequence; page p holds its tokens ``[p * page_tokens, ...)``; the last page
    may be partial.

    Buffers with one row per page (state, index keys) are ``[pages, heads, dim]`` in every layout.
    """

    NHD = "nhd"
    HND = "hnd"
    SEQ = "seq"


@dataclass(frozen=True, slots=True)
class HotBuffer:
    """One buffer of all pages: element ``(page, head, token, d)`` is at
    ``address + page * page_stride + head * head_stride + token * token_stride + d * itemsize``, strides in bytes.
    `num_tokens` bounds it: token ``page * page_tokens + token`` exists if it is smaller. `owner` keeps it alive."""

    address: int
    page_stride: int
    head_stride: int
    token_stride: int
    num_tokens: int
    owner: Any


@dataclass(frozen=True, slots=True)
class HotPool:
    """The hot buffers of every page, in the order of `spec.buffers`. device: where they lie, as torch names it; only
    "cpu" has memory that this process may read. owner: what keeps the memory alive where the buffers do not. plans:
    what codecs make of these buffers for their calls, by the identity of a layout."""

    spec: PageSpec
    buffers: tuple[HotBuffer, ...]
    device: str = "cpu"
    owner: Any = field(default=None, repr=False, compare=False)
    plans: dict[int, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_pages(self) -> int:
        return min(-(-b.num_tokens // self.spec.page_tokens) for b in self.buffers)

    @staticmethod
    def of(spec: PageSpec, arrays: Sequence[Any], layout: HotLayout) -> HotPool:
        """Describe `arrays` (torch tensors of the CPU or of one CUDA device, or numpy arrays, one per buffer of `spec`,
        in its order).

        BF16 and FP8 live in numpy as uint16 and uint8. Nothing is copied; the pool keeps the arrays alive.
        """
        if len(arrays) != len(spec.buffers):
            raise SpecError(f"{len(arrays)} arrays for a page of {len(spec.buffers)} buffers")
        devices = sorted({str(getattr(a, "device", "cpu")) for a in arrays})
        if len(devices) > 1:
            raise SpecError(f"hot buffers on {' and '.join(devices)}: all must be on one device")
        buffers = tuple(_describe(spec, b, a, layout) for b, a in zip(spec.buffers, arrays, strict=True))
        return HotPool(spec, buffers, devices[0])


_AXES = {
    HotLayout.NHD: ("token", "head", "dim"),
    HotLayout.HND: ("page", "head", "token", "dim"),
    HotLayout.SEQ: ("head", "token", "dim"),
}


def _describe(spec: PageSpec, buffer: BufferSpec, array: Any, layout: HotLayout) -> HotBuffer:
    address, shape, strides, itemsize = _memory(array)
    per_page = buffer.tokens != spec.page_tokens
    if per_page and buffer.tokens != 1:
        raise SpecError(
            f"{buffer.role.value} buffer of layer {buffer.layer} has {buffer.tokens} tokens in a page of "
            f"{spec.page_tokens}: a buffer has one row per token or one per page"
        )
    axes = ("page", "head", "dim") if per_page else _AXES[layout]
    if len(shape) != len(axes):
        raise SpecError(f"layout {layout.value} has axes {axes}, got an array of shape {shape}")
    size = dict(zip(axes, shape, strict=True))
    step = dict(zip(axes, strides, strict=True))
    if (size["head"], size["dim"], itemsize) != (buffer.heads, buffer.dim, buffer.dtype.itemsize):
        raise SpecError(
            f"{buffer.role.value} buffer of layer {buffer.layer} is {buffer.heads} heads x {buffer.dim} of "
            f"{buffer.dtype.value}, got shape {shape} with {itemsize}-byte elements in layout {layout.value}"
        )
    if step["dim"] != itemsize and buffer.dim > 1:
        raise SpecError(f"the last axis must be contiguous, its stride is {step['dim']} bytes")
    if per_page:
        return HotBuffer(address, step["page"], step["head"], 0, size["page"] * spec.page_tokens, array)
    if layout is HotLayout.HND:
        if size["token"] != spec.page_tokens:
            raise SpecError(f"pages of {size['token']} tokens in a pool for pages of {spec.page_tokens}")
        page_stride, num_tokens = step["page"], size["page"] * spec.page_tokens
    else:
        page_stride, num_tokens = step["token"] * spec.page_tokens, size["token"]
    return HotBuffer(address, page_stride, step["head"], step["token"], num_tokens, array)


def _memory(array: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
    """Address, shape, strides in bytes and element size of a numpy array or a torch tensor."""
    if isinstance(array, np.ndarray):
        return int(array.ctypes.data), array.shape, array.strides, array.itemsize
    device = getattr(getattr(array, "device", None), "type", None)
    if device not in ("cpu", "cuda"):
        where = f" on {device}" if device else ""
        raise SpecError(
            f"hot buffers must be numpy arrays or torch tensors on cpu or cuda, got {type(array).__name__}{where}"
        )
    itemsize = array.element_size()
    return array.data_ptr(), tuple(array.shape), tuple(s * itemsize for s in array.stride()), itemsize


def dtype_of(array: Any) -> DType:
    """The DType of a torch tensor, by the name torch gives it."""
    name = str(array.dtype).removeprefix("torch.")
    known = {
        "bfloat16": DType.BF16,
        "float16": DType.FP16,
        "float32": DType.FP32,
        "float8_e4m3fn": DType.FP8_E4M3,
        "uint8": DType.UINT8,
    }
    if name not in known:
        raise SpecError(f"KV dtype {name!r} is not supported; supported: {', '.join(sorted(known))}")
    return known[name]
