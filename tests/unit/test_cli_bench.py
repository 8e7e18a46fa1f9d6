"""The bench command shows what the measuring modules return."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from kvtier.cli import main

ROWS = [{"codec": "nvfp4", "gb_per_s": 7.25, "baseline": None}, {"codec": "raw", "gb_per_s": 12345.0, "extra": 3}]


@pytest.mark.parametrize("name", ["codec", "tier", "store"])
def test_rows_as_json_and_as_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setitem(sys.modules, f"kvtier.cli.bench_{name}", SimpleNamespace(run=lambda: ROWS))
    with pytest.raises(SystemExit):
        main(["bench", name, "--json"])
    assert json.loads(capsys.readouterr().out) == ROWS
    with pytest.raises(SystemExit):
        main(["bench", name])
    out = capsys.readouterr().out
    for words in ("codec", "gb_per_s", "7.25", "12345.0", "extra", "-"):
        assert words in out
