"""kill -9 at random moments of puts, evictions, deletes and log rewrites; then the directory is opened again."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtier.abc.tier import GetStatus
from kvtier.storage_backends.nvme.tier import NvmeTier
from kvtier.testing.pages import aligned_buffer, belongs, item_of, key_of

ROUNDS = 5
CAPACITY_BYTES = 3 << 20
DELETED_EVERY = 7

CHILD = """
import sys, threading
from kvtier.abc.tier import PutStatus
from kvtier.storage_backends.nvme import log
from kvtier.storage_backends.nvme.tier import NvmeTier
from kvtier.testing.pages import item_of, key_of

path = sys.argv[1]
capacity, start, every, *sizes = map(int, sys.argv[2:])
log._COMPACT_SLACK_BYTES = 8192  # rewrite the log all the time
tier = NvmeTier(path, capacity, segment_bytes=1 << 20)
say = threading.Lock()

def work(first):
    number = first
    while True:
        batch = [number + 2 * i for i in range(4)]
        number += 8
        statuses = tier.put_many([item_of(key_of(n), sizes[n % len(sizes)]) for n in batch])
        assert all(s is PutStatus.STORED for s in statuses), statuses
        gone = [n for n in batch if n % every == 0]
        if gone:
            tier.delete_many([key_of(n) for n in gone])
        with say:
            sys.stdout.write("".join(f"{'-' if n in gone else '+'}{n}\\n" for n in batch))
            sys.stdout.flush()

threads = [threading.Thread(target=work, args=(start + i,)) for i in range(2)]
print("open", flush=True)
for t in threads: t.start()
"""


def run_and_kill(
    directory: Path, capacity_bytes: int, start: int, sizes: tuple[int, ...], rng: random.Random
) -> list[str]:
    """What the child said it had committed (+n) and deleted (-n), in order, before it was killed: at a random moment
    after a random number of pages."""
    arguments = [str(n) for n in (capacity_bytes, start, DELETED_EVERY, *sizes)]
    child = subprocess.Popen([sys.executable, "-c", CHILD, directory, *arguments], stdout=subprocess.PIPE)
    assert child.stdout is not None
    said = b""
    try:
        assert child.stdout.readline() == b"open\n"
        said = b"".join(child.stdout.readline() for _ in range(rng.randrange(400)))
        time.sleep(rng.uniform(0, 0.02))
    finally:
        child.send_signal(signal.SIGKILL)
        said += child.stdout.read()
        child.stdout.close()
        child.wait()
    return said.decode().split("\n")[:-1]


def read_all(tier: NvmeTier) -> dict[bytes, GetStatus]:
    found = {}
    for key, meta in tier.scan():
        out = aligned_buffer(meta.nbytes)
        (result,) = tier.get_many_into([key], [out])
        found[key] = result.status
        if result.status is GetStatus.HIT:
            assert meta == item_of(key, meta.nbytes).meta
            assert belongs(key, out), "wrong bytes were served"
    return found


def check_after_kill(tier: NvmeTier, said: list[str], must_be_there: list[str]) -> None:
    """Every page can be verified, those of `must_be_there` that were committed are there, deleted ones are not."""
    found = read_all(tier)
    assert set(found.values()) <= {GetStatus.HIT}, "a page was listed that cannot be verified"
    usage = tier.usage()
    assert usage.recovered_pages == usage.resident_pages == len(found)
    missing = [line for line in must_be_there if line[0] == "+" and key_of(int(line[1:])) not in found]
    assert not missing, f"committed pages were lost: {missing}"
    back = [line for line in said if line[0] == "-" and key_of(int(line[1:])) in found]
    assert not back, f"deleted pages came back: {back}"


def test_every_committed_page_and_nothing_else_survives_kill(tmp_path: Path) -> None:
    """Sizes mixed, with room for all of them."""
    rng, committed, capacity_bytes = random.Random(20), 0, 512 << 20
    for turn in range(ROUNDS):
        said = run_and_kill(tmp_path, capacity_bytes, 1_000_000 * turn, (20_000, 20_000, 40_000, 4096, 100), rng)
        tier = NvmeTier(tmp_path, capacity_bytes)
        check_after_kill(tier, said, said)
        committed += len(said)
        tier.delete_many([key for key, _ in tier.scan()])
        tier.close()
    assert committed > 500, "the child was killed before it did anything"


def test_a_tier_killed_while_evicting_keeps_its_recent_pages(tmp_path: Path) -> None:
    """One size, so that eviction is by recency alone, in a tier of which every round writes a multiple."""
    rng, committed = random.Random(21), 0
    for turn in range(ROUNDS):
        said = run_and_kill(tmp_path, CAPACITY_BYTES, 1_000_000 * turn, (20_000,), rng)
        tier = NvmeTier(tmp_path, CAPACITY_BYTES)
        check_after_kill(tier, said, said[-60:])  # of about 150 that fit
        committed += len(said)
        tier.close()
    assert committed > 500, "too little for evictions"


def test_a_tier_killed_while_space_moves_between_sizes(tmp_path: Path) -> None:
    rng = random.Random(22)
    for turn in range(ROUNDS):
        said = run_and_kill(tmp_path, CAPACITY_BYTES, 1_000_000 * turn, (20_000, 4096, 40_000, 100_000), rng)
        tier = NvmeTier(tmp_path, CAPACITY_BYTES)
        check_after_kill(tier, said, [])
        tier.close()


@pytest.mark.parametrize("cut", [1, 30, 47, 48, 100])
def test_a_torn_log_tail_costs_only_what_it_held(tmp_path: Path, cut: int) -> None:
    tier = NvmeTier(tmp_path, CAPACITY_BYTES)
    tier.put_many([item_of(key_of(n), 5000) for n in range(1)])
    tier.put_many([item_of(key_of(1), 5000)])
    tier.close()
    log = tmp_path / "index.log"
    log.write_bytes(log.read_bytes()[:-cut])
    for _ in range(2):  # the torn tail is cut off, so that what is appended next is found
        tier = NvmeTier(tmp_path, CAPACITY_BYTES)
        found = read_all(tier)
        assert set(found.values()) == {GetStatus.HIT} and key_of(0) in found and key_of(1) not in found
        tier.put_many([item_of(key_of(2), 5000)])
        tier.close()
    tier = NvmeTier(tmp_path, CAPACITY_BYTES)
    assert len(read_all(tier)) == 2
    tier.close()
