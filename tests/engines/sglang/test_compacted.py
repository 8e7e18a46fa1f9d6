"""Compacted prefixes in a whole engine: the same tokens as under transformers, or an error that says why not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ArtefactError

from .engine_process import EngineProcess
from .ranked import Rank, run_ranks

PAGE, ROWS, NEW = 16, 80, 12
QUESTION = [(11 + i * 7) % 500 + 5 for i in range(70)]


@dataclass(frozen=True)
class Example:
    path: Path
    key: str
    answer: list[int]


def sets(rows: int = ROWS, heads: int = 2) -> list[Any]:
    """Of 4 layers, each head with its own."""
    from .compact_examples import drawn

    return [drawn(n, rows, heads) for n in range(4)]


def answered(folder: Path, path: Path, heads: int) -> Example:
    """A prefix of `folder`'s model, and what transformers answers behind it."""
    from kvtier.cli.compact import _read
    from kvtier.connectors.transformers.compact_serving import CompactServing

    from .compact_examples import compact, model_of

    prefix, model = compact(folder, path, sets(heads=heads)), model_of(folder)
    with CompactServing(model, prefix, model_name="tiny") as serving:
        answer = serving.generate([QUESTION], do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW)
    return Example(path, _read(path)[0].key, answer[0, len(QUESTION) :].tolist())


@pytest.fixture(scope="module")
def example(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Example:
    return answered(tiny, tmp_path_factory.mktemp("compacted") / "prefix.safetensors", heads=2)


def block(example: Example, folder: Path) -> dict[str, Any]:
    return {
        "tiers": [
            {"type": "host", "capacity": "64MiB"},
            {"type": "nvme", "path": str(folder / "kv"), "capacity": "256MiB"},
        ],
        "kv_cache_compression_config": [{"algorithm": "quantization_for_cold_page", "quant": "none"}],
        "promote_deadline": "60s",
        "break_even": False,
        "compacted": [str(example.path)],
    }


@pytest.fixture
def start(tiny: Path, tmp_path: Path) -> Iterator[Any]:
    running: list[EngineProcess] = []

    def start(example: Example, *, model: Path = tiny, **options: Any) -> EngineProcess:
        running.append(
            EngineProcess(model, block(example, tmp_path), tmp_path / "run", page_size=PAGE, dtype="float32", **options)
        )
        return running[-1]

    yield start
    for engine in running:
        engine.kill()


@pytest.mark.timeout(600)
def test_the_tokens_are_those_of_transformers(start: Any, example: Example, other: Path) -> None:
    from .compact_examples import CONTEXT

    engine = start(example, chunked_prefill_size=32)
    asked, named = [0] * ROWS + QUESTION, {"extra_key": example.key}
    first = engine.one("first", asked, tokens=NEW, more=dict(named))
    assert first["ids"] == example.answer
    assert first["details"] == {"device": 0, "host": ROWS}
    again = engine.one("again", asked, tokens=NEW, more=dict(named))
    assert again["ids"] == example.answer and again["details"]["device"] >= ROWS
    # What was computed behind the prefix is restored behind it, at its positions.
    engine.stored((ROWS + len(QUESTION)) // PAGE)
    assert engine.flush()
    restored = engine.one("restored", asked, tokens=NEW, more=dict(named))
    assert restored["ids"] == example.answer
    assert restored["details"] == {"device": 0, "host": (ROWS + len(QUESTION)) // PAGE * PAGE}
    # Side by side with requests of plain text, each at its own positions.
    plain = engine.one("plain", CONTEXT + QUESTION, tokens=NEW)
    together = engine.generate(
        {"rid": "a", "ids": asked, "tokens": NEW, "more": dict(named)},
        {"rid": "b", "ids": CONTEXT + QUESTION, "tokens": NEW},
        {"rid": "c", "ids": [0] * ROWS + QUESTION[:-1], "tokens": NEW, "more": dict(named)},
        {"rid": "d", "ids": asked, "tokens": NEW},
    )
    assert together[0]["ids"] == example.answer and together[1]["ids"] == plain["ids"]
    assert together[3]["cached"] == 0  # the same ids without the name are a text of their own

    for rid, ids, more, told in (
        ("unknown", asked, {"extra_key": "kvtier-compact:" + "0" * 32}, "names no compacted prefix"),
        ("fewer", [0] * (ROWS - 1) + QUESTION, named, f"has {ROWS} rows"),
        ("none", [0] * ROWS, named, f"has {ROWS} rows"),
        ("long", asked, {**named, "sampling": {"max_new_tokens": 8000}}, "reach position"),
    ):
        refused = engine.one(rid, ids, tokens=NEW, more=dict(more))
        assert told in refused.get("error", "") + str(refused.get("finish")), refused
    assert engine.one("after", asked, tokens=NEW, more=dict(named))["ids"] == example.answer

    # With other weights the rows are worth nothing.
    assert engine.do("update_from_disk", path=str(other)) is True
    changed = engine.one("changed", asked, tokens=NEW, more=dict(named))
    assert "names no compacted prefix" in changed.get("error", "") + str(changed.get("finish")), changed
    metrics = engine.metrics()
    assert metrics["kvtier_open_requests"] == 0
    engine.stop()


@pytest.mark.timeout(600)
def test_rows_that_are_damaged_end_the_request_and_nothing_is_computed_in_their_place(
    start: Any, example: Example, tmp_path: Path
) -> None:
    engine = start(example)
    asked, named = [0] * ROWS + QUESTION, {"extra_key": example.key}
    engine.fail_next_load.touch()
    failed = engine.one("failed", asked, tokens=NEW, more=dict(named))
    assert failed["ids"] == [] and failed.get("status", 503) == 503, failed
    assert engine.one("after", asked, tokens=NEW, more=dict(named))["ids"] == example.answer
    engine.stop()


@pytest.mark.timeout(600)
def test_the_tokens_are_those_of_transformers_over_latent_rows(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from .compact_examples import latent_model

    monkeypatch.setenv("KVTIER_TEST_POOLS", "1")
    folder = latent_model(tmp_path / "model")
    example = answered(folder, tmp_path / "prefix.safetensors", heads=1)
    engine = start(example, model=folder, chunked_prefill_size=32)
    asked, named = [0] * ROWS + QUESTION, {"extra_key": example.key}
    first = engine.one("first", asked, tokens=NEW, more=dict(named))
    assert first["ids"] == example.answer and len(set(example.answer)) > 1
    assert first["details"] == {"device": 0, "host": ROWS}
    engine.stored((ROWS + len(QUESTION)) // PAGE)
    assert engine.flush()
    restored = engine.one("restored", asked, tokens=NEW, more=dict(named))
    assert restored["ids"] == example.answer
    assert restored["details"] == {"device": 0, "host": (ROWS + len(QUESTION)) // PAGE * PAGE}
    engine.stop()


def split(rank: Rank) -> Any:
    """Each rank has one of the two heads; then one of them loses a page."""
    import torch

    from kvtier.cli.compact import _read
    from kvtier.compression.compaction.artefact import CompactPrefix

    from . import harness

    harness.Engine.layers, harness.Engine.heads = 4, 1
    path = rank.folder / "prefix.safetensors"
    key, prefix = _read(path)[0].key, CompactPrefix.load(path)
    engine = rank.engine(harness.config(compacted=[str(path)]))
    scheduler = rank.scheduler(engine)
    scheduler.add("named", [0] * ROWS, extra_key=key)
    scheduler.run()
    for layer, (keys, values) in zip(prefix.layers, scheduler.rows["named"], strict=True):
        for name, found in (("keys", keys), ("values", values)):
            assert torch.equal(found[:, 0], layer.rows[name][rank.rank].to(found.dtype))
    if rank.rank == 1:
        engine.linker._store.host.delete_many([list(engine.linker.compacted.renamed.values())[2]])
    engine.flush()
    scheduler.add("lost", [0] * ROWS, extra_key=key)
    scheduler.run()
    scheduler.add("unknown", [0] * ROWS, extra_key=key[:-1] + "-")
    scheduler.run()
    engine.flush()
    engine.assert_nothing_held()
    engine.close()
    return rank.decisions


def test_ranks_serve_their_own_heads_and_end_a_request_together(tiny: Path, tmp_path: Path) -> None:
    from .compact_examples import compact

    compact(tiny, tmp_path / "prefix.safetensors", sets())
    answers = run_ranks(split, tmp_path, tiny, tp=2)
    assert answers[0] == answers[1]
    assert answers[0][0] == ("named", 0, ROWS)
    assert ("lost", 0, 2 * PAGE) in answers[0] and ("lost", "failed") in answers[0]


def staged(rank: Rank) -> str:
    from . import harness

    harness.Engine.layers = 2
    with pytest.raises(ArtefactError) as error:
        rank.engine(harness.config(compacted=[str(rank.folder / "prefix.safetensors")]))
    return str(error.value)


def test_stages_of_a_pipeline_refuse_to_start(tiny: Path, tmp_path: Path) -> None:
    from .compact_examples import compact

    compact(tiny, tmp_path / "prefix.safetensors", sets())
    for told in run_ranks(staged, tmp_path, tiny, pp=2):
        assert "--pp-size 1" in told and "prefix.safetensors" in told


@pytest.mark.skipif(os.environ.get("KVTIER_TEST_LONG") != "1", reason="takes minutes: make test-sglang-long runs it")
@pytest.mark.timeout(600)
def test_an_engine_of_two_ranks_answers_as_transformers_does(
    start: Any, example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    engine = start(example, ranks=2, tp_size=2)
    asked, named = [0] * ROWS + QUESTION, {"extra_key": example.key}
    first = engine.one("first", asked, tokens=NEW, more=dict(named))
    assert first["ids"] == example.answer and first["details"] == {"device": 0, "host": ROWS}
    refused = engine.one("unknown", asked, tokens=NEW, more={"extra_key": "kvtier-compact:" + "0" * 32})
    assert "names no compacted prefix" in refused.get("error", "") + str(refused.get("finish"))
    assert engine.one("after", asked, tokens=NEW, more=dict(named))["ids"] == example.answer
    engine.stop()


def checked(path: Path, folder: Path, **changes: Any) -> None:
    from kvtier.checkpoint import fingerprint_checkpoint
    from kvtier.codecs import registry
    from kvtier.connectors.sglang.compacted import EngineRank, load
    from kvtier.connectors.sglang.compacted_rows import Heads
    from kvtier.connectors.sglang.movers import Stored
    from kvtier.connectors.sglang.pools import DevicePool
    from kvtier.hot import HotPool
    from kvtier.keys import Namespace
    from kvtier.mover import policy_of
    from kvtier.spec import DType, PageSpec

    spec = PageSpec.mha(layers=4, kv_heads=2, head_dim=16, page_tokens=changes.get("page", PAGE), dtype=DType.FP32)
    raw = registry.codec("raw")
    namespace = Namespace.of(spec, policy_of(raw), model="tiny", weights="0", dtype="fp32")
    pool = DevicePool(spec, HotPool(spec, ()))
    rank = EngineRank(changes.get("checkpoint", fingerprint_checkpoint(folder)), Heads(0, 2, 2))
    load([path], Stored(pool, namespace, raw), rank)


def test_prefixes_that_cannot_be_served_are_refused_with_the_way_out(tiny: Path, other: Path, tmp_path: Path) -> None:
    import torch

    from kvtier.compression.compaction.prefix import LayerSelection

    from .compact_examples import compact

    path, (first, *rest) = tmp_path / "prefix.safetensors", sets()
    compact(tiny, path, [first, *rest])
    checked(path, tiny)
    with pytest.raises(ArtefactError, match="another model"):
        checked(path, other)
    with pytest.raises(ArtefactError, match="remove the option compacted"):
        checked(path, tiny, checkpoint=None)
    with pytest.raises(ArtefactError, match="--page-tokens 64"):
        checked(path, tiny, page=64)
    compact(tiny, path, [LayerSelection(first.kept, (torch.zeros(ROWS),) * 4), *rest])
    with pytest.raises(ArtefactError, match="--method kvzip"):
        checked(path, tiny)
    compact(tiny, path, [LayerSelection((first.kept[0][:-1], *first.kept[1:])), *rest])
    with pytest.raises(ArtefactError, match="--selector uniform"):
        checked(path, tiny)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ArtefactError, match="checksum"):
        checked(path, tiny)
    with pytest.raises(ArtefactError, match="cannot be read"):
        checked(tmp_path / "none.safetensors", tiny)


def test_a_request_whose_rows_were_not_all_restored_is_ended_before_it_answers() -> None:
    from types import SimpleNamespace

    from kvtier.connectors.sglang.compacted import Compacted, Served

    served = Served("kvtier-compact:a", 32, 100, (), (), ())
    stored: Any = None  # nothing is put into tiers here
    prefixes = Compacted([served], stored, positions=1000)

    def named(rid: str) -> Any:
        return SimpleNamespace(
            rid=rid, extra_key=served.key, origin_input_ids=[0] * 32 + [5], prefix_len=32, to_finish=None,
            return_logprob=False, sampling_params=SimpleNamespace(max_new_tokens=8), skip_radix_cache_insert=False,
            discard_output_reason=None,
        )  # fmt: skip

    whole, partly, chunked = named("whole"), named("partly"), named("chunked")
    partly.prefix_len = chunked.prefix_len = 16
    for req in (whole, partly, chunked):
        prefixes.queued(req)
    aborted: list[Any] = []
    prefixes.started([whole, partly, chunked], chunked, aborted.append)
    assert whole.discard_output_reason is None and not whole.skip_radix_cache_insert
    for req in (partly, chunked):
        assert "are not there" in req.discard_output_reason.message and req.skip_radix_cache_insert
    assert aborted == [chunked]
    # Its next chunk is part of the same start.
    prefixes.started([chunked], chunked, aborted.append)
    assert aborted == [chunked]
    prefixes.queued(partly)
    prefixes.keep(set())  # it was aborted by its client
    partly.discard_output_reason = None
    prefixes.started([partly], None, aborted.append)
    assert partly.discard_output_reason is None
