"""What a demo run tells, whichever engine served it: a line per turn, the ledger, bytes, agreement, and the plot."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from kvtier.ledger import LedgerSnapshot

_BAR_COLUMNS = 40


@dataclass(frozen=True, slots=True)
class TurnResult:
    """One served request. restored_pages: by the tier they were found in. *_s: time to the first token, in seconds."""

    session: str
    number: int
    prompt_tokens: int
    restored_tokens: int
    restored_pages: dict[str, int]
    recompute_s: float
    kvtier_s: float

    @property
    def name(self) -> str:
        return f"{self.session} {self.number}"

    @property
    def tiers(self) -> str:
        return " ".join(f"{n} {tier}" for tier, n in sorted(self.restored_pages.items()) if n) or "-"


@dataclass(frozen=True, slots=True)
class DemoResult:
    """A whole run. agreeing of positions: teacher-forced output positions at which both runs rank the same token first.
    setup: what was run, in words. notes: what a reader has to know to judge the figures."""

    setup: str
    turns: tuple[TurnResult, ...]
    ledger: LedgerSnapshot
    agreeing: int
    positions: int
    notes: tuple[str, ...] = ()

    @property
    def top1_agreement(self) -> float:
        return self.agreeing / self.positions if self.positions else 1.0

    @property
    def hot_bytes(self) -> int:
        """Of the pages offloaded, at 16 bits a value."""
        return self.ledger.hot_bytes_16bit["offload"]

    @property
    def cold_bytes(self) -> int:
        return self.ledger.cold_bytes["offload"]

    @property
    def adds_up(self) -> bool:
        return self.ledger.lookups == sum(self.ledger.hits.values()) + sum(self.ledger.misses.values())

    def as_json(self) -> dict[str, Any]:
        return {
            "lookups": self.ledger.lookups,
            "hits": self.ledger.hits,
            "misses": self.ledger.misses,
            "hot_bytes": self.hot_bytes,
            "cold_bytes": self.cold_bytes,
            "ttft_s": {
                "recompute": [round(t.recompute_s, 4) for t in self.turns],
                "kvtier": [round(t.kvtier_s, 4) for t in self.turns],
            },
            "top1_agreement": round(self.top1_agreement, 6),
        }


def turn_line(turn: TurnResult) -> str:
    """One line while the run goes on."""
    return (
        f"{turn.name:>9}: {turn.prompt_tokens:,} tokens, {turn.restored_tokens:,} restored ({turn.tiers}); first token "
        f"{turn.kvtier_s:.2f} s, recomputed {turn.recompute_s:.2f} s"
    )


def print_report(result: DemoResult, console: Console) -> None:
    """Tables of the turns and of the ledger, and the figures below them."""
    console.print(_turns_table(result.turns))
    console.print(_ledger_table(result.ledger))
    hot, cold = result.hot_bytes, result.cold_bytes
    if cold:
        console.print(
            f"Pages offloaded: {hot:,} B hot, counted as BF16 (16 bits a value); {cold:,} B cold; "
            f"ratio against BF16 {hot / cold:.2f}"
        )
    console.print(
        f"Top-1 agreement with the uncompressed run: {result.top1_agreement:.2%} (both rank the same token first at "
        f"{result.agreeing} of {result.positions} positions of the recorded outputs, which are fed to both)"
    )
    again = [t for t in result.turns if t.restored_tokens]
    if again:
        ratio = median(t.recompute_s / t.kvtier_s for t in again)
        console.print(
            f"First token {ratio:.1f} times sooner than recomputing (median over the {len(again)} turns with hits)"
        )
    for note in result.notes:
        console.print(note)


def _turns_table(turns: Sequence[TurnResult]) -> Table:
    table = Table(title="turn by turn: tokens, and seconds to the first token", box=SIMPLE_HEAD)
    table.add_column("turn", no_wrap=True)
    for column in ("prompt", "restored", "pages from", "recompute", "kvtier", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    for t in turns:
        table.add_row(
            t.name,
            f"{t.prompt_tokens:,}",
            f"{t.restored_tokens:,}",
            t.tiers,
            f"{t.recompute_s:.2f}",
            f"{t.kvtier_s:.2f}",
            f"{t.recompute_s / t.kvtier_s:.1f}",
        )
    return table


def _ledger_table(ledger: LedgerSnapshot) -> Table:
    table = Table(title="ledger: pages looked up")
    table.add_column("pages", min_width=24)
    table.add_column("count", justify="right")
    for tier, n in ledger.hits.items():
        table.add_row(f"hit in {tier}", f"{n:,}")
    for reason, n in ledger.misses.items():
        if n:
            table.add_row(f"miss: {reason}", f"{n:,}")
    total = sum(ledger.hits.values()) + sum(ledger.misses.values())
    table.add_section()
    table.add_row("hits and misses", f"{total:,}")
    table.add_row("looked up", f"{ledger.lookups:,}")
    return table


def plot(turns: Sequence[TurnResult], folder: Path, console: Console) -> None:
    """TTFT per turn: a PNG in `folder` where matplotlib is installed, else bars in the terminal."""
    try:
        matplotlib = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        console.print(bars(turns), highlight=False)
        console.print("(install 'kvtier[demo]' for the plot as a PNG)", markup=False)
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "ttft.png"
    figure, axes = pyplot.subplots(figsize=(max(6.0, 0.7 * len(turns)), 4.0), layout="constrained")
    places = range(len(turns))
    axes.bar([p - 0.2 for p in places], [t.recompute_s for t in turns], 0.4, label="recompute")
    axes.bar([p + 0.2 for p in places], [t.kvtier_s for t in turns], 0.4, label="kvtier")
    axes.set_xticks(list(places), [f"{t.session}\nturn {t.number}" for t in turns], fontsize=7)
    axes.set_ylabel("time to first token (s)")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    console.print(f"Plot: {path}", highlight=False)


def bars(turns: Sequence[TurnResult]) -> str:
    """The plot as text."""
    longest = max((max(t.recompute_s, t.kvtier_s) for t in turns), default=1.0)
    lines = ["time to first token"]
    for t in turns:
        for label, seconds in ((t.name, t.recompute_s), ("kvtier", t.kvtier_s)):
            lines.append(f"{label:>10} {'#' * max(1, round(seconds / longest * _BAR_COLUMNS))} {seconds:.2f} s")
    return "\n".join(lines)
