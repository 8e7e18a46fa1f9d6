"""``kvtier eval compaction``: what a compacted context costs in answers and saves in bytes, method by method."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.eval_compaction_tasks import RUNS_MAX, TASKS
from kvtier.cli.eval_compaction_units import Plan, chosen, collect, collect_sparse, numbers, spread, work
from kvtier.cli.options import at_least, at_most, check_writable
from kvtier.errors import ConfigError, missing_extra

METHODS = ("kvzip", "kvzip_uniform", "hak", "omp", "oracle", "random", "recent")
USUAL = ("random", "recent", "kvzip", "hak", "omp", "oracle")
JSON_KEYS = ("method", "ratio", "nll", "accuracy", "tokens_removed", "bytes_removed", "seconds", "memory_bytes")
SELECTOR_KEYS = ("selector", "mean_coverage", "min_coverage", "seconds")


def evaluate(
    selectors: Annotated[
        bool, typer.Option("--selectors", help="Coverage of the sparse selectors on a tiny random GlmMoeDsa instead.")
    ] = False,
    model: Annotated[Path | None, typer.Option(help="Folder of a model; by default SmolLM2-135M-Instruct.")] = None,
    tasks: Annotated[str, typer.Option(help=f"Any of {', '.join(TASKS)}.")] = ",".join(TASKS),
    methods: Annotated[str, typer.Option(help=f"Any of {', '.join(METHODS)}.")] = ",".join(USUAL),
    ratios: Annotated[str, typer.Option(help="Shares of tokens removed.")] = "0.1,0.5,0.8,0.9,0.95",
    runs: Annotated[int, typer.Option(help="Contexts per task.")] = 4,
    questions: Annotated[int, typer.Option(help="Questions per context.")] = 4,
    processes: Annotated[int, typer.Option(help="Processes that share the work and the cores.")] = 2,
    work_folder: Annotated[
        Path | None, typer.Option("--work", help="Folder in which finished pieces are kept; a stopped run goes on.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Stop after so long, and tell of the contexts that every method has done.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Folder for compaction.md and its plots; measures the sparse tables as well.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
    part: Annotated[str | None, typer.Option(hidden=True)] = None,
    sparse: Annotated[bool, typer.Option("--sparse", hidden=True)] = False,
) -> None:
    """Answers from compacted contexts against ratio: NLL, accuracy, tokens and bytes removed, time and memory."""
    at_least(1, runs=runs, questions=questions, processes=processes)
    at_most(RUNS_MAX, runs=runs)
    if minutes is not None and not minutes > 0:
        raise ConfigError(f"--minutes {minutes}: give a number larger than 0")
    if report is not None:
        check_writable("--report", report)
    if work_folder is not None:
        check_writable("--work", work_folder)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported
    plan = Plan(
        "" if model is None else str(model),
        chosen("--tasks", tasks, TASKS),
        runs,
        chosen("--methods", methods, METHODS),
        numbers("--ratios", ratios),
        questions,
        sparse or report is not None,
    )
    from kvtier.cli.demo_model import check_model

    check_model(model)
    for package in ("torch", "transformers", "scipy"):  # before processes are started that need them
        if importlib.util.find_spec(package) is None:
            raise missing_extra(package, "compaction")
    if part is not None:
        if work_folder is None:
            raise ConfigError("--part belongs to --work")
        number, _, total = part.partition("/")
        work(plan, work_folder, int(number), int(total))
        return
    if selectors:
        _selectors(as_json)
        return
    if work_folder is not None:
        _measure(plan, work_folder, processes, minutes, report, as_json)
        return
    with tempfile.TemporaryDirectory(prefix="kvtier-compaction-") as folder:
        _measure(plan, Path(folder), processes, minutes, report, as_json)


def _selectors(as_json: bool) -> None:
    from kvtier.cli.eval_compaction_sparse import SEEDS, coverage, coverage_table

    rows = coverage_table([coverage(seed) for seed in range(SEEDS)])
    if as_json:
        sys.stdout.write(json.dumps([{key: row[key] for key in SELECTOR_KEYS} for row in rows]) + "\n")
        return
    from rich.console import Console
    from rich.table import Table

    from kvtier.compression.compaction.selection_figures import POSITIONS, ROWS, measure_selection

    console = Console()
    table = Table(*SELECTOR_KEYS, title="30 % removed, one set per group of layers, tiny random GlmMoeDsa")
    for row in rows:
        table.add_row(*(str(row[key]) for key in SELECTOR_KEYS))
    console.print(table)
    table = Table(*SELECTOR_KEYS, title=f"30 % removed, made-up scores of {ROWS} rows x {POSITIONS:,} positions")
    for figures in measure_selection():
        table.add_row(
            *(f"{getattr(figures, key):.4f}" if key != "selector" else figures.selector for key in SELECTOR_KEYS)
        )
    console.print(table)


def _measure(
    plan: Plan, folder: Path, processes: int, minutes: float | None, report: Path | None, as_json: bool
) -> None:
    from rich.console import Console

    from kvtier.cli.compact_progress import shown
    from kvtier.cli.demo_model import ensure_model
    from kvtier.cli.eval_compaction_report import records, write

    console = Console(stderr=True)
    if not plan.model:
        ensure_model(console=console)  # once, before several processes would
    with shown("measuring") as show:
        limit_s = None if minutes is None else 60 * minutes
        spread(plan, folder, processes, lambda done, total: show(done, total, "measuring"), limit_s)
    measured = collect(plan, folder)
    if not measured:
        raise ConfigError(f"--minutes {minutes}: no context was done by every method; give more, or go on with --work")
    rows = records(measured)
    if report is not None:
        write(measured, *collect_sparse(plan, folder), plan, report)
    if as_json:
        sys.stdout.write(json.dumps([{key: row[key] for key in JSON_KEYS} for row in rows]) + "\n")
        return
    from rich.table import Table

    columns = ("method", "ratio", "nll", "nll_spread", "accuracy", "accuracy_spread", *JSON_KEYS[4:])
    table = Table(*columns, title="answers from compacted contexts")
    for row in rows:
        table.add_row(*(str(row[key]) for key in columns))
    Console().print(table)
