"""Choosing positions at the size of a real model's group: 256 rows, 29 807 positions, 70 % kept."""

from __future__ import annotations

from kvtier.compression.compaction.selection_figures import measure_selection

BOUNDS_S = {"normalized_max": 1.0, "log_coverage": 120.0}
"""What two cores must reach; the test fails beyond twice that, in the best of some tries."""
ATTEMPTS = 3


def test_selection_is_quick() -> None:
    told: list[tuple[int, int]] = []
    found = {f.selector: f for f in measure_selection(progress=lambda done, total, label: told.append((done, total)))}
    assert list(found) == ["raw_max", "normalized_max", "log_coverage"]
    tries = [found]
    while not all(min(one[name].seconds for one in tries) < 2 * most for name, most in BOUNDS_S.items()):
        assert len(tries) < ATTEMPTS, tries
        tries.append({f.selector: f for f in measure_selection()})
    assert len(told) > 10 and told[-1][0] == told[-1][1]
    for figures in found.values():
        assert 0.7 < figures.min_coverage <= figures.mean_coverage < 1.0
