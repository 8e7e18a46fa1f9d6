"""Hit rate against bytes, per codec, and what that says about how much to buy."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

from kvtier.errors import ConfigError
from kvtier.replay.page import BlockBytes, ReplayCodec
from kvtier.replay.report import ReplayInput, replay
from kvtier.replay.simulate import ClosedLoop, Timing
from kvtier.replay.stack import UNLIMITED, Placement, TierPlan
from kvtier.replay.trace import Trace

POINTS = 12
_SPAN = 128
ENOUGH = 0.9
"""Share of what unlimited memory would give that the advice aims for: beyond it, doubling adds little."""


class Metric(str, Enum):
    """What a sweep shows. tier_share: of all hits, those from the swept tier. requests_completed: closed loops only."""

    HIT_RATE = "hit_rate"
    TIER_SHARE = "tier_share"
    TTFT_P50 = "ttft_p50"
    TTFT_P99 = "ttft_p99"
    REQUESTS_COMPLETED = "requests_completed"

    @property
    def label(self) -> str:
        return _LABELS[self]


_LABELS = {
    Metric.HIT_RATE: "blocks hit, %",
    Metric.TIER_SHARE: "hits from this tier, %",
    Metric.TTFT_P50: "median time to first token, s",
    Metric.TTFT_P99: "99th percentile of time to first token, s",
    Metric.REQUESTS_COMPLETED: "requests completed",
}

Curve = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Sweep:
    """curves[metric][codec][i]: with ``sizes_bytes[i]`` of the swept `tier`. Hit rates are per cent over all tiers;
    `ideal` is the one without a limit."""

    tier: str
    sizes_bytes: tuple[int, ...]
    curves: dict[Metric, dict[ReplayCodec, Curve]]
    ideal: float

    @property
    def hit_rate(self) -> dict[ReplayCodec, Curve]:
        return self.curves[Metric.HIT_RATE]

    def smallest(self, codec: ReplayCodec, rate: float) -> int | None:
        """Index of the smallest swept size that reaches `rate`, if one does."""
        return next((i for i, r in enumerate(self.hit_rate[codec]) if r >= rate), None)


def default_sizes(trace: Trace, block_bytes: int, points: int = POINTS) -> tuple[int, ...]:
    """Sizes from 1/128 of all distinct blocks to all of them, evenly spaced by ratio, rounded to two digits."""
    if points < 2:
        raise ConfigError(f"--points {points}: give a number from 2 up")
    whole = trace.unique_blocks * block_bytes
    sizes = [whole * _SPAN ** (i / (points - 1) - 1) for i in range(points)]
    return tuple(sorted({max(math.ceil(_two_digits(s)), block_bytes) for s in sizes}))


def sweep(
    trace: Trace,
    tiers: tuple[TierPlan, ...],
    block_bytes: BlockBytes,
    sizes_bytes: tuple[int, ...],
    placement: Placement,
    timing: Timing,
    loop: ClosedLoop | None = None,
) -> Sweep:
    """Replay the trace with every size of the last tier, in every codec; the tiers above it stay as they are."""
    if len(trace.blocks) == 0:
        raise ConfigError("--sweep: the trace holds no block")

    def point(codec: ReplayCodec, size: int) -> dict[Metric, float]:
        return _point(
            trace, (*tiers[:-1], replace(tiers[-1], capacity_bytes=size)), codec, block_bytes, placement, timing, loop
        )

    points = {codec: [point(codec, size) for size in sizes_bytes] for codec in ReplayCodec}
    measured = points[ReplayCodec.RAW][0]
    curves = {m: {codec: tuple(p[m] for p in row) for codec, row in points.items()} for m in Metric if m in measured}
    return Sweep(tiers[-1].name, sizes_bytes, curves, point(ReplayCodec.RAW, UNLIMITED)[Metric.HIT_RATE])


def _point(
    trace: Trace,
    tiers: tuple[TierPlan, ...],
    codec: ReplayCodec,
    block_bytes: BlockBytes,
    placement: Placement,
    timing: Timing,
    loop: ClosedLoop | None,
) -> dict[Metric, float]:
    report = replay(ReplayInput(trace, tiers, codec, block_bytes(codec)), placement, timing, loop)
    rates, ttft = report["hit_rate"], report["ttft_s"]
    point = {
        Metric.HIT_RATE: rates["total"],
        Metric.TIER_SHARE: round(100 * rates[tiers[-1].name] / rates["total"], 2) if rates["total"] else 0.0,
        Metric.TTFT_P50: ttft["p50"] or 0.0,
        Metric.TTFT_P99: ttft["p99"] or 0.0,
    }
    if loop is not None:
        point[Metric.REQUESTS_COMPLETED] = report["closed_loop"]["requests_completed"]
    return point


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


def _two_digits(value: float) -> float:
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(round(value / step, 6)) * step
