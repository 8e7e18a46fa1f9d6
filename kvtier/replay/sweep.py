"""Hit rate against bytes, per codec, and what that says about how much to buy."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from kvtier.errors import ConfigError
from kvtier.replay.page import BlockBytes, ReplayCodec
from kvtier.replay.simulate import cache_plan, run_open
from kvtier.replay.stack import UNLIMITED, Placement, TierPlan
from kvtier.replay.trace import Trace

POINTS = 12
_SPAN = 128
ENOUGH = 0.9
"""Share of what unlimited memory would give that the advice aims for: beyond it, doubling adds little."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """hit_rate[codec][i]: per cent, all tiers, with ``sizes_bytes[i]`` of the swept `tier`. ideal: without a limit."""

    tier: str
    sizes_bytes: tuple[int, ...]
    hit_rate: dict[ReplayCodec, tuple[float, ...]]
    ideal: float

    def smallest(self, codec: ReplayCodec, rate: float) -> int | None:
        """Index of the smallest swept size that reaches `rate`, if one does."""
        return next((i for i, r in enumerate(self.hit_rate[codec]) if r >= rate), None)


def default_sizes(trace: Trace, block_bytes: int, points: int = POINTS) -> tuple[int, ...]:
    """Sizes from 1/128 of all distinct blocks to all of them, evenly spaced by ratio, rounded to two digits."""
    if points < 2:
        raise ConfigError(f"--points {points}: give a number from 2 up")
    whole = trace.unique_blocks * block_bytes
    sizes = [whole * _SPAN ** (i / (points - 1) - 1) for i in range(points)]
    return tuple(max(math.ceil(_two_digits(s)), block_bytes) for s in sizes)


def sweep(
    trace: Trace,
    tiers: tuple[TierPlan, ...],
    block_bytes: BlockBytes,
    sizes_bytes: tuple[int, ...],
    placement: Placement,
) -> Sweep:
    """Replay the trace with every size of the last tier, in every codec; the tiers above it stay as they are."""
    if len(trace.blocks) == 0:
        raise ConfigError("--sweep: the trace holds no block")
    curves = {}
    for codec in ReplayCodec:
        nbytes = block_bytes(codec)
        rates = []
        for size in sizes_bytes:
            stack = (*tiers[:-1], replace(tiers[-1], capacity_bytes=size))
            counts = run_open(trace, cache_plan(stack, nbytes, placement))
            rates.append(_rate(int(counts.hits.sum(dtype=np.int64)), trace))
        curves[codec] = tuple(rates)
    unlimited = (*tiers[:-1], replace(tiers[-1], capacity_bytes=UNLIMITED))
    ideal = run_open(trace, cache_plan(unlimited, block_bytes(ReplayCodec.RAW), placement))
    return Sweep(tiers[-1].name, sizes_bytes, curves, _rate(int(ideal.hits.sum(dtype=np.int64)), trace))


def advice(result: Sweep) -> str:
    """One sentence: how much to buy for which gain."""
    nvfp4, raw = result.hit_rate[ReplayCodec.NVFP4], result.hit_rate[ReplayCodec.RAW]
    largest = decimal(result.sizes_bytes[-1])
    best = result.smallest(ReplayCodec.NVFP4, ENOUGH * result.ideal)
    if best is None:
        return (
            f"Even {largest} of {result.tier} as NVFP4 stays at {nvfp4[-1]:.1f} % hits ({raw[-1]:.1f} % raw) of the "
            f"{result.ideal:.1f} % that unlimited memory gives: buy more than this sweep covers."
        )
    equal = result.smallest(ReplayCodec.RAW, nvfp4[best])
    needed = f"more than {largest}" if equal is None else decimal(result.sizes_bytes[equal])
    return (
        f"Buy {decimal(result.sizes_bytes[best])} of {result.tier} and store NVFP4: {nvfp4[best]:.1f} % of blocks hit, "
        f"where raw pages in the same memory hit {raw[best]:.1f} % and need {needed} to do as well; all memory beyond "
        f"that could add {max(0.0, result.ideal - nvfp4[best]):.1f} points."
    )


def decimal(nbytes: int) -> str:
    """Bytes in the largest decimal unit that keeps a digit in front: 400 GB, 1.6 TB."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes} B"


def _rate(hits: int, trace: Trace) -> float:
    return round(100 * hits / len(trace.blocks), 3)


def _two_digits(value: float) -> float:
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(round(value / step, 6)) * step
