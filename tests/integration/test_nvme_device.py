"""A device that is full, fails, hangs or refuses: no new writes, misses, and back by itself once it works again."""

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

import pytest

from kvtier.abc.tier import LENGTH_UNKNOWN, GetStatus, PutStatus
from kvtier.errors import TierPathError
from kvtier.ledger import MissReason
from kvtier.storage_backends.host.tier import HostTier
from kvtier.storage_backends.nvme import health
from kvtier.storage_backends.nvme.health import DeviceState
from kvtier.storage_backends.nvme.striped import StripedNvmeTier
from kvtier.storage_backends.nvme.tier import NvmeTier
from kvtier.store import TieredStore
from kvtier.testing.faulty_device import NO_SPACE, Fault, FaultyDevice, failing
from kvtier.testing.pages import item_of, key_of
from kvtier.testing.redis_servers import wait_for
from kvtier.testing.tiers import check_counters
from tests.nvme_tiers import CAPACITY_BYTES, PAGE_BYTES, PAGES, PATIENCE_S, put, statuses


@pytest.fixture
def device() -> FaultyDevice:
    return FaultyDevice()


@pytest.fixture
def tier(tmp_path: Path, device: FaultyDevice) -> Iterator[NvmeTier]:
    tier = NvmeTier(tmp_path / "pages", CAPACITY_BYTES, device=device, retry_s=0.02)
    put(tier, 0, PAGES)
    yield tier
    device.set()
    tier.close()


def wait_until_serving(tier: NvmeTier) -> None:
    wait_for(lambda: tier.health.state is DeviceState.SERVING, "the device did not come back", PATIENCE_S)


# ---- writing


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", ["write", "append"])
def test_a_device_that_fails_to_write_takes_nothing_and_serves_what_it_has(
    tier: NvmeTier, device: FaultyDevice, call: str, code: int
) -> None:
    device.set(failing(code, call))
    for n in range(6):
        assert put(tier, 100 + n, 1) == [PutStatus.FAILED]
    assert tier.health.state is DeviceState.NO_WRITES
    before = tier.health.counters()
    struck = []
    for _ in range(5):  # beside the probes, which come at growing intervals
        sofar = device.struck
        assert put(tier, 200, 5) == [PutStatus.FAILED] * 5
        struck.append(device.struck - sofar)
    assert not any(tier.contains_many([key_of(n) for n in (100, 105, 200)])), "a failed page is visible"
    counters = tier.health.counters()
    assert counters.refused_puts == before.refused_puts + 25 and counters.outages == 1
    assert counters.write_failures >= (4 if code == errno.EIO else 1) and counters.read_failures == 0
    assert min(struck) == 0, "a device that is known to fail was asked for every page"
    assert statuses(tier) == [GetStatus.HIT] * PAGES
    tier.delete_many([key_of(0)])
    check_counters(tier)
    assert tier.usage().evicted_pages == 0, "pages made room for what could not be written"
    device.set()
    wait_until_serving(tier)
    assert put(tier, 100, 3) == [PutStatus.STORED] * 3
    assert not (tier.path / "PROBE").exists()
    tier.close()
    again = NvmeTier(tier.path, CAPACITY_BYTES)
    assert statuses(again, 100, 3) == [GetStatus.HIT] * 3
    assert statuses(again) == [GetStatus.ABSENT] + [GetStatus.HIT] * (PAGES - 1)
    check_counters(again)
    again.close()


def test_one_failed_write_is_one_failed_put(tier: NvmeTier, device: FaultyDevice) -> None:
    device.set(failing(errno.EIO, "write"))
    assert put(tier, 100, 1) == [PutStatus.FAILED]
    device.set()
    assert tier.health.state is DeviceState.SERVING and tier.health.counters().write_failures == 1
    assert put(tier, 100, 1) == [PutStatus.STORED]


def test_a_full_tier_keeps_its_pages_while_the_device_is_full(tier: NvmeTier, device: FaultyDevice) -> None:
    put(tier, 100, 100)
    before = tier.usage().resident_pages
    device.set(NO_SPACE)
    for n in range(30):
        assert put(tier, 1000 + n, 1) == [PutStatus.FAILED]
    assert tier.usage().resident_pages >= before - 1
    check_counters(tier)


def test_a_rewrite_of_the_log_that_fails_leaves_everything(
    tier: NvmeTier, device: FaultyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier._index, "_compact_at", 0)
    device.set(failing(errno.ENOSPC, "sync"), failing(errno.EIO, "unlink"))
    put(tier, 100, 3)
    assert tier._compactor is not None
    tier._compactor.join(PATIENCE_S)
    device.set()
    tier.close()
    again = NvmeTier(tier.path, CAPACITY_BYTES)
    assert statuses(again) == [GetStatus.HIT] * PAGES and statuses(again, 100, 3) == [GetStatus.HIT] * 3
    again.close()


def test_lost_writes_are_misses(tier: NvmeTier, device: FaultyDevice) -> None:
    """A device that says it wrote and did not, as a power cut makes of one."""
    device.set(Fault(("write",), lose=True))
    assert put(tier, 100, 5) == [PutStatus.STORED] * 5
    device.set()
    assert statuses(tier, 100, 5) == [GetStatus.CORRUPT] * 5
    assert statuses(tier) == [GetStatus.HIT] * PAGES
    check_counters(tier)


# ---- reading


def test_a_device_that_fails_to_read_is_left_alone_until_it_works(tier: NvmeTier, device: FaultyDevice) -> None:
    device.set(failing(errno.EIO))
    assert statuses(tier, 0, 10) == [GetStatus.FAILED] * 10
    assert tier.health.state is DeviceState.OUT
    assert tier.health.counters().read_failures < 10, "it was asked on"
    assert tier.length_many([key_of(0), key_of(999)]) == [LENGTH_UNKNOWN, -1]
    assert tier.contains_many([key_of(0)]) == [False]
    assert put(tier, 100, 2) == [PutStatus.FAILED] * 2
    tier.delete_many([key_of(1)])
    check_counters(tier)
    device.set()
    wait_until_serving(tier)
    assert statuses(tier) == [GetStatus.HIT, GetStatus.ABSENT] + [GetStatus.HIT] * (PAGES - 2)
    assert tier.usage().quarantined_pages == 0


def test_a_page_that_alone_cannot_be_read_is_given_up(tier: NvmeTier, device: FaultyDevice) -> None:
    """A bad sector: the page is a miss for good instead of one that is known and never had."""
    for _ in range(3):
        device.set(failing(errno.EIO, "read"))
        assert statuses(tier, 0, 1) == [GetStatus.FAILED]
        device.set()
        assert statuses(tier, 1, 1) == [GetStatus.HIT]
    assert tier.contains_many([key_of(0)]) == [False]
    assert tier.usage().quarantined_pages == 1 and tier.health.state is DeviceState.SERVING
    check_counters(tier)
    assert put(tier, 0, 1) == [PutStatus.STORED]


def test_a_transfer_that_hangs_keeps_the_others_from_following(
    tier: NvmeTier, device: FaultyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_STALL_S", 0.2)
    go_on = threading.Event()
    device.set(Fault(("read",), hold=go_on))
    found: list[GetStatus] = []
    caught = threading.Thread(target=lambda: found.extend(statuses(tier, 3, 1)))
    caught.start()
    wait_for(lambda: tier.health.state is DeviceState.OUT, "the hanging transfer was not noticed", PATIENCE_S)
    started = time.monotonic()
    assert statuses(tier, 0, 3) == [GetStatus.FAILED] * 3
    assert put(tier, 100, 1) == [PutStatus.FAILED]
    assert tier.delete_many([key_of(5)]) == 1
    assert time.monotonic() - started < PATIENCE_S / 2
    go_on.set()
    caught.join(PATIENCE_S)
    device.set()
    assert found == [GetStatus.HIT]
    wait_until_serving(tier)
    assert put(tier, 100, 1) == [PutStatus.STORED]


def test_a_store_counts_its_misses_and_stores_the_pages_again(tmp_path: Path, device: FaultyDevice) -> None:
    nvme = NvmeTier(tmp_path / "pages", CAPACITY_BYTES, device=device, retry_s=30.0)
    put(nvme, 0, 4)
    store = TieredStore(HostTier(CAPACITY_BYTES), [nvme])
    try:
        device.set(failing(errno.EIO, "read", "write", "append"))
        for n in range(8):
            statuses(nvme, n % 4, 1)
        assert not any(store.known_below([key_of(n) for n in range(4)])), (
            "pages that cannot be had are not stored again"
        )
        snapshot = store.ledger.snapshot()
        assert sum(snapshot.misses.values()) == 0
        store.lookup("r", [key_of(0)])
        store.settle("r")
        snapshot = store.ledger.snapshot()
        assert snapshot.misses[MissReason.TIER_DOWN.value] == snapshot.lookups == 1
    finally:
        store.close()


def test_closing_does_not_wait_for_a_probe_that_hangs(tmp_path: Path, device: FaultyDevice) -> None:
    tier = NvmeTier(tmp_path, CAPACITY_BYTES, device=device, retry_s=0.01)
    go_on = threading.Event()
    device.set(failing(errno.ENOSPC, "write"))
    put(tier, 0, 1)
    struck = device.struck
    device.set(Fault(("sync",), hold=go_on))
    wait_for(lambda: device.struck > struck, "nothing was tried", PATIENCE_S)
    started = time.monotonic()
    tier.close()
    assert time.monotonic() - started < PATIENCE_S / 2, "closing is to take 2 s, and waited for the device"
    with pytest.raises(TierPathError, match="in use"):  # its files may still be written to
        NvmeTier(tmp_path, CAPACITY_BYTES)
    go_on.set()


def test_nobody_polls(tmp_path: Path, device: FaultyDevice) -> None:
    """A store with nothing to do, one of whose devices is tried again and again, leaves the core to its engine."""
    nvme = StripedNvmeTier([tmp_path / "a", tmp_path / "b"], CAPACITY_BYTES, device=device)
    store = TieredStore(HostTier(CAPACITY_BYTES), [nvme])
    try:
        device.set(failing(errno.ENOSPC, "write", under=tmp_path / "a"))
        nvme.put_many([item_of(key_of(n), PAGE_BYTES) for n in range(PAGES)])
        assert DeviceState.NO_WRITES in {state for _, state, _ in nvme.directories()}
        spent_s: list[float] = []
        while min(spent_s, default=1.0) >= 0.2 and len(spent_s) < 5:  # other tests' threads may be on their way out
            cpu = time.process_time()
            time.sleep(2.0)  # what is measured
            spent_s.append(time.process_time() - cpu)
        assert min(spent_s) < 0.2, f"{spent_s} s of CPU, of two seconds each"
    finally:
        device.set()
        store.close()


# ---- O_DIRECT


@pytest.mark.parametrize("call", ["open", "read", "write"])
def test_where_direct_transfers_are_refused_the_page_cache_serves(
    tmp_path: Path, device: FaultyDevice, call: str
) -> None:
    """At opening, as tmpfs did for long, or at the first transfer, as some network file systems do."""
    device.set(Fault((call,), code=errno.EINVAL, direct=True))
    tier = NvmeTier(tmp_path, CAPACITY_BYTES, device=device)
    assert put(tier, 0, 8) == [PutStatus.STORED] * 8
    assert statuses(tier, 0, 8) == [GetStatus.HIT] * 8
    assert device.struck and not tier._segments.direct
    assert tier.health.state is DeviceState.SERVING and tier.health.counters().outages == 0
    tier.close()
    again = NvmeTier(tmp_path, CAPACITY_BYTES)
    assert statuses(again, 0, 8) == [GetStatus.HIT] * 8
    again.close()


def test_short_transfers_are_carried_on(tmp_path: Path, device: FaultyDevice) -> None:
    device.set(Fault(("read", "write"), short=8192), Fault(("append",), short=11))
    tier = NvmeTier(tmp_path, CAPACITY_BYTES, device=device)
    put(tier, 0, 5)
    assert statuses(tier, 0, 5) == [GetStatus.HIT] * 5
    tier.close()
    again = NvmeTier(tmp_path, CAPACITY_BYTES, device=device)
    assert statuses(again, 0, 5) == [GetStatus.HIT] * 5
    again.close()


# ---- opening


@pytest.mark.parametrize("call", ["open", "preallocate", "read"])
def test_a_device_that_fails_at_opening_is_named_and_nothing_stays_locked(
    tmp_path: Path, device: FaultyDevice, call: str
) -> None:
    tier = NvmeTier(tmp_path / "pages", CAPACITY_BYTES)
    put(tier, 0, PAGES)
    tier.close()
    device.set(failing(errno.EIO, call))
    with pytest.raises(TierPathError, match=r"path = '.*pages'|in '.*pages'") as raised:
        NvmeTier(tmp_path / "pages", CAPACITY_BYTES, device=device)
    assert "Input/output error" in str(raised.value)
    again = NvmeTier(tmp_path / "pages", CAPACITY_BYTES)
    assert statuses(again) == [GetStatus.HIT] * PAGES
    again.close()


def test_a_disk_that_is_full_at_opening_gives_what_it_holds(tier: NvmeTier) -> None:
    """Also where what is behind a lowered capacity cannot be recorded as gone yet."""
    tier.close()
    full = FaultyDevice()
    full.set(failing(errno.ENOSPC, "write", "append"))
    again = NvmeTier(tier.path, CAPACITY_BYTES // 4, device=full, retry_s=0.02)
    kept = again.usage().resident_pages
    assert 0 < kept < PAGES
    assert again.health.state is DeviceState.NO_WRITES
    assert statuses(again).count(GetStatus.HIT) == kept
    full.set()
    wait_until_serving(again)
    assert put(again, 100, 1) == [PutStatus.STORED]
    again.close()
    last = NvmeTier(tier.path, CAPACITY_BYTES)
    assert statuses(last, 100, 1) == [GetStatus.HIT]
    check_counters(last)
    last.close()


# ---- a disk that is really full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small file system needs root and mount(8)")
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {made.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """A file that takes all that is left."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as file:
        for step in (1 << 16, 4096, 1):
            with contextlib.suppress(OSError):
                while file.write(b"x" * step):
                    pass
    return path


def test_a_disk_that_fills_up_and_is_emptied(small_disk: Path) -> None:
    tier = NvmeTier(small_disk / "pages", 2 << 20, retry_s=0.02)
    put(tier, 0, PAGES)
    filler = fill(small_disk)
    failed = 0
    for n in range(2000):  # the log's last block has room for some
        (status,) = tier.put_many([item_of(key_of(1000 + n), 4096)])
        failed += status is PutStatus.FAILED
        if tier.health.state is DeviceState.NO_WRITES:
            break
    assert failed and tier.health.state is DeviceState.NO_WRITES
    assert put(tier, 100, 3) == [PutStatus.FAILED] * 3
    assert tier.health.counters().refused_puts >= 3
    served = [s for s in statuses(tier) if s is GetStatus.HIT]
    assert len(served) == PAGES or tier.usage().evicted_pages
    resident = {key for key, _ in tier.scan()}
    check_counters(tier)
    tier.close()
    tier = NvmeTier(small_disk / "pages", 2 << 20, retry_s=0.02)  # opens on the full disk
    assert {key for key, _ in tier.scan()} >= resident
    filler.unlink()
    put(tier, 100, 1)
    wait_until_serving(tier)
    assert put(tier, 100, 3)[1:] == [PutStatus.STORED] * 2
    assert statuses(tier, 100, 3) == [GetStatus.HIT] * 3
    tier.close()


def test_a_capacity_that_the_disk_has_not_is_refused(small_disk: Path) -> None:
    with pytest.raises(TierPathError, match=r"lower the capacity or free some space"):
        NvmeTier(small_disk / "pages", 8 << 20)
    assert not list((small_disk / "pages").glob("segment-*"))
