"""``kvtier eval round-trip``: what becomes of every FP8, FP16 and BF16 value over several trips through a cold page.

Every finite value is encoded as plain NVFP4 in a page of its own, decoded, encoded again, and so on. Its group of 16
holds it alone, or beside a neighbour three times as large, which takes the scale. What matters is that nothing moves
after the first trip."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier.cli.options import at_least, at_most, check_writable
from kvtier.errors import missing_extra

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvtier.spec import PageSpec

TRIPS_MAX = 64
NEIGHBOUR = 3.0
_CASES = (("fp8_e4m3", 1.0), ("fp8_e4m3", 3.3), ("fp16", 1.0), ("bf16", 1.0))
"""dtype and fp8_scale."""


@dataclass(frozen=True, slots=True)
class TripRecord:
    """All values of one dtype after `trip` trips. beside: whether the neighbour is there. refused: values that a page
    cannot hold, which are stored as they are (and count in nothing else). changed: values that this trip moved.
    Errors are relative, over values other than 0."""

    dtype: str
    fp8_scale: float
    beside: bool
    trip: int
    values: int
    refused: int
    changed: int
    max_relative_error: float
    mean_relative_error: float


@dataclass(frozen=True, slots=True)
class Curve:
    """`exact` values and, after each trip, their relative errors."""

    dtype: str
    fp8_scale: float
    beside: bool
    exact: npt.NDArray[np.float64]
    errors: tuple[npt.NDArray[np.float64], ...]


def evaluate(
    trips: Annotated[int, typer.Option(help="Trips through the page.")] = 4,
    plot: Annotated[Path | None, typer.Option(help="PNG to write the errors to.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """The error of every FP8, FP16 and BF16 value after one and more trips through a plain NVFP4 page."""
    at_least(1, trips=trips)
    at_most(TRIPS_MAX, trips=trips)
    if plot is not None:
        check_writable("--plot", plot.parent)
    records: list[TripRecord] = []
    curves: list[Curve] = []
    for dtype, fp8_scale in _CASES:
        for beside in (False, True):
            more, curve = measure(dtype, fp8_scale, beside, trips)
            records += more
            curves.append(curve)
    if plot is not None:
        draw(curves, plot)
    if as_json:
        sys.stdout.write(json.dumps([asdict(record) for record in records]) + "\n")
        return
    _print(records)


def measure(dtype: str, fp8_scale: float, beside: bool, trips: int) -> tuple[list[TripRecord], Curve]:
    import numpy as np

    from kvtier.kernels.nvfp4 import reference
    from kvtier.spec import GROUP, BufferSpec, DType, PageSpec, Role

    bits = np.arange(256, dtype=np.uint8) if dtype == "fp8_e4m3" else np.arange(1 << 16, dtype=np.uint16)
    values = _floats(bits, dtype)
    bits = bits[np.isfinite(values)]
    rows = np.zeros((len(bits), GROUP), bits.dtype)
    rows[:, 0] = bits
    if beside:
        with np.errstate(over="ignore"):
            wide = (NEIGHBOUR * _floats(bits, dtype)).astype(np.float32)
            near = reference.e4m3_codes(wide) if dtype == "fp8_e4m3" else reference.from_float32(wide, dtype)
        rows[:, 1] = near
        kept = np.isfinite(_floats(near, dtype))
        rows, bits = rows[kept], bits[kept]
    spec = PageSpec(1, (BufferSpec(Role.K, 0, 1, 1, GROUP, DType(dtype), fp8_scale),))
    exact = _floats(bits, dtype).astype(np.float64)
    records, errors = [], []
    now, refused = _trip(spec, rows)
    before = rows[:, 0]
    for trip in range(1, trips + 1):
        if trip > 1:
            now, again = _trip(spec, now)
            refused |= again
        back = _floats(now[:, 0], dtype).astype(np.float64)
        good = ~refused & (exact != 0)
        relative = np.full(len(exact), np.nan)
        relative[good] = np.abs(back[good] - exact[good]) / np.abs(exact[good])
        moved = int((now[:, 0] != before)[~refused].sum())
        before = now[:, 0].copy()
        errors.append(relative)
        seen = relative[good]
        records.append(
            TripRecord(
                dtype, fp8_scale, beside, trip, len(exact), int(refused.sum()), moved,
                round(float(seen.max()), 6), round(float(seen.mean()), 6),
            )
        )  # fmt: skip
    return records, Curve(dtype, fp8_scale, beside, exact, tuple(errors))


def _trip(spec: PageSpec, rows: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """Each row as a page, encoded and decoded; which pages were refused, whose rows are as they were."""
    import numpy as np

    from kvtier.codecs.registry import codec
    from kvtier.hot import HotLayout, HotPool

    which = codec("nvfp4")
    layout, pages = which.layout(spec), len(rows)
    ids, valid = np.arange(pages, dtype=np.int64), np.ones(pages, np.int32)
    arena, offsets = np.zeros(pages * layout.cold_page_bytes, np.uint8), ids * layout.cold_page_bytes
    source, back = np.ascontiguousarray(rows[:, None]), rows[:, None].copy()
    pool = HotPool.of(spec, [source], HotLayout.NHD)
    result = which.encode(layout, pool, ids, valid, arena, offsets, np.zeros(pages, np.uint64))
    good = ids[~result.refused]
    which.decode(layout, HotPool.of(spec, [back], HotLayout.NHD), good, valid[good], arena, offsets[good])
    return back[:, 0], result.refused


def _floats(bits: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    from kvtier.kernels.nvfp4 import reference

    return reference.e4m3_values(bits) if dtype == "fp8_e4m3" else reference.to_float32(bits, dtype)


def draw(curves: list[Curve], path: Path) -> None:
    """Relative error by magnitude, a panel for each dtype and neighbour, one mark per trip."""
    try:
        import matplotlib as mpl
    except ImportError as e:
        raise missing_extra("matplotlib", "demo") from e
    mpl.use("Agg")
    from matplotlib import pyplot

    columns = len(curves) // 2
    figure, axes = pyplot.subplots(2, columns, figsize=(4.2 * columns, 6.4), squeeze=False, sharey=True)
    for n, curve in enumerate(curves):
        axis = axes[n % 2][n // 2]
        keep = curve.exact > 0
        for trip, errors in enumerate(curve.errors, 1):
            axis.plot(
                curve.exact[keep], errors[keep], ".", markersize=5.5 - trip, label=f"trip {trip}", rasterized=True
            )
        axis.set_xscale("log", base=2)
        scale = f", scale {curve.fp8_scale}" if curve.fp8_scale != 1 else ""
        axis.set_title(
            f"{curve.dtype}{scale}, {'beside one 3 times as large' if curve.beside else 'alone'}", fontsize=9
        )
        axis.grid(alpha=0.3)
        if n % 2:
            axis.set_xlabel("magnitude")
    for row in axes:
        row[0].set_ylabel("relative error")
        row[0].set_ylim(0, 1.05)
    axes[0][-1].legend(fontsize=8, markerscale=2)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _print(records: list[TripRecord]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="every value through a page of plain nvfp4")
    for name in ("values", "neighbour", "trip", "number", "refused", "moved", "largest error", "mean error"):
        table.add_column(name, justify="left" if name == "values" else "right")
    for r in records:
        name = r.dtype if r.fp8_scale == 1 else f"{r.dtype}, scale {r.fp8_scale}"
        table.add_row(
            name, "3 times" if r.beside else "none", str(r.trip), f"{r.values:,}", f"{r.refused:,}", f"{r.changed:,}",
            f"{r.max_relative_error:.4f}", f"{r.mean_relative_error:.4f}",
        )  # fmt: skip
    Console().print(table)
