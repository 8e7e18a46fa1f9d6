"""TriAttention on a GPU: the same steps as `fast.py`, over keys where they lie in a paged pool. Only enqueues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kvtier.kernels.triattention import triton_kernels as kernels
from kvtier.kernels.triattention.fast import LayerTable
from kvtier.kernels.triattention.reference import MODES, OFFSETS, STD_FLOOR

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_TOKENS = 1024
_TILE_VALUES = 2048
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": True}


@dataclass(frozen=True, slots=True)
class ModelTable:
    """Statistics of a uniform group of layers on one device. real_mean, imag_mean: fp64 ``[layers, query_heads, F]``,
    the gain folded in; spread: fp32 alike; omega: fp64 ``[F]``; real, imag: int32 ``[F]``."""

    real_mean: torch.Tensor
    imag_mean: torch.Tensor
    spread: torch.Tensor
    omega: torch.Tensor
    real: torch.Tensor
    imag: torch.Tensor
    kv_heads: int

    @staticmethod
    def of(layers: Sequence[LayerTable], real: torch.Tensor, imag: torch.Tensor, device: torch.device) -> ModelTable:
        """From the layers' own tables, which share `omega` and the pairs' dimensions, `real` and `imag`."""
        mean = torch.stack([t.mean for t in layers])
        # [kv_heads, F, group] -> [query_heads, F]
        spread = torch.stack([t.spread.transpose(1, 2).reshape(len(t.mean), -1) for t in layers])
        return ModelTable(
            mean.real.contiguous().to(device),
            mean.imag.contiguous().to(device),
            spread.contiguous().to(device),
            torch.from_numpy(layers[0].omega).to(device),
            real.to(device, torch.int32),
            imag.to(device, torch.int32),
            layers[0].kv_heads,
        )


def tile_tokens(f: int) -> int:
    """Keys of a tile of `score`, for F rounded up to a power of two."""
    return max(4, _TILE_VALUES // f)


def phase_rows(table: ModelTable, t: int) -> torch.Tensor:
    """fp32 ``[layers, query_heads, 2, F]``: weights of the keys' real and imaginary parts at position `t`. Phases are
    in fp64, because an fp32 phase near position 95 000 is off by more than a thousandth."""
    layers, heads, frequencies = table.real_mean.shape
    rows = torch.empty((layers, heads, 2, frequencies), dtype=torch.float32, device=table.omega.device)
    kernels.rows_kernel[(layers * heads,)](
        table.real_mean, table.imag_mean, table.omega, rows, t, frequencies,
        OFFSETS=len(OFFSETS), F=triton.next_power_of_2(frequencies), **OPTIONS,
    )  # fmt: skip
    return rows


def score(
    pools: Sequence[torch.Tensor], pages: torch.Tensor, first: int, count: int, table: ModelTable, rows: torch.Tensor
) -> torch.Tensor:
    """fp32 ``[layers, query_heads, count]`` of the rows ``[first, first + count)`` of one sequence.

    pools: keys of each layer, ``[pages, page_tokens, kv_heads, head_dim]``, of one shape, type and strides. pages:
    int64, the sequence's page table. Raises ValueError where pools differ."""
    model = pools[0]
    for pool in pools:
        if (pool.shape, pool.stride(), pool.dtype) != (model.shape, model.stride(), model.dtype):
            raise ValueError("keys of one launch must have one shape, type and strides; group the layers by them")
    if model.dtype not in _TYPES or model.stride(3) != 1:
        raise ValueError(f"keys must be bf16, fp16 or fp32 with a contiguous last axis, got {model.dtype}")
    layers, heads, _, frequencies = rows.shape
    scores = torch.empty((layers, heads, count), dtype=torch.float32, device=model.device)
    f = triton.next_power_of_2(frequencies)
    if count:
        kernels.score_kernel[(triton.cdiv(count, tile_tokens(f)), table.kv_heads, layers)](
            addresses(pools), pages, table.real, table.imag, rows, table.spread, scores, first, count,
            model.shape[1], frequencies, heads, model.stride(0), model.stride(1), model.stride(2),
            DTYPE=_TYPES[model.dtype], F=f, GROUP=heads // table.kv_heads, TOKENS=tile_tokens(f), **OPTIONS,
        )  # fmt: skip
    return scores


def addresses(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64, on the tensors' device; the copy is queued."""
    where = torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64)
    if tensors[0].device.type == "cpu":
        return where
    return where.pin_memory().to(tensors[0].device, non_blocking=True)


def reduce(scores: torch.Tensor, kv_heads: int, mode: str, *, normalized: bool = True) -> torch.Tensor:
    """fp32 ``[layers or 1, kv_heads or 1, T]`` from ``[layers, query_heads, T]``, as `reference.reduce`."""
    if mode not in MODES:
        raise ValueError(f"eviction mode {mode!r}: give one of {', '.join(MODES)}")
    layers, heads, count = scores.shape
    normalized = normalized or mode == "union"
    shape = {"union": (1, 1), "per_head": (1, kv_heads), "per_layer_perhead": (layers, kv_heads)}[mode]
    out = torch.empty((*shape, count), dtype=torch.float32, device=scores.device)
    if not count:
        return out
    statistics = torch.empty((layers * heads, 2), dtype=torch.float64, device=scores.device)
    if normalized:
        kernels.statistics_kernel[(layers * heads,)](
            scores, statistics, count, FLOOR=STD_FLOOR, TOKENS=_TOKENS, **OPTIONS
        )
    kernels.reduce_kernel[(triton.cdiv(count, _TOKENS), shape[0] * shape[1])](
        scores, statistics, out, count, layers, heads, kv_heads,
        MODE=MODES.index(mode), NORMALIZED=normalized, TOKENS=_TOKENS, **OPTIONS,
    )  # fmt: skip
    return out


def select(scores: torch.Tensor, budget: int) -> torch.Tensor:
    """As `reference.select`: int64 ``[..., budget]``, or all where there are fewer."""
    count = scores.shape[-1]
    if budget >= count:
        return torch.arange(count, device=scores.device).expand(*scores.shape[:-1], -1).clone()
    flat = scores.reshape(-1, count).contiguous()
    kept = torch.empty((len(flat), budget), dtype=torch.int64, device=scores.device)
    if budget and len(flat):
        kernels.select_kernel[(len(flat),)](flat, kept, count, budget, TOKENS=_TOKENS, **OPTIONS)
    return kept.reshape(*scores.shape[:-1], budget)
