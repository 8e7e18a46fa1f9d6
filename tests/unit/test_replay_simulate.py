"""The simulator: the public figures, small cases by hand, and the native loop against the plain one."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.kernels import _native
from kvtier.replay.formats import read_trace
from kvtier.replay.page import ReplayCodec, from_bytes_per_token
from kvtier.replay.reference import CachePlan, Counts, Speeds
from kvtier.replay.simulate import Implementation, Timing, cache_plan, idle_ttft_s, run_closed, run_open
from kvtier.replay.stack import UNLIMITED, Placement, Policy, TierPlan
from kvtier.replay.trace import Request, Trace

QWEN3_8B = 147_456
INF = math.inf


def trace_of(
    requests: Sequence[Sequence[int]],
    *,
    times: Sequence[float] | None = None,
    sessions: Sequence[int] | None = None,
    think: Sequence[float] | None = None,
    output_tokens: int = 1,
    block_tokens: int = 10,
) -> Trace:
    return Trace.of(
        [
            Request(
                times[i] if times is not None else float(i),
                len(blocks) * block_tokens,
                output_tokens,
                blocks,
                sessions[i] if sessions is not None else i,
                think[i] if think is not None else 0.0,
            )
            for i, blocks in enumerate(requests)
        ],
        block_tokens,
    )


def plan_of(
    *capacity: int, placement: Placement = Placement.WRITE_THROUGH, policy: Policy = Policy.LRU, ttl_s: float = INF
) -> CachePlan:
    return CachePlan(capacity, (policy,) * len(capacity), (ttl_s,) * len(capacity), placement)


def hits(trace: Trace, plan: CachePlan) -> list[list[int]]:
    return [row.tolist() for row in run_open(trace, plan).hits]


@pytest.fixture(scope="module")
def mooncake() -> dict[str, Trace]:
    return {name: read_trace(f"mooncake-{name}") for name in ("conversation", "synthetic")}


# -- the public figures ----------------------------------------------------------------------------------------------


def rate(trace: Trace, capacity: int) -> float:
    counts = run_open(trace, plan_of(capacity))
    return 100 * int(counts.hits.sum()) / len(trace.blocks)


@pytest.mark.parametrize(
    ("name", "requests", "span_s", "ideal"), [("conversation", 12_031, 3_537, 36.6), ("synthetic", 3_993, 1_022, 64.0)]
)
def test_infinite_cache(mooncake: dict[str, Trace], name: str, requests: int, span_s: float, ideal: float) -> None:
    trace = mooncake[name]
    assert (trace.requests, round(trace.span_s)) == (requests, span_s)
    assert rate(trace, UNLIMITED) == pytest.approx(ideal, abs=0.1)
    assert rate(trace, UNLIMITED) == pytest.approx(100 * (1 - trace.unique_blocks / len(trace.blocks)))


@pytest.mark.parametrize(
    ("name", "curve"),
    [("conversation", (5.2, 19.5, 27.8, 34.5, 36.3)), ("synthetic", (3.4, 15.5, 26.0, 39.1, 58.9))],
)
def test_lru_curve(mooncake: dict[str, Trace], name: str, curve: tuple[float, ...]) -> None:
    trace = mooncake[name]
    got = [rate(trace, int(trace.unique_blocks * share)) for share in (0.01, 0.05, 0.1, 0.2, 0.5)]
    assert got == pytest.approx(curve, abs=0.1)


@pytest.mark.parametrize(
    ("name", "gigabytes", "rates"),
    [
        ("conversation", 200, (6.1, 11.9, 20.0)),
        ("conversation", 400, (11.9, 21.6, 28.3)),
        ("conversation", 800, (21.6, 29.4, 34.9)),
        ("conversation", 1600, (29.4, 35.2, 36.0)),
        ("synthetic", 200, (17.6, 28.6, 41.2)),
        ("synthetic", 400, (28.6, 43.7, 56.0)),
        ("synthetic", 800, (43.7, 58.3, 63.8)),
        ("synthetic", 1600, (58.3, 64.0, 64.0)),
    ],
)
def test_bytes_and_codecs(mooncake: dict[str, Trace], name: str, gigabytes: int, rates: tuple[float, ...]) -> None:
    trace = mooncake[name]
    block_bytes = from_bytes_per_token(QWEN3_8B, trace.block_tokens)
    tier = TierPlan("host", gigabytes * 10**9, 25e9, 0.0)
    got = [rate(trace, tier.capacity_blocks(block_bytes(codec))) for codec in ReplayCodec]
    assert got == pytest.approx(rates, abs=0.1)


# -- by hand ---------------------------------------------------------------------------------------------------------


def test_lru_keeps_what_was_used_last() -> None:
    trace = trace_of([[1, 2, 3], [1], [4], [1, 2, 3]])
    assert hits(trace, plan_of(3)) == [[0], [1], [0], [1]]  # 4 evicts 2; then 2 evicts 3 before 3 is asked for
    assert hits(trace, plan_of(3, policy=Policy.FIFO)) == [[0], [1], [0], [0]]  # 4 evicts 1, and so on round
    assert hits(trace, plan_of(UNLIMITED)) == [[0], [1], [0], [3]]


def test_prefix_ends_at_the_first_miss() -> None:
    counts = run_open(trace_of([[1, 2, 3], [1, 9, 3]]), plan_of(UNLIMITED))
    assert counts.hits.tolist() == [[0], [2]]
    assert counts.prefix.tolist() == [[0], [1]]


def test_write_through_keeps_pages_below_and_copies_hits_up() -> None:
    trace = trace_of([[1, 2], [3], [1], [1]])
    counts = run_open(trace, plan_of(2, UNLIMITED))
    assert counts.hits.tolist() == [[0, 0], [0, 0], [0, 1], [1, 0]]
    assert counts.stored.tolist() == [[2, 2], [1, 1], [1, 0], [0, 0]]


def test_write_back_moves_pages_down_and_hits_up() -> None:
    trace = trace_of([[1, 2], [3], [1], [2], [3]])
    counts = run_open(trace, plan_of(2, 1, placement=Placement.WRITE_BACK))
    # After [3]: top 2 3, below 1. After [1]: top 3 1, below 2: three pages in tiers of two and one.
    assert counts.hits.tolist() == [[0, 0], [0, 0], [0, 1], [0, 1], [0, 1]]
    assert counts.stored.tolist() == [[2, 0], [1, 1], [1, 1], [1, 1], [1, 1]]


def test_a_hit_above_keeps_a_page_below_where_that_counts_as_a_use() -> None:
    # 0 is hit in the upper tier while 1 and 2 fill the lower one; then 3 pushes the oldest out of both.
    trace = trace_of([[0], [1], [0], [2], [0], [3], [4], [5], [0]])
    for refresh, hit in ((False, 0), (True, 1)):
        plan = replace(plan_of(2, 4), refresh=(False, refresh))
        assert int(run_open(trace, plan).hits[-1].sum()) == hit


def test_admission_on_second_use() -> None:
    plan = replace(plan_of(1, 10), second_use=(False, True))
    counts = run_open(trace_of([[0], [1], [0], [2], [0], [3], [3], [4], [3]]), plan)
    # 0 comes back after it was evicted, 3 is hit in the upper tier: both are written below then, and found there later.
    assert counts.stored[:, 1].tolist() == [0, 0, 1, 0, 0, 0, 1, 0, 0]
    assert counts.hits[:, 1].tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 1]
    back = replace(plan, placement=Placement.WRITE_BACK)
    counts = run_open(trace_of([[0], [1], [1], [2], [0], [1]]), back)
    assert counts.stored[:, 1].tolist() == [0, 0, 0, 1, 0, 1]
    assert counts.hits[:, 1].tolist() == [0, 0, 0, 0, 0, 1]


def test_a_page_not_used_for_its_time_to_live_is_gone() -> None:
    trace = trace_of([[1]] * 5, times=[0, 5, 10, 16, 20])
    assert hits(trace, plan_of(4, ttl_s=5.0)) == [[0], [1], [1], [0], [1]]


def test_s3fifo_survives_a_scan_that_empties_lru() -> None:
    popular = [[1, 2, 3]] * 4
    scan = [[n] for n in range(100, 140)]
    trace = trace_of([*popular, *scan, [1, 2, 3]])
    assert hits(trace, plan_of(10))[-1] == [0]
    assert hits(trace, plan_of(10, policy=Policy.S3FIFO))[-1] == [3]


def test_s3fifo_remembers_what_left_its_small_queue() -> None:
    # 1 leaves the small queue unused; asked for again it goes to the main queue, where a scan does not reach it.
    trace = trace_of([[1], *[[n] for n in range(10, 20)], [1], *[[n] for n in range(20, 40)], [1]])
    assert hits(trace, plan_of(10, policy=Policy.S3FIFO))[-1] == [1]


def test_ttft_of_an_idle_engine() -> None:
    trace = trace_of([[1, 2, 3, 4], [1, 2, 9], [1, 2, 3, 4]])
    speeds = Speeds(100, (1000.0, 500.0), (0.5, 0.25), 2.0, 0.1, 0.0, 0.0)
    counts = Counts.zeros(3, 2)
    counts.prefix[1] = (1, 1)
    counts.prefix[2] = (4, 0)
    got = idle_ttft_s(trace, counts, speeds)
    assert got.tolist() == pytest.approx(
        [2 + 40 * 0.1, 0.1 + 0.5 + 0.2 + 0.25 + 2 + 10 * 0.1, 0.4 + 0.5 + 2 + 1 * 0.1]  # one token is always computed
    )


def test_closed_loop_by_hand() -> None:
    # Two users; prefill 1 s per 10-token block, decode 2 more tokens, 1 s per step and 0.5 s per request in the batch.
    trace = trace_of(
        [[1], [1, 2], [3], [4]], sessions=[0, 0, 1, 2], think=[0, 4.5, 0, 0], output_tokens=3, times=[0, 1, 2, 3]
    )
    speeds = Timing(0.0, 0.1, 1.0, 0.5).speeds((TierPlan("host", UNLIMITED, INF, 0.0),), 1)
    run = run_closed(trace, plan_of(UNLIMITED), speeds, 2, INF)
    # Sessions 0 and 1 begin at 0; the engine prefills 0 until 1, 1 until 2. Decode of 0: 2 * 1.5 s, of 1: 2 * 2 s.
    assert run.issued_s.tolist() == [0, 4 + 4.5, 0, 6]
    assert run.first_token_s.tolist() == pytest.approx([1, 9.5, 2, 7])
    assert run.finished_s.tolist() == pytest.approx([4, 9.5 + 2 * 2, 6, 7 + 2 * 1.5])
    assert run.counts.hits[:, 0].tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("duration_s", [3.0, 3.5])
def test_a_closed_loop_ends_in_time(duration_s: float) -> None:
    trace = trace_of([[n] for n in range(10)])
    speeds = Timing(1.0, 0.0, 0.0, 0.0).speeds((TierPlan("host", UNLIMITED, INF, 0.0),), 1)
    run = run_closed(trace, plan_of(UNLIMITED), speeds, 1, duration_s)
    assert run.finished_s[:3].tolist() == [1, 2, 3]
    assert np.isnan(run.finished_s[3:]).all()
    assert run.issued_s[3] == 3
    assert np.isnan(run.issued_s[4:]).all()


def test_loads_share_the_bandwidth_of_a_tier() -> None:
    trace = trace_of([[1, 2, 3], [1, 2, 3], [1, 2, 3]], sessions=[0, 1, 2])
    speeds = Timing(0.0, 0.0, 0.0, 0.0).speeds((TierPlan("host", UNLIMITED, 3.0, 0.25),), 1)
    run = run_closed(trace, plan_of(UNLIMITED), speeds, 3, INF)
    assert run.first_token_s.tolist() == pytest.approx([0, 1.25, 2.25])


# -- native against plain --------------------------------------------------------------------------------------------


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    requests = draw(st.lists(st.lists(st.integers(0, 14), max_size=8), min_size=1, max_size=25))
    n = len(requests)
    times = np.cumsum(draw(st.lists(st.sampled_from([0.0, 0.5, 2.0]), min_size=n, max_size=n))).tolist()
    sessions = draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    think = draw(st.lists(st.sampled_from([0.0, 0.25, 3.0]), min_size=n, max_size=n))
    return trace_of(requests, times=times, sessions=sessions, think=think, output_tokens=draw(st.integers(0, 3)))


@st.composite
def plans(draw: st.DrawFn) -> CachePlan:
    tiers = draw(st.integers(1, 3))

    def each(values: st.SearchStrategy[int]) -> tuple[int, ...]:
        return tuple(draw(values) for _ in range(tiers))

    return CachePlan(
        each(st.one_of(st.just(UNLIMITED), st.integers(1, 12))),
        tuple(draw(st.sampled_from(Policy)) for _ in range(tiers)),
        tuple(draw(st.sampled_from([INF, 1.0, 4.0])) for _ in range(tiers)),
        draw(st.sampled_from(Placement)),
        tuple(draw(st.booleans()) for _ in range(tiers)),
        tuple(draw(st.booleans()) for _ in range(tiers)),
    )


def assert_same(a: Counts, b: Counts) -> None:
    for field in ("hits", "prefix", "stored"):
        np.testing.assert_array_equal(getattr(a, field), getattr(b, field), err_msg=field)


@settings(max_examples=400, deadline=None)
@given(trace=traces(), plan=plans())
def test_native_open_equals_plain(trace: Trace, plan: CachePlan) -> None:
    assert_same(run_open(trace, plan), run_open(trace, plan, Implementation.PYTHON))


@settings(max_examples=300, deadline=None)
@given(
    trace=traces(),
    plan=plans(),
    concurrency=st.integers(1, 8),
    duration_s=st.sampled_from([INF, 1.0, 7.3]),
    timing=st.sampled_from([Timing(), Timing(0.1, 0.03, 0.7, 0.3), Timing(0.0, 0.0, 0.0, 0.0)]),
    bandwidth=st.sampled_from([3.0, 1e9]),
)
def test_native_closed_equals_plain(
    trace: Trace, plan: CachePlan, concurrency: int, duration_s: float, timing: Timing, bandwidth: float
) -> None:
    speeds = timing.speeds(tuple(TierPlan(str(t), UNLIMITED, bandwidth, 0.1 * t) for t in range(plan.tiers)), 7)
    native = run_closed(trace, plan, speeds, concurrency, duration_s)
    plain = run_closed(trace, plan, speeds, concurrency, duration_s, Implementation.PYTHON)
    assert_same(native.counts, plain.counts)
    for field in ("issued_s", "first_token_s", "finished_s"):
        np.testing.assert_array_equal(getattr(native, field), getattr(plain, field), err_msg=field)


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("placement", Placement)
def test_native_equals_plain_where_some_blocks_are_popular(policy: Policy, placement: Placement) -> None:
    # Long enough for blocks to be used often, to move between the queues, and to leave all of them.
    rng = np.random.default_rng(3)
    trace = trace_of([(rng.zipf(1.2, 10) % 300).tolist() for _ in range(500)])
    for capacity in ((10,), (40,), (7, 25)):
        for second_use, refresh in ((False, False), (True, True)):
            plan = replace(
                plan_of(*capacity, placement=placement, policy=policy),
                second_use=(second_use,) * len(capacity),
                refresh=(refresh,) * len(capacity),
            )
            assert_same(run_open(trace, plan), run_open(trace, plan, Implementation.PYTHON))


@settings(max_examples=100, deadline=None)
@given(trace=traces(), capacity=st.integers(1, 12))
def test_lru_hits_are_stack_distances_below_the_capacity(trace: Trace, capacity: int) -> None:
    stack: list[int] = []
    expected = 0
    for block in trace.blocks.tolist():
        if block in stack:
            expected += stack.index(block) < capacity
            stack.remove(block)
        stack.insert(0, block)
    assert int(run_open(trace, plan_of(capacity)).hits.sum()) == expected


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("placement", Placement)
def test_native_equals_plain_on_a_real_trace(mooncake: dict[str, Trace], policy: Policy, placement: Placement) -> None:
    trace = mooncake["synthetic"].head(600)
    plan = CachePlan((300, 2000), (policy, policy), (INF, 60.0), placement)
    assert_same(run_open(trace, plan), run_open(trace, plan, Implementation.PYTHON))


# -- bad input and speed ---------------------------------------------------------------------------------------------


def test_the_native_loop_refuses_what_would_leave_its_arrays() -> None:
    good = trace_of([[0, 1], [1]])
    no = np.array([0], np.int32)
    plan = (np.array([1], np.int64), np.array([0], np.int32), np.array([INF]), 0, no, no)

    def call(blocks: list[int], offsets: list[int], unique: int, rows: int = 2) -> None:
        counts = Counts.zeros(rows, 1)
        _native.replay_open(
            np.array(blocks, np.int32),
            np.array(offsets, np.int64),
            unique,
            good.times_s,
            *plan,
            counts.hits,
            counts.prefix,
            counts.stored,
        )

    call([0, 1, 1], [0, 2, 3], 2)
    for blocks, offsets, unique, rows in (
        ([0, 2, 1], [0, 2, 3], 2, 2),
        ([0, -1, 1], [0, 2, 3], 2, 2),
        ([0, 1, 1], [0, 2, 4], 2, 2),
        ([0, 1, 1], [0, 4, 3], 2, 2),
        ([0, 1, 1], [1, 2, 3], 2, 2),
        ([0, 1, 1], [0, 2, 3], 2, 1),
    ):
        with pytest.raises(ValueError):
            call(blocks, offsets, unique, rows)


def test_a_tier_smaller_than_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="host: 5 bytes hold no block of 6"):
        cache_plan((TierPlan("host", 5, 1.0, 0.0),), 6, Placement.WRITE_THROUGH)


def test_offsets_and_lengths_of_a_trace_are_checked() -> None:
    good = trace_of([[0, 1], [1]])
    with pytest.raises(ConfigError, match="offsets"):
        Trace(*(good.block_tokens, good.blocks, good.offsets[:-1], good.times_s, good.input_tokens),
              good.output_tokens, good.sessions, good.think_s, 2)  # fmt: skip
    with pytest.raises(ConfigError, match=r"\[0, 1\)"):
        Trace(*(good.block_tokens, good.blocks, good.offsets, good.times_s, good.input_tokens),
              good.output_tokens, good.sessions, good.think_s, 1)  # fmt: skip


@pytest.mark.speed
def test_a_long_trace_of_long_requests_is_replayed_in_time() -> None:
    # A tenth of 50 000 requests of 120 000 tokens in blocks of 64, a tenth of the blocks unique; the bound is 2 * 6 s.
    requests, size = 5_000, 1_875
    unique = requests * size // 10
    rng = np.random.default_rng(9)
    starts = rng.integers(0, unique - size, requests)
    blocks = (starts[:, None] + np.arange(size)).astype(np.int32).reshape(-1)
    ones = np.ones(requests, np.int64)
    trace = Trace(
        64,
        blocks,
        np.arange(0, requests * size + 1, size),
        np.arange(requests, dtype=np.float64),
        120_000 * ones,
        ones,
        np.arange(requests, dtype=np.int32),
        np.zeros(requests),
        unique,
    )
    times: list[float] = []
    while min(times, default=12) >= 12 and len(times) < 3:  # of processor; a busy machine makes even that longer
        start = time.thread_time()
        run_open(trace, plan_of(unique // 4))
        times.append(time.thread_time() - start)
    assert min(times) < 12
