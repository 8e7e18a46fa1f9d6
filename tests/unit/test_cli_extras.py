"""Commands whose extra, or whose model, is not there say so in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvtier.cli import main


@pytest.mark.parametrize(
    "command",
    [
        "demo",
        "eval cold-page",
        "eval lossless",
        "eval triattention",
        "eval compaction",
        "calibrate MODEL --text TEXT --output x.safetensors",
        "compact MODEL TEXT --ratio 0.5 --out x.safetensors",
        "compact head-scores MODEL TEXT --out x.safetensors",
    ],
)
def test_without_torch(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("TEXT").write_text("once upon a time " * 50)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit) as ending:
        main(command.split())
    shown = capsys.readouterr()
    assert ending.value.code == 2 and shown.out == ""
    assert shown.err.startswith("kvtier: error: this needs the package 'torch': pip install 'kvtier[")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("name", ["cold-page", "lossless", "triattention", "compaction"])
def test_a_model_that_is_not_there(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvtier[transformers]'")
    with pytest.raises(SystemExit) as ending:
        main(["eval", name, "--model", str(tmp_path)])
    shown = capsys.readouterr()
    assert ending.value.code == 2 and shown.out == ""
    assert f"--model {str(tmp_path)!r} holds no config.json: give the folder of a model" in shown.err
