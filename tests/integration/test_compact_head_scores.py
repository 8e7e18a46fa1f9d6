"""``kvtier compact head-scores``, and a context compacted by what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from kvtier.cli.app import app

WORDS = [*"abcdefghijklmnopqrstuvwxyz", "[UNK]"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny random model with a tokenizer of letters."""
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.4, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    letters = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="[UNK]").save_pretrained(
        tmp_path / "model"
    )
    (tmp_path / "text.txt").write_text("thequickbrownfoxjumpsoverthelazydog" * 3)
    return tmp_path


def kvtier(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["compact", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_context_is_compacted_by_scores_measured_on_another(folder: Path) -> None:
    scores, out = folder / "heads.safetensors", folder / "compact.safetensors"
    said = kvtier("head-scores", folder / "model", folder / "text.txt", "--out", scores)
    assert "3 layers x 2 KV heads" in said
    measured = load_file(scores)["scores"]
    assert measured.shape == (3, 2) and 0 < measured.min() < measured.max() <= 1
    (folder / "context.txt").write_text("packmyboxwithfivedozenliquorjugs" * 10)
    how: list[str | Path] = ["--selector", "head", "--head-scores", scores, "--ratio", "0.15", "--out", out, "--json"]
    rows = json.loads(kvtier(folder / "model", folder / "context.txt", *how))["rows"]
    assert sum(map(sum, rows)) == int(6 * 320 * 0.85)
    best = divmod(int(measured.argmax()), 2)
    assert rows[best[0]][best[1]] == 320
    worst = divmod(int(measured.argmin()), 2)
    assert rows[worst[0]][worst[1]] == 4 + 256


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--out", "heads.bin"], ".safetensors"), (["--system-tokens", "4000"], "the text has 105 tokens")],
)
def test_what_cannot_work_is_told(folder: Path, arguments: list[str], named: str) -> None:
    out = [] if "--out" in arguments else ["--out", str(folder / "heads.safetensors")]
    command = ["compact", "head-scores", str(folder / "model"), str(folder / "text.txt"), *arguments, *out]
    result = CliRunner().invoke(app, command)
    assert result.exit_code != 0 and named in f"{result.output}{result.exception}"
