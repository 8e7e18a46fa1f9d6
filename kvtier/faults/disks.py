"""Disks that are full, fail, rot or hang, and files that somebody changes underneath."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from kvtier.abc.tier import GetStatus, PutStatus
from kvtier.errors import TierPathError
from kvtier.faults.trial import PATIENCE_S, LocalTier, Trial, expect, expect_counters
from kvtier.storage_backends.host.tier import HostTier
from kvtier.storage_backends.nvme.health import DeviceCounters, DeviceState
from kvtier.storage_backends.nvme.striped import StripedNvmeTier
from kvtier.store import TieredStore
from kvtier.testing.faulty_device import Fault, FaultyDevice, failing
from kvtier.testing.redis_servers import wait_for

PAGE_BYTES = 20_000
PAGES = 40
CAPACITY_BYTES = 3 << 20
_CLOSE_S = 2.0
_CLOSE_MARGIN_S = 30.0
"""What a busy machine may add to it: a store that waits for the device would not close at all."""


def fill_the_disk(trial: Trial) -> None:
    """Promises: a full disk takes no new pages, which is counted; what it holds is served; a restart on it works; with
    space it takes pages again, by itself."""
    device = FaultyDevice()
    with _small_disk(trial) as disk:
        folder = trial.folder if disk is None else disk
        names = [str(folder / name) for name in "ab"[: 1 + trial.number % 2]]
        capacity_bytes = 2 << 20
        tier = trial.open(names, capacity_bytes, device=device)
        try:
            trial.put(tier, range(PAGES), PAGE_BYTES)
            filler = None
            if disk is None:
                device.set(failing(errno.ENOSPC, "write", "append"))
                trial.seen["full by injection"] += 1
            else:
                filler = _fill(disk)
                trial.seen["full for real"] += 1
            number, failed = 1000, 0
            while _states(tier) != {DeviceState.NO_WRITES} and number < 20_000:
                failed += trial.put(tier, [number], 4096).count(PutStatus.FAILED)
                number += 1
            expect(failed > 0, "no put failed on a full disk")
            expect(_states(tier) == {DeviceState.NO_WRITES}, "the disk is full and writes go on")
            held = [n for n, s in enumerate(trial.get(tier, range(PAGES), PAGE_BYTES)) if s is GetStatus.HIT]
            before = _refused(tier)
            expect(set(trial.put(tier, range(100, 104), PAGE_BYTES)) == {PutStatus.FAILED}, "a full disk took pages")
            expect(_refused(tier) > before, "refused pages were not counted")
            expect(_hits(trial, tier, held) == len(held), "pages that were there before are not served")
            expect_counters(tier)
            tier.close()
            tier = trial.open(names, capacity_bytes, device=device)
            expect(_hits(trial, tier, held) == len(held), "pages were lost by a restart on a full disk")
            trial.put(tier, range(200, 210), 4096)
            device.set()
            if filler is not None:
                filler.unlink()
            wait_for(
                lambda: _states(tier) == {DeviceState.SERVING}, "writes did not come back with the space", PATIENCE_S
            )
            expect(PutStatus.STORED in trial.put(tier, range(300, 310), PAGE_BYTES), "no page is taken after it")
            expect_counters(tier)
        finally:
            tier.close()


def fail_one_device(trial: Trial) -> None:
    """Promises: pages of a device that fails are misses, those of the other one are served, new ones are taken by it;
    the device comes back by itself with every page."""
    device = FaultyDevice()
    tier = trial.open("ab", CAPACITY_BYTES, device=device)
    try:
        trial.put(tier, range(PAGES), PAGE_BYTES)
        bad = trial.folder / trial.rng.choice("ab")
        if trial.number % 2:
            device.set(failing(errno.EIO, "write", "append", under=bad))
            state = DeviceState.NO_WRITES
        else:
            device.set(failing(errno.EIO, under=bad))
            state = DeviceState.OUT
        # Enough to fail several times in a row, whichever way.
        for start in range(100, 160, 4):
            taken = trial.put(tier, range(start, start + 4), PAGE_BYTES)
            expect(set(taken) == {PutStatus.STORED}, f"one of two devices works, and pages were not taken: {taken}")
            found = trial.get(tier, range(PAGES), PAGE_BYTES)
            expect(found.count(GetStatus.HIT) >= PAGES // 8, "the device that works serves nothing")
        expect(_states(tier) == {DeviceState.SERVING, state}, f"the device that fails is not {state.value}")
        device.set()
        wait_for(lambda: _states(tier) == {DeviceState.SERVING}, "the device did not come back", PATIENCE_S)
        expect(set(trial.get(tier, range(PAGES), PAGE_BYTES)) == {GetStatus.HIT}, "pages were lost with the failure")
        expect_counters(tier)
    finally:
        device.set()
        tier.close()


def flip_bits(trial: Trial) -> None:
    """Promises: a flipped bit costs at most the page it lies in, which is a counted miss; a flipped bit of the log at
    most its own record's, and never a page's description."""
    names = trial.some_names()
    tier = trial.open(names, CAPACITY_BYTES)
    try:
        trial.put(tier, range(PAGES), PAGE_BYTES)
        flips = 1 + trial.rng.randrange(8)
        for _ in range(flips):
            _flip(trial, trial.rng.choice(_files(trial, names, "segment-*")))
        lost = [s for s in trial.get(tier, range(PAGES), PAGE_BYTES) if s is not GetStatus.HIT]
        expect(len(lost) <= flips, f"{flips} flipped bits cost {len(lost)} pages")
        expect(set(lost) <= {GetStatus.CORRUPT}, f"a flipped bit is answered with {set(lost)}")
        expect(tier.usage().quarantined_pages == len(lost), "bad pages were not counted")
        tier.close()
        flips = 1 + trial.rng.randrange(8)
        for _ in range(flips):
            _flip(trial, trial.rng.choice(_files(trial, names, "index.log")))
        left = PAGES - len(lost)
        tier = trial.open(names, CAPACITY_BYTES)
        # The page of a record that said it had gone may be listed again; it cannot be read.
        hits = _hits(trial, tier, range(PAGES))
        expect(hits >= left - flips, f"{flips} flipped bits of the log cost {left - hits} pages")
        trial.get_all(tier)
        expect_counters(tier)
    finally:
        tier.close()


def change_files(trial: Trial) -> None:
    """Promises: files that were swapped, removed, cut or overwritten, while the tier is open or closed, cost pages and
    never give wrong ones; the tier goes on storing."""
    names = list("ab")
    tier = trial.open(names, CAPACITY_BYTES, segment_bytes=1 << 20)
    try:
        trial.put(tier, range(PAGES), PAGE_BYTES)
        was_open = trial.rng.random() < 0.5
        if not was_open:
            tier.close()
        files = _files(trial, names, "segment-*")
        change = trial.rng.choice(("swap", "remove", "cut", "noise", "log"))
        one, other = trial.rng.sample(files, 2)
        if change == "swap":
            one.rename(trial.folder / "swap")
            other.rename(one)
            (trial.folder / "swap").rename(other)
        elif change == "remove":
            one.unlink()
        elif change == "cut":
            os.truncate(one, trial.rng.randrange(one.stat().st_size))
        elif change == "noise":
            one.write_bytes(trial.rng.randbytes(1 << 20))
        else:
            log = trial.rng.choice(_files(trial, names, "index.log"))
            log.write_bytes(log.read_bytes()[: trial.rng.randrange(log.stat().st_size)])
        trial.seen[f"{change}, {'open' if was_open else 'closed'}"] += 1
        if was_open:
            trial.get(tier, range(PAGES), PAGE_BYTES)
            trial.put(tier, range(100, 110), PAGE_BYTES)
            trial.get_all(tier)
            tier.close()
        tier = trial.open(names, CAPACITY_BYTES)
        trial.get_all(tier)
        trial.get(tier, range(PAGES), PAGE_BYTES)
        expect_counters(tier)
        stored = trial.put(tier, range(200, 210), PAGE_BYTES)
        expect(set(stored) == {PutStatus.STORED}, f"the tier does not take pages any more: {stored}")
        expect(_hits(trial, tier, range(200, 210)) == 10, "pages that were stored after it are not there")
        expect_counters(tier)
    finally:
        tier.close()


def close_over_a_stuck_device(trial: Trial) -> None:
    """Promises: closing ends in time though transfers hang; nobody else gets the directory before they ended."""
    device, go_on = FaultyDevice(), threading.Event()
    nvme = trial.open("ab" if trial.number % 2 else "a", CAPACITY_BYTES, device=device)
    store = TieredStore(HostTier(1 << 20), [nvme])
    caught = threading.Thread(target=lambda: _ignoring_close(trial, nvme), daemon=True)
    try:
        trial.put(nvme, range(PAGES), PAGE_BYTES)
        device.set(Fault(("read",), under=trial.folder / "a", hold=go_on))
        caught.start()
        wait_for(lambda: device.struck > 0, "no transfer began", PATIENCE_S)
        started = time.monotonic()
        store.close()
        took_s = time.monotonic() - started
        trial.seen["closed in time"] += 1
        expect(took_s < _CLOSE_S + _CLOSE_MARGIN_S, f"closing took {took_s:.1f} s over a device that hangs")
        try:
            trial.open("a", CAPACITY_BYTES).close()
            expect(False, "a directory was given to another while a transfer was under way")
        except TierPathError:
            trial.seen["kept from others"] += 1
    finally:
        go_on.set()
        device.set()
        if caught.ident is not None:
            caught.join(PATIENCE_S)
        store.close()


def _ignoring_close(trial: Trial, tier: LocalTier) -> None:
    with contextlib.suppress(RuntimeError):  # closed under it
        trial.get(tier, range(PAGES), PAGE_BYTES)


def _states(tier: LocalTier) -> set[DeviceState]:
    if isinstance(tier, StripedNvmeTier):
        return {state for _, state, _ in tier.directories()}
    return {tier.health.state}


def _refused(tier: LocalTier) -> int:
    counters: list[DeviceCounters] = (
        [c for _, _, c in tier.directories()] if isinstance(tier, StripedNvmeTier) else [tier.health.counters()]
    )
    return sum(c.refused_puts for c in counters)


def _hits(trial: Trial, tier: LocalTier, numbers: range | list[int]) -> int:
    return trial.get(tier, numbers, PAGE_BYTES).count(GetStatus.HIT)


def _files(trial: Trial, names: str | list[str], pattern: str) -> list[Path]:
    return sorted(path for name in names for path in (trial.folder / name).glob(pattern))


def _flip(trial: Trial, path: Path) -> None:
    with path.open("r+b", buffering=0) as file:
        # Of a segment the part in use.
        at = trial.rng.randrange(min(path.stat().st_size, PAGES * 20_480))
        file.seek(at)
        old = file.read(1)[0]
        file.seek(at)
        file.write(bytes([old ^ (1 << trial.rng.randrange(8))]))
    trial.seen["bits flipped"] += 1


@contextlib.contextmanager
def _small_disk(trial: Trial) -> Iterator[Path | None]:
    """A file system of 8 MiB of its own, or None where none can be mounted."""
    disk = trial.folder / "disk"
    disk.mkdir()
    trial.outside.append(lambda: _unmount(disk))
    mount = shutil.which("mount")
    command = [mount or "", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if mount is None or os.geteuid() != 0 or _done(command):
        yield None
        return
    try:
        yield disk
    finally:
        _unmount(disk)


def _unmount(disk: Path) -> None:
    if disk.is_mount() and _done(["umount", "--lazy", str(disk)]) and disk.is_mount():
        raise OSError(f"{disk} cannot be unmounted")


def _done(command: list[str]) -> int:
    """Its exit status. In a session of its own: a Ctrl-C must not end it half way."""
    return subprocess.run(command, capture_output=True, check=False, start_new_session=True).returncode


def _fill(disk: Path) -> Path:
    """A file that takes all that is left."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as file:
        for step in (1 << 16, 4096, 1):
            with contextlib.suppress(OSError):  # full
                while file.write(b"x" * step):
                    pass
    return path
