"""The measurement as pieces that are kept: one file per task, run and method, so that a run that was stopped goes on,
and several processes share the work."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.errors import KVTierError

if TYPE_CHECKING:
    from kvtier.cli.eval_compaction_run import Measured


SPARSE = "sparse"
SPARSE_SEEDS = 4


class MeasurementError(KVTierError, RuntimeError):
    """A process of the measurement failed. The message says which, and its last words."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. model: a folder, or empty for the demo's model. sparse: the tables of the tiny GlmMoeDsa as
    well."""

    model: str
    tasks: tuple[str, ...]
    runs: int
    methods: tuple[str, ...]
    ratios: tuple[float, ...]
    questions: int
    sparse: bool = False

    def units(self) -> list[Unit]:
        """Every piece, the whole context first; those of one task and run lie apart, so that a measurement that was
        stopped has something of each."""
        sparse = [Unit(SPARSE, seed, "all") for seed in range(SPARSE_SEEDS if self.sparse else 0)]
        return sparse + [
            Unit(task, run, method)
            for run in range(self.runs)
            for task in self.tasks
            for method in ("full", *self.methods)
        ]

    def file(self, folder: Path, unit: Unit) -> Path:
        """Where a piece is kept. Its name changes with everything that its figures depend on."""
        if unit.task == SPARSE:
            return folder / f"{SPARSE}-{unit.run}.json"
        said = json.dumps([self.model, self.questions, self.ratios if unit.method != "full" else []])
        mark = hashlib.sha256(said.encode()).hexdigest()[:8]
        return folder / f"{unit.task}-{unit.run}-{unit.method}-{mark}.json"


@dataclass(frozen=True, slots=True)
class Unit:
    task: str
    run: int
    method: str


def work(plan: Plan, folder: Path, part: int, parts: int) -> None:
    """Measure the pieces that are not there yet, in this process: every `parts`-th of them, `part` first, and then
    what others have not begun."""
    import torch

    from kvtier.cli import eval_compaction_sparse
    from kvtier.cli.eval_compaction_run import Bench, measure
    from kvtier.cli.eval_compaction_tasks import make

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // parts))
    bench: Bench | None = None
    units = plan.units()
    for unit in units[part::parts] + units:
        path = plan.file(folder, unit)
        if path.exists() or not _claim(path):
            continue
        found: Any
        if unit.task == SPARSE:
            found = {
                "coverage": eval_compaction_sparse.coverage(unit.run),
                "errors": eval_compaction_sparse.errors(unit.run),
            }
        else:
            bench = bench or Bench.load(Path(plan.model) if plan.model else None)
            task = make(unit.task, unit.run, plan.questions)
            found = [asdict(m) for m in measure(bench, task, unit.method, plan.ratios, seed=unit.run)]
        new = path.with_suffix(".new")
        new.write_text(json.dumps(found) + "\n")
        new.replace(path)


def _claim(path: Path) -> bool:
    """Whether nobody else of this run has begun the piece."""
    try:
        path.with_suffix(f".claim{os.getppid()}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def spread(
    plan: Plan, folder: Path, processes: int, tell: Callable[[int, int], None], limit_s: float | None = None
) -> None:
    """Have `processes` processes do the work; returns when all of it is there, or after `limit_s`: then pieces that are
    not finished are given up. Raises MeasurementError."""
    command = [sys.executable, "-m", "kvtier.cli", "eval", "compaction", "--work", str(folder)]
    command += ["--tasks", ",".join(plan.tasks), "--runs", str(plan.runs), "--questions", str(plan.questions)]
    command += ["--methods", ",".join(plan.methods), "--ratios", ",".join(str(r) for r in plan.ratios)]
    command += ["--model", plan.model] if plan.model else []
    command += ["--sparse"] if plan.sparse else []
    env = {
        "OMP_WAIT_POLICY": "passive",
        **os.environ,
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes)),
    }
    files = [plan.file(folder, unit) for unit in plan.units()]
    logs = [folder / f"process-{n}.log" for n in range(processes)]
    children = []
    give_up = None if limit_s is None else time.monotonic() + limit_s
    try:
        for n, log in enumerate(logs):
            with log.open("wb") as out:
                part = ["--part", f"{n}/{processes}"]
                children.append(subprocess.Popen([*command, *part], env=env, stdout=out, stderr=out))
        while any(child.poll() is None for child in children):
            tell(sum(file.exists() for file in files), len(files))
            if give_up is not None and time.monotonic() > give_up:
                return
            time.sleep(0.5)
        tell(sum(file.exists() for file in files), len(files))
        for n, child in enumerate(children):
            if child.returncode:
                last = logs[n].read_text(errors="replace").strip().splitlines()[-3:]
                raise MeasurementError(
                    f"process {n} of the measurement ended with {child.returncode}: {' | '.join(last)}"
                )
    finally:
        for child in children:
            if child.poll() is None:
                child.terminate()
            child.wait(30)
        for claim in folder.glob(f"*.claim{os.getpid()}"):
            claim.unlink(missing_ok=True)


def collect(plan: Plan, folder: Path) -> list[Measured]:
    """What is in `folder` of the contexts of `plan` that every method has done: means over different contexts would
    not compare methods."""
    from kvtier.cli.eval_compaction_run import Measured

    contexts: dict[tuple[str, int], list[Path]] = {}
    for unit in plan.units():
        if unit.task != SPARSE:
            contexts.setdefault((unit.task, unit.run), []).append(plan.file(folder, unit))
    whole = [files for files in contexts.values() if all(path.exists() for path in files)]
    rows = [row for files in whole for path in files for row in json.loads(path.read_text())]
    return [Measured(**{**row, "nll": tuple(row["nll"]), "right": tuple(row["right"])}) for row in rows]


def collect_sparse(plan: Plan, folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The tables of selectors and of fits that are in `folder`."""
    from kvtier.cli.eval_compaction_sparse import coverage_table, error_table

    files = [plan.file(folder, unit) for unit in plan.units() if unit.task == SPARSE]
    found = [json.loads(path.read_text()) for path in files if path.exists()]
    return coverage_table([one["coverage"] for one in found]), error_table([one["errors"] for one in found])


def numbers(option: str, text: str) -> tuple[float, ...]:
    """Ratios of an option."""
    from kvtier.errors import ConfigError

    try:
        found = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        found = ()
    if not found or not all(0.0 < ratio < 1.0 for ratio in found):
        raise ConfigError(f"{option} {text}: give shares between 0 and 1, with commas between")
    return found


def chosen(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Names of an option, each one of `known`."""
    from kvtier.errors import ConfigError

    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise ConfigError(f"{option} {text}: {name!r} is unknown; use any of {', '.join(known)}")
    return names
