"""Runs the simulator over a trace: native, or the plain Python reference where it is asked for by name."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError
from kvtier.kernels import _native
from kvtier.replay import reference
from kvtier.replay.reference import CachePlan, ClosedRun, Counts, Speeds, by_session
from kvtier.replay.stack import Placement, TierPlan
from kvtier.replay.trace import Trace


class Implementation(str, Enum):
    NATIVE = "native"
    PYTHON = "python"


@dataclass(frozen=True, slots=True)
class Timing:
    """The linear model of an engine: see `kvtier.replay.reference.Speeds`."""

    prefill_base_s: float = 0.0
    prefill_s_per_token: float = 1e-4
    decode_step_s: float = 0.015
    decode_step_per_request_s: float = 0.00025

    def speeds(self, tiers: tuple[TierPlan, ...], block_bytes: int) -> Speeds:
        return Speeds(
            block_bytes,
            tuple(t.bandwidth for t in tiers),
            tuple(t.latency_s for t in tiers),
            self.prefill_base_s,
            self.prefill_s_per_token,
            self.decode_step_s,
            self.decode_step_per_request_s,
        )


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """So many users for so long, each sending on as it is answered, rather than the arrivals of the trace."""

    concurrency: int
    duration_s: float


def cache_plan(tiers: tuple[TierPlan, ...], block_bytes: int, placement: Placement) -> CachePlan:
    """The stack in blocks of `block_bytes`."""
    if block_bytes < 1:
        raise ConfigError(f"a block of {block_bytes} bytes: give --bytes-per-token from 1 up")
    return CachePlan(
        tuple(t.capacity_blocks(block_bytes) for t in tiers),
        tuple(t.policy for t in tiers),
        tuple(t.ttl_s for t in tiers),
        placement,
        tuple(t.second_use for t in tiers),
        tuple(t.refresh for t in tiers),
    )


def run_open(trace: Trace, plan: CachePlan, implementation: Implementation = Implementation.NATIVE) -> Counts:
    """Every request in order, at the time of its arrival. Releases the GIL; any thread."""
    if implementation is Implementation.PYTHON:
        return reference.replay_open(trace, plan)
    counts = Counts.zeros(trace.requests, plan.tiers)
    _native.replay_open(
        trace.blocks,
        trace.offsets,
        trace.unique_blocks,
        trace.times_s,
        *_arrays(plan),
        int(plan.placement),
        *_rules(plan),
        counts.hits,
        counts.prefix,
        counts.stored,
    )
    return counts


def run_closed(
    trace: Trace,
    plan: CachePlan,
    speeds: Speeds,
    concurrency: int,
    duration_s: float,
    implementation: Implementation = Implementation.NATIVE,
) -> ClosedRun:
    """`concurrency` users at once, for `duration_s` simulated seconds: see `kvtier.replay.reference.replay_closed`."""
    if concurrency < 1:
        raise ConfigError(f"--sessions {concurrency}: give a number from 1 up")
    if implementation is Implementation.PYTHON:
        return reference.replay_closed(trace, plan, speeds, concurrency, duration_s)
    order, starts = by_session(trace)
    run = ClosedRun.empty(trace.requests, plan.tiers)
    _native.replay_closed(
        trace.blocks,
        trace.offsets,
        trace.unique_blocks,
        trace.input_tokens,
        trace.output_tokens,
        trace.think_s,
        trace.block_tokens,
        order,
        starts,
        *_arrays(plan),
        int(plan.placement),
        *_rules(plan),
        speeds.block_bytes,
        np.array(speeds.bandwidth, np.float64),
        np.array(speeds.latency_s, np.float64),
        speeds.prefill_base_s,
        speeds.prefill_s_per_token,
        speeds.decode_step_s,
        speeds.decode_step_per_request_s,
        concurrency,
        duration_s,
        run.counts.hits,
        run.counts.prefix,
        run.counts.stored,
        run.issued_s,
        run.first_token_s,
        run.finished_s,
    )
    return run


def idle_ttft_s(trace: Trace, counts: Counts, speeds: Speeds) -> npt.NDArray[np.float64]:
    """float64 ``[requests]``: time to the first token on an engine that has nothing else to do. Loading the contiguous
    prefix, tier after tier, then prefilling the rest; the last token of a prompt is always computed."""
    prefix = counts.prefix.astype(np.float64)
    load_s = prefix * speeds.block_bytes / np.array(speeds.bandwidth) + (prefix > 0) * np.array(speeds.latency_s)
    restored = counts.prefix.sum(axis=1, dtype=np.int64) * trace.block_tokens
    fresh = trace.input_tokens - np.minimum(restored, np.maximum(trace.input_tokens - 1, 0))
    total: npt.NDArray[np.float64] = load_s.sum(axis=1) + speeds.prefill_base_s + fresh * speeds.prefill_s_per_token
    return total


def _arrays(plan: CachePlan) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.float64]]:
    return (
        np.array(plan.capacity_blocks, np.int64),
        np.array([int(p) for p in plan.policies], np.int32),
        np.array(plan.ttl_s, np.float64),
    )


def _rules(plan: CachePlan) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    none = (False,) * plan.tiers
    return np.array(plan.second_use or none, np.int32), np.array(plan.refresh or none, np.int32)
