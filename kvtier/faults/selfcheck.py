"""Whether torture would notice: tiers that are broken on purpose must fail it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtier.abc.tier import GetResult, GetStatus, PageMeta, Slot
from kvtier.faults.disks import flip_bits
from kvtier.faults.killing import kill_while_writing
from kvtier.faults.trial import PromiseError, Trial
from kvtier.storage_backends.nvme.tier import NvmeTier

_TRIES = 20


class UnverifiedTier(NvmeTier):
    """Gives what it read, whatever that is."""

    def _get(self, key: bytes, slot: Slot, meta: PageMeta, out: memoryview, until: float | None) -> GetResult:
        del key, until
        self._transfers.read(slot.offset, out, meta.nbytes)
        return GetResult(GetStatus.HIT, meta)


class ForgetfulTier(NvmeTier):
    """Loses every tenth page by being opened again."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.delete_many([key for key, _ in self.scan()][::10])


def notice_broken_tiers(trial: Trial) -> None:
    """Raises PromiseError where a broken tier passes."""
    _must_fail(trial, UnverifiedTier, flip_bits, "wrong bytes")
    _must_fail(trial, ForgetfulTier, kill_while_writing, "committed pages were lost")


def _must_fail(trial: Trial, kind: type[NvmeTier], check: Any, complaint: str) -> None:
    def opens(paths: Sequence[Path], capacity_bytes: int, **options: Any) -> NvmeTier:
        return kind(paths[0], capacity_bytes, **options)

    for n in range(_TRIES):
        folder = trial.folder / f"{kind.__name__}{n}"
        folder.mkdir()
        try:
            check(Trial(folder, trial.rng, number=0, opens=opens, outside=trial.outside))
        except PromiseError as broken:
            if complaint not in str(broken):
                raise PromiseError(f"{kind.__name__} failed for another reason: {broken}") from broken
            trial.seen[f"{kind.__name__} caught"] += 1
            return
    raise PromiseError(f"{kind.__name__} passed {_TRIES} trials: torture would not notice it")
