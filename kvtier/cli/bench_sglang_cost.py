"""What an engine loses to kvtier where nothing is found: by pairs of the same new prompt, with and without.

The same is asked of a second engine without kvtier: the difference between two that are alike is the floor under which
nothing can be seen. Prompts are added until that floor lies within `ENOUGH_PERCENT`, whatever the other engines show.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from math import comb

from kvtier.cli.bench_sglang_process import Served

AGAIN = "sglang again"
"""The second engine without kvtier."""
ENOUGH_PERCENT = 2.0
PAIRS_MIN = 9


def differences(runs: Sequence[Served], without: Sequence[Served]) -> dict[str, str | int | float | bool]:
    """Medians of the pairs in percent of the time to the first token, `without`'s, and the interval of each: of that
    time itself, of the CPU time of the scheduler's thread beside its forward, and of that of kvtier's own threads."""
    pairs = list(zip(runs, without, strict=True))
    return {
        **_median("cost", [100 * (a.ttft_s / b.ttft_s - 1) for a, b in pairs]),
        **_median("thread", [100 * (a.thread_cpu_s - b.thread_cpu_s) / b.ttft_s for a, b in pairs]),
        **_median("workers", [100 * a.workers_cpu_s / b.ttft_s for a, b in pairs]),
    }


def _median(name: str, percents: Sequence[float]) -> dict[str, str | int | float | bool]:
    least, most = median_interval(sorted(percents))
    return {
        f"{name}_percent": round(statistics.median(percents), 3),
        f"{name}_least_percent": round(least, 3),
        f"{name}_most_percent": round(most, 3),
    }


def enough(again: Sequence[Served], first: Sequence[Served]) -> bool:
    """Whether two engines without kvtier are known to be equal within `ENOUGH_PERCENT`."""
    if len(again) < PAIRS_MIN:
        return False
    least, most = median_interval(sorted(100 * (a.ttft_s / b.ttft_s - 1) for a, b in zip(again, first, strict=True)))
    return least > -ENOUGH_PERCENT and most < ENOUGH_PERCENT


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Order statistics between which the median lies with 95 percent, or the whole range where they are too few."""
    n = len(values)
    outside = itertools.accumulate(comb(n, k) / 2**n for k in range(n // 2))
    first = max((k for k, p in enumerate(outside) if 2 * p <= 0.05), default=0)
    return values[first], values[n - 1 - first]
