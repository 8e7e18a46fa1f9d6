"""KVzip's pure parts: what is fed for each chunk, and the largest probability of each position."""

from __future__ import annotations

import pytest
import torch

from kvtier.compression.compaction.kvzip import (
    Chunk,
    RepeatPrompts,
    fitting_chunk,
    largest_probabilities,
    over_groups,
    plan,
)
from kvtier.errors import ConfigError
from kvtier.kernels.compaction import attention

PROMPTS = RepeatPrompts(first=(900, 901), later=(910,), suffix=(920, 921))


def test_every_position_behind_the_system_prompt_is_repeated_once() -> None:
    chunks = plan(range(100, 125), PROMPTS, start=3, chunk_tokens=10, overlap_tokens=4)
    assert chunks == [
        Chunk(3, 13, (900, 901, 920, 921, *range(103, 113))),
        Chunk(13, 23, (910, *range(109, 113), 920, 921, *range(113, 123))),
        Chunk(23, 25, (910, *range(119, 123), 920, 921, 123, 124)),
    ]
    assert plan(range(5), PROMPTS) == [Chunk(0, 5, (900, 901, 920, 921, 0, 1, 2, 3, 4))]
    # The overlap never reaches into the system prompt.
    assert plan(range(9), PROMPTS, start=5, chunk_tokens=2)[1].fed == (910, 5, 6, 920, 921, 7, 8)


@pytest.mark.parametrize(("start", "chunk_tokens"), [(5, 10), (6, 10), (-1, 10), (0, 0)])
def test_contexts_without_anything_to_score_are_refused(start: int, chunk_tokens: int) -> None:
    with pytest.raises(ConfigError, match="a context of 5 tokens"):
        plan(range(5), PROMPTS, start=start, chunk_tokens=chunk_tokens)


def test_chunks_never_pass_the_models_last_position() -> None:
    assert fitting_chunk(100, None, PROMPTS) == fitting_chunk(100, 1 << 20, PROMPTS) == 2000
    for tokens in (6000, 7000, 7925):
        size = fitting_chunk(tokens, 8192, PROMPTS)
        chunks = plan(range(tokens), PROMPTS, chunk_tokens=size)
        assert max(len(chunk.fed) for chunk in chunks) + tokens <= 8192
        assert 256 <= size <= 2000
    with pytest.raises(ConfigError, match=r"8192 positions.* give a context of 7925 tokens at most"):
        fitting_chunk(7926, 8192, PROMPTS)


@pytest.mark.parametrize("limit_bytes", [1, 4 * 4 * 17 * 3, 1 << 30])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])])
def test_the_largest_probability_is_that_of_the_whole_softmax(limit_bytes: int, sinks: torch.Tensor | None) -> None:
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(4, 7, 8, generator=generator)
    keys = torch.randn(2, 17, 8, generator=generator)

    def logits(part: torch.Tensor) -> torch.Tensor:
        return attention.logits(part, keys, scale=0.4, softcap=3.0)

    found = largest_probabilities(logits, queries, 17, slice(2, 10), last_rows=7, sinks=sinks, limit_bytes=limit_bytes)
    z = (queries @ keys.repeat_interleave(2, dim=0).transpose(1, 2)) * 0.4
    z = 3.0 * torch.tanh(z / 3.0)
    z[:, :, 10:] = z[:, :, 10:].masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), float("-inf"))
    weight = z.exp()
    total = weight.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None, None])
    torch.testing.assert_close(found, (weight / total)[:, :, 2:10].amax(dim=1), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(over_groups(found, 2)[1], torch.maximum(found[2], found[3]))


def test_slices_of_queries_bound_the_memory() -> None:
    parts = list(attention.query_slices(10, q_heads=4, rows=100, limit_bytes=3 * 4 * 100 * 4))
    assert [(p.start, p.stop) for p in parts] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert len(list(attention.query_slices(10, q_heads=4, rows=100, limit_bytes=1))) == 10
