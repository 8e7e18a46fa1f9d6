"""The simulator in plain Python: what the native one must equal, number for number. Slow, and meant to be obvious.

Both answer per request and tier: `hits`, blocks found there; `prefix`, those of them that no miss comes before;
`stored`, blocks written there. Blocks are accessed one by one in the order of the request, and a missing block is
stored at once.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.replay.stack import UNLIMITED, Placement, Policy
from kvtier.replay.trace import Trace

REMEMBERED_EVICTIONS = 65536
"""As many as the store remembers; known to the native simulator, too."""


@dataclass(frozen=True, slots=True)
class CachePlan:
    """A stack in blocks, fastest tier first: ``capacity_blocks[t]`` (or UNLIMITED), ``policies[t]``, ``ttl_s[t]``;
    ``second_use[t]`` and ``refresh[t]`` as of `TierPlan`, all False where nothing is given."""

    capacity_blocks: tuple[int, ...]
    policies: tuple[Policy, ...]
    ttl_s: tuple[float, ...]
    placement: Placement
    second_use: tuple[bool, ...] = ()
    refresh: tuple[bool, ...] = ()

    @property
    def tiers(self) -> int:
        return len(self.capacity_blocks)


@dataclass(frozen=True, slots=True)
class Counts:
    """int32 ``[requests, tiers]`` each; see the module's docstring."""

    hits: npt.NDArray[np.int32]
    prefix: npt.NDArray[np.int32]
    stored: npt.NDArray[np.int32]

    @staticmethod
    def zeros(requests: int, tiers: int) -> Counts:
        return Counts(*(np.zeros((requests, tiers), np.int32) for _ in range(3)))


class _Tier:
    """Blocks in order of use, the first in each dict the next to go; the value is when the block was last used."""

    def __init__(self, capacity: int, policy: Policy, ttl_s: float) -> None:
        self.capacity = capacity
        self.policy = policy
        self.ttl_s = ttl_s
        self.main: OrderedDict[int, float] = OrderedDict()
        self.small: OrderedDict[int, float] = OrderedDict()
        self.ghost: OrderedDict[int, None] = OrderedDict()
        self.uses: dict[int, int] = {}
        self.small_capacity = max(1, capacity // 10)
        self.ghost_capacity = capacity - self.small_capacity

    def has(self, block: int) -> bool:
        return block in self.main or block in self.small

    def use(self, block: int, now: float) -> bool:
        """Whether the block is here; if so it was used now. An expired one leaves."""
        queue = self.main if block in self.main else self.small
        if block not in queue:
            return False
        if now - queue[block] > self.ttl_s:
            self.remove(block)
            return False
        queue[block] = now
        if self.policy is Policy.LRU:
            queue.move_to_end(block)
        elif self.policy is Policy.S3FIFO:
            self.uses[block] = min(self.uses[block] + 1, 3)
        return True

    def remove(self, block: int) -> float:
        """Take the block out; returns when it was last used."""
        self.uses.pop(block, None)
        return self.main.pop(block) if block in self.main else self.small.pop(block)

    def insert(self, block: int, used: float) -> tuple[int, float] | None:
        """Store a block that is not here; returns the one that made room, and when it was last used."""
        victim = None
        if self.capacity != UNLIMITED and len(self.main) + len(self.small) >= self.capacity:
            victim = self._evict()
        if self.policy is not Policy.S3FIFO:
            self.main[block] = used
            return victim
        self.uses[block] = 0
        if block in self.ghost:
            del self.ghost[block]
            self.main[block] = used
        else:
            self.small[block] = used
        return victim

    def _evict(self) -> tuple[int, float]:
        if self.policy is not Policy.S3FIFO:
            return self.main.popitem(last=False)
        while True:
            if self.small and (len(self.small) >= self.small_capacity or not self.main):
                block, used = self.small.popitem(last=False)
                if self.uses[block] > 1:
                    self.uses[block] = 0
                    self.main[block] = used
                    continue
                del self.uses[block]
                if self.ghost_capacity:
                    self.ghost[block] = None
                    if len(self.ghost) > self.ghost_capacity:
                        self.ghost.popitem(last=False)
                return block, used
            block, used = self.main.popitem(last=False)
            if self.uses[block] == 0:
                del self.uses[block]
                return block, used
            self.uses[block] -= 1
            self.main[block] = used


class _Stack:
    """`evicted` remembers the blocks that made room somewhere, the latest `REMEMBERED_EVICTIONS` of them; `used_again`
    are those that were used a second time, which tiers that admit on second use may have."""

    def __init__(self, plan: CachePlan) -> None:
        self.placement = plan.placement
        self.tiers = [_Tier(*t) for t in zip(plan.capacity_blocks, plan.policies, plan.ttl_s, strict=True)]
        self.second_use = plan.second_use or (False,) * plan.tiers
        self.refresh = plan.refresh or (False,) * plan.tiers
        self.evicted: OrderedDict[int, None] = OrderedDict()
        self.used_again: set[int] = set()

    def request(self, blocks: list[int], now: float, counts: Counts, row: int) -> None:
        gap = False
        for block in blocks:
            tier = self._access(block, now, counts.stored[row])
            if tier < 0:
                gap = True
            else:
                counts.hits[row, tier] += 1
                counts.prefix[row, tier] += not gap

    def _access(self, block: int, now: float, stored: npt.NDArray[np.int32]) -> int:
        found = next((i for i, tier in enumerate(self.tiers) if tier.use(block, now)), -1)
        if found >= 0 or block in self.evicted:
            self.used_again.add(block)
        else:
            self.used_again.discard(block)
        if self.placement is Placement.WRITE_THROUGH:
            for i, tier in enumerate(self.tiers):
                if found >= 0 and i > found and self.refresh[i]:
                    tier.use(block, now)
                admitted = i == 0 or not self.second_use[i] or block in self.used_again
                if (found < 0 or i < found or self.second_use[i]) and admitted and not tier.has(block):
                    victim = tier.insert(block, now)
                    stored[i] += 1
                    self._remember(victim)
        elif found != 0:
            if found > 0:
                self.tiers[found].remove(block)
            down: tuple[int, float] | None = (block, now)
            for i, tier in enumerate(self.tiers):
                if down is None or (i and self.second_use[i] and down[0] not in self.used_again):
                    break
                down = tier.insert(*down)
                stored[i] += 1
                self._remember(down)
        return found

    def _remember(self, victim: tuple[int, float] | None) -> None:
        if victim is None or victim[0] in self.evicted:
            return
        self.evicted[victim[0]] = None
        if len(self.evicted) > REMEMBERED_EVICTIONS:
            self.evicted.popitem(last=False)


def replay_open(trace: Trace, plan: CachePlan) -> Counts:
    """Every request in order, at the time of its arrival."""
    counts = Counts.zeros(trace.requests, plan.tiers)
    stack = _Stack(plan)
    for row in range(trace.requests):
        stack.request(trace.blocks_of(row).tolist(), float(trace.times_s[row]), counts, row)
    return counts


@dataclass(frozen=True, slots=True)
class Speeds:
    """The linear model. block_bytes: of one stored block. bandwidth (bytes/s), latency_s: per tier.

    A prefill of n tokens takes ``prefill_base_s + n * prefill_s_per_token``; a decode step with m requests in the batch
    ``decode_step_s + m * decode_step_per_request_s``.
    """

    block_bytes: int
    bandwidth: tuple[float, ...]
    latency_s: tuple[float, ...]
    prefill_base_s: float
    prefill_s_per_token: float
    decode_step_s: float
    decode_step_per_request_s: float


@dataclass(frozen=True, slots=True)
class ClosedRun:
    """Of a closed loop: float64 ``[requests]``, seconds since its start, NaN for what did not happen before its end."""

    counts: Counts
    issued_s: npt.NDArray[np.float64]
    first_token_s: npt.NDArray[np.float64]
    finished_s: npt.NDArray[np.float64]

    @staticmethod
    def empty(requests: int, tiers: int) -> ClosedRun:
        return ClosedRun(Counts.zeros(requests, tiers), *(np.full(requests, math.nan) for _ in range(3)))


def by_session(trace: Trace) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Requests session after session, int32 ``[R]``, and where each session begins, int64 ``[sessions + 1]``."""
    order = np.argsort(trace.sessions, kind="stable").astype(np.int32)
    sizes = np.bincount(trace.sessions) if trace.requests else np.zeros(0, np.int64)
    return order, np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)


_ISSUE, _LOADED, _FIRST_TOKEN, _FINISHED = range(4)


def replay_closed(trace: Trace, plan: CachePlan, speeds: Speeds, concurrency: int, duration_s: float) -> ClosedRun:
    """`concurrency` users take the trace's sessions in order, each the next when its last one has ended, and send the
    requests of a session one after the other, with its pauses.

    A request looks its blocks up when it is sent, and what it misses is there for the others from then on. Its loads
    wait for each tier's bandwidth, its prefill for the one engine, first come first served; decoding is batched, and a
    request keeps the step time that its first step had.
    """
    run = ClosedRun.empty(trace.requests, plan.tiers)
    stack = _Stack(plan)
    order, starts = by_session(trace)
    sessions = len(starts) - 1
    users = min(concurrency, sessions)
    at = [int(starts[u]) for u in range(users)]
    end = [int(starts[u + 1]) for u in range(users)]
    next_session = users
    tier_free_s = [0.0] * plan.tiers
    engine_free_s = 0.0
    decoding = 0
    events = [(0.0, u, _ISSUE, u) for u in range(users)]
    heapq.heapify(events)
    number = users

    while events:
        now, _, kind, user = heapq.heappop(events)
        if now > duration_s:
            break
        row = int(order[at[user]])
        if kind == _ISSUE:
            run.issued_s[row] = now
            stack.request(trace.blocks_of(row).tolist(), now, run.counts, row)
            then = now
            for t in range(plan.tiers):
                blocks = int(run.counts.prefix[row, t])
                if blocks:
                    busy_s = blocks * float(speeds.block_bytes) / speeds.bandwidth[t]
                    tier_free_s[t] = max(then, tier_free_s[t]) + busy_s
                    then = tier_free_s[t] + speeds.latency_s[t]
            event = _LOADED
        elif kind == _LOADED:
            tokens = int(trace.input_tokens[row])
            restored = int(run.counts.prefix[row].sum()) * trace.block_tokens
            fresh = tokens - min(restored, max(tokens - 1, 0))
            engine_free_s = max(now, engine_free_s) + (speeds.prefill_base_s + fresh * speeds.prefill_s_per_token)
            then = engine_free_s
            event = _FIRST_TOKEN
        elif kind == _FIRST_TOKEN:
            run.first_token_s[row] = now
            decoding += 1
            steps = max(int(trace.output_tokens[row]) - 1, 0)
            then = now + steps * (speeds.decode_step_s + decoding * speeds.decode_step_per_request_s)
            event = _FINISHED
        else:
            run.finished_s[row] = now
            decoding -= 1
            at[user] += 1
            then = now
            if at[user] < end[user]:
                then = now + float(trace.think_s[order[at[user]]])
            elif next_session < sessions:
                at[user], end[user] = int(starts[next_session]), int(starts[next_session + 1])
                next_session += 1
            else:
                continue
            event = _ISSUE
        heapq.heappush(events, (then, number, event, user))
        number += 1
    return run
