"""The store's cost to its caller and the whole way out, held to twice their bounds; the bench prints the truth."""

from __future__ import annotations

import pytest

from kvtier.cli import bench_store

pytestmark = pytest.mark.speed

ATTEMPTS = 5


def test_the_store_stays_within_twice_its_bounds() -> None:
    # Best rounds of some runs: on a machine that is busy with something else, medians tell about that.
    shares: dict[str, float] = {}
    for _ in range(ATTEMPTS):
        path, call, beside, lookup = bench_store.run(index_pages=200_000)
        found = {
            "path": path["best"] / path["baseline"] / 0.25,
            "call": 400 / call["best"],
            "beside": beside["over_baseline"] / 0.25,
            "lookup": 4 / lookup["best"],
        }
        shares = {name: max(share, shares.get(name, 0.0)) for name, share in found.items()}
        if min(shares.values()) > 1:
            return
    raise AssertionError(f"shares of twice the bounds: {shares}, all must be over 1")
