"""``kvtier torture``: faults done on purpose, and a sheet that says what held."""

from __future__ import annotations

import json
import logging
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.cli.doctor_line import size
from kvtier.cli.options import at_least, check_writable
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from kvtier.faults.sheet import Line

_MARKS = {"passed": "[green]passed[/]", "failed": "[bold red]FAILED[/]", "skipped": "[yellow]skipped[/]"}


def torture(
    seconds: Annotated[float, typer.Option(help="How long to go on; every check runs once at least.")] = 60.0,
    trials: Annotated[int, typer.Option(help="How often every check runs at least.")] = 1,
    only: Annotated[
        list[str] | None, typer.Option(help="A check by its name; repeatable. Default: all.", show_default=False)
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where the files go: on the disk to be tried. Default: a temporary folder.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of all chance, to see a failure again.", show_default="any")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the sheet as JSON.")] = False,
) -> None:
    """Kill, fill, flip, freeze, swap and hang things under the tiers, and check that no wrong byte is served.

    Works in a folder of its own and with a Redis server of its own: no running engine, directory or server is touched.
    Exit status 1 if a promise was broken.
    """
    from rich.console import Console

    from kvtier.faults.sheet import CHECKS, Outcome
    from kvtier.faults.sheet import torture as run

    at_least(1, trials=trials)
    if not 0 <= seconds <= 7 * 86400:
        raise ConfigError(f"--seconds {seconds}: give a time from 0 up to a week")
    names = [check.name for check in CHECKS]
    for name in only or ():
        if name not in names:
            raise ConfigError(f"--only {name}: there is no such check; give one of {', '.join(names)}")
    checks = [check for check in CHECKS if not only or check.name in only]
    if folder is not None:
        check_writable("--folder", folder)
    place = Path(tempfile.gettempdir()) if folder is None else folder
    free_bytes, room_bytes = shutil.disk_usage(place).free, max(check.room_bytes for check in checks)
    if free_bytes < room_bytes:
        raise ConfigError(
            f"--folder {str(place)!r}: {size(free_bytes)} free, and the checks may take {size(room_bytes)}: name one "
            "on another disk"
        )
    seed = random.randrange(1 << 32) if seed is None else seed
    console = Console(stderr=as_json)
    started = time.monotonic()
    with (
        _quiet(),
        tempfile.TemporaryDirectory(prefix="kvtier-torture-", dir=place) as scratch,
        _Progress(console, seconds) as progress,
    ):
        lines = run(
            Path(scratch),
            seconds,
            seed,
            checks=checks,
            trials=trials,
            progress=progress.show,
        )
    took_s = time.monotonic() - started
    passed = all(line.outcome is not Outcome.FAILED for line in lines)
    if as_json:
        sheet = {
            "passed": passed,
            "seed": seed,
            "seconds": round(took_s, 3),
            "checks": [line.as_json() for line in lines],
        }
        print(json.dumps(sheet, indent=2))
    else:
        _print(console, lines, passed, seed, took_s)
    if not passed:
        raise typer.Exit(1)


@contextmanager
def _quiet() -> Iterator[None]:
    """Every fault is reported by the tier that meets it: here that is no news."""
    log = logging.getLogger("kvtier")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


class _Progress:
    """One line that says what runs, where somebody watches."""

    def __init__(self, console: Console, seconds: float) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console, transient=True
        )
        self._task = self._progress.add_task("starting", total=max(seconds, 1e-3))
        self._started = time.monotonic()

    def __enter__(self) -> _Progress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, line: Line) -> None:
        self._progress.update(
            self._task,
            description=f"{line.check.name}: {line.check.what}, trial {line.trials + 1}",
            completed=time.monotonic() - self._started,
        )


def _print(console: Console, lines: list[Line], passed: bool, seed: int, took_s: float) -> None:
    from rich.table import Table

    table = Table(title="kvtier torture")
    table.add_column("check", no_wrap=True)
    for column in ("trials", "s", "put", "read", "hits"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("what was done, and seen")
    table.add_column("result", no_wrap=True)
    for line in lines:
        seen = dict(line.seen)
        pages = [f"{seen.pop(name, 0):,}" for name in ("pages put", "pages read", "hits")]
        seen.pop("misses", None)
        also = "; ".join(f"{count:,} {name}" for name, count in sorted(seen.items()))
        table.add_row(
            line.check.name,
            f"{line.trials:,}",
            f"{line.seconds:.1f}",
            *pages,
            f"{line.check.what}: {also}" if also else line.check.what,
            _MARKS[line.outcome.value],
        )
    console.print(table)
    for line in lines:
        if line.detail:
            console.print(f"{line.check.name} {line.outcome.value}: {line.detail}", markup=False, highlight=False)
    verdict = "passed" if passed else "FAILED"
    console.print(f"{verdict} in {took_s:.0f} s; again with --seed {seed}", highlight=False)
    sys.stdout.flush()
