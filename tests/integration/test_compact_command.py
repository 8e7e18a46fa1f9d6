"""``kvtier compact``: a file from a model and a text, resumable; what it refuses; and what is told of a file."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from typer.testing import CliRunner

from kvtier.cli.app import app
from kvtier.cli.compact_run import Work
from kvtier.compression.compaction.artefact import CompactPrefix
from kvtier.connectors.transformers.compact_serving import CompactServing
from kvtier.connectors.transformers.matching_layer import LayerFits
from kvtier.errors import ArtefactError, ConfigError, KVTierError, TierPathError
from tests.compact_models import VOCABULARY, context, tiny

T = 80


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and a tokenizer of words ``w0`` to ``w127``."""
    path = tmp_path_factory.mktemp("model")
    words = {f"w{n}": n for n in range(VOCABULARY)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0").save_pretrained(path)
    tiny("llama").save_pretrained(path)
    (path / "context.json").write_text(json.dumps(context(T)))
    (path / "context.txt").write_text(" ".join(f"w{n}" for n in context(T)))
    return path


def compact(folder: Path, out: Path, *options: str, context: str = "context.json") -> Any:
    """The command's answer; errors of ours are raised."""
    args = ["compact", str(folder), str(folder / context), "--out", str(out), "--name", "tiny", *options]
    done = CliRunner().invoke(app, args)
    if isinstance(done.exception, KVTierError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done


METHODS = (
    ("random", ""), ("recent", ""), ("kvzip", "pair"), ("kvzip", "uniform"), ("am", "hak"), ("am", "omp"),
)  # fmt: skip


@pytest.mark.parametrize(("method", "selector"), METHODS)
def test_every_method_makes_a_file_that_is_served(method: str, selector: str, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "prefix.safetensors"
    options = ["--selector", selector] if selector else []
    done = compact(folder, out, "--method", method, *options, "--ratio", "0.75", "--json")
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["recipe"]["method"] == method
    assert told["recipe"]["selector"] == selector
    assert told["tokens_removed"] == pytest.approx(0.75, abs=0.01)
    assert told["fitted_values"] == told["biases"] == (method == "am")
    prefix = CompactPrefix.load(out)
    assert told["compact_bytes"] == prefix.manifest.compact_bytes == out.stat().st_size - header(out)
    prefix.check_tokens(context(T))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with CompactServing(model, prefix, model_name="tiny") as serving:
        answer = serving.generate(context(5, seed=3), max_new_tokens=4, do_sample=False)
    assert answer.shape == (1, 9)


def header(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_text_and_token_ids_give_the_same_file(folder: Path, tmp_path: Path) -> None:
    compact(folder, tmp_path / "a.safetensors", "--method", "random", "--seed", "4")
    compact(folder, tmp_path / "b.safetensors", "--method", "random", "--seed", "4", context="context.txt")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


@pytest.mark.parametrize(
    "options",
    [
        ("--method", "kvzip"),
        ("--method", "am", "--queries", "self_study"),
        ("--method", "am", "--selector", "hak", "--queries", "context"),
    ],
    ids=lambda options: options[-1],
)
def test_equal_runs_give_equal_files(options: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    """To the byte: the key by which clients of an engine name a file depends on all of it."""
    for name in ("a", "b"):
        compact(folder, tmp_path / f"{name}.safetensors", *options, "--seed", "3")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("method", ["kvzip", "am", "random", "recent"])
def test_the_shortest_contexts(method: str, tokens: int, folder: Path, tmp_path: Path) -> None:
    """There is always a row left; KVzip and what is too short to be divided keep the first four tokens."""
    (folder / "short.json").write_text(json.dumps(context(tokens)))
    compact(folder, tmp_path / "short.safetensors", "--method", method, "--ratio", "0.9", context="short.json")
    prefix = CompactPrefix.load(tmp_path / "short.safetensors")
    rows = {len(kept) for layer in prefix.layers for kept in layer.kept}
    assert rows == {min(tokens, 4) if method == "kvzip" else 1}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with CompactServing(model, prefix, model_name="tiny") as serving:
        assert bool(torch.isfinite(serving.forward(context(5, seed=3)).logits).all())


def test_what_else_changes_the_result_is_part_of_the_recipe(folder: Path, tmp_path: Path) -> None:
    """Else two results would have one name in the tiers, and the second one would never be found."""
    for name, text in (("one.txt", "w3 w4 w5"), ("two.txt", "w3 w4 w6")):
        (folder / name).write_text(text)
    recipes = []
    for n, options in enumerate(
        [
            ["--method", "recent"],
            ["--method", "recent", "--system-tokens", "20"],
            ["--method", "am", "--queries", "given", "--given", str(folder / "one.txt")],
            ["--method", "am", "--queries", "given", "--given", str(folder / "two.txt")],
            ["--method", "am", "--queries", "given", "--given", str(folder / "two.txt"), "--system-tokens", "9"],
        ]
    ):
        compact(folder, tmp_path / f"{n}.safetensors", *options)
        recipes.append(CompactPrefix.load(tmp_path / f"{n}.safetensors").manifest.recipe)
    assert recipes[1].options["system_tokens"] == "20"
    assert len({recipe.encoded() for recipe in recipes}) == 5


def test_whole_pages_hold_the_system_prompt(folder: Path, tmp_path: Path) -> None:
    """16 rows to a page, 25 tokens that stay, a budget of 26: two pages."""
    how = ["--selector", "uniform", "--ratio", "0.67", "--system-tokens", "25", "--page-tokens", "16"]
    compact(folder, tmp_path / "pages.safetensors", *how)
    prefix = CompactPrefix.load(tmp_path / "pages.safetensors")
    assert {len(kept) for layer in prefix.layers for kept in layer.kept} == {32}
    assert all(kept[:25].tolist() == list(range(25)) for layer in prefix.layers for kept in layer.kept)


KILLED = """
import os, signal, sys
from pathlib import Path
from kvtier.cli import compact_run
from kvtier.cli.app import app
saved, save = [], compact_run.Work.save
compact_run._SAVE_EVERY_S = -1.0
def killed(self, state):
    save(self, state)
    saved.append(1)
    if len(saved) == 2:  # and in the middle of the next writing
        (self._state.parent / "state.new").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
compact_run.Work.save = killed
app(sys.argv[1:])
"""


def test_a_run_that_was_killed_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--method", "am", "--ratio", "0.8"]
    compact(folder, tmp_path / "once.safetensors", *options)
    out, work = tmp_path / "twice.safetensors", tmp_path / "work"
    args = ["compact", str(folder), str(folder / "context.json"), "--out", str(out), "--name", "tiny", *options]
    command = [sys.executable, "-c", KILLED, *args, "--work", str(work)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not out.exists() and (work / "state.safetensors").exists()
    fitted: list[int] = []
    right = LayerFits.fit

    def fit(self: LayerFits, layer: int, *arguments: Any) -> Any:
        fitted.append(layer)
        return right(self, layer, *arguments)

    monkeypatch.setattr(LayerFits, "fit", fit)
    compact(folder, out, *options, "--work", str(work))
    assert fitted == [2, 3]
    assert out.read_bytes() == (tmp_path / "once.safetensors").read_bytes()
    assert list(work.iterdir()) == []


def test_work_that_cannot_be_kept_or_used_is_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, out = tmp_path / "work", tmp_path / "x.safetensors"
    options = ["--method", "am", "--ratio", "0.8", "--work", str(work)]
    full = OSError(errno.ENOSPC, "No space left on device")

    def fail(*_: object) -> None:
        raise full

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", fail)
        patch.setattr("kvtier.cli.compact_run._SAVE_EVERY_S", -1.0)
        with pytest.raises(ConfigError, match=r"--work .*No space left.* make room and run again"):
            compact(folder, out, *options)
    (work / "state.safetensors").write_bytes(b"cut off")
    with pytest.raises(ConfigError, match="remove the folder to begin anew"):
        compact(folder, out, *options)
    (work / "job.json").write_text("{")
    with pytest.raises(ConfigError, match="another model, context or recipe"):
        compact(folder, out, *options)
    (work / "job.json").unlink()  # then nobody knows what the state is of, and it is not used
    compact(folder, out, *options)
    assert CompactPrefix.load(out).tokens == T and list(work.iterdir()) == []


@pytest.mark.parametrize(("method", "selector"), [("am", "omp"), ("am", "hak")])
def test_a_run_that_was_stopped_goes_on(
    method: str, selector: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped behind its second layer, and run again: the layers that were done are not done again, and the same
    positions, biases and values come out."""
    options = ["--method", method, "--selector", selector, "--ratio", "0.8"]
    compact(folder, tmp_path / "once.safetensors", *options)
    work, save, saved = tmp_path / "work", Work.save, []

    class StoppedError(RuntimeError):
        pass

    def stop(self: Work, state: dict[str, torch.Tensor]) -> None:
        self._saved_s = 0.0
        monkeypatch.setattr("kvtier.cli.compact_run._SAVE_EVERY_S", -1.0)
        save(self, state)
        saved.append(1)
        if len(saved) == 2:
            raise StoppedError

    monkeypatch.setattr(Work, "save", stop)
    out = tmp_path / "twice.safetensors"
    done = CliRunner().invoke(
        app,
        [
            *("compact", str(folder), str(folder / "context.json"), "--out", str(out), "--name", "tiny"),
            *options,
            *("--work", str(work)),
        ],
    )
    assert isinstance(done.exception, StoppedError)
    assert not out.exists()
    with pytest.raises(ConfigError, match="another model, context or recipe"):
        compact(folder, out, *options[:-1], "0.5", "--work", str(work))
    compact(folder, out, *options, "--work", str(work))
    assert len(saved) == 4, "two of four layers were left"
    assert list(work.iterdir()) == []
    once, twice = CompactPrefix.load(tmp_path / "once.safetensors"), CompactPrefix.load(out)
    for name, tensor in once.tensors().items():
        assert torch.equal(tensor, twice.tensors()[name]), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ratio", "1"], "--ratio 1.0"),
        (["--ratio", "-0.1"], "--ratio -0.1"),
        (["--method", "best"], "--method best"),
        (["--method", "kvzip", "--selector", "omp"], "'omp'"),
        (["--method", "kvzip", "--selector", "raw_max"], "raw_max"),
        (["--method", "kvzip", "--selector", "head"], "belong together"),
        (["--method", "kvzip", "--head-scores", "heads.safetensors"], "belong together"),
        (["--method", "kvzip", "--queries", "repeat"], "leave --queries out"),
        (["--method", "am", "--selector", "pair"], "--selector pair"),
        (["--method", "am", "--selector", "indexer_omp"], "no indexer"),
        (["--method", "am", "--queries", "all"], "--queries all"),
        (["--method", "am", "--queries", "given"], "belong together"),
        (["--method", "random", "--selector", "pair"], "has no selector"),
        (["--system-tokens", "80"], "--system-tokens 80"),
        (["--system-tokens", "41"], "leaves 40 of 80 tokens, less than these: give a ratio up to 0.487"),
        (["--page-tokens", "81"], "--page-tokens 81"),
        (["--dtype", "fp8"], "--dtype fp8"),
        (["--name", "./tiny"], "path"),
    ],
)
def test_options_that_cannot_work_are_told(options: list[str], message: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        compact(folder, tmp_path / "x.safetensors", *options)
    assert not list(tmp_path.iterdir())


def test_files_that_cannot_be_read_are_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        compact(folder, tmp_path / "x.safetensors", context="none.txt")
    with pytest.raises(ConfigError, match="safetensors"):
        compact(folder, tmp_path / "x.bin")
    (folder / "bad.json").write_text('{"a": 1}')
    with pytest.raises(ConfigError, match="JSON list"):
        compact(folder, tmp_path / "x.safetensors", context="bad.json")
    (folder / "large.json").write_text("[5, 100000]")
    with pytest.raises(ConfigError, match="0 to 127"):
        compact(folder, tmp_path / "x.safetensors", context="large.json")
    (tmp_path / "dir.safetensors").mkdir()
    with pytest.raises(ConfigError, match="is a folder"):
        compact(folder, tmp_path / "dir.safetensors")
    (tmp_path / "file").write_text("")
    with pytest.raises(TierPathError, match=r"--out .*give a writable folder"):
        compact(folder, tmp_path / "file" / "x.safetensors")


def test_models_that_cannot_be_had_are_told(folder: Path, tmp_path: Path) -> None:
    """In one line, and what is known without weights before they are loaded."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "context.json").write_text(json.dumps(context(T)))
    with pytest.raises(ConfigError, match=r"MODEL .* cannot be loaded"):
        compact(tmp_path, tmp_path / "x.safetensors")
    weights = (folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ConfigError, match=r"MODEL .* cannot be loaded"):
        compact(tmp_path, tmp_path / "x.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ConfigError, match=r"model type 'gpt2' .* use one of .*llama"):
        compact(tmp_path, tmp_path / "x.safetensors")
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"MODEL .* cannot be loaded"):
        compact(tmp_path, tmp_path / "x.safetensors")


def test_a_model_is_known_by_the_name_of_its_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "x.safetensors"
    for here, model in ((folder.parent, folder.name), (folder, ".")):
        monkeypatch.chdir(here)
        args = ["compact", model, str(folder / "context.json"), "--method", "recent", "--out", str(out)]
        done = CliRunner().invoke(app, args)
        assert done.exit_code == 0, f"{done.output}{done.exception}"
        assert CompactPrefix.load(out).manifest.model == folder.name


def test_what_a_file_says_of_itself_drives_no_terminal(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.safetensors"
    compact(folder, out, "--method", "recent", "--name", "[/bold]\x1b[2J[link=x]")
    shown = CliRunner().invoke(app, ["compact", "inspect", str(out)])
    assert shown.exit_code == 0, shown.exception
    assert "\x1b[2J" not in shown.output and "[/bold]\\x1b[2J[link=x]" in shown.output.replace("\n", "")


def test_inspect_needs_no_torch_and_notices_damage(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "prefix.safetensors"
    compact(folder, out, "--method", "kvzip", "--ratio", "0.5")
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        f"sys.argv = ['kvtier', 'compact', 'inspect', {str(out)!r}, '--json']\n"
        "from kvtier.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["context"]["tokens"] == T
    assert told["sets"] == "sets of different sizes"
    assert sum(sum(counts) for counts in told["rows"]) == 4 * 2 * T // 2
    table = CliRunner().invoke(app, ["compact", "inspect", str(out)])
    assert "50.00 %" in table.output
    raw = bytearray(out.read_bytes())
    raw[-1] ^= 1
    out.write_bytes(raw)
    failed = CliRunner().invoke(app, ["compact", "inspect", str(out)])
    assert isinstance(failed.exception, ArtefactError)
    assert "checksum" in str(failed.exception)
