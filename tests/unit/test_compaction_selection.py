"""Which positions stay: selectors against their definitions, and the native greedy choice against the plain one."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.compression.compaction import selection
from kvtier.compression.compaction.recipe import budget_tokens
from kvtier.errors import ConfigError
from kvtier.kernels.compaction import coverage, coverage_reference

EXAMPLES = settings(max_examples=150, deadline=None)


@st.composite
def shares(draw: st.DrawFn) -> npt.NDArray[np.float64]:
    """``[positions, rows]``, with ties, zeros, columns that are alike, and very small numbers."""
    positions, rows = draw(st.integers(1, 14)), draw(st.integers(1, 5))
    value = st.one_of(
        st.sampled_from([0.0, 0.0, 0.25, 0.5, 1e-9, 1e-300, 5e-324, 1.0]), st.floats(0, 1, allow_subnormal=False)
    )
    columns = draw(st.lists(st.lists(value, min_size=rows, max_size=rows), min_size=1, max_size=positions))
    picks = draw(st.lists(st.integers(0, len(columns) - 1), min_size=positions, max_size=positions))
    return np.array([columns[n] for n in picks], np.float64)


@EXAMPLES
@given(shares(), st.data())
def test_lazy_greedy_is_naive_greedy(p: npt.NDArray[np.float64], data: st.DataObject) -> None:
    """In the same order, ties to the lowest position."""
    first = np.array(sorted(data.draw(st.sets(st.integers(0, len(p) - 1)))), np.int64)
    count = data.draw(st.integers(0, len(p) - len(first)))
    lazy = coverage.choose(p, count, chosen=first)
    assert lazy.tolist() == coverage_reference.choose(p, count, chosen=first).tolist()


@pytest.mark.parametrize(("positions", "rows", "count"), [(300, 24, 210), (700, 3, 699)])
def test_lazy_greedy_is_naive_greedy_on_more(positions: int, rows: int, count: int) -> None:
    """Against the formula as it is written, all gains of a step at once."""
    rng = np.random.default_rng(3)
    p = np.exp(1.5 * rng.normal(size=(positions, rows)))
    p /= p.sum(axis=0)
    covered, left, order = np.zeros(rows), np.ones(positions, bool), []
    for _ in range(count):
        gains = (np.log(covered + p + coverage_reference.EPSILON) - np.log(covered + coverage_reference.EPSILON)).sum(
            axis=1
        )
        best = int(np.where(left, gains, -np.inf).argmax())
        order.append(best)
        covered, left[best] = covered + p[best], False
    reports: list[int] = []
    assert coverage.choose(p, count, progress=reports.append).tolist() == order
    assert reports[-1] == count and reports == sorted(reports)


@EXAMPLES
@given(shares())
def test_the_objective_grows_and_its_steps_shrink(p: npt.NDArray[np.float64]) -> None:
    order = coverage.choose(p, len(p))
    assert sorted(order.tolist()) == list(range(len(p)))
    covered, gains = np.zeros(p.shape[1]), []
    for position in order:
        gains.append(coverage_reference.gain(p[position], covered))
        covered += p[position]
    assert all(gain >= 0 for gain in gains)
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in itertools.pairwise(gains))
    assert math.isclose(
        sum(gains), float(np.log1p(covered / coverage_reference.EPSILON).sum()), rel_tol=1e-9, abs_tol=1e-12
    )


@EXAMPLES
@given(shares(), st.data())
def test_a_set_adds_no_less_to_fewer(p: npt.NDArray[np.float64], data: st.DataObject) -> None:
    """Submodular: what a position adds to a set, it adds at least to any part of the set."""
    larger = data.draw(st.sets(st.integers(0, len(p) - 1)))
    smaller = data.draw(st.sets(st.sampled_from(sorted(larger)))) if larger else set()
    position = data.draw(st.integers(0, len(p) - 1))
    few, many = (p[sorted(s)].sum(axis=0) if s else np.zeros(p.shape[1]) for s in (smaller, larger))
    many = np.maximum(few, many)  # not below by rounding
    to_few, to_many = (coverage_reference.gain(p[position], c) for c in (few, many))
    assert to_few >= to_many * (1 - 1e-12)


@pytest.mark.parametrize("bad", [-1e-9, math.nan, math.inf])
def test_shares_that_are_none_are_refused(bad: float) -> None:
    p = np.full((4, 2), 0.25)
    p[2, 1] = bad
    with pytest.raises(ValueError, match="finite and not negative"):
        coverage.choose(p, 1)
    with pytest.raises(ValueError, match="5 positions are to be chosen of 4"):
        coverage.choose(np.full((4, 2), 0.25), 5)


def scores(layers: int = 3, heads: int = 2, tokens: int = 40, seed: int = 0) -> torch.Tensor:
    return torch.rand(layers, heads, tokens, generator=torch.Generator().manual_seed(seed))


def counts(kept: selection.Kept) -> list[list[int]]:
    return [[len(k) for k in layer] for layer in kept]


def check_sets(kept: selection.Kept, tokens: int, protected: int) -> None:
    for layer in kept:
        for k in layer:
            assert k.dtype == torch.int64 and (k[1:] > k[:-1]).all() and int(k[0]) >= 0 and int(k[-1]) < tokens
            assert k[:protected].tolist() == list(range(protected))


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("protected", [0, 4])
def test_every_selector_keeps_its_budget_and_what_is_protected(ratio: float, protected: int) -> None:
    s, tokens = scores(), 40
    for kept in (selection.pair(s, ratio, protected), selection.uniform(s, ratio, protected)):
        check_sets(kept, tokens, protected)
        per_head = max(protected, 1)
        assert sum(map(sum, counts(kept))) == max(6 * per_head, budget_tokens(tokens * 6, ratio))
    assert set(map(tuple, counts(selection.uniform(s, ratio, protected)))) == {
        (max(protected, 1, budget_tokens(tokens, ratio)),) * 2
    }
    by_head = selection.head(selection.head_scores_of(s, protected), tokens, ratio, protected, recent=3)
    check_sets(by_head, tokens, protected)
    assert sum(map(sum, counts(by_head))) == max(6 * max(protected, 1), budget_tokens(tokens * 6, ratio))
    for selector in selection.GROUP_SELECTORS:
        k = selection.group(selector, s.flatten(0, 1), budget_tokens(tokens, ratio), protected)
        check_sets(((k,),), tokens, protected)
        assert len(k) == max(protected, 1, budget_tokens(tokens, ratio))


def test_ratio_0_keeps_everything() -> None:
    s = scores()
    everything = list(range(40))
    sets = [*selection.pair(s, 0.0), *selection.uniform(s, 0.0), *selection.head(s.amax(-1), 40, 0.0)]
    sets += [(selection.group(selector, s.flatten(0, 1), 40, 4),) for selector in selection.GROUP_SELECTORS]
    assert all(k.tolist() == everything for layer in sets for k in layer)


def test_pair_has_one_threshold() -> None:
    s = scores()
    kept = selection.pair(s, 0.6, protected=4)
    stays = torch.zeros(3, 2, 40, dtype=torch.bool)
    for layer, heads in enumerate(kept):
        for head, k in enumerate(heads):
            stays[layer, head, k] = True
    free = torch.arange(40) >= 4
    assert s[stays & free].min() > s[~stays].max()
    assert len({len(k) for layer in kept for k in layer}) > 1


def test_ties_go_to_the_lowest_position() -> None:
    flat = torch.ones(1, 2, 6)
    assert [k.tolist() for k in selection.uniform(flat, 0.5)[0]] == [[0, 1, 2]] * 2
    assert [k.tolist() for k in selection.pair(flat, 0.5)[0]] == [[0, 1, 2, 3, 4], [0]]
    for selector in selection.GROUP_SELECTORS:
        assert selection.group(selector, flat[0], 3).tolist() == [0, 1, 2]


def test_head_gives_the_best_heads_everything_and_the_others_their_latest() -> None:
    kept = selection.head(torch.tensor([[0.1, 0.9], [0.5, 0.2]]), 20, 0.5, protected=2, recent=3)
    assert [k.tolist() for k in kept[0]] == [[0, 1, 17, 18, 19], list(range(20))]
    assert kept[1][0].tolist() == [0, 1, *range(12, 20)]
    assert kept[1][1].tolist() == [0, 1, 17, 18, 19]
    # Too little for the latest of every head: all get the same.
    assert counts(selection.head(torch.rand(2, 2), 20, 0.9, protected=2, recent=10)) == [[2, 2], [2, 2]]


def test_selectors_see_what_they_are_named_after() -> None:
    """One row with a large peak, one spread thin: the largest value, the largest share, and the coverage of both."""
    s = torch.zeros(2, 8)
    s[0, :4] = torch.tensor([0.9, 0.85, 0.8, 0.75])
    s[1, 4:] = torch.tensor([0.05, 0.04, 0.03, 0.02])
    assert selection.group("raw_max", s, 2).tolist() == [0, 1]
    assert selection.group("normalized_max", s, 2).tolist() == [4, 5]
    assert selection.group("log_coverage", s, 2).tolist() == [0, 4]
    p = selection.shares_of(s)
    torch.testing.assert_close(p.sum(dim=1), torch.ones(2, dtype=torch.float64))
    assert torch.equal(selection.largest_shares(s), p.amax(dim=0))
    covered = selection.covered(p, torch.tensor([0, 4]))
    torch.testing.assert_close(covered, torch.tensor([0.9 / 3.3, 5 / 14], dtype=torch.float64), rtol=1e-6, atol=0)
    assert selection.Coverage.of(covered) == selection.Coverage(float(covered.mean()), float(covered[0]))


def test_a_row_that_nobody_looked_at_has_no_shares() -> None:
    s = torch.zeros(2, 5)
    s[1, 3] = 1.0
    assert selection.shares_of(s)[0].tolist() == [0.0] * 5
    assert torch.equal(selection.largest_shares(s), selection.shares_of(s).amax(dim=0))
    for selector in selection.GROUP_SELECTORS:
        assert selection.group(selector, s, 2, protected=1).tolist() == [0, 3]


def test_unknown_selectors_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'best'.*raw_max, normalized_max, log_coverage"):
        selection.group("best", torch.rand(2, 4), 2)
