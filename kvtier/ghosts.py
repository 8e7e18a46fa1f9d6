"""What the hit rate would be with a tier of another size, or with pages in another form, told from the load itself.

One sampled list of recently used pages (`kernels/csrc/ghosts.cpp`) gives the bytes used between two uses of a page,
and so the hit rate of an LRU tier of any size. Memory is bounded by `max_keys`; a page that is not followed costs one
comparison. Pages are counted one by one: a page behind a missing one counts as found, unlike in the ledger.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtier.abc.tier import PageMeta
from kvtier.kernels import _native
from kvtier.kernels.ghosts.reference import BUCKETS, bucket_starts

SIZES = (0.5, 1.0, 2.0, 4.0)
"""Times a tier's size, as metrics show them."""
CURVE_SIZES = tuple(2.0 ** (half / 2) for half in range(-8, 5))
"""Times a tier's size, as curves show them: from a sixteenth to four times."""
MAX_KEYS = 32768
_REACH = 16
"""How many times the largest tier's size is followed: four times, with pages of a quarter of their size."""
_WINDOW_S = 900.0


class GhostForm(str, Enum):
    """Pages as they are stored, or as they would be: 16 bits a value, 8 bits, or NVFP4."""

    STORED = "stored"
    RAW = "raw"
    FP8 = "fp8"
    NVFP4 = "nvfp4"


BITS = {GhostForm.RAW: 16.0, GhostForm.FP8: 8.0, GhostForm.NVFP4: 4.5}


@dataclass(frozen=True, slots=True)
class GhostCurves:
    """Hit ratios, 0 to 1: ``ratios[tier][form][i]`` is what a tier of ``sizes[i]`` times its size would have found, the
    tiers above it included. lookups: pages asked for in that time. Forms other than `stored` are missing until the
    size of a page at 16 bits is known."""

    sizes: tuple[float, ...]
    lookups: int
    ratios: dict[str, dict[GhostForm, list[float]]]


class _Mark(NamedTuple):
    at_s: float
    lookups: int
    histogram: npt.NDArray[np.float64]


class Ghosts(Collector):
    """Any thread may call every method. capacities: bytes by tier, fastest first; a tier of 0 bytes has no ghosts.

    exclusive: a page is in one tier at a time, so that the tiers add up. bits_per_value: of the pages stored so far,
    where attention values have 16 when they are hot; None while unknown. window_s: how much of the past the ratios
    cover at least, once they are asked for regularly, and twice as much at most; None: everything.
    """

    def __init__(
        self,
        capacities: Mapping[str, int],
        bits_per_value: Callable[[], float | None] = lambda: None,
        *,
        exclusive: bool = False,
        max_keys: int = MAX_KEYS,
        window_s: float | None = _WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacities = {name: n for name, n in capacities.items() if n > 0}
        self._bits_per_value = bits_per_value
        self._exclusive = exclusive
        self._window_s = window_s
        self._clock = clock
        self._lock = threading.Lock()
        total = sum(self._capacities.values()) if exclusive else max(self._capacities.values(), default=1)
        self._stack = _native.GhostStack(max_keys, min(_REACH * total, 1 << 62))
        self._marks = deque([_Mark(clock(), 0, np.zeros(BUCKETS + 1))])

    @property
    def keys(self) -> int:
        """Pages that are followed now."""
        return self._stack.keys

    def looked_up(self, keys: Sequence[bytes]) -> None:
        """Pages that a request asked for, each once."""
        joined = b"".join(keys)
        with self._lock:
            self._stack.looked_up(joined)

    def looked_up_one(self, key: bytes) -> None:
        """As `looked_up`, of one page."""
        with self._lock:
            self._stack.looked_up(key)

    def stored(self, keys: Sequence[bytes], nbytes: Sequence[int]) -> None:
        """Pages that were stored for the first time or again, with the bytes that they take."""
        joined, sizes = b"".join(keys), np.array(nbytes, np.int64)
        with self._lock:
            self._stack.stored(joined, sizes)

    def stored_one(self, key: bytes, meta: PageMeta) -> None:
        """As `stored`, of one page."""
        with self._lock:
            self._stack.stored_one(key, meta.nbytes)

    def dropped(self, keys: Sequence[bytes]) -> None:
        """Pages that were deleted, not evicted."""
        joined = b"".join(keys)
        with self._lock:
            self._stack.dropped(joined)

    def curves(self, sizes: Sequence[float] = CURVE_SIZES) -> GhostCurves:
        """Hit ratios of the window, at `sizes` times each tier's size."""
        lookups, histogram = self._window()
        beyond = np.append(np.cumsum(histogram[::-1])[::-1], 0.0)  # beyond[b]: lookups in bucket b and above
        bits = self._bits_per_value()
        ratios: dict[str, dict[GhostForm, list[float]]] = {}
        above = 0
        for name, capacity in self._capacities.items():
            forms = {GhostForm.STORED: 1.0}
            if bits:
                forms |= {form: bits / of_form for form, of_form in BITS.items()}
            ratios[name] = {}
            for form, pages in forms.items():
                others = above * pages
                sized = [s * capacity * pages for s in sizes]
                reach = [others + n if self._exclusive else max(others, n) for n in sized]
                ratios[name][form] = [_ratio(lookups, beyond, nbytes) for nbytes in reach]
            above = above + capacity if self._exclusive else max(above, capacity)
        return GhostCurves(tuple(sizes), lookups, ratios)

    def _window(self) -> tuple[int, npt.NDArray[np.float64]]:
        """Lookups of the window, and their histogram by distance; unknown pages last."""
        now = self._clock()
        histogram = np.zeros(BUCKETS + 1)
        with self._lock:
            self._stack.histogram(histogram)
            lookups = self._stack.lookups
            if self._window_s is not None and now - self._marks[-1].at_s >= self._window_s:
                self._marks.append(_Mark(now, lookups, histogram))
                if len(self._marks) > 2:
                    self._marks.popleft()
            since = self._marks[0]
        return lookups - since.lookups, histogram - since.histogram

    def collect(self) -> Iterator[Metric]:
        """For Prometheus."""
        curves = self.curves(SIZES)
        family = GaugeMetricFamily(
            "kvtier_ghost_hit_ratio",
            "Hit ratio that this tier would have, with those above it, at other sizes and with pages in other forms",
            labels=["tier", "form", "size"],
        )
        for tier, forms in curves.ratios.items():
            for form in GhostForm:
                for i, size in enumerate(SIZES):
                    value = forms[form][i] if form in forms else 0.0
                    family.add_metric([tier, form.value, f"{size:g}"], value)
        yield family


_STARTS = bucket_starts()


def _ratio(lookups: int, beyond: npt.NDArray[np.float64], nbytes: float) -> float:
    """Share of lookups within `nbytes`; where they end inside a bucket, its lookups are taken as evenly spread."""
    if lookups <= 0:
        return 0.0
    bucket = min(int(np.searchsorted(_STARTS, nbytes, side="right")) - 1, BUCKETS - 1)
    inside = (nbytes - _STARTS[bucket]) / (_STARTS[bucket + 1] - _STARTS[bucket])
    misses = float(beyond[bucket + 1] + (1.0 - inside) * (beyond[bucket] - beyond[bucket + 1]))
    # Of all lookups, not of the sampled ones: pages that everybody uses are in the sample or not, and either way are
    # hits at any size (SHARDS-adj).
    return min(1.0, max(0.0, 1.0 - misses / lookups))
