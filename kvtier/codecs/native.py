"""A layout and a pool as the plan of a native call, and the calls themselves. Both codecs differ only in the layout."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.abc.codec import EncodeResult
from kvtier.errors import CodecError
from kvtier.hot import HotPool
from kvtier.kernels import _native
from kvtier.spec import ColdLayout, DType

_CODES = {DType.BF16: 0, DType.FP16: 1, DType.FP32: 2, DType.FP8_E4M3: 3, DType.UINT8: 3}
_POOL_FIELDS = 5
_CACHED_LAYOUTS = 64


class Pages(NamedTuple):
    """Pages of one pool and their slots in one arena, as every codec call names them."""

    ids: npt.NDArray[np.int64]
    valid_tokens: npt.NDArray[np.int32]
    arena: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]


def encode(layout: ColdLayout, pool: HotPool, pages: Pages, seeds: npt.NDArray[np.uint64]) -> EncodeResult:
    """One native call for the batch. Raises CodecError before anything is written."""
    plan = _plan(layout, pool)
    count = len(pages.ids)
    checksums = np.zeros((count, 16), np.uint8)
    refused = np.zeros(count, np.uint8)
    try:
        _native.encode_pages(
            plan,
            np.ascontiguousarray(pages.ids, np.int64),
            np.ascontiguousarray(pages.valid_tokens, np.int32),
            layout.spec.page_tokens,
            pages.arena,
            np.ascontiguousarray(pages.offsets, np.int64),
            layout.cold_page_bytes,
            layout.scale_table_offset,
            np.ascontiguousarray(seeds, np.uint64),
            checksums,
            refused,
        )
    except (ValueError, TypeError) as e:
        raise _error(e, pages.arena) from e
    return EncodeResult(checksums, refused != 0)


def decode(layout: ColdLayout, pool: HotPool, pages: Pages, buffers: range | None) -> None:
    """One native call for the batch. Raises CodecError before anything is written."""
    plan = _plan(layout, pool)
    wanted = range(len(layout.buffers)) if buffers is None else buffers
    if wanted.step != 1:
        raise CodecError(f"buffers = {wanted}: buffers are decoded in runs, give a range with step 1")
    try:
        _native.decode_pages(
            plan,
            np.ascontiguousarray(pages.ids, np.int64),
            np.ascontiguousarray(pages.valid_tokens, np.int32),
            layout.spec.page_tokens,
            pages.arena,
            np.ascontiguousarray(pages.offsets, np.int64),
            layout.cold_page_bytes,
            layout.scale_table_offset,
            wanted.start,
            wanted.stop,
        )
    except (ValueError, TypeError) as e:
        raise _error(e, pages.arena) from e


def _error(e: Exception, arena: npt.NDArray[np.uint8]) -> CodecError:
    if isinstance(e, TypeError):
        return CodecError(
            f"the arena must be a contiguous, writable numpy array of bytes, got {type(arena).__name__} "
            f"{getattr(arena, 'dtype', '')} {getattr(arena, 'shape', '')}"
        )
    return CodecError(str(e))


class _LayoutPlan(NamedTuple):
    layout: ColdLayout
    fields: npt.NDArray[np.int64]


# By identity: hashing a layout costs more than building its plan. An entry keeps its layout, so an id is never reused.
_plans: dict[int, _LayoutPlan] = {}


def _plan(layout: ColdLayout, pool: HotPool) -> npt.NDArray[np.int64]:
    if pool.spec is not layout.spec and pool.spec != layout.spec:
        raise CodecError("the pool and the layout describe different pages; build both from the same PageSpec")
    plan = np.empty((len(layout.buffers), _native.PLAN_FIELDS), np.int64)
    plan[:, :_POOL_FIELDS] = [
        (b.address, b.page_stride, b.head_stride, b.token_stride, b.num_tokens) for b in pool.buffers
    ]
    plan[:, _POOL_FIELDS:] = _layout_fields(layout)
    return plan


def _layout_fields(layout: ColdLayout) -> npt.NDArray[np.int64]:
    known = _plans.get(id(layout))
    if known is not None:
        return known.fields
    rows = []
    for spec, at in zip(layout.spec.buffers, layout.buffers, strict=True):
        if at.compressed and spec.dtype is DType.FP8_E4M3:
            raise CodecError(
                f"{spec.role.value} buffer of layer {spec.layer}: dtype {spec.dtype.value} cannot be quantized yet; "
                "use the codec 'raw'"
            )
        code = _CODES[spec.dtype]
        rows.append((spec.heads, spec.tokens, spec.dim, code, int(at.compressed), at.data_offset, at.scale_offset))
    fields = np.array(rows, np.int64)
    if len(_plans) >= _CACHED_LAYOUTS:
        _plans.clear()
    _plans[id(layout)] = _LayoutPlan(layout, fields)
    return fields
