"""The page of the comparison: every figure in it comes from the parts' results, and so does every verdict."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.compare.groups import EXACT_FLOOR, FLOOR, Column, Group, groups
from tests.benchmarks.compare.plots import plot

PAGE, FIGURES = "compare.md", "compare.json"
_WIDTH = 120
_NAMES = {
    "codecs": "codec", "lmcache": "LMCache", "redis": "Redis", "hicache": "SGLang's hierarchical cache",
    "kvzip": "KVzip", "ttft": "time to the first token",
}  # fmt: skip


def write(results: Sequence[dict[str, Any]], folder: Path) -> Path:
    """`PAGE`, the results as `FIGURES`, and plots, in `folder`; the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    made = groups(results)
    plots = plot(made, folder)
    (folder / FIGURES).write_text(json.dumps(list(results), indent=1) + "\n")
    path = folder / PAGE
    path.write_text("\n".join(_lines(results, made, plots)) + "\n")
    return path


def _lines(results: Sequence[dict[str, Any]], made: Sequence[Group], plots: dict[str, str]) -> Iterator[str]:
    yield "# kvtier beside what one would pick instead"
    yield ""
    yield from _wrapped(
        "Made by `make compare` from its results alone, which are in "
        f"[{FIGURES}]({FIGURES}); no figure and no verdict on this page was written by hand."
    )
    yield ""
    yield from _how(results)
    for group in made:
        yield from _section(group, plots.get(group.title))
    yield from _verdicts(made)


def _how(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    machines = list(dict.fromkeys(json.dumps(result["machine"], sort_keys=True) for result in results))
    for text in machines:
        machine = json.loads(text)
        yield from _wrapped(
            f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB, {machine['system']}, Python "
            f"{machine['python']}."
            + ("" if len(machines) == 1 else " **Not all parts were measured on this machine.**")
        )
    versions: dict[str, set[str]] = {}
    for result in results:
        for name, version in result["versions"].items():
            versions.setdefault(name, set()).add(version)
    told = ", ".join(f"{name} {' and '.join(sorted(found))}" for name, found in sorted(versions.items()))
    yield from _wrapped(f"With {told}.")
    yield ""
    yield "| part | began | took, s | load before | environment | command, of its Python |"
    yield "|---|---|---:|---:|---|---|"
    for result in results:
        yield (
            f"| {_NAMES.get(result['part'], result['part'])} | {result['began']} | {result['seconds']:.0f} | "
            f"{result['load_before']:.1f} | {result['environment'] or 'test'} | `{result['command']}` |"
        )
    yield ""
    given = sorted({result["kv"] for result in results})
    yield from _wrapped(
        "Commands with `{kv}` were given the same K and V in BF16, of the shape of SmolLM2-135M: "
        f"{', '.join(given)}; "
        "the others make data of their own."
        + ("" if len(given) == 1 else " **Not all parts were given the same.**")
        + " MB and GB are decimal and of hot bytes, as the engine has them, whatever is stored; figures are medians, "
        "p99 the 99th percentile of single calls. What is compared takes turns in one run. The relative error is the "
        "norm of the difference over the norm."
    )
    yield ""
    yield from _wrapped(
        "**Noise.** What runs twice under one name has `again` behind it: by how much its two figures differ is the "
        "noise of the table, given in its last line. Two figures are called different below only where they differ by "
        f"more than that (the largest of the table where nothing in a column ran twice), and by "
        f"{100 * (FLOOR - 1):.0f} % at least; sizes and errors, which have no noise, by "
        f"{100 * (EXACT_FLOOR - 1):.1f} %. A load before a part of much less than one means that nothing else ran."
    )


def _section(group: Group, image: str | None) -> Iterator[str]:
    yield ""
    yield f"## {group.title}"
    yield ""
    yield from _wrapped(group.note)
    yield ""
    columns = [c for c in group.columns if any(c.title in values for values in group.values.values())]
    yield f"| | {' | '.join(column.title for column in columns)} |"
    yield f"|---|{'---:|' * len(columns)}"
    for system, values in group.values.items():
        cells = (_figure(values.get(column.title), column) for column in columns)
        yield f"| {system} | {' | '.join(cells)} |"
    noises = (group.noise(column) for column in columns)
    yield f"| *noise, times* | {' | '.join('' if noise is None else f'{noise:.2f}' for noise in noises)} |"
    if image is not None:
        yield ""
        yield f"![{group.title}]({image})"


def _verdicts(made: Sequence[Group]) -> Iterator[str]:
    """Both ways, in the same form."""
    for title, ours_win in (("Where others are better", False), ("Where kvtier is better", True)):
        yield ""
        yield f"## {title}"
        count = 0
        for group in made:
            lines = list(_of_group(group, ours_win=ours_win))
            count += len(lines)
            if lines:
                yield ""
                yield f"{group.title}:"
                yield ""
                yield from lines
        if not count:
            yield ""
            yield "In nothing that was measured here."
    equal = sum(1 for group in made for *_, verdict in _pairs(group) if verdict == 0)
    total = sum(1 for group in made for _ in _pairs(group))
    yield ""
    yield from _wrapped(f"Of {total} pairs of figures {equal} do not differ by more than the noise.")


def _of_group(group: Group, *, ours_win: bool) -> Iterator[str]:
    """A line for each system of the others and column."""
    for column in group.columns:
        for other in group.others():
            found = [
                f"{ours} ({_figure(group.values[ours][column.title], column)}{_times(advantage)})"
                for ours, its, column_of, advantage, verdict in _pairs(group)
                if its == other and column_of is column and verdict == (1 if ours_win else -1)
            ]
            if found:
                theirs = f"{other} ({_figure(group.values[other][column.title], column)})"
                yield from textwrap.wrap(
                    f"- {column.title}: {', '.join(found)} against {theirs}"
                    if ours_win
                    else f"- {column.title}: {theirs} against {', '.join(found)}",
                    _WIDTH,
                    subsequent_indent="  ",
                    break_long_words=False,
                )


def _pairs(group: Group) -> Iterator[tuple[str, str, Column, float, int]]:
    """Ours, the other, the column, how many times better ours is, and the verdict: 1 better, -1 worse, 0 neither."""
    for column in group.columns:
        for ours in group.ours():
            for other in group.others():
                advantage = group.advantage(column, ours, other)
                if advantage is not None:
                    threshold = group.threshold(column)
                    yield ours, other, column, advantage, (advantage > threshold) - (advantage < 1 / threshold)


def _times(advantage: float) -> str:
    ratio = advantage if advantage >= 1 else 1 / advantage if advantage else math.inf
    return "" if math.isinf(ratio) else f", {ratio:.2f} times" if ratio < 10 else f", {ratio:.0f} times"


def _figure(value: float | None, column: Column) -> str:
    if value is None:
        return ""
    return "0" if value == 0 else f"{value:,.{column.digits}f}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
