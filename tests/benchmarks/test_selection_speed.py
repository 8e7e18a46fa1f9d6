"""Choosing positions at the size of a real model's group: 256 rows, 29 807 positions, 70 % kept."""

from __future__ import annotations

from kvtier.compression.compaction.selection_figures import measure_selection

NORMALIZED_MAX_S = 1.0
LOG_COVERAGE_S = 120.0
"""What two cores must reach; a busy machine gets twice that."""


def test_selection_is_quick() -> None:
    told: list[tuple[int, int]] = []
    found = {f.selector: f for f in measure_selection(progress=lambda done, total, label: told.append((done, total)))}
    assert list(found) == ["raw_max", "normalized_max", "log_coverage"]
    assert found["normalized_max"].seconds < 2 * NORMALIZED_MAX_S
    assert found["log_coverage"].seconds < 2 * LOG_COVERAGE_S
    assert len(told) > 10 and told[-1][0] == told[-1][1]
    for figures in found.values():
        assert 0.7 < figures.min_coverage <= figures.mean_coverage < 1.0
