"""The accuracy of cold pages as files: figures as JSON, tables in Markdown, and KL by bytes per value as a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kvtier.cli.eval_forms import CODECS, FORMS, Again, Record
from kvtier.errors import ConfigError, missing_extra

GATE_KL = 0.02


def write(records: Sequence[Record], folder: Path) -> None:
    """``accuracy.json``, ``accuracy-table.md`` and ``accuracy.png`` in `folder`. Figures that are there already stay,
    unless `records` has newer ones of the same form, length and kind of keys: long runs may be done piece by piece."""
    path = folder / "accuracy.json"
    known = {_key(r): r for r in (_read(path) if path.exists() else [])}
    known |= {_key(r): r for r in records}
    merged = sorted(known.values(), key=lambda r: (r.offset, r.context_tokens, FORMS.index(r.form)))
    path.write_text(json.dumps([asdict(r) for r in merged], indent=1) + "\n")
    (folder / "accuracy-table.md").write_text(table(merged))
    plot(merged, folder / "accuracy.png")


def _key(record: Record) -> tuple[str, int, bool]:
    return record.form, record.context_tokens, record.offset


def _read(path: Path) -> list[Record]:
    try:
        rows = json.loads(path.read_text())
        return [Record(**{**row, "again": None if row["again"] is None else Again(**row["again"])}) for row in rows]
    except (ValueError, TypeError, KeyError) as e:
        raise ConfigError(f"--report: {path} is not what this command writes ({e}); give another folder") from None


def table(records: Sequence[Record]) -> str:
    """One table per length and kind of keys."""
    out = []
    for offset, length in sorted({(r.offset, r.context_tokens) for r in records}):
        out += [
            f"### {length:,} stored tokens".replace(",", " ") + (", keys with an offset" if offset else ""),
            "",
            "| form | bytes per value | KL (worst window) | top-1, % | NLL change | pass-key NLL "
            "| after a second trip: KL | pass-key NLL | compressed, % |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        out += [_row(r) for r in records if (r.offset, r.context_tokens) == (offset, length)]
        out.append("")
    return "\n".join(out)


def _row(r: Record) -> str:
    again = r.again or Again(float("nan"))
    cells = [
        f"`{r.form}`",
        f"{r.bytes_per_value:.4f}",
        f"{r.kl:.4f} ({r.kl_max:.4f})",
        f"{100 * r.top1:.1f}",
        f"{r.delta_nll:+.4f}",
        "" if r.key_nll is None else f"{r.key_nll:.3f}",
        "" if r.again is None else f"{again.kl:.4f}",
        "" if again.key_nll is None else f"{again.key_nll:.3f}",
        f"{100 * r.compressed:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def plot(records: Sequence[Record], path: Path) -> None:
    """A panel per length, the forms by bytes per value, plain keys and keys with an offset."""
    try:
        import matplotlib as mpl
    except ImportError as e:
        raise missing_extra("matplotlib", "demo") from e
    mpl.use("Agg")
    from matplotlib import pyplot

    lengths = sorted({r.context_tokens for r in records})
    figure, axes = pyplot.subplots(1, len(lengths), figsize=(4.6 * len(lengths), 3.8), squeeze=False, sharey=True)
    for axis, length in zip(axes[0], lengths, strict=True):
        for offset, marker, label in ((False, "o", "keys as they are"), (True, "x", "keys with an offset")):
            shown = [
                r for r in records if (r.context_tokens, r.offset) == (length, offset) and r.form in (*CODECS, "fp8")
            ]
            axis.scatter(
                [r.bytes_per_value for r in shown], [max(r.kl, 1e-6) for r in shown], marker=marker, label=label
            )
            for r in shown if not offset else ():
                axis.annotate(
                    r.form, (r.bytes_per_value, max(r.kl, 1e-6)), fontsize=7, xytext=(3, 3), textcoords="offset points"
                )
        axis.axhline(GATE_KL, color="black", linestyle="--", linewidth=1, label="gate")
        axis.set_yscale("log")
        axis.set_xlabel("bytes per value of K and V")
        axis.set_title(f"{length} stored tokens", fontsize=10)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("KL to the float32 cache, nats per token")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
