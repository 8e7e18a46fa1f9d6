"""What the metrics were: samples of a registry kept in this process, so that the status page has a past to show.

Two rings of rows, an hour fine and a day coarse. A column is one series; memory is bounded by rows times columns, at
most 17 MB, in practice about 2.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry

_log = logging.getLogger(__name__)

FINE_STEP_S = 5.0
FINE_ROWS = 720
COARSE_STEP_S = 60.0
COARSE_ROWS = 1440
MAX_COLUMNS = 1000
_JOIN_S = 1.0

_CURRENT_ONLY = ("kvtier_relative_error", "kvtier_server_commands", "kvtier_server_quota")
"""Many series that are looked at as they are now."""


def series_of(registry: CollectorRegistry) -> dict[str, float]:
    """Every sample by its name and labels, as in the text format; buckets of histograms are left out."""
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_created")):
                labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = float(sample.value)
    return found


@dataclass(frozen=True, slots=True)
class Past:
    """times_s: float64 ``[rows]``, unix time, growing. series: float64 ``[rows]`` each, NaN where it was not there."""

    step_s: float
    times_s: npt.NDArray[np.float64]
    series: dict[str, npt.NDArray[np.float64]]


class _Ring:
    def __init__(self, step_s: float, rows: int) -> None:
        self.step_s = step_s
        self._times = np.zeros(rows)
        self._values = np.full((rows, 64), np.nan, np.float64)
        self._columns: dict[str, int] = {}
        self._count = 0

    @property
    def last_s(self) -> float:
        return float(self._times[(self._count - 1) % len(self._times)]) if self._count else float("-inf")

    def add(self, now_s: float, series: dict[str, float]) -> None:
        row = self._count % len(self._times)
        self._times[row] = now_s
        self._values[row] = np.nan
        for name, value in series.items():
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) == MAX_COLUMNS:
                    continue
                column = self._columns[name] = len(self._columns)
                if column == self._values.shape[1]:
                    grown = np.full((len(self._times), min(2 * column, MAX_COLUMNS)), np.nan)
                    grown[:, :column] = self._values
                    self._values = grown
            self._values[row, column] = value
        self._count += 1

    def since(self, since_s: float) -> Past:
        rows = len(self._times)
        order = np.arange(max(0, self._count - rows), self._count) % rows
        order = order[self._times[order] > since_s]
        values = self._values[order]
        return Past(
            self.step_s, self._times[order], {name: values[:, column] for name, column in self._columns.items()}
        )


class History:
    """Samples `registry` every 5 s in a thread of its own, from `start` until `close`. Any thread may read."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.time) -> None:
        self._registry = registry
        self._clock = clock
        self._lock = threading.Lock()
        self._fine = _Ring(FINE_STEP_S, FINE_ROWS)
        self._coarse = _Ring(COARSE_STEP_S, COARSE_ROWS)
        self._stop = threading.Event()
        self._told = False
        self._thread = threading.Thread(target=self._run, name="kvtier-history", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Safe to call twice, and without `start`."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def sample(self) -> None:
        """Add a row now."""
        series = {k: v for k, v in series_of(self._registry).items() if not k.startswith(_CURRENT_ONLY)}
        now = self._clock()
        with self._lock:
            self._fine.add(now, series)
            if now - self._coarse.last_s >= COARSE_STEP_S:
                self._coarse.add(now, series)

    def fine(self, since_s: float = 0.0) -> Past:
        """The last hour, or what came after `since_s`."""
        with self._lock:
            return self._fine.since(since_s)

    def coarse(self, since_s: float = 0.0) -> Past:
        """The last day, or what came after `since_s`."""
        with self._lock:
            return self._coarse.since(since_s)

    def _run(self) -> None:
        while True:
            try:
                self.sample()
            except Exception as error:  # noqa: BLE001 - a collector's fault: told once, seen at each scrape
                if not self._told:
                    self._told = True
                    _log.warning(
                        "the status page lacks samples: a collector failed: %s: %s", type(error).__name__, error
                    )
            if self._stop.wait(FINE_STEP_S):
                return
