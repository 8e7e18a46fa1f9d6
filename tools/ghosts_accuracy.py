"""Compare what ghosts say with LRU caches of each size, on traces.

python tools/ghosts_accuracy.py [TRACE ...]     names or files that `kvtier replay` takes
"""

from __future__ import annotations

import sys
import time
from hashlib import blake2b

from kvtier.ghosts import MAX_KEYS, GhostForm, Ghosts
from kvtier.replay.formats import read_trace
from kvtier.replay.simulate import cache_plan, run_open
from kvtier.replay.stack import Placement, TierPlan

PAGE_BYTES = 1 << 20
SIZES = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Times a tier that holds a tenth of the pages of a trace."""


def main(names: list[str]) -> None:
    print("trace, times a tenth of its pages | " + " | ".join(f"{size:g}" for size in SIZES) + " | us per page")
    for name in names:
        trace = read_trace(name)
        pages = trace.unique_blocks // 10
        keys = [blake2b(n.to_bytes(8, "little"), digest_size=32).digest() for n in range(trace.unique_blocks)]
        ghosts = Ghosts({"host": pages * PAGE_BYTES}, window_s=None)
        spent_s = 0.0
        for request in range(trace.requests):
            asked = [keys[block] for block in trace.blocks_of(request).tolist()]
            sizes = [PAGE_BYTES] * len(asked)
            start = time.perf_counter()
            ghosts.looked_up(asked)
            ghosts.stored(asked, sizes)
            spent_s += time.perf_counter() - start
        said = ghosts.curves(SIZES).ratios["host"][GhostForm.STORED]
        exact = []
        for size in SIZES:
            plan = cache_plan(
                (TierPlan("host", int(pages * size) * PAGE_BYTES, 1e9, 0.0),), PAGE_BYTES, Placement.WRITE_THROUGH
            )
            exact.append(float(run_open(trace, plan).hits.sum()) / len(trace.blocks))
        cells = " | ".join(f"{100 * g:.2f} / {100 * e:.2f}" for g, e in zip(said, exact, strict=True))
        print(f"{name}, {trace.unique_blocks} pages, {min(ghosts.keys, MAX_KEYS)} followed | {cells} | "
              f"{1e6 * spent_s / len(trace.blocks):.2f}")  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:] or ["mooncake-conversation", "mooncake-synthetic"])
