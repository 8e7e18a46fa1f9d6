"""The older in-process door with chunks in which nothing is taken for attention, and what becomes of its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

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


def checked(tmp_path: Path, **options: Any) -> str:
    """What LMCache's own check of a remote backend says, with our plugin's `options`."""
    given = {"module_path": "kvtier.connectors.lmcache.remote", "class_name": "KvtierConnectorAdapter", **options}
    settings = {
        "chunk_size": 256,
        "local_cpu": False,
        "max_local_cpu_size": 0.1,
        "remote_storage_plugins": ["kvtier"],
        "remote_url": "plugin://kvtier",
        "extra_config": {f"remote_storage_plugin.kvtier.{name}": value for name, value in given.items()},
    }
    (tmp_path / "lmcache.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "lmcache.v1.basic_check", "--mode", "test_remote"]
    environment = {**os.environ, "LMCACHE_CONFIG_FILE": str(tmp_path / "lmcache.yaml")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    return done.stdout + done.stderr


def test_lmcaches_own_check_passes_and_a_mistake_is_named_in_its_warning(tmp_path: Path) -> None:
    (tmp_path / "kvtier.yaml").write_text(
        "kv_cache_compression_config: [{algorithm: quantization_for_cold_page, quant: none}]\n"
        "tiers: [{type: host, capacity: 16MiB}]\n"
    )
    said = checked(tmp_path, config=str(tmp_path / "kvtier.yaml"))
    assert "Validation (not None): 5/5 passed" in said and "(content correct): 5/5 passed" in said, said[-3000:]
    said = checked(tmp_path, confg=str(tmp_path / "kvtier.yaml"))
    assert "Failed to initialize/re-establish remote connection: unknown option 'confg'" in said, said[-3000:]
    assert "did you mean 'config'? Else remove it" in said
