"""What an LMCache chunk is made of: where the KV of each layer lies in one flat buffer, and which of it is attention.

LMCache tells shapes and dtypes, one of each per kernel group, and not what they mean. So the configuration names the
layout of attention, and only what fits it is quantized; everything else is copied byte for byte. Layouts: LMCache
0.5.6, `lmcache/v1/distributed/api.py:MemoryLayoutDesc`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.hot import HotBuffer, HotPool
from kvtier.spec import BufferSpec, DType, PageSpec, Role

_DTYPES = {
    "torch.bfloat16": DType.BF16,
    "torch.float16": DType.FP16,
    "torch.float32": DType.FP32,
    "torch.float8_e4m3fn": DType.FP8_E4M3,
}


class Attention(str, Enum):
    """How an engine lays out attention in a chunk of T tokens and L layers.

    vllm: ``(2, L, T, H)``, K and V. sglang: ``(1, 2L, T, H)``, the K of every layer, then the V. mla: ``(1, L, T, D)``
    or ``(L, T, D)``, a latent row per token. none: nothing is taken for attention.
    """

    VLLM = "vllm"
    SGLANG = "sglang"
    MLA = "mla"
    NONE = "none"


_SPAN_BYTES = 1 << 36
_MOST_BYTES = 1 << 44
"""More than there is memory behind the start of a pool."""
Shape = tuple[tuple[int, ...], str]
"""One kernel group: its shape and the name torch gives its dtype."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkLayout:
    """spec: a chunk as a page. offsets: of each buffer of `spec` in the chunk, in bytes. nbytes: of the chunk. known:
    whether LMCache told its shapes; otherwise it is so many bytes. whole: of a chunk of fewer tokens, the layout of
    whole ones, whose keys and pages it shares. Compared by identity: `layout_of` gives one for equal shapes."""

    spec: PageSpec
    offsets: tuple[int, ...]
    nbytes: int
    known: bool = True
    whole: ChunkLayout | None = None

    def pool(self, chunks: Sequence[Chunk]) -> tuple[HotPool, npt.NDArray[np.int64]]:
        """A pool in which each of `chunks` is one page, and the numbers of their pages. Page p lies p bytes behind the
        pool's start: chunks are anywhere in memory. A partial one is alone in its pool, which ends with its tokens."""
        owner = [chunk.owner for chunk in chunks]
        if self.whole is not None:
            (partial,) = chunks
            start, pool = partial.address, HotPool(self.spec, _buffers(self, partial.address, partial.tokens or 0))
        else:
            lowest = min(chunk.address for chunk in chunks)
            start = (lowest - 1) // _SPAN_BYTES * _SPAN_BYTES + 1  # no buffer has the address 0
            pool = _whole_pool(self, start)
        ids = np.array([chunk.address - start for chunk in chunks], dtype=np.int64)
        return replace(pool, owner=owner), ids


def _buffers(layout: ChunkLayout, start: int, tokens: int) -> tuple[HotBuffer, ...]:
    return tuple(
        HotBuffer(start + offset, 1, 0, b.dim * b.dtype.itemsize, tokens, None)
        for b, offset in zip(layout.spec.buffers, layout.offsets, strict=True)
    )


@lru_cache(maxsize=256)
def _whole_pool(layout: ChunkLayout, start: int) -> HotPool:
    """Of whole chunks anywhere behind `start`: there are few starts, and a chunk has many buffers."""
    return HotPool(layout.spec, _buffers(layout, start, _MOST_BYTES * layout.spec.page_tokens))


class Chunk(NamedTuple):
    """A chunk in memory: its layout, its address, and what keeps the memory alive. tokens: of a partial one."""

    layout: ChunkLayout
    address: int
    owner: Any
    tokens: int | None = None


def shapes_of(shapes: Sequence[Any] | None, dtypes: Sequence[Any] | None) -> tuple[Shape, ...]:
    """What LMCache says of an object, or of objects to come, in a form that can be compared. Empty where it says
    nothing, as under ``lmcache bench l2``."""
    if not shapes or not dtypes or len(shapes) != len(dtypes):
        return ()
    return tuple((tuple(int(n) for n in s), str(d)) for s, d in zip(shapes, dtypes, strict=True))


@lru_cache(maxsize=256)
def plain_layout(nbytes: int) -> ChunkLayout:
    """So many bytes."""
    return ChunkLayout(PageSpec(1, (BufferSpec(Role.OPAQUE, 0, 1, 1, nbytes, DType.UINT8),)), (0,), nbytes, known=False)


@lru_cache(maxsize=256)
def layout_of(
    groups: tuple[Shape, ...], attention: Attention, rope_dim: int, itemsizes: tuple[int, ...]
) -> ChunkLayout:
    """The layout of a chunk of these kernel groups, in the order in which they lie in it. `itemsizes`: bytes per
    element of each group. rope_dim: columns at the end of an MLA row that carry a rotary position."""
    tokens = {t for shape, dtype in groups if (t := _tokens(shape, dtype, attention))}
    page_tokens = tokens.pop() if len(tokens) == 1 else 0
    buffers: list[BufferSpec] = []
    offsets: list[int] = []
    at = 0
    for (shape, dtype), itemsize in zip(groups, itemsizes, strict=True):
        nbytes = math.prod(shape) * itemsize
        first = buffers[-1].layer + 1 if buffers else 0
        if _tokens(shape, dtype, attention) == page_tokens > 0:
            for buffer, offset in _attention(shape, _DTYPES[dtype], attention, first, rope_dim):
                buffers.append(buffer)
                offsets.append(at + offset)
        elif nbytes:
            buffers.append(BufferSpec(Role.OPAQUE, first, 1, 1, nbytes, DType.UINT8))
            offsets.append(at)
        at += nbytes
    if not buffers:
        return plain_layout(max(at, 1))
    return ChunkLayout(PageSpec(page_tokens or 1, tuple(buffers)), tuple(offsets), at)


def object_layout(described: Any, attention: Attention, rope_dim: int) -> ChunkLayout:
    """By the shapes and dtypes that LMCache tells of an object, or of objects to come, if it does."""
    shapes, dtypes = getattr(described, "shapes", None), getattr(described, "dtypes", None)
    if not shapes or not dtypes:
        return plain_layout(1)
    return _described_layout(tuple(map(tuple, shapes)), tuple(dtypes), attention, rope_dim)


@lru_cache(maxsize=256)
def _described_layout(
    shapes: tuple[tuple[int, ...], ...], dtypes: tuple[Any, ...], attention: Attention, rope_dim: int
) -> ChunkLayout:
    """Asked for with every chunk."""
    groups = shapes_of(shapes, dtypes)
    if not groups:
        return plain_layout(1)
    return layout_of(groups, attention, rope_dim, tuple(int(dtype.itemsize) for dtype in dtypes))


def object_chunk(item: Any, attention: Attention, rope_dim: int) -> Chunk | None:
    """The memory of one of LMCache's objects; None where it was freed meanwhile, holds nothing, or is not what it
    says."""
    return object_chunks([item], attention, rope_dim)[0]


def object_chunks(items: Sequence[Any], attention: Attention, rope_dim: int) -> list[Chunk | None]:
    """As `object_chunk`, of each: a layout is looked for only where it is not that of the object before."""
    chunks: list[Chunk | None] = []
    shapes = dtypes = layout = None
    for item in items:
        nbytes = item.get_size() if item.is_valid() else 0
        memory = item.raw_tensor if nbytes else None
        if memory is None or not memory.is_cpu or not memory.is_contiguous():
            chunks.append(None)
            continue
        meta = item.meta
        if layout is None or meta.shapes != shapes or meta.dtypes != dtypes:
            shapes, dtypes, layout = meta.shapes, meta.dtypes, object_layout(meta, attention, rope_dim)
        whole = layout if layout.known else plain_layout(nbytes)
        chunks.append(Chunk(whole, memory.data_ptr(), memory) if whole.nbytes == nbytes else None)
    return chunks


@lru_cache(maxsize=1024)
def partial_layout(whole: ChunkLayout, part: ChunkLayout) -> ChunkLayout | None:
    """Where `part`, a chunk of fewer tokens, has what a page of `whole` has; None where the two are not alike."""
    if part is whole:
        return whole
    tokens, fewer = whole.spec.page_tokens, part.spec.page_tokens
    alike = tuple(replace(b, tokens=tokens) if b.tokens == fewer else b for b in part.spec.buffers)
    if fewer > tokens or alike != whole.spec.buffers:
        return None
    return ChunkLayout(whole.spec, part.offsets, part.nbytes, whole=whole)


def _tokens(shape: tuple[int, ...], dtype: str, attention: Attention) -> int:
    """Tokens of a group that is attention, 0 of one that is not."""
    if dtype not in _DTYPES or len(shape) < 3 or shape[-1] % 16 or 0 in shape:
        return 0
    fits = {
        Attention.VLLM: len(shape) == 4 and shape[0] == 2,
        Attention.SGLANG: len(shape) == 4 and shape[0] == 1 and shape[1] % 2 == 0,
        Attention.MLA: len(shape) == 3 or (len(shape) == 4 and shape[0] == 1),
        Attention.NONE: False,
    }
    return shape[-2] if fits[attention] else 0


def _attention(
    shape: tuple[int, ...], dtype: DType, attention: Attention, first: int, rope_dim: int
) -> list[tuple[BufferSpec, int]]:
    """Buffers of one attention group and their offsets in it, by layer, K before V."""
    tokens, dim = shape[-2:]
    plane = tokens * dim * dtype.itemsize
    if attention is Attention.MLA:
        rotary = (dim - rope_dim, dim) if 0 < rope_dim < dim and rope_dim % 16 == 0 else (0, 0)
        return [
            (BufferSpec(Role.LATENT, first + n, 1, tokens, dim, dtype, rotary=rotary), n * plane)
            for n in range(shape[-3])
        ]
    layers = shape[1] if attention is Attention.VLLM else shape[1] // 2
    return [
        (BufferSpec(role, first + n, 1, tokens, dim, dtype), (n + part * layers) * plane)
        for n in range(layers)
        for part, role in enumerate((Role.K, Role.V))
    ]


SAMPLE = layout_of((((2, 1, 16, 64), "torch.bfloat16"),), Attention.VLLM, 0, (2,))
"""Some attention, by which it is seen before the first chunk whether the configuration has a codec for any."""
