"""Curves over a logarithmic axis: as text, and as a PNG where matplotlib is installed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvtier.errors import ConfigError, missing_extra
from kvtier.replay.sweep import Metric, Sweep, decimal

_MARKS = "RFN*+o"


def text_plot(
    x: Sequence[float], curves: Mapping[str, Sequence[float]], *, x_label: str, height: int = 16, width: int = 64
) -> str:
    """Curves as letters, the first letter of each name where it is free; x grows by ratio, y from 0."""
    top = max((max(c) for c in curves.values()), default=0.0) or 1.0
    low, high = math.log(x[0]), math.log(x[-1])
    columns = [round((math.log(v) - low) / (high - low or 1.0) * (width - 1)) for v in x]
    cells = [[" "] * width for _ in range(height)]
    marks: dict[str, str] = {}
    for name, curve in curves.items():
        letter = name[0].upper()
        marks[name] = letter if letter not in marks.values() else next(m for m in _MARKS if m not in marks.values())
        for column, value in zip(columns, curve, strict=True):
            cells[height - 1 - round(value / top * (height - 1))][column] = marks[name]
    lines = []
    for i, row in enumerate(cells):
        label = f"{top * (height - 1 - i) / (height - 1):8.4g}" if i % 5 == 0 or i == height - 1 else " " * 8
        lines.append(f"{label} |{''.join(row)}")
    lines.append(" " * 9 + "+" + "-" * width)
    left, right = decimal(int(x[0])), decimal(int(x[-1]))
    lines.append(" " * 10 + left + x_label.center(width - len(left) - len(right)) + right)
    lines.append(" " * 10 + "   ".join(f"{mark} {name}" for name, mark in marks.items()))
    return "\n".join(lines)


def sweep_text(result: Sweep, metric: Metric) -> str:
    """One metric of a sweep as text; the axis from 0."""
    curves = {codec.value: curve for codec, curve in result.curves[metric].items()}
    plot = text_plot(result.sizes_bytes, curves, x_label=f"{result.tier}, bytes")
    return f"{metric.label}\n{plot}"


def sweep_png(result: Sweep, metric: Metric, path: Path, title: str) -> None:
    """Write one metric of a sweep to `path`. ImportError with the name of the extra where matplotlib is missing."""
    png(
        path,
        title,
        [b / 1e9 for b in result.sizes_bytes],
        {codec.value: curve for codec, curve in result.curves[metric].items()},
        x_label=f"{result.tier}, GB",
        y_label=metric.label,
        limit=result.ideal if metric is Metric.HIT_RATE else None,
    )


def png(
    path: Path,
    title: str,
    x: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    *,
    x_label: str,
    y_label: str,
    limit: float | None = None,
) -> None:
    """Curves over `x`; `limit` is drawn as a dotted line."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("matplotlib", "demo") from None
    figure = Figure(figsize=(6.4, 4.0), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for (name, curve), style in zip(curves.items(), ("o-", "s-", "^-", "v-", "d-", "x-"), strict=False):
        axes.plot(x, curve, style, label=name, markersize=4)
    if limit is not None:
        axes.axhline(limit, linestyle=":", color="gray", label="unlimited")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, metadata={"Software": None})
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--plot {str(path)!r} cannot be written: {error}; give a .png in a writable directory"
        ) from None
