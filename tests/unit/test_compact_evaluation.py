"""The measurement of compacted contexts: its tasks can be answered from their contexts, its rows are the means that
they say, and its page claims no more than the figures show."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvtier.cli.app import app
from kvtier.cli.eval_compaction_report import LABELS, by_question, difference, records, write
from kvtier.cli.eval_compaction_run import Measured
from kvtier.cli.eval_compaction_tasks import RUNS_MAX, TASKS, make
from kvtier.cli.eval_compaction_units import Plan, _claim, collect
from kvtier.errors import ConfigError


@pytest.mark.parametrize("run", range(RUNS_MAX))
@pytest.mark.parametrize("name", TASKS)
def test_tasks_can_be_answered_from_their_context(name: str, run: int) -> None:
    task = make(name, run, 4)
    assert task == make(name, run, 4)
    assert 3 <= len(task.questions) <= 4
    for question in task.questions:
        assert len({question.answer, *question.wrong}) == 4
        if name != "session":
            assert question.answer.strip() in task.context
            assert all(wrong.strip() in task.context for wrong in question.wrong)
    if name == "session":
        said = task.context.lower().replace("`", "").replace("(", "").replace(")", "")
        for question in task.questions:
            words = question.answer.lower().strip().strip("`").replace("()", "")
            assert all(part in said for part in words.split()), question
    if name == "tools":
        assert all(question.call and question.answer in task.tools for question in task.questions)


def test_runs_differ() -> None:
    for name in ("lookup", "tools"):
        assert len({make(name, run, 4).context for run in range(RUNS_MAX)}) == RUNS_MAX
    assert len({make("session", run, 4).context for run in range(4)}) == 4


def measured(method: str, ratio: float, run: int, nll: list[float], right: list[bool], **changes: Any) -> Measured:
    values: dict[str, Any] = {
        "method": method, "ratio": ratio, "task": "tools", "run": run, "nll": tuple(nll), "right": tuple(right),
        "calls": 2, "called": 1, "called_right": 1, "tokens_removed": ratio, "bytes_removed": ratio - 0.1,
        "seconds": 1.0 + run, "memory_bytes": 1 << (20 + run), "figures": {},
    }  # fmt: skip
    return Measured(**{**values, **changes})


def test_rows_are_means_and_their_spread_is_that_of_runs() -> None:
    rows = records(
        [
            measured("kvzip", 0.5, 0, [1.0, 2.0], [True, False]),
            measured("kvzip", 0.5, 1, [3.0, 4.0], [True, True]),
            measured("full", 0.0, 0, [0.5], [True]),
        ]
    )
    assert [row["method"] for row in rows] == ["full", "kvzip"]
    row = rows[1]
    assert (row["nll"], row["accuracy"], row["seconds"], row["memory_bytes"]) == (2.5, 0.75, 1.5, 2 << 20)
    assert row["nll_spread"] == pytest.approx(2**0.5, abs=1e-4)
    assert row["accuracy_spread"] == pytest.approx(0.5 / 2**0.5, abs=1e-4)
    assert (row["calls"], row["called"], row["called_right"]) == (4, 2, 2)


def test_differences_are_paired_by_question_and_counted_by_context() -> None:
    found = by_question(
        [
            measured("omp", 0.5, 0, [1.0, 2.0, 3.0, 4.0], [True] * 4),
            measured("omp", 0.5, 1, [1.0, 2.0, 3.0, 4.0], [True] * 4),
            measured("oracle", 0.5, 0, [0.5, 2.5], [True] * 2),
            measured("oracle", 0.5, 1, [0.0, 2.0], [True] * 2),
            measured("oracle_held_out", 0.5, 0, [5.0, 7.0], [True] * 2),
        ]
    )
    mean, doubt = difference(found["oracle", 0.5], found["omp", 0.5]) or (0.0, 0.0)
    assert mean == pytest.approx(-0.75)
    assert doubt == pytest.approx(2 * 0.5 / 2**0.5 / 2**0.5)
    assert found["oracle_held_out", 0.5] == {("tools", 0, 1): 5.0, ("tools", 0, 3): 7.0}
    assert difference(found["oracle_held_out", 0.5], found["omp", 0.5]) is None  # one context says nothing of noise


def test_the_page_marks_only_what_is_larger_than_its_noise(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'kvtier[demo]'")
    plan = Plan("", ("tools",), 3, ("random", "kvzip"), (0.5, 0.9), 2)
    rows = [measured("full", 0.0, run, [0.5, 0.6], [True, True]) for run in range(3)]
    for run, better in enumerate((1.0, 1.1, 0.9)):
        rows.append(measured("random", 0.5, run, [3.0, 3.0], [False, False]))
        rows.append(measured("kvzip", 0.5, run, [3.0 - better, 3.0 - better], [True, False]))
        rows.append(measured("random", 0.9, run, [4.0, 4.0], [False, False]))
        rows.append(measured("kvzip", 0.9, run, [4.0 + (run - 1), 4.1 + (run - 1)], [False, False]))
    coverage = [
        {
            "selector": "raw_max", "mean_coverage": 0.7, "mean_coverage_spread": 0.01, "min_coverage": 0.6,
            "min_coverage_spread": 0.02, "seconds": 0.1, "seconds_spread": 0.01,
        }
    ]  # fmt: skip
    errors = [
        {"method": "hak", "ratio": 0.8}
        | {f"{n}{s}": 0.1 for n in ("output_error", "mass_error") for s in ("", "_spread")}
    ]
    write(rows, coverage, errors, plan, tmp_path)
    page = (tmp_path / "compaction.md").read_text()
    (line,) = [x for x in page.splitlines() if x.startswith(f"| {LABELS['kvzip']} minus {LABELS['random']}")]
    assert line.endswith("| **-1.00 ± 0.12** | +0.05 ± 1.15 |")
    assert "3 contexts" in page
    for name in ("answers", "tasks", "sparse"):
        assert (tmp_path / f"compaction-{name}.png").stat().st_size > 5000
    assert len(json.loads((tmp_path / "compaction.json").read_text())["records"]) == 5


def test_pieces_are_kept_and_belong_to_their_settings(tmp_path: Path) -> None:
    plan = Plan("", ("tools",), 1, ("random",), (0.5,), 2)
    (full, random) = plan.units()
    row = measured("full", 0.0, 0, [0.5], [True])
    plan.file(tmp_path, full).write_text(json.dumps([asdict(row)]))
    assert collect(plan, tmp_path) == []  # not every method has done this context
    other_row = measured("random", 0.5, 0, [1.5], [False])
    plan.file(tmp_path, random).write_text(json.dumps([asdict(other_row)]))
    assert collect(plan, tmp_path) == [row, other_row]
    plan.file(tmp_path, random).unlink()
    other = Plan("", ("tools",), 1, ("random",), (0.6,), 2)
    assert other.file(tmp_path, random) != plan.file(tmp_path, random)
    assert other.file(tmp_path, full) == plan.file(tmp_path, full)
    assert _claim(plan.file(tmp_path, random))
    assert not _claim(plan.file(tmp_path, random))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "poems"], "--tasks poems"),
        (["--methods", "best"], "--methods best"),
        (["--ratios", "0.5,1"], "--ratios 0.5,1"),
        (["--ratios", "x"], "--ratios x"),
        (["--runs", "0"], "--runs 0"),
        (["--runs", "9"], "--runs 9"),
        (["--questions", "0"], "--questions 0"),
        (["--minutes", "0"], "--minutes 0"),
    ],
)
def test_options_that_cannot_work_are_told(options: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["eval", "compaction", *options])
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)
