"""Row packing: the fast version moves the same bytes as the reference, which moves one row at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.kernels.rowpack import fast, reference
from kvtier.kernels.rowpack.sequences import PagedSequence

GROUPS, HEADS = 3, 2


def nhd(pages: int, page_tokens: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """A pool of rows ``[slots, heads, dim]``, seen as pages."""
    return torch.randn(pages * page_tokens, HEADS, dim).to(dtype).view(pages, page_tokens, HEADS, dim)


def hnd(pages: int, page_tokens: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """A pool with the heads outside, seen with the tokens outside."""
    return torch.randn(pages, HEADS, page_tokens, dim).to(dtype).transpose(1, 2)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[torch.Tensor]], list[PagedSequence]]:
    page_tokens = draw(st.sampled_from([1, 4, 16]))
    make = draw(st.sampled_from([nhd, hnd]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    needed = [-(-rows // page_tokens) for rows in lengths]
    pages = sum(needed) + 2
    torch.manual_seed(draw(st.integers(0, 1000)))
    free = torch.randperm(pages)
    shape = (draw(st.sampled_from([1, GROUPS])), draw(st.sampled_from([1, HEADS])))
    sequences = []
    for rows, count in zip(lengths, needed, strict=True):
        table, free = free[:count], free[count:]
        tail = draw(st.integers(0, rows))
        first = draw(st.integers(0, rows - tail))
        evictable = rows - tail - first
        kept = draw(st.integers(0, evictable))
        ordinals = torch.stack([torch.randperm(evictable)[:kept].sort().values for _ in range(shape[0] * shape[1])])
        sequences.append(PagedSequence(table, rows, first, ordinals.view(*shape, kept), tail))
    pools = [[make(pages, page_tokens, 6, dtype), make(pages, page_tokens, 3, dtype)] for _ in range(GROUPS)]
    return pools, sequences


def copies(pools: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    # clone() keeps the strides, so the view of an HND pool stays one.
    return [[pool.clone() for pool in group] for group in pools]


@settings(max_examples=80, deadline=None)
@given(cases())
def test_fast_moves_the_same_bytes_as_the_reference(
    case: tuple[list[list[torch.Tensor]], list[PagedSequence]],
) -> None:
    pools, sequences = case
    slow, quick = copies(pools), copies(pools)
    expected, found = reference.pack(slow, sequences), fast.pack(quick, sequences)
    assert [(p.rows, p.freed_pages.tolist()) for p in expected] == [(p.rows, p.freed_pages.tolist()) for p in found]
    for group, (left, right) in enumerate(zip(slow, quick, strict=True)):
        for a, b in zip(left, right, strict=True):
            for sequence in sequences:
                assert same_rows(a, b, sequence), f"group {group}"


@settings(max_examples=40, deadline=None)
@given(cases())
def test_reference_keeps_exactly_the_chosen_rows(
    case: tuple[list[list[torch.Tensor]], list[PagedSequence]],
) -> None:
    pools, sequences = case
    before = copies(pools)
    packed = reference.pack(pools, sequences)
    for group in range(GROUPS):
        for old, new in zip(before[group], pools[group], strict=True):
            for sequence, result in zip(sequences, packed, strict=True):
                for head in range(HEADS):
                    kept = sequence.kept.expand(GROUPS, HEADS, -1)[group, head] + sequence.first_row
                    rows = [
                        *range(sequence.first_row),
                        *kept.tolist(),
                        *range(sequence.rows - sequence.tail_rows, sequence.rows),
                    ]
                    assert len(rows) == result.rows
                    expected = table_rows(old, sequence, sequence.rows)[rows, head]
                    assert torch.equal(table_rows(new, sequence, result.rows)[:, head], expected)


def table_rows(pool: torch.Tensor, sequence: PagedSequence, rows: int) -> torch.Tensor:
    """``[rows, heads, dim]`` of a sequence."""
    return pool[sequence.pages].flatten(0, 1)[:rows]


def same_rows(a: torch.Tensor, b: torch.Tensor, sequence: PagedSequence) -> bool:
    rows = sequence.packed_rows
    return torch.equal(table_rows(a, sequence, rows), table_rows(b, sequence, rows))


def test_other_sequences_are_not_touched() -> None:
    pool = nhd(6, 4, 3, torch.float32)
    before = pool.clone()
    kept = torch.arange(0, 8, 2).view(1, 1, -1)
    (packed,) = fast.pack([[pool]], [PagedSequence(torch.tensor([4, 1, 3]), 10, 2, kept)])
    assert (packed.rows, packed.freed_pages.tolist()) == (6, [3])
    assert torch.equal(pool[[0, 2, 5]], before[[0, 2, 5]])


@pytest.mark.parametrize("pack", [reference.pack, fast.pack])
@pytest.mark.parametrize(
    ("kept", "rows", "words"),
    [
        (torch.tensor([[[1, 0]]]), 8, "ascending"),
        (torch.tensor([[[0, 0]]]), 8, "ascending"),
        (torch.tensor([[[0, 6]]]), 8, r"lie in \[0, 6\)"),
        (torch.tensor([[[-1, 2]]]), 8, "lie in"),
        (torch.tensor([[[0, 1], [0, 1], [0, 1]]]), 8, "does not fit"),
        (torch.tensor([[0, 1]]), 8, "int64"),
        (torch.tensor([[[0, 1]]], dtype=torch.int32), 8, "int64"),
        (torch.tensor([[[0, 1]]]), 9, "do not fit 2 pages"),
        (torch.arange(7).view(1, 1, -1), 8, "7 kept of 8 rows"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_moves(
    pack: Callable[..., object], kept: torch.Tensor, rows: int, words: str
) -> None:
    pool = nhd(2, 4, 3, torch.float32)
    before = pool.clone()
    good = PagedSequence(torch.tensor([0, 1]), 8, 2, torch.tensor([[[3]]]))
    with pytest.raises(ValueError, match=words):
        pack([[pool]], [good, PagedSequence(torch.tensor([0, 1]), rows, 2, kept)])
    assert torch.equal(pool, before)
