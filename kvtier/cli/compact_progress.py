"""How far a long piece of work is, and the time left: a bar in a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

Show = Callable[[int, int, str], None]
"""``(done, total, label)``; each label is counted by itself."""

LINES_EVERY_S = 30.0


@contextmanager
def shown(label: str) -> Iterator[Show]:
    """On stderr, `label` at first."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lines(sys.stderr.write)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(label, total=None)

        def show(done: int, total: int, label: str) -> None:
            bar.update(task, completed=done, total=total, description=label)

        yield show


def lines(write: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> Show:
    """Writes a line at most every `LINES_EVERY_S` seconds."""
    told_s, label_of, began_s, first = clock(), "", 0.0, 0

    def show(done: int, total: int, label: str) -> None:
        nonlocal told_s, label_of, began_s, first
        now = clock()
        if label != label_of:
            label_of, began_s, first = label, now, done
        if now - told_s < LINES_EVERY_S:
            return
        told_s, left = now, ""
        if done > first:
            seconds = round((now - began_s) * (total - done) / (done - first))
            left = f", {timedelta(seconds=seconds)} left"
        write(f"{label}: {done} of {total}{left}\n")

    return show
