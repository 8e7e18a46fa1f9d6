"""Whole pages between hot buffers and cold slots with Triton: plans, and launches that only enqueue.

The plan is the one of the native kernels (`kernels/csrc/pages.h`), a row of int64 per part, made longer by `prepare`
with what a program would otherwise work out again and again. Hot addresses are those of the device; cold slots lie in
memory that the device can write, which on a GPU is pinned and mapped. Nothing here checks page ids or offsets: the
native kernels' own check does that for both (`kvtier/codecs/device.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvtier.kernels.nvfp4 import triton_pages

I64 = npt.NDArray[np.int64]

NATIVE_FIELDS = 15
FIELDS = int(triton_pages.FIELDS.value)
SLOT_ALIGN = 16
"""What the address of every slot must be a multiple of."""

UNWRITTEN, DONE, NON_FINITE, OUT_OF_RANGE = range(4)
"""What a program leaves behind; UNWRITTEN is what the launch starts from."""

_ITEM_BYTES = {0: 2, 1: 2, 2: 4, 3: 1, 4: 1}
_RAW, _NVFP4, _TWO_FP4, _OFFSET, _TOKEN, _FP8, _FP8_MEAN = range(7)
_WITH_K = (_NVFP4, _TWO_FP4, _OFFSET, _TOKEN)
_WIDEST_MEAN = 512
"""Columns of `fp8_mean` whose tile a program can hold in registers."""
_LARGEST = 2**31 - 1
_BUSY_PROGRAMS = 2048
"""Programs that keep a large GPU busy: smaller batches are split further."""
_MOST_SPLITS = 8


class Native(NamedTuple):
    """Fields of a row of the native plan, in order."""

    address: int
    page_stride: int
    head_stride: int
    token_stride: int
    num_tokens: int
    heads: int
    tokens: int
    dim: int
    dtype: int
    coding: int
    data_offset: int
    scale_offset: int
    side_offset: int
    fp8_scale_bits: int
    global_scale_bits: int

    @property
    def table_bytes(self) -> int:
        """Of its global scale, where the page has a table: a signed byte k, or a float of its checkpoint."""
        return 0 if self.coding not in _WITH_K else 4 if self.global_scale_bits else 1

    @property
    def values(self) -> int:
        return self.heads * self.tokens * self.dim

    def cold_bytes(self) -> tuple[int, int, int]:
        """Bytes of values, scales, and what lies beside them."""
        n, mean = self.values, self.heads * self.dim * 2
        return {
            _RAW: (n * _ITEM_BYTES[self.dtype], 0, 0),
            _NVFP4: (n // 2, n // 16, 0),
            _TWO_FP4: (n, n // 8, 0),
            _OFFSET: (n // 2, n // 16, mean),
            _TOKEN: (n // 2, n // 16, mean * (self.tokens // 16)),
            _FP8: (n, 0, 0),
            _FP8_MEAN: (n, 0, mean + -(-self.heads * self.tokens // 8)),
        }[self.coding]


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """rows: int64 ``[parts, FIELDS]``, to be copied to the device. The rest is what a kernel is compiled for: `kinds`,
    16 times the coding plus the type (or, for raw parts, the bytes of a unit); `even`, whether no two heads of
    `fp8_mean` share a byte of flags; `columns` of its tiles; what hot rows (bytes) and cold parts are aligned to."""

    rows: I64
    page_tokens: int
    cold_bytes: int
    kinds: tuple[int, ...]
    even: bool
    columns: int
    hot_align: int
    cold_align: int

    @property
    def parts(self) -> int:
        return len(self.rows)

    def constants(self) -> dict[str, Any]:
        return {
            "KINDS": self.kinds,
            "EVEN": self.even,
            "COLUMNS": self.columns,
            "HOT_ALIGN": self.hot_align,
            "COLD_ALIGN": self.cold_align,
        }

    def options(self) -> dict[str, Any]:
        return options_for(self.columns)


def prepare(plan: I64, page_tokens: int, cold_bytes: int, table_offset: int) -> DevicePlan:
    """From a native plan ``[parts, 15]``; `table_offset`: of the global scales, -1 where there are none.

    Raises ValueError for parts that 32-bit indices do not reach."""
    rows = np.zeros((len(plan), FIELDS), np.int64)
    rows[:, :NATIVE_FIELDS] = plan
    parts = [Native(*map(int, row)) for row in plan]
    kinds: dict[int, int] = {}
    table_at = table_offset
    for n, part in enumerate(parts):
        if part.values * _ITEM_BYTES[part.dtype] > _LARGEST:
            raise ValueError(f"part {n} has {part.values} values: more than a page's part can have on a device")
        kind = 16 * part.coding + part.dtype
        if part.coding == _RAW:
            unit = _unit(part)
            rows[n, 7] = part.dim * _ITEM_BYTES[part.dtype] // unit
            kind = 16 * _RAW + unit
        tabled = table_offset >= 0 and part.table_bytes > 0
        rows[n, 15:17] = kinds.setdefault(kind, len(kinds)), table_at if tabled else -1
        table_at += part.table_bytes
        rows[n, 21] = part.tokens == page_tokens
    for n, (begin, end) in enumerate(paddings(parts, cold_bytes, table_offset)):
        at = 17 + 2 * (n // len(parts))
        rows[n % len(parts), at : at + 2] = begin, end - begin
    centred = [part for part in parts if part.coding == _FP8_MEAN]
    widest = max((part.dim for part in centred), default=16)
    if widest > _WIDEST_MEAN:
        raise ValueError(
            f"keys of {widest} columns: on a device k8v4 takes at most {_WIDEST_MEAN}; use another precision"
        )
    columns = 1 << (widest - 1).bit_length()
    compressed = [part for part in parts if part.coding != _RAW]
    strides = (n for p in compressed for n in (p.address, p.page_stride, p.head_stride, p.token_stride))
    return DevicePlan(
        rows,
        page_tokens,
        cold_bytes,
        tuple(kinds),
        all(part.tokens % 8 == 0 for part in centred),
        columns,
        math.gcd(SLOT_ALIGN, *strides),
        math.gcd(SLOT_ALIGN, *(part.data_offset for part in compressed)),
    )


def _unit(part: Native) -> int:
    """The most bytes, up to 8, that a raw part can be copied by at a time."""
    row_bytes = part.dim * _ITEM_BYTES[part.dtype]
    return math.gcd(
        8, part.address, part.page_stride, part.head_stride, part.token_stride, part.data_offset, row_bytes
    )  # fmt: skip


def paddings(parts: list[Native], cold_bytes: int, table_offset: int) -> list[tuple[int, int]]:
    """Bytes ``[begin, end)`` of a cold page that belong to no part, in pieces of at most 16."""
    used = []
    for part in parts:
        offsets = (part.data_offset, part.scale_offset, part.side_offset)
        used += [(at, at + size) for at, size in zip(offsets, part.cold_bytes(), strict=True) if size]
    if table_offset >= 0:
        used.append((table_offset, table_offset + sum(part.table_bytes for part in parts)))
    gaps, at = [], 0
    for begin, end in [*sorted(used), (cold_bytes, cold_bytes)]:
        gaps += [(piece, min(piece + 16, begin)) for piece in range(at, begin, 16)]
        at = end
    if len(gaps) > 2 * len(parts):
        raise ValueError(f"{len(gaps)} gaps in a cold page of {len(parts)} parts: it is not laid out as a page is")
    return gaps


def options_for(columns: int) -> dict[str, Any]:
    """How the kernels are compiled. A fused multiply-add would change bytes. More threads hold longer rows of
    `fp8_mean`. Registers are stated because the assembler would rather spill some than run fewer programs at once."""
    warps = 4 if columns <= 64 else 8 if columns == 128 else 16
    return {"enable_fp_fusion": False, "num_warps": warps, "maxnreg": 168 if warps == 4 else 128}


def splits_for(pages: int, parts: int) -> int:
    """Programs that share a part: few pages are spread over the device, many are not."""
    return max(1, min(_MOST_SPLITS, _BUSY_PROGRAMS // max(1, pages * parts)))


def grid_of(pages: int, parts: int) -> int:
    programs = pages * parts * splits_for(pages, parts)
    if programs > _LARGEST:
        raise ValueError(
            f"{pages} pages of {parts} parts are more programs than a launch has; give fewer pages at once"
        )
    return programs


def enqueue_encode(
    plan: DevicePlan, rows: torch.Tensor, pages: torch.Tensor, arena_address: int, status: torch.Tensor
) -> None:
    """Queue one launch on the current stream. rows: of the plan, pages: int64 ``[n, 3]`` (page, valid tokens, offset in
    the arena), status: uint8 ``[n, parts, splits_for(n, parts)]``, all where the device reads and writes them; `status`
    zeroed. A page is good if all its bytes of status are DONE once the launch has completed."""
    count = len(pages)
    if count:
        triton_pages.encode_kernel[(grid_of(count, plan.parts),)](
            rows, pages, status, arena_address, 0, plan.parts, splits_for(count, plan.parts),
            **plan.constants(), **plan.options(),
        )  # fmt: skip


def enqueue_decode(
    plan: DevicePlan, rows: torch.Tensor, pages: torch.Tensor, arena_address: int, part_begin: int, part_end: int
) -> None:
    """As `enqueue_encode`, of the parts ``[part_begin, part_end)``."""
    count, parts = len(pages), part_end - part_begin
    if count and parts:
        triton_pages.decode_kernel[(grid_of(count, parts),)](
            rows, pages, arena_address, part_begin, parts, splits_for(count, parts), plan.page_tokens,
            **plan.constants(), **plan.options(),
        )  # fmt: skip
