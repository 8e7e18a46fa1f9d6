"""Times of one piece of work, taken again and again, as the figures that every part of the comparison has."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from typing import Any

Row = dict[str, Any]


@dataclass(slots=True)
class Samples:
    """hot_bytes: that one sample moves. CPU seconds are those of this process."""

    hot_bytes: int
    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    @contextmanager
    def one(self) -> Iterator[None]:
        cpu, start = time.process_time(), time.perf_counter()
        yield
        self.seconds.append(time.perf_counter() - start)
        self.cpu_s.append(time.process_time() - cpu)

    def figures(self) -> Row:
        """``hot_mb_per_s`` is of the median; ``cpu_s_per_gb`` of the mean, since clocks of processes are coarse."""
        seconds, gb = sorted(self.seconds), self.hot_bytes / 1e9
        return {
            "hot_mb_per_s": round(1e3 * gb / statistics.median(seconds), 1),
            "cpu_s_per_gb": round(sum(self.cpu_s) / len(seconds) / gb, 4),
            "p50_ms": round(1e3 * statistics.median(seconds), 3),
            "p99_ms": round(1e3 * seconds[ceil(0.99 * len(seconds)) - 1], 3),
            "samples": len(seconds),
        }
