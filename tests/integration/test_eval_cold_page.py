"""The commands that measure cold pages, on a tiny model: what they print, what they write, and what must hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from kvtier.cli.eval_forms import CODECS, CONTROLS
from kvtier.cli.eval_round_trip import measure
from tests.character_model import write_character_model

KEYS = ["form", "context_tokens", "kl", "top1", "delta_nll", "key_nll", "bytes_per_value"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_character_model(tmp_path_factory.mktemp("model"), hidden=64, heads=2, kv_heads=1, head_dim=32)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    with pytest.raises(SystemExit) as done:
        main(["eval", *arguments, "--json"])
    assert done.value.code == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    return rows


def test_every_form_in_one_list_and_a_report_that_grows(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("zstandard", reason="zstandard is not installed: pip install 'kvtier[lossless]'")
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'kvtier[demo]'")
    common = ("cold-page", "--model", str(folder), "--windows", "2", "--continuation", "16", "--report", str(tmp_path))
    rows = run(capsys, *common, "--contexts", "192", "--keys", "1", "--again")
    assert all(list(row) == KEYS for row in rows)
    codecs = [name for name in CODECS if name != "lossless"]
    expected = list(CONTROLS)
    expected += [name for form in CODECS for name in (form, f"{form}, second trip")]
    shifted = [f"{form}, keys with an offset" for form in codecs]
    expected += [name for form in shifted for name in (form, f"{form}, second trip")]
    assert [row["form"] for row in rows] == expected
    by_form = {row["form"]: row for row in rows}
    assert all(row["key_nll"] is not None and row["context_tokens"] == 192 for row in rows)
    assert by_form["lossless"]["kl"] == by_form["bf16"]["kl"] < 1e-3
    assert by_form["lossless"]["bytes_per_value"] < 1.9
    assert by_form["nvfp4_identity"]["bytes_per_value"] == 0.5625
    for form in ("nvfp4", "nvfp4_identity", "lossless"):  # a second trip changes nothing
        assert by_form[f"{form}, second trip"] == {**by_form[form], "form": f"{form}, second trip"}
    assert by_form["int2"]["kl"] > 3 * by_form["nvfp4"]["kl"]
    assert by_form["nvfp4, keys with an offset"]["kl"] > 3 * by_form["nvfp4_token, keys with an offset"]["kl"]

    more = run(capsys, *common, "--contexts", "64", "--keys", "0", "--forms", "fp8,k8v4", "--no-offset")
    assert [row["key_nll"] for row in more] == [None, None]
    written = json.loads((tmp_path / "accuracy.json").read_text())
    assert len(written) == len(CONTROLS) + len(CODECS) + len(codecs) + 2
    assert all(row["compressed"] == (0 if row["form"] == "recency_50" else 1) for row in written)
    text = (tmp_path / "accuracy-table.md").read_text()
    assert text.count("###") == 3 and "`k8v4`" in text and "compressed, %" in text
    assert (tmp_path / "accuracy.png").stat().st_size > 5_000
    (tmp_path / "accuracy.json").write_text('[{"form": "bf16"}]')
    with pytest.raises(SystemExit):
        main(["eval", *common, "--contexts", "64", "--keys", "0", "--forms", "bf16", "--no-offset"])
    assert "is not what this command writes" in capsys.readouterr().err


def test_lossless_on_a_models_own_values(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("zstandard", reason="zstandard is not installed: pip install 'kvtier[lossless]'")
    rows = run(capsys, "lossless", "--model", str(folder), "--tokens", "128")
    assert [row["dtype"] for row in rows] == ["bf16", "fp16", "fp32", "fp8_e4m3"]
    for row in rows:
        assert row["bytes_equal"] and row["ratio"] == round(row["hot_bytes"] / row["cold_bytes"], 4)
        assert row["encode_gb_per_s"] > 0 and row["decode_gb_per_s"] > 0
    assert rows[0]["hot_bytes"] == 128 * 2 * 2 * 32 * 2


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(("dtype", "count"), [("fp8_e4m3", 254), ("fp16", 63_488), ("bf16", 65_280)])
def test_no_value_of_any_type_moves_after_its_first_trip(dtype: str, count: int, beside: bool) -> None:
    """Exhaustive: every finite value, alone in its group and beside one three times as large."""
    records, curve = measure(dtype, 1.0, beside, 4)
    assert [r.trip for r in records] == [1, 2, 3, 4]
    assert records[0].values == count or beside
    assert records[0].changed > 0
    for record in records[1:]:
        assert record.changed == 0
        assert record.max_relative_error == records[0].max_relative_error
    # Where the formats are normal, no value is off by more than half a step of the scale, and of the code 2.
    normal = (abs(curve.exact) > 2.0**-13) & (abs(curve.exact) < 2.0**7)
    assert curve.errors[0][normal].max() < (0.21 if dtype == "fp8_e4m3" else 0.07)


def test_the_round_trip_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'kvtier[demo]'")
    rows = run(capsys, "round-trip", "--trips", "2", "--plot", str(tmp_path / "plot.png"))
    assert len(rows) == 4 * 2 * 2
    assert all(row["changed"] == 0 for row in rows if row["trip"] == 2 and row["fp8_scale"] == 1)
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("cold-page", "--contexts", "100"), "multiple of 64"),
        (("cold-page", "--forms", "nvfp5"), "--forms nvfp5: use any of bf16"),
        (("lossless", "--tokens", "65"), "--tokens 65: give a multiple of 64"),
        (("round-trip", "--trips", "0"), "--trips 0"),
    ],
)
def test_bad_options_are_named_before_a_model_is_loaded(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        main(["eval", *arguments])
    assert done.value.code == 2 and words in capsys.readouterr().err
