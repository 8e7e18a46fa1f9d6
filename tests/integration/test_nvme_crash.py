"""kill -9 at random moments of puts, evictions, deletes and log rewrites, and torn logs; then opened again.

Ten kills here; `make test-long` does two hundred.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvtier.abc.tier import GetStatus
from kvtier.faults.killing import KILLS, kill_while_writing
from kvtier.faults.trial import Trial
from kvtier.storage_backends.nvme.tier import NvmeTier
from kvtier.testing.pages import item_of, key_of

CAPACITY_BYTES = 3 << 20


@pytest.mark.parametrize("number", range(5))
def test_every_committed_page_and_nothing_else_survives_kill(tmp_path: Path, number: int) -> None:
    """Over one, two and three directories; with room for all, while evicting, and while space moves between sizes."""
    trial = Trial(tmp_path, random.Random(number), number=number)
    kill_while_writing(trial)
    assert trial.seen["kills"] == KILLS
    assert trial.seen["hits"] > 10, "the writer was killed before it did anything"


@pytest.mark.parametrize("cut", [1, 30, 47, 48, 100])
def test_a_torn_log_tail_costs_only_what_it_held(tmp_path: Path, cut: int) -> None:
    trial = Trial(tmp_path, random.Random(0))
    tier = NvmeTier(tmp_path, CAPACITY_BYTES)
    tier.put_many([item_of(key_of(n), 5000) for n in range(1)])
    tier.put_many([item_of(key_of(1), 5000)])
    tier.close()
    log = tmp_path / "index.log"
    log.write_bytes(log.read_bytes()[:-cut])
    for _ in range(2):  # the torn tail is cut off, so that what is appended next is found
        tier = NvmeTier(tmp_path, CAPACITY_BYTES)
        found = trial.get_all(tier)
        assert set(found.values()) == {GetStatus.HIT} and key_of(0) in found and key_of(1) not in found
        tier.put_many([item_of(key_of(2), 5000)])
        tier.close()
    tier = NvmeTier(tmp_path, CAPACITY_BYTES)
    assert len(trial.get_all(tier)) == 2
    tier.close()
