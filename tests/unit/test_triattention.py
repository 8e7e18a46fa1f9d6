"""TriAttention's arithmetic: the score against an fp64 oracle, its identity with attention, selection, rotary types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.compression.triattention import Rotary, rotary_of
from kvtier.errors import ConfigError
from kvtier.kernels.triattention import fast, reference

HEAD_DIM, HALF = 16, 8
OMEGA = 10000.0 ** (-np.arange(HALF) / HALF)


def rotary(style: str = "half", gain: float = 1.0, omega: np.ndarray[Any, Any] = OMEGA) -> Rotary:
    half = len(omega)
    pairs = np.arange(2 * half).reshape(2, half) if style == "half" else np.arange(2 * half).reshape(half, 2).T
    return Rotary(omega, np.full(half, gain), pairs[0].astype(np.int64), pairs[1].astype(np.int64))


def statistics(heads: int, seed: int, half: int = HALF) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    mean = (rng.normal(size=(heads, half)) + 1j * rng.normal(size=(heads, half))).astype(np.complex64)
    return mean, (np.abs(mean) + rng.random((heads, half))).astype(np.float32)


@pytest.mark.parametrize("style", ["half", "interleaved", "uneven"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("t", [0, 300, 95_000])
def test_fast_score_is_the_oracles(style: str, dtype: torch.dtype, t: int) -> None:
    kv_heads, heads, tokens = 2, 6, 50
    turn = rotary("half" if style == "uneven" else style, gain=1.3)
    if style == "uneven":  # a quarter of the dimensions is not rotated
        dims = np.array([0, 1, 2, 6, 7, 8, 12, 13]), np.array([3, 4, 5, 9, 10, 11, 14, 15])
        turn = Rotary(turn.omega * (np.arange(HALF) < 6), turn.gain, *dims)
    mean, absolute = statistics(heads, seed=t)
    keys = torch.randn(kv_heads, tokens, HEAD_DIM, generator=torch.Generator().manual_seed(t)).to(dtype) * 3
    arguments = (turn.omega, turn.gain, turn.real, turn.imag)
    table = fast.layer_table(mean, absolute, *arguments, kv_heads, torch.device("cpu"))
    found = fast.score(keys, table, fast.mean_phase(turn.omega, t))
    assert found.shape == (heads, tokens) and found.dtype == torch.float32
    for head in range(heads):
        own = keys[head // (heads // kv_heads)].float().numpy()
        expected = reference.score(own, turn.real, turn.imag, mean[head], absolute[head], turn.omega, turn.gain, t)
        np.testing.assert_allclose(found[head].numpy(), expected, atol=5e-3, rtol=0)
        assert np.abs(expected).max() > 1  # the tolerance means something


def test_an_fp32_phase_would_be_off() -> None:
    """Why phases are fp64: near position 95 000 they would miss the oracle."""
    omega = 10000.0 ** (-np.arange(64) / 64)
    exact = np.exp(1j * omega * 95_001.0)
    single = np.exp(1j * (omega.astype(np.float32) * np.float32(95_001.0)).astype(np.float64))
    assert np.abs(exact - single).max() > 1e-3
    np.testing.assert_allclose(fast.mean_phase(omega, 95_000, (1,)).numpy(), exact, atol=1e-12)


def test_one_offset_is_the_attention_product() -> None:
    """With one offset and queries equal to their mean, the first term is the rotated query times the rotated key."""
    turn = rotary()
    rng = np.random.default_rng(1)
    query = rng.normal(size=HEAD_DIM)
    keys = rng.normal(size=(20, HEAD_DIM))
    positions = np.arange(100, 120)
    stored = turn.rotate(keys, positions)
    t, d = 500, 4
    rotated_query = turn.rotate(query[None], np.array([t + d]))[0]
    mean = query[turn.real] + 1j * query[turn.imag]
    expected = stored @ rotated_query
    # |mean| as the mean absolute value makes the second term vanish.
    oracle = reference.score(stored, turn.real, turn.imag, mean, np.abs(mean), turn.omega, turn.gain, t, offsets=(d,))
    np.testing.assert_allclose(oracle, expected, atol=1e-9)
    table = fast.layer_table(
        mean[None], np.abs(mean)[None], turn.omega, turn.gain, turn.real, turn.imag, 1, torch.device("cpu")
    )
    found = fast.score(torch.from_numpy(stored)[None].float(), table, fast.mean_phase(turn.omega, t, (d,)))
    np.testing.assert_allclose(found[0].numpy(), expected, atol=1e-5)


values = st.sampled_from([-2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 3.0, float("nan"), float("inf"), float("-inf")])


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3), st.lists(values, min_size=1, max_size=30), st.data())
def test_selection_is_the_references_bit_for_bit(rows: int, base: list[float], data: st.DataObject) -> None:
    budget = data.draw(st.integers(1, len(base)))
    scores = np.array([data.draw(st.permutations(base)) for _ in range(rows)], dtype=np.float32)[:, None]
    expected = reference.select(scores, budget)
    found = fast.select(torch.from_numpy(scores), budget)
    np.testing.assert_array_equal(found.numpy(), expected)
    assert found.dtype == torch.int64 and found.shape == (rows, 1, budget)


def test_ties_take_the_lowest_index_in_ascending_order() -> None:
    scores = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 0.0]])
    assert fast.select(scores, 4).tolist() == [[0, 1, 2, 3]]
    assert fast.select(scores, 2).tolist() == [[1, 3]]
    assert fast.select(scores, 9).tolist() == [[0, 1, 2, 3, 4, 5]]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(2, 40), st.integers(0, 10**6), st.data())
def test_union_is_the_plain_best_of_the_maximum(
    layers: int, kv_heads: int, group: int, tokens: int, seed: int, data: st.DataObject
) -> None:
    budget = data.draw(st.integers(1, tokens))
    scores = np.random.default_rng(seed).normal(2.0, 3.0, size=(layers, kv_heads * group, tokens))
    normalized = (scores - scores.mean(-1, keepdims=True)) / np.maximum(scores.std(-1, keepdims=True), 1e-6)
    best = normalized.reshape(-1, tokens).max(axis=0)
    plain = sorted(sorted(range(tokens), key=lambda n: (-best[n], n))[:budget])
    assert reference.select(reference.reduce(scores, kv_heads, "union"), budget)[0, 0].tolist() == plain


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(reference.MODES), st.booleans(), st.integers(1, 4), st.integers(2, 30), st.integers(0, 10**6))
def test_reduction_is_the_references(mode: str, normalized: bool, layers: int, tokens: int, seed: int) -> None:
    kv_heads, heads = 2, 6
    scores = np.random.default_rng(seed).normal(5.0, 2.0, size=(layers, heads, tokens)).astype(np.float32)
    reduction = fast.Reduction(mode, kv_heads, normalized=normalized)
    for layer in scores:
        reduction.add(torch.from_numpy(layer))
    expected = reference.reduce(scores.astype(np.float64), kv_heads, mode, normalized=normalized)
    assert reduction.result().shape == expected.shape
    np.testing.assert_allclose(reduction.result().numpy(), expected, atol=2e-5)


def test_a_constant_row_is_not_divided_by_zero() -> None:
    assert fast.normalize(torch.full((1, 5), 7.0)).tolist() == [[0.0] * 5]
    assert reference.normalize(np.full((1, 5), 7.0)).tolist() == [[0.0] * 5]


@pytest.mark.parametrize("mode", ["Union", "head", ""])
def test_unknown_modes_are_refused(mode: str) -> None:
    with pytest.raises(ValueError, match="give one of union, per_head, per_layer_perhead"):
        fast.Reduction(mode, 1)
    with pytest.raises(ValueError, match="give one of union"):
        reference.reduce(np.zeros((1, 1, 1)), 1, mode)


class Config:
    """A model's configuration, as far as the rotary embedding asks."""

    model_type = "example"
    hidden_size, num_attention_heads, head_dim = 64, 4, HEAD_DIM
    max_position_embeddings = 4096

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def test_default_frequencies_and_both_layouts() -> None:
    config = Config(rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    half, interleaved = (rotary_of(config, {}, 0, style=style) for style in ("half", "interleaved"))
    np.testing.assert_allclose(half.omega, OMEGA, rtol=1e-6)
    assert half.real.tolist() == list(range(8)) and half.imag.tolist() == list(range(8, 16))
    assert interleaved.real.tolist() == list(range(0, 16, 2))
    assert half.valid_tokens is None and half.gain.tolist() == [1.0] * HALF


def test_dimensions_that_are_not_rotated_count_as_frequency_zero() -> None:
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    turn = rotary_of(Config(rope_parameters=parameters), {}, 0)
    assert turn.omega[4:].tolist() == [0.0] * 4 and (turn.omega[:4] > 0).all()
    assert sorted([*turn.real.tolist(), *turn.imag.tolist()]) == list(range(16))
    x = np.random.default_rng(0).normal(size=(3, HEAD_DIM))
    np.testing.assert_array_equal(turn.rotate(x, np.array([0, 7, 9]))[:, 8:], x[:, 8:])


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (None, ["no rope_parameters"]),
        ({"rope_theta": 10000.0}, ["rope_type = None", "default"]),
        ({"rope_type": "spiral", "rope_theta": 1e4}, ["'spiral'", "linear"]),
        ({"rope_type": "default"}, ["rope_theta is missing"]),
    ],
)
def test_missing_or_unknown_rotary_types_are_errors(parameters: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        rotary_of(Config(rope_parameters=parameters), {"linear": lambda *_: None}, 0)
    for word in words:
        assert word in str(caught.value)
    with pytest.raises(ConfigError, match="rope_style"):
        rotary_of(Config(rope_parameters={"rope_type": "default", "rope_theta": 1e4}), {}, 0, style="thirds")
