"""Bars of what each system does in a second, and of the time to the first token."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.compare.groups import AGAIN, Group

_OURS, _THEIRS, _BASELINE = "#1f6f8b", "#d98032", "#9a9a9a"


def plot(made: Sequence[Group], folder: Path) -> dict[str, str]:
    """Names of the images in `folder`, by title of the group; none where matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        return {}
    mpl.use("Agg")
    from matplotlib import pyplot

    names: dict[str, str] = {}
    for group in made:
        columns = [c for c in group.columns if c.title.endswith((", MB/s", ", s")) and _values(group, c.title)][:3]
        figure, axes = pyplot.subplots(
            1, len(columns), figsize=(4.2 * len(columns), 1.1 + 0.26 * len(_systems(group))), squeeze=False, sharey=True
        )
        for axis, column in zip(axes[0], columns, strict=True):
            values = _values(group, column.title)
            shown = list(reversed(list(values)))
            axis.barh(shown, [values[name] for name in shown], color=[_color(group, name) for name in shown])
            axis.set_title(f"{column.title} ({'less' if column.lower else 'more'} is better)", fontsize=9)
            axis.tick_params(labelsize=8)
            axis.grid(axis="x", alpha=0.3)
        figure.tight_layout()
        names[group.title] = f"compare-{re.sub(r'[^a-z]+', '-', group.title.lower())}.png"
        figure.savefig(folder / names[group.title], dpi=100)
        pyplot.close(figure)
    return names


def _systems(group: Group) -> list[str]:
    return [name for name in group.values if not name.endswith(AGAIN)]


def _values(group: Group, title: str) -> dict[str, float]:
    return {name: group.values[name][title] for name in _systems(group) if title in group.values[name]}


def _color(group: Group, name: str) -> str:
    return _BASELINE if name in group.baseline else _OURS if "kvtier" in name else _THEIRS
