"""The bench command shows what the measuring modules return."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.cli import main
from tests.refusals import assert_refused

ROWS = [{"codec": "nvfp4", "gb_per_s": 7.25, "baseline": None}, {"codec": "raw", "gb_per_s": 12345.0, "extra": 3}]


@pytest.mark.parametrize("name", ["codec", "tier", "store", "lmcache"])
def test_rows_as_json_and_as_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setitem(sys.modules, f"kvtier.cli.bench_{name}", SimpleNamespace(run=lambda **_: ROWS))
    with pytest.raises(SystemExit):
        main(["bench", name, "--json"])
    assert json.loads(capsys.readouterr().out) == ROWS
    with pytest.raises(SystemExit):
        main(["bench", name])
    out = capsys.readouterr().out
    for words in ("codec", "gb_per_s", "7.25", "12345.0", "extra", "-"):
        assert words in out


def test_options_reach_the_measuring_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    def run(**options: Any) -> list[dict[str, Any]]:
        asked.append(options)
        return []

    for name in ("codec", "tier", "lmcache"):
        monkeypatch.setitem(sys.modules, f"kvtier.cli.bench_{name}", SimpleNamespace(run=run))
    for args in ("codec", "codec --dtype bf16 --threads 1", f"tier --directory {tmp_path}", "lmcache --rounds 3"):
        with pytest.raises(SystemExit):
            main(["bench", *args.split(), "--json"])
    assert asked == [
        {},
        {"dtypes": ("bf16",), "threads": (1,)},
        {"directory": tmp_path},
        {"directory": None, "rounds": 3},
    ]


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ("codec --dtype int8", ("--dtype int8", "bf16")),
        ("codec --threads 0", ("--threads 0", "from 1 up")),
        ("codec --threads 100000", ("--threads 100000", "up to 1024")),
        ("lmcache --rounds 0", ("--rounds 0", "from 1 up")),
        ("lmcache --kv /dev/null/kv.npy", ("--kv /dev/null/kv.npy", "no such file")),
        ("tier --directory /dev/null/x", ("--directory", "/dev/null/x", "writable")),
    ],
)
def test_bad_options_are_named(capsys: pytest.CaptureFixture[str], args: str, named: tuple[str, ...]) -> None:
    assert_refused(capsys, f"bench {args}", named)


def test_a_bench_beside_lmcache_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as done:
        main(["bench", "lmcache"])
    assert done.value.code not in (0, None)
    assert "pip install lmcache==0.5.6" in " ".join(capsys.readouterr().err.split())
