"""The older in-process door with chunks in which nothing is taken for attention, and what becomes of its memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .test_remote import Engine, config


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Any]:
    made: list[Engine] = []

    def build(**options: Any) -> Engine:
        made.append(Engine(config(tmp_path, **options)))
        return made[-1]

    yield build
    for one in made:
        one.close()


@pytest.mark.parametrize("attention", ["none", "sglang", "mla"])
def test_whole_chunks_come_back_where_nothing_fits_the_attention_that_is_named(engine: Any, attention: str) -> None:
    import torch

    worker = engine(attention=attention)
    items = [worker.chunk(n) for n in range(3)]
    written = [worker.values(item) for item in items]
    for n, item in enumerate(items):
        worker.run(worker.connector.put(worker.key(n), item))
    assert all(worker.connector.exists_sync(worker.key(n)) for n in range(3))
    for n, want in enumerate(written):
        got = worker.run(worker.connector.get(worker.key(n)))
        assert got is not None, "a chunk that exists comes back"
        assert torch.equal(worker.values(got), want)
        got.ref_count_down()
    assert worker.connector.getWrappedConnector()._chunks.ledger.snapshot().hits["host"] == 3


def test_a_partial_chunk_that_cannot_be_kept_costs_the_others_of_its_batch_nothing(engine: Any) -> None:
    worker = engine(attention="none")
    items = [worker.chunk(1), worker.chunk(2), worker.chunk(3, 17)]
    inner = worker.connector.getWrappedConnector()
    worker.run(inner.batched_put([worker.key(n) for n in (1, 2, 3)], items))
    assert all(item.get_ref_count() == 1 for item in items)
    for item in items:
        item.ref_count_down()
    assert inner.batched_contains([worker.key(n) for n in (1, 2, 3)]) == 2
    assert inner._chunks.ledger.snapshot().errors["engine"] == 1, "the third one is counted"
