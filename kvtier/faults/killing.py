"""kill -9 at a random moment of puts, evictions, deletes and log rewrites; then the directories are opened again."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from kvtier.abc.tier import GetStatus
from kvtier.errors import TierPathError
from kvtier.faults.trial import LocalTier, PromiseError, Trial, expect, expect_counters
from kvtier.testing.pages import key_of

ROOMY_BYTES = 512 << 20
TIGHT_BYTES = 6 << 20
DELETED_EVERY = 7
KILLS = 2
"""Of one trial, in the same directories."""
_PAGES_MAX = 400
_RECENT = 60


def kill_while_writing(trial: Trial) -> None:
    """Promises: every page that is listed can be verified; every committed page is there (where there was room for all,
    else the recent ones); none that was deleted is back; the counters add up."""
    kind = trial.number % 4
    names = trial.some_names()
    sizes: tuple[int, ...]
    if kind < 2:  # room for all
        capacity_bytes, sizes = ROOMY_BYTES, (20_000, 20_000, 40_000, 4096, 100)
    elif kind == 2:  # evictions, by recency alone
        capacity_bytes, sizes = TIGHT_BYTES, (20_000,)
    else:  # space moves between sizes
        capacity_bytes, sizes = TIGHT_BYTES, (20_000, 4096, 40_000, 100_000)
    for turn in range(KILLS):
        said = run_and_kill(trial, names, capacity_bytes, 1_000_000 * (1 + turn), sizes)
        tier = trial.open(names, capacity_bytes)
        try:
            must = said if kind < 2 else said[-_RECENT:] if kind == 2 else []
            check_after_kill(trial, tier, said, must)
        finally:
            tier.close()


def run_and_kill(trial: Trial, names: list[str], capacity_bytes: int, start: int, sizes: tuple[int, ...]) -> list[str]:
    """What the writer said before it was killed, at a random moment after a random number of pages."""
    arguments = [str(n) for n in (capacity_bytes, start, DELETED_EVERY)] + [",".join(map(str, sizes))]
    child = subprocess.Popen(
        [sys.executable, "-m", "kvtier.faults.writer", *arguments, *(str(trial.folder / name) for name in names)],
        stdout=subprocess.PIPE,
    )
    trial.outside.append(child.kill)
    out = child.stdout
    if out is None:
        raise PromiseError("the writer has no output")
    said = b""
    try:
        expect(out.readline() == b"open\n", "the writer could not open its directories")
        if trial.number % 10 == 0:
            _second_process(trial, names, capacity_bytes)
        said = b"".join(out.readline() for _ in range(trial.rng.randrange(_PAGES_MAX)))
        time.sleep(trial.rng.uniform(0, 0.02))  # the moment of the kill, not a wait for anything
    finally:
        child.send_signal(signal.SIGKILL)
        said += out.read()
        out.close()
        child.wait()
    lines = said.decode().split("\n")[:-1]
    expect(not any(line.startswith("failed") for line in lines), f"the writer failed: {lines[-1:]}")
    trial.seen["kills"] += 1
    trial.seen["pages put"] += len(lines)
    return lines


def check_after_kill(trial: Trial, tier: LocalTier, said: list[str], must_be_there: list[str]) -> None:
    found = trial.get_all(tier)
    bad = [key.hex()[:16] for key, status in found.items() if status is not GetStatus.HIT]
    expect(not bad, f"pages were listed that cannot be verified: {bad[:5]}")
    missing = [line for line in must_be_there if line[0] == "+" and key_of(int(line[1:])) not in found]
    expect(not missing, f"{len(missing)} committed pages were lost, {missing[:5]} among them")
    back = [line for line in said if line[0] == "-" and key_of(int(line[1:])) in found]
    expect(not back, f"{len(back)} deleted pages came back, {back[:5]} among them")
    usage = tier.usage()
    expect(usage.recovered_pages - usage.evicted_pages == len(found), f"not every page was counted: {usage}")
    expect_counters(tier)


def _second_process(trial: Trial, names: list[str], capacity_bytes: int) -> None:
    try:
        tier = trial.open(names, capacity_bytes)
    except TierPathError as error:
        expect("in use by process" in str(error), f"a directory in use was refused with {error}")
        trial.seen["second processes refused"] += 1
    else:
        tier.close()
        raise PromiseError("two processes had one directory open")
