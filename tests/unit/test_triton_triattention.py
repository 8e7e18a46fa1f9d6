"""TriAttention and row packing in Triton's interpreter against their references, on tiny caches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from kvtier.kernels.rowpack import reference as pack_reference
from kvtier.kernels.rowpack.sequences import PagedSequence
from kvtier.kernels.triattention import fast, reference

pytest.importorskip("triton", reason="triton is not installed: pip install 'kvtier[triton]'")
with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
    from kvtier.kernels.rowpack import triton as rowpack
    from kvtier.kernels.triattention import triton as device
    from kvtier.kernels.triattention import triton_kernels as kernels

# numpy, which interprets, warns of overflow where a GPU is silent.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

LAYERS, KV_HEADS, HEADS, HALF = 2, 2, 6, 12
OMEGA = 10000.0 ** (-np.arange(HALF) / HALF)
REAL, IMAG = np.arange(HALF), np.arange(HALF) + 14  # two columns in the middle are not rotated
GAIN = np.full(HALF, 1.3)
Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    assert type(kernels.score_kernel).__name__ == "InterpretedFunction"
    monkeypatch.setattr(device, "_TOKENS", 32)  # several tiles of a few tokens
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        yield


def statistics(seed: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    mean = (rng.normal(size=(HEADS, HALF)) + 1j * rng.normal(size=(HEADS, HALF))).astype(np.complex64)
    return mean, (np.abs(mean) + rng.random((HEADS, HALF))).astype(np.float32)


def tables() -> tuple[list[fast.LayerTable], device.ModelTable]:
    cpu = torch.device("cpu")
    layers = [fast.layer_table(*statistics(n), OMEGA, GAIN, REAL, IMAG, KV_HEADS, cpu) for n in range(LAYERS)]
    return layers, device.ModelTable.of(layers, torch.from_numpy(REAL), torch.from_numpy(IMAG), cpu)


@pytest.mark.parametrize("t", [0, 300, 95_000])
def test_phase_rows(t: int) -> None:
    layers, table = tables()
    rows = device.phase_rows(table, t)
    assert rows.shape == (LAYERS, HEADS, 2, HALF)
    for layer, one in enumerate(layers):
        expected = (one.mean * fast.mean_phase(OMEGA, t)).numpy()
        np.testing.assert_allclose(rows[layer, :, 0].numpy(), expected.real, atol=1e-6)
        np.testing.assert_allclose(rows[layer, :, 1].numpy(), expected.imag, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("page_tokens", "inner_heads"), [(1, True), (16, False)])
def test_score_over_pages_is_the_oracles(dtype: Any, page_tokens: int, inner_heads: bool) -> None:
    first, count, t, dim = 5, 37, 95_000, 26
    pages = -(-(first + count) // page_tokens)
    generator = torch.Generator().manual_seed(page_tokens)
    order = torch.randperm(pages + 3, generator=generator)[:pages]
    pools = []
    for _ in range(LAYERS):
        shape = (pages + 3, page_tokens, KV_HEADS, dim) if inner_heads else (pages + 3, KV_HEADS, page_tokens, dim)
        pool = (torch.randn(shape, generator=generator) * 3).to(dtype)
        pools.append(pool if inner_heads else pool.transpose(1, 2))
    layers, table = tables()
    weights = torch.stack([one.mean * fast.mean_phase(OMEGA, t) for one in layers])
    rows = torch.stack([weights.real, weights.imag], dim=2).float()
    scores = device.score(pools, order, first, count, table, rows)
    assert scores.shape == (LAYERS, HEADS, count)
    for layer in range(LAYERS):
        mean, absolute = statistics(layer)
        keys = pools[layer][order].reshape(-1, KV_HEADS, dim)[first : first + count].float().numpy()
        for head in range(HEADS):
            own = keys[:, head // (HEADS // KV_HEADS)]
            expected = reference.score(own, REAL, IMAG, mean[head], absolute[head], OMEGA, GAIN, t)
            np.testing.assert_allclose(scores[layer, head].numpy(), expected, atol=5e-3, rtol=0)
            assert np.abs(expected).max() > 1


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("mode", reference.MODES)
def test_reductions(mode: str, normalized: bool) -> None:
    scores = torch.randn(3, HEADS, 70, generator=torch.Generator().manual_seed(4)) * 5 + 100
    scores[1, 2] = 7.0  # no deviation at all: the floor
    found = device.reduce(scores, KV_HEADS, mode, normalized=normalized)
    expected = reference.reduce(scores.double().numpy(), KV_HEADS, mode, normalized=normalized)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5, rtol=1e-6)


def test_modes_have_the_numbers_of_the_kernel() -> None:
    numbers = {"union": kernels.UNION, "per_head": kernels.PER_HEAD, "per_layer_perhead": kernels.PER_LAYER_PERHEAD}
    assert {mode: reference.MODES.index(mode) for mode in reference.MODES} == {m: n.value for m, n in numbers.items()}


@pytest.mark.parametrize("budget", [0, 1, 31, 69, 70, 99])
@pytest.mark.parametrize("kind", ["all alike", "few values", "spread", "hostile"])
def test_selection_is_the_references(kind: str, budget: int) -> None:
    rng = np.random.default_rng(budget)
    scores = {
        "all alike": np.full((2, 70), -3.5),
        "few values": rng.integers(-2, 2, (2, 70)).astype(float),
        "spread": rng.normal(size=(2, 70)) * np.exp2(rng.integers(-120, 120, (2, 70))),
        "hostile": rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-42, -1e-42], (2, 70)),
    }[kind].astype(np.float32)
    expected = reference.select(scores, budget)
    np.testing.assert_array_equal(device.select(torch.from_numpy(scores), budget).numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize(("groups", "heads"), [(1, 1), (1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("page_tokens", [1, 16])
def test_packing_moves_the_same_bytes(
    page_tokens: int, groups: int, heads: int, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rowpack, "_TILE_UNITS", 16)  # tiles of four rows: many have to follow each other
    generator = torch.Generator().manual_seed(groups * heads)
    lengths = ((40, 5, 3), (23, 0, 0))
    free = torch.randperm(80 // page_tokens + 4, generator=generator)
    sequences = []
    for rows, first, tail in lengths:
        used = -(-rows // page_tokens)
        table, free = free[:used], free[used:]
        evictable = rows - first - tail
        kept = torch.stack(
            [
                torch.randperm(evictable, generator=generator)[: evictable // 2].sort().values
                for _ in range(groups * heads)
            ]
        )
        sequences.append(PagedSequence(table, rows, first, kept.view(groups, heads, -1), tail))
    shapes = ((80 // page_tokens + 4, page_tokens, 2, 6), (80 // page_tokens + 4, 2, page_tokens, 6))
    pools = [
        [
            torch.randint(0, 200, shapes[0], generator=generator).to(dtype),
            torch.randint(0, 200, shapes[1], generator=generator).to(dtype).transpose(1, 2),
        ]
        for _ in range(2)
    ]
    slow = [[pool.clone() for pool in group] for group in pools]
    expected, found = pack_reference.pack(slow, sequences), rowpack.pack(pools, sequences)
    assert [(p.rows, p.freed_pages.tolist()) for p in expected] == [(p.rows, p.freed_pages.tolist()) for p in found]
    for left, right in zip(slow, pools, strict=True):
        for a, b in zip(left, right, strict=True):
            for sequence, packed in zip(sequences, found, strict=True):
                pages = sequence.pages
                own = [x[pages].reshape(-1, *x.shape[2:])[: packed.rows] for x in (a, b)]
                assert torch.equal(own[0], own[1])
    assert rowpack.pack(pools, []) == []


def test_uneven_pools_are_refused() -> None:
    _, table = tables()
    pools = [torch.zeros(2, 4, KV_HEADS, 26), torch.zeros(2, 4, KV_HEADS, 26).to(torch.bfloat16)]
    with pytest.raises(ValueError, match="one shape, type and strides"):
        device.score(pools, torch.arange(2), 0, 8, table, torch.zeros(LAYERS, HEADS, 2, HALF))
    with pytest.raises(ValueError, match="eviction mode 'all'"):
        device.reduce(torch.zeros(1, 2, 3), 1, "all")
