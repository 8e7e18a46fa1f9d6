"""All checks of ``kvtier torture``, run for a time, and the sheet of what came out."""

from __future__ import annotations

import random
import shutil
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from kvtier.faults import disks, killing, ranks, selfcheck, servers
from kvtier.faults.trial import PromiseError, Trial, UnavailableError

TRIAL_LIMIT_S = 180.0
"""A trial that has not ended by then hangs, and failed."""
_ROOM_BYTES = 32 << 20
_BREAK_OFF_S = 10.0
"""How long a trial that is broken off may take to notice."""


@dataclass(frozen=True, slots=True)
class Check:
    """room_bytes: what its files may take of the folder's disk."""

    name: str
    what: str
    run: Callable[[Trial], None]
    room_bytes: int = _ROOM_BYTES


CHECKS = (
    Check("self-check", "broken tiers are noticed", selfcheck.notice_broken_tiers, killing.ROOMY_BYTES + _ROOM_BYTES),
    Check(
        "kill", "kill -9 while writing, then opened again", killing.kill_while_writing,
        killing.ROOMY_BYTES + _ROOM_BYTES,
    ),
    Check("full", "a disk without space, and space again", disks.fill_the_disk),
    Check("device", "one of two devices fails and comes back", disks.fail_one_device),
    Check("flips", "bits flipped in pages and in the log", disks.flip_bits),
    Check("files", "files swapped, removed, cut, overwritten", disks.change_files),
    Check("close", "closing over a device that hangs", disks.close_over_a_stuck_device),
    Check("redis", "Redis frozen, killed, its values changed", servers.freeze_and_kill_redis),
    Check("ranks", "ranks with different pages, one slow", ranks.skew_ranks),
)  # fmt: skip


class Outcome(Enum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(slots=True)
class Line:
    """What became of one check. seen: what happened, by name. detail: what broke, or why it was skipped."""

    check: Check
    outcome: Outcome = Outcome.PASSED
    trials: int = 0
    seconds: float = 0.0
    seen: Counter[str] = field(default_factory=Counter)
    detail: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "check": self.check.name,
            "what": self.check.what,
            "outcome": self.outcome.value,
            "trials": self.trials,
            "seconds": round(self.seconds, 3),
            "seen": dict(self.seen),
            "detail": self.detail,
        }


def torture(
    folder: Path,
    seconds: float,
    seed: int,
    *,
    checks: Sequence[Check] = CHECKS,
    trials: int = 1,
    progress: Callable[[Line], None] = lambda line: None,
) -> list[Line]:
    """Run every check `trials` times, then all of them in turn until `seconds` have passed. A check that failed or
    cannot be run is not run again. folder: an empty one; left empty, also where a KeyboardInterrupt or
    SystemExit breaks it off. progress: called before and after each trial."""
    lines = [Line(check) for check in checks]
    folder = folder.absolute()  # a disk of its own is mounted below it, and is named by its whole path
    until = time.monotonic() + seconds
    while True:
        going = [line for line in lines if line.outcome is Outcome.PASSED]
        due = [line for line in going if line.trials < trials]
        if not due and (not going or time.monotonic() >= until):
            return lines
        for line in due or going:
            if line.trials >= trials and time.monotonic() >= until:
                break
            progress(line)
            _run(line, folder, seed)
            progress(line)


def _run(line: Line, folder: Path, seed: int) -> None:
    place = folder / f"{line.check.name}-{line.trials}"
    place.mkdir()
    trial = Trial(place, random.Random(f"{seed} {line.check.name} {line.trials}"), number=line.trials)
    outcome: list[tuple[Outcome, str]] = []

    def run() -> None:
        try:
            line.check.run(trial)
        except PromiseError as broken:
            outcome.append((Outcome.FAILED, f"trial {trial.number}: {broken}"))
        except UnavailableError as reason:
            outcome.append((Outcome.SKIPPED, str(reason)))
        except Exception:  # noqa: BLE001 - whatever a fault brings up is what is looked for
            outcome.append((Outcome.FAILED, f"trial {trial.number}: {traceback.format_exc(limit=-3)}"))

    started = time.monotonic()
    thread = threading.Thread(target=run, name=f"kvtier-torture-{line.check.name}", daemon=True)
    try:
        thread.start()
        thread.join(TRIAL_LIMIT_S)
    except (KeyboardInterrupt, SystemExit):
        trial.end_outside()
        if thread.ident is not None:
            thread.join(_BREAK_OFF_S)
        trial.end_outside()  # what it began meanwhile
        shutil.rmtree(place, ignore_errors=True)
        raise
    line.seconds += time.monotonic() - started
    line.trials += 1
    line.seen.update(trial.seen)
    if thread.is_alive():
        trial.end_outside()
        outcome.append((Outcome.FAILED, f"trial {trial.number} has not ended after {TRIAL_LIMIT_S:.0f} s"))
    if outcome:
        line.outcome, line.detail = outcome[0]
    shutil.rmtree(place, ignore_errors=True)
