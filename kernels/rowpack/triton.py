"""Row packing on a GPU, in place and without a second copy: one launch for sequences and tensors of one shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton

from kvtier.kernels.rowpack.sequences import Packed, PagedSequence, check, freed_pages
from kvtier.kernels.rowpack.triton_kernels import pack_kernel

_TILE_UNITS = 1024
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": True}


def tile_rows(columns: int) -> int:
    """Rows of a tile, for a row of that many units, rounded up to a power of two."""
    return max(1, _TILE_UNITS // columns)


def pack(pools: Sequence[Sequence[torch.Tensor]], sequences: Sequence[PagedSequence]) -> list[Packed]:
    """As ``reference.pack``, with the same bytes as result; only enqueues. Tensors of all groups that have one shape,
    element size and strides move in one launch, for every set of sequences whose kept rows have one shape."""
    groups = [list(group) for group in pools]
    for sequence in sequences:
        check(groups, sequence)
    batches: dict[tuple[int, ...], list[PagedSequence]] = {}
    for sequence in sequences:
        batches.setdefault((*sequence.kept.shape, sequence.tail_rows), []).append(sequence)
    alike: dict[tuple[object, ...], list[tuple[int, torch.Tensor]]] = {}
    for n, group in enumerate(groups):
        for pool in group:
            alike.setdefault((pool.shape, pool.stride(), pool.element_size()), []).append((n, pool))
    for batch in batches.values():
        for members in alike.values():
            _pack_batch(members, batch)
    page_tokens = int(groups[0][0].shape[1])
    return [freed_pages(sequence, page_tokens) for sequence in sequences]


def _pack_batch(members: list[tuple[int, torch.Tensor]], batch: list[PagedSequence]) -> None:
    model = members[0][1]
    if model.stride(3) != 1 and model.shape[3] > 1:
        raise ValueError(f"the last axis of a pool must be contiguous, its stride is {model.stride(3)}")
    device = model.device
    sources = torch.stack([s.sources().to(device) for s in batch]).contiguous()
    moved = sources.shape[-1]
    if not moved:
        return
    tables = torch.nn.utils.rnn.pad_sequence([s.pages.to(device) for s in batch], batch_first=True)
    first = _sent([s.first_row for s in batch], device)
    pools = _sent([value for group, pool in members for value in (pool.data_ptr(), group)], device)
    # Rows are bytes: the most that divides all of them is moved at a time.
    size = model.element_size()
    row_bytes = size * model.shape[3]
    strides = [size * n for n in model.stride()[:3]]
    unit = math.gcd(8, row_bytes, *strides, *(pool.data_ptr() for _, pool in members))
    units = row_bytes // unit
    columns = triton.next_power_of_2(units)
    pack_kernel[(len(batch) * len(members) * model.shape[2],)](
        pools, tables, sources, first, len(members), model.shape[2], tables.shape[1], model.shape[1], moved,
        sources.shape[1], sources.shape[2], units, *(n // unit for n in strides),
        SIZE=unit, COLUMNS=columns, ROWS=tile_rows(columns), **OPTIONS,
    )  # fmt: skip


def _sent(values: list[int], device: torch.device) -> torch.Tensor:
    here = torch.tensor(values, dtype=torch.int64)
    return here if device.type == "cpu" else here.pin_memory().to(device, non_blocking=True)
