"""``kvtier eval triattention`` on a tiny model: the records, the plot, and what it measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvtier.cli import main
from kvtier.cli.eval_baselines import AttentionScore, RandomRows, RecentWindow
from kvtier.cli.eval_quality import measure, pass_keys
from tests.character_model import write_character_model

FIELDS = ["method", "budget", "nll", "key_nll", "kv_bytes", "decode_tok_per_s", "batch"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_character_model(tmp_path_factory.mktemp("model"), hidden=32, heads=4, kv_heads=2, head_dim=8)


def test_records_of_quality_and_speed(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'kvtier[demo]'")
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 20)
    plot = tmp_path / "plot.png"
    with pytest.raises(SystemExit) as done:
        main([
            "eval", "triattention", "--json", "--model", str(folder), "--text", str(text), "--budgets", "16,32",
            "--beta", "16", "--windows", "2", "--window-tokens", "256", "--keys", "2", "--key-tokens", "160",
            "--generated", "1", "--context", "256", "--batch", "1,64", "--pool-mib", "1", "--steps", "2",
            "--plot", str(plot),
        ])  # fmt: skip
    assert done.value.code == 0
    printed = capsys.readouterr()
    assert "'nll_generated': " in printed.err.replace("\n", " ")
    records = json.loads(printed.out.strip().splitlines()[-1])
    assert all(list(record) == FIELDS for record in records)
    quality = [r for r in records if r["nll"] is not None]
    assert [(r["method"], r["budget"]) for r in quality] == [
        ("dense", None),
        *((m, b) for m in ("triattention", "random", "recent_window", "attention") for b in (16, 32)),
    ]
    assert all(r["key_nll"] > 0 for r in quality)
    # fp32 keys and values: 2 layers x 2 heads x 8 values.
    row = 2 * 2 * 2 * 8 * 4
    assert {r["kv_bytes"] for r in quality if r["budget"] == 16} == {(32 + 16 + 16) * row}
    assert quality[0]["kv_bytes"] == 256 * row
    timed = [r for r in records if r["decode_tok_per_s"] is not None]
    assert {(r["method"], r["batch"]) for r in timed} >= {("dense", 1), ("triattention", 1), ("triattention", 64)}
    dense_fits = (1 << 20) // ((32 + 256) * row)
    assert [r["batch"] for r in timed if r["method"] == "dense"] == [1, dense_fits]
    assert [r["batch"] for r in records if r["method"] == "dense" and r["nll"] is None and r not in timed] == [64]
    assert timed[-1]["batch"] == (1 << 20) // ((32 + 32 + 16) * row) > dense_fits
    assert plot.stat().st_size > 10_000


def test_speed_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main([
            "eval", "triattention", "--json", "--model", str(folder), "--budgets", "16", "--beta", "16",
            "--windows", "0", "--keys", "0", "--context", "64", "--batch", "2", "--pool-mib", "1", "--steps", "1",
        ])  # fmt: skip
    assert done.value.code == 0
    records = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert [r["method"] for r in records] == ["dense", "triattention"] * 2
    assert all(r["decode_tok_per_s"] > 0 and r["nll"] is None for r in records)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--budgets", "64,x"], "--budgets 64,x"),
        (["--methods", "magic"], "'magic' is not one of triattention"),
        (["--budgets", "4096"], "would never evict"),
        (["--beta", "0"], "--beta 0"),
    ],
)
def test_options_are_checked_before_a_model_is_loaded(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        main(["eval", "triattention", *arguments])
    assert done.value.code == 2 and words in capsys.readouterr().err


def test_nll_without_eviction_is_the_models(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = torch.randint(256, (2, 90), generator=torch.Generator().manual_seed(0))
    for measured in (range(40, 90), range(33, 61), range(10, 20)):
        found = measure(model, texts, None, prompt=7, beta=16, measured=measured)
        with torch.no_grad():
            logits = model(texts).logits[:, measured.start - 1 : measured.stop - 1]
        expected = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), texts[:, measured.start : measured.stop], reduction="none"
        ).mean(1)
        torch.testing.assert_close(torch.tensor(found.nll), expected, atol=1e-4, rtol=0)
        assert found.evicted_tokens == 0
    before = model.config._attn_implementation
    for method in (AttentionScore(16, 16), RandomRows(16, 16), RecentWindow(16, 16)):
        found = measure(model, texts, method, prompt=7, beta=16, measured=range(40, 90))
        assert found.evicted_tokens == 2 * (80 - 16)
        assert model.config._attn_implementation == before


def test_attention_keeps_what_was_looked_at() -> None:
    from kvtier.abc.compression import LiveRequest

    attentions = torch.zeros(1, 1, 4, 10)  # 4 queries, the last 4 of 10 rows
    attentions[0, 0, :, 3] = 0.9
    attentions[0, 0, 3, 9] = 0.5
    scores = AttentionScore(2, 2).scores(0, LiveRequest("r", 2, 8, 10), (attentions,))
    assert scores.topk(2).indices.tolist() == [3, 9]
    assert scores[9] == 0.5  # per query that could see it: one


class Letters:
    """A tokenizer of one token per character."""

    def __call__(self, text: str, **_: Any) -> Any:
        return type("Encoding", (), {"input_ids": [ord(c) for c in text]})


def test_pass_keys_lie_in_the_generated_part_and_are_asked_for_after_a_round() -> None:
    texts, key = pass_keys(Letters(), 4, prompt=20, tokens=410, beta=16)
    assert texts.shape == (4, key.stop) and len(key) == 5
    for row in texts.tolist():
        text = "".join(map(chr, row))
        digits = text[key.start : key.stop]
        assert digits.isdigit() and text[20 : key.start].count(digits) == 2
        assert text[20 + 400 :].startswith("\n\nWhat is the pass key")
    with pytest.raises(ValueError, match="do not hold a pass key"):
        pass_keys(Letters(), 1, prompt=20, tokens=16, beta=16)
