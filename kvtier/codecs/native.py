"""A layout and a pool as the plan of a native call, the calls themselves, and the codec that they make up.

Codecs with native kernels differ only in their layout."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.abc.codec import Codec, EncodeResult
from kvtier.errors import CodecError, ConfigError
from kvtier.hot import HotBuffer, HotPool
from kvtier.kernels import _native
from kvtier.spec import Coding, ColdLayout, DType, PageSpec

_CODES = {DType.BF16: 0, DType.FP16: 1, DType.FP32: 2, DType.UINT8: 3, DType.FP8_E4M3: 4}
_CODINGS = {
    Coding.RAW: 0,
    Coding.NVFP4: 1,
    Coding.TWO_FP4: 2,
    Coding.OFFSET: 3,
    Coding.TOKEN: 4,
    Coding.FP8: 5,
    Coding.FP8_MEAN: 6,
}
_POOL_FIELDS = 5
_CACHED_LAYOUTS = 64


class Pages(NamedTuple):
    """Pages of one pool and their slots in one arena, as every codec call names them."""

    ids: npt.NDArray[np.int64]
    valid_tokens: npt.NDArray[np.int32]
    arena: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]


_Places = tuple[
    npt.NDArray[np.int64], npt.NDArray[np.int32], int, npt.NDArray[np.uint8], npt.NDArray[np.int64], int, int
]


def _places(layout: ColdLayout, pages: Pages) -> _Places:
    """What every native call takes after its plan: the pages, and where in the arena what of them lies."""
    return (
        np.ascontiguousarray(pages.ids, np.int64),
        np.ascontiguousarray(pages.valid_tokens, np.int32),
        layout.spec.page_tokens,
        pages.arena,
        np.ascontiguousarray(pages.offsets, np.int64),
        layout.cold_page_bytes,
        layout.scale_table_offset,
    )


def encode(layout: ColdLayout, pool: HotPool, pages: Pages, seeds: npt.NDArray[np.uint64]) -> EncodeResult:
    """One call for the batch, native, or a launch where the pool's device is. Raises CodecError before anything is
    written."""
    if pool.device != "cpu":
        from kvtier.codecs import device

        return device.encode(layout, pool, pages, seeds)
    plan = plan_of(layout, pool)
    count = len(pages.ids)
    checksums = np.zeros((count, 16), np.uint8)
    refused = np.zeros(count, np.uint8)
    try:
        seeds = np.ascontiguousarray(seeds, np.uint64)
        _native.encode_pages(plan, *_places(layout, pages), seeds, checksums, refused)
    except (ValueError, TypeError) as e:
        raise _error(e, pages.arena) from e
    return EncodeResult(checksums, refused != 0)


def decode(layout: ColdLayout, pool: HotPool, pages: Pages, buffers: range | None) -> None:
    """One call for the batch, native, or a launch where the pool's device is. Raises CodecError before anything is
    written."""
    if pool.device != "cpu":
        from kvtier.codecs import device

        return device.decode(layout, pool, pages, buffers)
    decode_parts(layout, plan_of(layout, pool), pages, parts_of(layout, buffers))


def parts_of(layout: ColdLayout, buffers: range | None) -> range:
    """The parts of `buffers`, or of all. Raises CodecError where the page has no such buffers."""
    wanted = range(len(layout.spec.buffers)) if buffers is None else buffers
    if wanted.step != 1:
        raise CodecError(f"buffers = {wanted}: buffers are decoded in runs, give a range with step 1")
    first = _first_parts(layout)
    if not 0 <= wanted.start <= wanted.stop < len(first):
        raise CodecError(f"buffers = {wanted} of a page with {len(first) - 1}")
    return range(first[wanted.start], first[wanted.stop])


def decode_parts(layout: ColdLayout, plan: npt.NDArray[np.int64], pages: Pages, parts: range) -> None:
    """The native call. Everything is checked first, so that one of no parts is a check and no more."""
    try:
        _native.decode_pages(plan, *_places(layout, pages), parts.start, parts.stop)
    except (ValueError, TypeError) as e:
        raise _error(e, pages.arena) from e


def errors(layout: ColdLayout, pool: HotPool, pages: Pages) -> npt.NDArray[np.float64]:
    """``[pages, buffers, 2]`` of pages just encoded: sums of squared errors and of squares, of compressed parts."""
    if pool.device != "cpu":
        from kvtier.codecs import device

        return device.errors(layout, pool, pages)
    plan = plan_of(layout, pool)
    sums = np.zeros((len(pages.ids), len(layout.parts), 2))
    try:
        _native.page_errors(plan, *_places(layout, pages), sums)
    except (ValueError, TypeError) as e:
        raise _error(e, pages.arena) from e
    return np.add.reduceat(sums, _first_parts(layout)[:-1], axis=1)


class NativeCodec(Codec):
    """A codec that is a layout. max_relative_error: pages whose relative L2 error over their compressed buffers is
    larger are refused; None: none are, and the error is not measured. quality_sample: share of the pages whose error
    the mover shows among its metrics. quality_budget: the relative error from which on it stores a buffer finer."""

    def __init__(
        self,
        max_relative_error: float | None = None,
        quality_sample: float = 0.0,
        quality_budget: float | None = None,
    ) -> None:
        if max_relative_error is not None and not 0 < max_relative_error < 1:
            raise ConfigError(f"max_relative_error = {max_relative_error}: must lie between 0 and 1, such as 0.15")
        if not 0 <= quality_sample <= 1:
            raise ConfigError(f"quality_sample = {quality_sample}: must lie between 0 and 1, such as 0.001")
        if quality_budget is not None and not 0 < quality_budget < 1:
            raise ConfigError(f"quality_budget = {quality_budget}: must lie between 0 and 1, such as 0.12")
        if quality_budget is not None and not quality_sample:
            raise ConfigError(
                f"quality_budget = {quality_budget} needs quality_sample, such as 0.001: nothing is measured without"
            )
        self._max_relative_error = max_relative_error
        self.quality_sample = quality_sample
        self.quality_budget = quality_budget

    def layout(self, spec: PageSpec) -> ColdLayout:
        return self.finer_layout(spec, ())

    @abstractmethod
    def finer_layout(self, spec: PageSpec, levels: tuple[int, ...]) -> ColdLayout: ...

    def encode(
        self,
        layout: ColdLayout,
        pool: HotPool,
        page_ids: npt.NDArray[np.int64],
        valid_tokens: npt.NDArray[np.int32],
        arena: npt.NDArray[np.uint8],
        offsets: npt.NDArray[np.int64],
        seeds: npt.NDArray[np.uint64],
    ) -> EncodeResult:
        pages = Pages(page_ids, valid_tokens, arena, offsets)
        result = encode(layout, pool, pages, seeds)
        if layout.levels:
            _write_levels(layout, pages, seeds, result)
        if self._max_relative_error is None:
            return result
        good = np.flatnonzero(~result.refused)
        sums = errors(layout, pool, Pages(page_ids[good], valid_tokens[good], arena, offsets[good])).sum(axis=1)
        relative = np.full(len(page_ids), np.nan)
        relative[good] = np.sqrt(sums[:, 0] / np.where(sums[:, 1] > 0, sums[:, 1], 1))
        # Pages refused before have no error, and compare as False.
        return EncodeResult(result.checksums, result.refused | (relative > self._max_relative_error), relative)

    def decode(
        self,
        layout: ColdLayout,
        pool: HotPool,
        page_ids: npt.NDArray[np.int64],
        valid_tokens: npt.NDArray[np.int32],
        arena: npt.NDArray[np.uint8],
        offsets: npt.NDArray[np.int64],
        buffers: range | None = None,
    ) -> None:
        decode(layout, pool, Pages(page_ids, valid_tokens, arena, offsets), buffers)

    def errors(
        self,
        layout: ColdLayout,
        pool: HotPool,
        page_ids: npt.NDArray[np.int64],
        valid_tokens: npt.NDArray[np.int32],
        arena: npt.NDArray[np.uint8],
        offsets: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.float64]:
        return errors(layout, pool, Pages(page_ids, valid_tokens, arena, offsets))


def _write_levels(layout: ColdLayout, pages: Pages, seeds: npt.NDArray[np.uint64], result: EncodeResult) -> None:
    """End each page with its levels, which the checksum has to cover too."""
    levels = np.array(layout.levels, np.uint8)
    for offset in pages.offsets[~result.refused]:
        at = offset + layout.levels_offset
        pages.arena[at : at + levels.size] = levels
    offsets = np.ascontiguousarray(pages.offsets, np.int64)
    _native.checksum_pages(
        pages.arena, offsets, layout.cold_page_bytes, np.ascontiguousarray(seeds, np.uint64), result.checksums
    )


def _float_bits(x: float) -> int:
    return int(np.float32(x).view(np.uint32))


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
    buffers: list[int]
    """Of each part."""
    columns: npt.NDArray[np.int64]
    """Bytes from a row's start to the part."""
    first_parts: list[int]
    """Index of each buffer's first part, and the number of parts."""


# By identity: hashing a layout costs more than building its plan. An entry keeps its layout, so an id is never reused.
_plans: dict[int, _LayoutPlan] = {}


def plan_of(layout: ColdLayout, pool: HotPool) -> npt.NDArray[np.int64]:
    """int64 ``[parts, PLAN_FIELDS]`` (`kernels/csrc/pages.h`), read-only, kept with the pool. Raises CodecError where
    these two do not go together."""
    made: tuple[ColdLayout, tuple[HotBuffer, ...], npt.NDArray[np.int64]] | None = pool.plans.get(id(layout))
    if made is not None and made[0] is layout and made[1] is pool.buffers:
        return made[2]
    if pool.spec is not layout.spec and pool.spec != layout.spec:
        raise CodecError("the pool and the layout describe different pages; build both from the same PageSpec")
    known = _layout_plan(layout)
    hot = [(b.address, b.page_stride, b.head_stride, b.token_stride, b.num_tokens) for b in pool.buffers]
    plan = np.empty((len(layout.parts), _native.PLAN_FIELDS), np.int64)
    plan[:, :_POOL_FIELDS] = hot if len(hot) == len(known.buffers) else [hot[i] for i in known.buffers]
    plan[:, 0] += known.columns
    plan[:, _POOL_FIELDS:] = known.fields
    plan.flags.writeable = False
    if len(pool.plans) >= _CACHED_LAYOUTS:
        pool.plans.clear()
    pool.plans[id(layout)] = layout, pool.buffers, plan
    return plan


def _first_parts(layout: ColdLayout) -> list[int]:
    return _layout_plan(layout).first_parts


def _layout_plan(layout: ColdLayout) -> _LayoutPlan:
    known = _plans.get(id(layout))
    if known is not None:
        return known
    rows, columns = [], []
    first: list[int] = []
    for n, part in enumerate(layout.parts):
        b = layout.spec.buffers[part.buffer]
        if part.buffer == len(first):
            first.append(n)
        columns.append(part.column * b.dtype.itemsize)
        global_scale = layout.global_scales[n] if layout.global_scales else 0.0
        rows.append(
            (b.heads, b.tokens, part.columns, _CODES[b.dtype], _CODINGS[part.coding],
             part.data_offset, part.scale_offset, part.side_offset, _float_bits(b.fp8_scale), _float_bits(global_scale))
        )  # fmt: skip
    done = _LayoutPlan(
        layout,
        np.array(rows, np.int64),
        [part.buffer for part in layout.parts],
        np.array(columns, np.int64),
        [*first, len(layout.parts)],
    )
    if len(_plans) >= _CACHED_LAYOUTS:
        _plans.clear()
    _plans[id(layout)] = done
    return done
