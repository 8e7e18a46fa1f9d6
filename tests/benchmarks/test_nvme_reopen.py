"""Opening a directory that holds many pages: 50 000 of them here, a million in `make test-long`."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import numpy as np
import pytest

from kvtier.abc.tier import GetStatus, PutStatus
from kvtier.storage_backends.nvme.records import encode_puts
from kvtier.storage_backends.nvme.tier import NvmeTier
from kvtier.storage_backends.slots.columns import PAGE, PageColumns
from kvtier.testing.pages import aligned_buffer, belongs, item_of, key_of
from kvtier.testing.tiers import check_counters

PAGES = int(os.environ.get("KVTIER_REOPEN_PAGES", "50000"))
BOUND_S_PER_MILLION = 10.0
FIXED_S = 1.0
ATTEMPTS = 3
PAGE_BYTES = 4000
REAL = 200


@pytest.mark.speed
@pytest.mark.timeout(600)
def test_many_pages_are_opened_within_their_time(tmp_path: Path) -> None:
    """CPU seconds, since the machine may be busy; fails beyond twice the bound of 10 s per million."""
    capacity_bytes = (PAGES + REAL) * 4096
    tier = NvmeTier(tmp_path, capacity_bytes)
    assert set(tier.put_many([item_of(key_of(n), PAGE_BYTES) for n in range(REAL)])) == {PutStatus.STORED}
    there = {page.offset for page in tier._table.entries(staged=False)}
    tier.close()
    rng = np.random.default_rng(1)
    pages = np.zeros(PAGES, PAGE)
    pages["key"] = np.frombuffer(rng.bytes(32 * PAGES), "V32")
    pages["checksum"] = np.frombuffer(rng.bytes(16 * PAGES), "V16")
    free = np.setdiff1d(np.arange(PAGES + REAL) * 4096, np.array(sorted(there)))
    pages["offset"] = rng.permutation(free)
    pages["nbytes"], pages["form"] = PAGE_BYTES, 2
    origins = {i: b"engine key %08d" % i for i in range(0, PAGES, 2)}
    log = tmp_path / "index.log"
    log.write_bytes(encode_puts(PageColumns(pages, origins), 0, PAGES) + log.read_bytes())

    bound_s = 2 * (FIXED_S + BOUND_S_PER_MILLION * PAGES / 1e6)
    spent_s: list[float] = []
    while True:  # neighbours take the caches, which makes even CPU seconds more
        cpu, wall = time.process_time(), time.perf_counter()
        tier = NvmeTier(tmp_path, capacity_bytes)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        print(f"{PAGES + REAL:,} pages opened in {wall:.2f} s, {cpu:.2f} s of CPU")
        spent_s.append(cpu)
        if cpu < bound_s or len(spent_s) == ATTEMPTS:
            break
        tier.close()
    try:
        usage = tier.usage()
        assert usage.recovered_pages == usage.resident_pages == PAGES + REAL and usage.quarantined_pages == 0
        for n in range(REAL):
            out = aligned_buffer(PAGE_BYTES)
            assert tier.get_many_into([key_of(n)], [out])[0].status is GetStatus.HIT and belongs(key_of(n), out)
        sample = random.Random(1).sample(range(PAGES), 1000)
        assert tier.contains_many([pages["key"][i].tobytes() for i in sample]) == [True] * 1000
        cpu_snapshot = time.process_time()
        assert len(tier._table.columns(staged=True)) == PAGES + REAL
        print(f"what a rewrite of the log holds up: {time.process_time() - cpu_snapshot:.2f} s of CPU")
        check_counters(tier)
    finally:
        tier.close()
    assert min(spent_s) < bound_s
