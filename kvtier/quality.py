"""QualityGuard: from the errors of sampled pages to how much finer each buffer of new pages is stored."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvtier.spec import LEVEL_MAX, Coding, ColdLayout, DType

_log = logging.getLogger(__name__)

WINDOW = 8
"""Samples of one buffer in a row whose mean must lie above the budget."""

_NAMES = ("its form", "two NVFP4 components", "uncompressed values")


class QualityGuard:
    """Watches a layer's K and V apart, in pages of `layout`. One that stays above `budget` is stored one precision
    finer from then on, in new pages only: never back, until the process ends. Pages say themselves how they are
    stored, so those already there stay readable, and engines need not agree. `switched` is called with the role, once
    per step. Thread-safe."""

    def __init__(self, layout: ColdLayout, budget: float, switched: Callable[[str], None]) -> None:
        spec = layout.spec
        self._spec = spec
        # Two components are no smaller than FP8 itself, coarser than columns that are kept, and no news to keys that
        # have them.
        self._whole_at_once = {i for i, b in enumerate(spec.buffers) if b.dtype is DType.FP8_E4M3} | {
            part.buffer
            for part in layout.parts
            if part.coding is Coding.RAW
            or (part.coding is Coding.TWO_FP4 and part.columns == spec.buffers[part.buffer].dim)
        }
        self._budget = budget
        self._switched = switched
        self._lock = threading.Lock()
        self._levels = [0] * len(spec.buffers)
        self._recent: list[list[float]] = [[] for _ in spec.buffers]
        self._current: tuple[int, ...] = ()

    @property
    def levels(self) -> tuple[int, ...]:
        """Of each buffer of a new page (`kvtier.spec.Codings`); nothing while all are 0."""
        return self._current

    def observe(self, levels: tuple[int, ...], buffer: int, relative_error: float) -> None:
        """The error of `buffer` in a page that was stored with `levels`. Errors under levels that have changed since
        say nothing about the present ones."""
        with self._lock:
            level = self._levels[buffer]
            if (levels[buffer] if levels else 0) != level or level == LEVEL_MAX:
                return
            recent = self._recent[buffer]
            recent.append(relative_error)
            if len(recent) < WINDOW:
                return
            mean = sum(recent) / WINDOW
            recent.clear()
            if mean <= self._budget:
                return
            b = self._spec.buffers[buffer]
            level = self._levels[buffer] = LEVEL_MAX if buffer in self._whole_at_once else level + 1
            self._current = tuple(self._levels)
        self._switched(b.role.value)
        _log.warning(
            "layer %d, %s: the relative error of %d sampled pages is %.3f, above quality_budget = %s: new pages store "
            "it as %s",
            b.layer,
            b.role.value,
            WINDOW,
            mean,
            self._budget,
            _NAMES[level],
        )
