"""What the measurement of compacted contexts gave: rows per method and ratio, a page in Markdown, and its plots."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.errors import missing_extra

if TYPE_CHECKING:
    from kvtier.cli.eval_compaction_run import Measured
    from kvtier.cli.eval_compaction_units import Plan

LABELS = {
    "full": "whole context",
    "random": "random",
    "recent": "recent window",
    "kvzip": "KVzip (pair)",
    "kvzip_uniform": "KVzip (uniform)",
    "hak": "Attention Matching, HAK",
    "omp": "Attention Matching, OMP",
    "oracle": "OMP, oracle queries",
    "oracle_held_out": "OMP, oracle's other questions",
}
_ORDER = list(LABELS)
Key = tuple[str, int, int]
"""Task, run, number of the question in its context."""


def records(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """One row per method and ratio: means over all questions, their spread (standard deviation of the runs' means),
    mean seconds of a context's compaction, and the most memory that one took."""
    groups: dict[tuple[str, float], list[Measured]] = {}
    for m in measured:
        groups.setdefault((m.method, m.ratio), []).append(m)
    rows = []
    for (method, ratio), members in sorted(groups.items(), key=lambda g: (_ORDER.index(g[0][0]), g[0][1])):
        nll = [x for m in members for x in m.nll]
        right = [float(x) for m in members for x in m.right]
        by_run: dict[int, list[Measured]] = {}
        for m in members:
            by_run.setdefault(m.run, []).append(m)
        rows.append(
            {
                "method": method,
                "ratio": ratio,
                "nll": round(statistics.fmean(nll), 4),
                "nll_spread": _spread([statistics.fmean([x for m in ms for x in m.nll]) for ms in by_run.values()]),
                "accuracy": round(statistics.fmean(right), 4),
                "accuracy_spread": _spread(
                    [statistics.fmean([float(x) for m in ms for x in m.right]) for ms in by_run.values()]
                ),
                "tokens_removed": round(statistics.fmean([m.tokens_removed for m in members]), 4),
                "bytes_removed": round(statistics.fmean([m.bytes_removed for m in members]), 4),
                "seconds": round(statistics.fmean([m.seconds for m in members]), 3),
                "memory_bytes": max(m.memory_bytes for m in members),
                "questions": len(nll),
                "calls": sum(m.calls for m in members),
                "called": sum(m.called for m in members),
                "called_right": sum(m.called_right for m in members),
                "figures": _figures(members),
            }
        )
    return rows


def _figures(members: Sequence[Measured]) -> dict[str, float]:
    names = sorted({name for m in members for name in m.figures})
    return {n: round(statistics.fmean([m.figures[n] for m in members if n in m.figures]), 4) for n in names}


def _spread(values: Sequence[float]) -> float:
    return round(statistics.stdev(values), 4) if len(values) > 1 else 0.0


def by_question(measured: Sequence[Measured]) -> dict[tuple[str, float], dict[Key, float]]:
    """NLL of each question, by method and ratio. The oracle has every second one, its held-out row the others."""
    found: dict[tuple[str, float], dict[Key, float]] = {}
    for m in measured:
        step = 2 if m.method.startswith("oracle") else 1
        first = 1 if m.method == "oracle_held_out" else 0
        into = found.setdefault((m.method, m.ratio), {})
        for n, nll in enumerate(m.nll):
            into[m.task, m.run, first + step * n] = nll
    return found


def difference(mine: Mapping[Key, float], theirs: Mapping[Key, float]) -> tuple[float, float] | None:
    """Mean of `mine` - `theirs` over the questions that both have, each context counted once, and twice its standard
    error over contexts; None with fewer than two contexts."""
    contexts: dict[tuple[str, int], list[float]] = {}
    for key in mine.keys() & theirs.keys():
        contexts.setdefault(key[:2], []).append(mine[key] - theirs[key])
    means = [statistics.fmean(values) for values in contexts.values()]
    if len(means) < 2:
        return None
    return statistics.fmean(means), 2 * statistics.stdev(means) / math.sqrt(len(means))


def write(
    measured: Sequence[Measured],
    coverage: Sequence[Mapping[str, Any]],
    errors: Sequence[Mapping[str, Any]],
    plan: Plan,
    folder: Path,
) -> None:
    """``compaction.md``, ``compaction.json`` with every figure, and the plots."""
    rows = records(measured)
    told = {
        "records": rows,
        "measured": [asdict(m) for m in measured],
        "coverage": list(coverage),
        "errors": list(errors),
    }
    (folder / "compaction.json").write_text(json.dumps(told, indent=1) + "\n")
    (folder / "compaction.md").write_text(page(measured, rows, coverage, errors, plan))
    plot_answers(rows, folder / "compaction-answers.png")
    plot_tasks(measured, folder / "compaction-tasks.png")
    plot_errors(errors, folder / "compaction-sparse.png")


def page(
    measured: Sequence[Measured],
    rows: Sequence[Mapping[str, Any]],
    coverage: Sequence[Mapping[str, Any]],
    errors: Sequence[Mapping[str, Any]],
    plan: Plan,
) -> str:
    """The page, without a claim that the figures do not make."""
    contexts = sorted({(m.task, m.run) for m in measured})
    first = rows[0] if rows else {"nll": 0.0, "accuracy": 0.0, "nll_spread": 0.0, "accuracy_spread": 0.0}
    ratios = ",".join(f"{r:g}" for r in plan.ratios)
    command = (
        f"kvtier eval compaction --tasks {','.join(plan.tasks)} --methods {','.join(plan.methods)} --ratios {ratios} "
        f"--runs {plan.runs} --questions {plan.questions} --report docs/results"
    )
    out = [
        "# Compacted contexts",
        "",
        f"SmolLM2-135M-Instruct in float32 on a CPU; {len(contexts)} contexts of about 300 tokens, {plan.runs} runs of "
        f"each task. Tasks: `lookup` (generated facts), `tools` (a tool list of the commands that the shipped agent "
        "sessions use, under drawn names), `session` (what those sessions hold: two PR descriptions and the "
        "output of an installation). The context alone is compacted; template, question and choices stay whole. NLL: "
        "nats per token of the right answer. Accuracy: how often it is likelier per token than three wrong ones of its "
        "kind (25 % by chance). `±` is the standard deviation of the runs' means. Ratio: share of tokens removed.",
        "",
        _machine(),
        "",
        f"Whole context: NLL {first['nll']:.3f} ± {first['nll_spread']:.3f}, accuracy {100 * first['accuracy']:.0f} ± "
        f"{100 * first['accuracy_spread']:.0f} %.",
        "",
        "![NLL and accuracy against ratio](compaction-answers.png)",
        "",
        "| method | ratio | NLL | accuracy, % | tokens removed, % | bytes removed, % | seconds | memory, MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    out += [
        f"| {LABELS[r['method']]} | {100 * r['ratio']:g} % | {r['nll']:.3f} ± {r['nll_spread']:.3f} | "
        f"{100 * r['accuracy']:.0f} ± {100 * r['accuracy_spread']:.0f} | {100 * r['tokens_removed']:.1f} | "
        f"{100 * r['bytes_removed']:.1f} | {r['seconds']:.1f} | {r['memory_bytes'] / 2**20:.0f} |"
        for r in rows
    ]
    out += [
        "",
        f"`{command}`",
        "",
        "Seconds and memory (beyond what was resident before) are of compacting one context, scoring included, with "
        "one thread per process. Bytes count rows, fitted values, biases and positions against the rows of the whole "
        "context, both in float32. `OMP, oracle queries` was fitted to the very questions that it is measured on, with "
        "their answers, which no real use knows; `OMP, oracle's other questions` is the same object on the questions "
        "between them.",
        "",
        "## What the figures show, and what they do not",
        "",
        "Differences of NLL per question, averaged by context, with twice their standard error over contexts. In bold "
        "where the difference is larger than that; all others are noise, and say nothing about which is better. About "
        "one comparison in twenty would be bold by chance.",
        "",
        *_differences(measured, plan),
        "",
        f"`{command}`",
        "",
        "## By task",
        "",
        "![NLL by task](compaction-tasks.png)",
        "",
        *_calls(rows, plan),
        "",
        "## Fitting and held-out queries",
        "",
        "Relative errors of attention mass and output, means over layers and heads: on the queries that were fitted, "
        "and on those of the questions, which were not (for the oracle, of the other questions).",
        "",
        *_fits(rows),
        "",
        f"`{command}`",
        "",
        "## Sparse forms, on a tiny GlmMoeDsa with random weights",
        "",
        "8 layers, 8 heads, 512 tokens, 4 seeds of weights and context. Random weights show what the arithmetic does; "
        "they say nothing about answers of a trained model.",
        "",
        "One set per group of layers at 30 % removed. Coverage: share of a head's summed largest probabilities that is "
        "kept.",
        "",
        "| selector | mean coverage | least coverage | selection, s |",
        "|---|---|---|---|",
        *(
            f"| `{r['selector']}` | {r['mean_coverage']:.4f} ± {r['mean_coverage_spread']:.4f} | "
            f"{r['min_coverage']:.4f} ± {r['min_coverage_spread']:.4f} | {r['seconds']:.3f} |"
            for r in coverage
        ),
        "",
        "`kvtier eval compaction --selectors --json`",
        "",
        "Errors of the fits, relative, means over layers; held out: queries of other tokens than those that were "
        "fitted. `evict` keeps the rows of HAK without bias and fitted values.",
        "",
        "| way | ratio | output error | mass error | held-out output error | held-out mass error | seconds |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| `{r['method']}` | {100 * r['ratio']:g} % | "
            + " | ".join(
                f"{r[n]:.3f} ± {r[f'{n}_spread']:.3f}" if n in r else ""
                for n in ("output_error", "mass_error", "held_out_output_error", "held_out_mass_error")
            )
            + f" | {r.get('seconds', 0.0):.1f} |"
            for r in errors
        ),
        "",
        "![Errors of the fits](compaction-sparse.png)",
        "",
        f"`{command}`",
        "",
    ]
    return "\n".join(out)


def _machine() -> str:
    """What the figures were measured on and with."""
    import os
    from importlib import metadata

    from kvtier import __version__

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "a CPU")
    versions = ", ".join(f"{package} {metadata.version(package)}" for package in ("torch", "transformers"))
    return f"On {os.cpu_count()} cores of {name}; kvtier {__version__}, {versions}."


def _differences(measured: Sequence[Measured], plan: Plan) -> list[str]:
    found = by_question(measured)
    pairs = [
        (mine, theirs)
        for mine, theirs in (
            ("recent", "random"),
            ("kvzip", "random"),
            ("hak", "random"),
            ("omp", "random"),
            ("hak", "kvzip"),
            ("omp", "kvzip"),
            ("omp", "hak"),
            ("oracle", "omp"),
            ("oracle_held_out", "omp"),
        )
        if any(key[0] == mine for key in found) and any(key[0] == theirs for key in found)
    ]
    lines = [
        "| difference of NLL | " + " | ".join(f"{100 * r:g} %" for r in plan.ratios) + " |",
        "|---|" + "---|" * len(plan.ratios),
    ]
    for mine, theirs in pairs:
        cells = []
        for ratio in plan.ratios:
            answer = difference(found.get((mine, ratio), {}), found.get((theirs, ratio), {}))
            if answer is None:
                cells.append("")
                continue
            text = f"{answer[0]:+.2f} ± {answer[1]:.2f}"
            cells.append(f"**{text}**" if abs(answer[0]) > answer[1] else text)
        lines.append(f"| {LABELS[mine]} minus {LABELS[theirs]} | " + " | ".join(cells) + " |")
    return lines


def _calls(rows: Sequence[Mapping[str, Any]], plan: Plan) -> list[str]:
    if not any(r["calls"] for r in rows):
        return []
    lines = [
        "Tool calls: greedy answers that name a tool of the list, and the right one, of all that were asked for.",
        "",
        "| method | " + " | ".join(f"{100 * r:g} %" for r in plan.ratios) + " |",
        "|---|" + "---|" * len(plan.ratios),
    ]
    for method in _ORDER:
        mine = {r["ratio"]: r for r in rows if r["method"] == method and r["calls"]}
        if method == "full" and mine:
            whole = mine[0.0]
            lines[0] += (
                f" With the whole context: {whole['called']} and {whole['called_right']} of {whole['calls']} calls."
            )
        elif mine:
            cells = [
                f"{mine[r]['called']} / {mine[r]['called_right']} of {mine[r]['calls']}" if r in mine else ""
                for r in plan.ratios
            ]
            lines.append(f"| {LABELS[method]} | " + " | ".join(cells) + " |")
    return lines


def _fits(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = ("mass_error", "held_out_mass_error", "output_error", "held_out_output_error")
    lines = [
        "| method | ratio | mass, fitted | mass, held out | output, fitted | output, held out |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        if "mass_error" in r["figures"] and r["method"] != "oracle_held_out":
            cells = " | ".join(f"{r['figures'][n]:.3f}" if n in r["figures"] else "" for n in names)
            lines.append(f"| {LABELS[r['method']]} | {100 * r['ratio']:g} % | {cells} |")
    return lines


def _pyplot() -> Any:
    try:
        import matplotlib as mpl
    except ImportError as e:
        raise missing_extra("matplotlib", "demo") from e
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _places(ratios: Iterable[float]) -> dict[float, int]:
    """Ratios side by side: those that matter lie close together near 1."""
    return {ratio: n for n, ratio in enumerate(sorted(ratios))}


def plot_answers(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """NLL and accuracy against ratio, a line per method with the spread of the runs."""
    pyplot = _pyplot()
    places = _places({r["ratio"] for r in rows if r["method"] != "full"})
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.4))
    methods = [m for m in _ORDER if m != "full" and any(r["method"] == m for r in rows)]
    for axis, field, label in (
        (axes[0], "nll", "NLL of the right answer, nats per token"),
        (axes[1], "accuracy", "right answer is the likeliest"),
    ):
        for n, method in enumerate(methods):
            mine = [r for r in rows if r["method"] == method]
            shift = 0.06 * (n - (len(methods) - 1) / 2)
            axis.errorbar(
                [places[r["ratio"]] + shift for r in mine],
                [r[field] for r in mine],
                yerr=[r[f"{field}_spread"] for r in mine],
                marker="o",
                markersize=4,
                linewidth=1.2,
                elinewidth=0.8,
                capsize=2,
                linestyle="--" if method.startswith("oracle") else "-",
                label=LABELS[method],
            )
        for r in rows:
            if r["method"] == "full":
                axis.axhline(r[field], color="black", linestyle=":", linewidth=1, label=LABELS["full"])
        axis.set_xticks(list(places.values()), [f"{100 * ratio:g} %" for ratio in places])
        axis.set_xlabel("tokens removed")
        axis.set_title(label, fontsize=10)
        axis.grid(alpha=0.3)
    axes[1].axhline(0.25, color="grey", linestyle="-.", linewidth=1, label="chance")
    axes[1].set_ylim(0, 1.02)
    handles, labels = axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="lower center", ncols=5)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot_tasks(measured: Sequence[Measured], path: Path) -> None:
    """NLL against ratio, a panel per task."""
    pyplot = _pyplot()
    tasks = sorted({m.task for m in measured})
    places = _places({m.ratio for m in measured if m.method != "full"})
    figure, axes = pyplot.subplots(1, len(tasks), figsize=(3.9 * len(tasks), 4.2), squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        rows = records([m for m in measured if m.task == task])
        for method in _ORDER:
            mine = [r for r in rows if r["method"] == method]
            if method == "full" and mine:
                axis.axhline(mine[0]["nll"], color="black", linestyle=":", linewidth=1, label=LABELS["full"])
            elif mine:
                axis.plot(
                    [places[r["ratio"]] for r in mine],
                    [r["nll"] for r in mine],
                    marker="o",
                    markersize=4,
                    linestyle="--" if method.startswith("oracle") else "-",
                    label=LABELS[method],
                )
        axis.set_xticks(list(places.values()), [f"{100 * ratio:g} %" for ratio in places])
        axis.set_xlabel("tokens removed")
        axis.set_title(task, fontsize=10)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("NLL, nats per token")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="lower center", ncols=4)
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot_errors(errors: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Output and mass error of the fits on held-out queries, against ratio."""
    pyplot = _pyplot()
    names = list(dict.fromkeys(str(r["method"]) for r in errors))
    places = _places({float(r["ratio"]) for r in errors})
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.8))
    for axis, field, label in (
        (axes[0], "output_error", "relative error of the output"),
        (axes[1], "mass_error", "relative error of the attention mass"),
    ):
        for n, name in enumerate(names):
            mine = [r for r in errors if r["method"] == name and field in r]
            colour = f"C{n}"
            at = [places[r["ratio"]] for r in mine]
            axis.errorbar(
                at,
                [r[field] for r in mine],
                yerr=[r[f"{field}_spread"] for r in mine],
                marker="o",
                markersize=4,
                capsize=2,
                color=colour,
                label=name,
            )
            held = [(places[r["ratio"]], r[f"held_out_{field}"]) for r in mine if f"held_out_{field}" in r]
            if held:
                axis.plot(*zip(*held, strict=True), marker="x", markersize=4, linestyle="--", color=colour)
        axis.set_yscale("log")
        axis.set_xticks(list(places.values()), [f"{100 * ratio:g} %" for ratio in places])
        axis.set_xlabel("tokens removed (dashed: queries that were held out)")
        axis.set_title(label, fontsize=10)
        axis.grid(alpha=0.3, which="both")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
