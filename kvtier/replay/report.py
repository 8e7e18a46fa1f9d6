"""What a replay found, in the shape that ``kvtier replay --json`` prints. Rates are per cent, times seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.replay.page import ReplayCodec
from kvtier.replay.reference import ClosedRun, Counts, Speeds
from kvtier.replay.simulate import ClosedLoop, Timing, cache_plan, idle_ttft_s, run_closed, run_open
from kvtier.replay.stack import Placement, TierPlan
from kvtier.replay.trace import Trace

CONVENTIONS = {
    "hit_rate": "per block in request order",
    "prefix_hit_rate": "blocks before the first miss of their request",
    "partial_last_block": "counts as full",
    "recency": "by block, in request order",
}


@dataclass(frozen=True, slots=True)
class ReplayInput:
    """What was replayed: `block_bytes` of one block of the trace in `codec`."""

    trace: Trace
    tiers: tuple[TierPlan, ...]
    codec: ReplayCodec
    block_bytes: int


def replay(given: ReplayInput, placement: Placement, timing: Timing, loop: ClosedLoop | None) -> dict[str, Any]:
    """Run it, at the arrival times of the trace or in a closed loop, and report."""
    plan = cache_plan(given.tiers, given.block_bytes, placement)
    speeds = timing.speeds(given.tiers, given.block_bytes)
    if loop is None:
        return open_report(given, run_open(given.trace, plan), speeds)
    run = run_closed(given.trace, plan, speeds, loop.concurrency, loop.duration_s)
    return closed_report(given, run, loop.concurrency, loop.duration_s)


def open_report(given: ReplayInput, counts: Counts, speeds: Speeds) -> dict[str, Any]:
    """Of a replay at the arrival times of the trace; TTFT on an otherwise idle engine."""
    return {
        **_cache_report(given, counts, len(given.trace.blocks)),
        "ttft_s": quantiles(idle_ttft_s(given.trace, counts, speeds)),
    }


def closed_report(given: ReplayInput, run: ClosedRun, concurrency: int, duration_s: float) -> dict[str, Any]:
    """Of a closed loop. `requests` and rates are of the requests that were sent; TTFT includes waiting for the engine.

    interactivity: output tokens per second that one user sees while a response is written, the median over requests."""
    trace = given.trace
    sent = ~np.isnan(run.issued_s)
    started = ~np.isnan(run.first_token_s)
    done = ~np.isnan(run.finished_s)
    blocks = int(np.diff(trace.offsets)[sent].sum())
    end_s = float(run.finished_s[done].max()) if done.all() and done.any() else duration_s
    writing = done & (trace.output_tokens > 1)
    pace = (trace.output_tokens[writing] - 1) / np.maximum(run.finished_s[writing] - run.first_token_s[writing], 1e-9)
    report = _cache_report(given, run.counts, blocks)
    report["requests"] = int(sent.sum())
    report["ttft_s"] = quantiles((run.first_token_s - run.issued_s)[started])
    report["closed_loop"] = {
        "sessions": concurrency,
        "duration_s": round(end_s, 3),
        "requests_completed": int(done.sum()),
        "requests_per_s": round(float(done.sum()) / max(end_s, 1e-9), 4),
        "input_tokens_per_s": round(float(trace.input_tokens[done].sum()) / max(end_s, 1e-9), 1),
        "output_tokens_per_s": round(float(trace.output_tokens[done].sum()) / max(end_s, 1e-9), 1),
        "interactivity_tokens_per_s": round(float(np.median(pace)), 2) if len(pace) else None,
    }
    return report


def hit_rates(hits: npt.NDArray[np.int32], tiers: tuple[TierPlan, ...], blocks: int) -> dict[str, float]:
    """Per cent of `blocks`, in all and per tier."""
    per_tier = hits.sum(axis=0, dtype=np.int64)
    rates = {"total": _percent(int(per_tier.sum()), blocks)}
    return rates | {t.name: _percent(int(n), blocks) for t, n in zip(tiers, per_tier, strict=True)}


def quantiles(values: npt.NDArray[np.float64]) -> dict[str, float | None]:
    if not len(values):
        return {"p50": None, "p90": None, "p99": None, "mean": None}
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return {k: round(float(v), 6) for k, v in (("p50", p50), ("p90", p90), ("p99", p99), ("mean", values.mean()))}


def _cache_report(given: ReplayInput, counts: Counts, blocks: int) -> dict[str, Any]:
    moved = {
        tier.name: {"read": int(read) * given.block_bytes, "written": int(written) * given.block_bytes}
        for tier, read, written in zip(
            given.tiers, counts.hits.sum(axis=0, dtype=np.int64), counts.stored.sum(axis=0, dtype=np.int64), strict=True
        )
    }
    return {
        "requests": given.trace.requests,
        "blocks": blocks,
        "unique_blocks": given.trace.unique_blocks,
        "block_tokens": given.trace.block_tokens,
        "block_bytes": given.block_bytes,
        "codec": given.codec.value,
        "capacity_blocks": {t.name: t.capacity_blocks(given.block_bytes) for t in given.tiers},
        "hit_rate": hit_rates(counts.hits, given.tiers, blocks),
        "prefix_hit_rate": hit_rates(counts.prefix, given.tiers, blocks),
        "bytes_moved": moved,
        "conventions": CONVENTIONS,
    }


def _percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 3) if whole else 0.0
