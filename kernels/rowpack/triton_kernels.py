"""The kernel of row packing."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["tensors", "heads", "table_pages", "page_tokens", "moved", "groups", "kept_heads", "dim"]
)
def pack_kernel(
    pools, tables, sources, first, tensors, heads, table_pages, page_tokens, moved, groups, kept_heads, dim,
    page_stride, token_stride, head_stride,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """All rows of one sequence, tensor and head a program, ROWS at a time: row ``sources[i]`` goes to ``first + i``.

    pools: int64 ``[tensors, 2]`` of address and group; strides and `dim` in units of SIZE bytes. tables: int64
    ``[sequences, table_pages]``. sources: int64 ``[sequences, groups, kept_heads, moved]``; groups and kept_heads are 1
    where one row of them stands for all. A source is never in front of its destination, so a tile's rows, once read,
    may be written: what later tiles read lies behind all of them."""
    program = tl.program_id(0).to(tl.int64)
    head = program % heads
    tensor = program // heads % tensors
    sequence = program // heads // tensors
    TYPE: tl.constexpr = tl.uint8 if SIZE == 1 else (tl.int16 if SIZE == 2 else (tl.int32 if SIZE == 4 else tl.int64))
    pool = tl.load(pools + 2 * tensor).to(tl.pointer_type(TYPE)) + head * head_stride
    group = tl.where(groups > 1, tl.load(pools + 2 * tensor + 1), 0)
    sources += ((sequence * groups + group) * kept_heads + tl.where(kept_heads > 1, head, 0)) * moved
    tables += sequence * table_pages
    start_row = tl.load(first + sequence)
    column = tl.arange(0, COLUMNS)[None, :]
    for start in range(0, moved, ROWS):
        n = start + tl.arange(0, ROWS)
        source = tl.load(sources + n, mask=n < moved, other=0)
        target = start_row + n
        from_page = tl.load(tables + source // page_tokens, mask=n < moved, other=0)
        to_page = tl.load(tables + target // page_tokens, mask=n < moved, other=0)
        from_row = from_page * page_stride + source % page_tokens * token_stride
        to_row = to_page * page_stride + target % page_tokens * token_stride
        mask = (n < moved)[:, None] & (column < dim)
        rows = tl.load(pool + from_row[:, None] + column, mask=mask, other=0)
        tl.debug_barrier()  # all of the tile is read before any of it is written
        tl.store(pool + to_row[:, None] + column, rows, mask=mask)
