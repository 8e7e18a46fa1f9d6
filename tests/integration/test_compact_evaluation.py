"""``kvtier eval compaction`` as it is run: its processes, and the lists that it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from typer.testing import CliRunner

from kvtier.cli.app import app
from tests.compact_models import tiny

PRINTABLE = [chr(n) for n in (10, *range(32, 127))]


def printed(*arguments: str) -> Any:
    done = CliRunner().invoke(app, ["eval", "compaction", *arguments, "--json"])
    assert done.exit_code == 0, f"{done.output}{done.exception}"
    return json.loads(done.stdout)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny random model with a tokenizer of letters."""
    letters = tokenizers.Tokenizer(tokenizers.models.WordLevel({c: n for n, c in enumerate(PRINTABLE)}, unk_token=" "))
    letters.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    letters.decoder = tokenizers.decoders.Fuse()
    path = tmp_path / "model"
    transformers.PreTrainedTokenizerFast(tokenizer_object=letters, unk_token=" ").save_pretrained(path)
    tiny("llama", max_position_embeddings=8192).save_pretrained(path)
    return path


@pytest.mark.timeout(600)
def test_every_method_and_ratio_is_a_record_and_a_second_run_takes_what_is_there(folder: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    options = ["--model", str(folder), "--tasks", "lookup", "--methods", "random,kvzip", "--ratios", "0.5,0.9"]
    options += ["--runs", "1", "--questions", "2", "--processes", "1", "--work", str(work)]
    rows = printed(*options)
    assert [(row["method"], row["ratio"]) for row in rows] == [
        ("full", 0.0),
        ("random", 0.5),
        ("random", 0.9),
        ("kvzip", 0.5),
        ("kvzip", 0.9),
    ]
    for row in rows:
        needed = {"method", "ratio", "nll", "accuracy", "tokens_removed", "bytes_removed", "seconds"}
        assert needed <= row.keys() and row["nll"] > 0 and 0 <= row["accuracy"] <= 1 and row["seconds"] >= 0
        assert row["tokens_removed"] == pytest.approx(row["ratio"], abs=0.01)
        assert row["bytes_removed"] < row["tokens_removed"]
    kept = {path: path.stat().st_mtime_ns for path in work.glob("lookup-*.json")}
    assert len(kept) == 3
    assert printed(*options) == rows
    assert {path: path.stat().st_mtime_ns for path in work.glob("lookup-*.json")} == kept


def test_selectors_are_told_by_their_coverage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.cli.eval_compaction_sparse.SEEDS", 1)
    rows = printed("--selectors")
    assert [row["selector"] for row in rows] == ["raw_max", "normalized_max", "log_coverage"]
    for row in rows:
        assert row.keys() == {"selector", "mean_coverage", "min_coverage", "seconds"}
        assert 0 < row["min_coverage"] <= row["mean_coverage"] < 1 and row["seconds"] >= 0
