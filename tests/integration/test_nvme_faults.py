"""What happens to an NVMe tier's files and device while it runs and between runs: never wrong bytes, never a raise."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.abc.tier import GetStatus, PutStatus
from kvtier.errors import TierPathError
from kvtier.storage_backends.nvme.tier import NvmeTier
from kvtier.testing.pages import aligned_buffer, key_of
from kvtier.testing.tiers import check_counters
from tests.nvme_tiers import CAPACITY_BYTES, PAGE_BYTES, PAGES, PATIENCE_S, FailingCall, put, reopened, statuses


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[NvmeTier]:
    tier = NvmeTier(tmp_path, CAPACITY_BYTES, segment_bytes=CAPACITY_BYTES // 2)
    put(tier, 0, PAGES)
    yield tier
    tier.close()


# ---- the log


def test_one_flipped_bit_anywhere_in_the_log_is_at_most_one_page(tmp_path: Path) -> None:
    tier = NvmeTier(tmp_path / "origin", CAPACITY_BYTES)
    put(tier, 0, 6)
    tier.delete_many([key_of(5)])
    tier.close()
    log = (tmp_path / "origin" / "index.log").read_bytes()
    for at in range(0, len(log), 13):  # no divisor of a record's length: every field has its turn
        directory = tmp_path / "copy"
        shutil.copytree(tmp_path / "origin", directory)
        damaged = bytearray(log)
        damaged[at] ^= 1 << (at % 8)
        (directory / "index.log").write_bytes(damaged)
        tier = NvmeTier(directory, CAPACITY_BYTES)
        try:
            found = statuses(tier, 0, 6)
            assert found[:5].count(GetStatus.HIT) >= 4, f"byte {at}: {found}"
            assert set(found) <= {GetStatus.HIT, GetStatus.ABSENT}  # a page whose deletion was lost may be back
            check_counters(tier)
            put(tier, 100, 60)
            check_counters(tier)
        finally:
            tier.close()
            shutil.rmtree(directory)


def test_a_log_of_noise_is_an_empty_tier(tier: NvmeTier) -> None:
    again = reopened(tier, lambda path: (path / "index.log").write_bytes(os.urandom(5000)))
    try:
        assert statuses(again) == [GetStatus.ABSENT] * PAGES
        assert put(again, 0, PAGES) == [PutStatus.STORED] * PAGES
    finally:
        again.close()


def test_a_lost_eviction_record_never_serves_the_slots_new_bytes(tier: NvmeTier) -> None:
    """The log as it was before an eviction, over the data as it is after it."""
    before = (tier.path / "index.log").read_bytes()
    put(tier, 100, 200)
    again = reopened(tier, lambda path: (path / "index.log").write_bytes(before))
    try:
        found = statuses(again)
        assert GetStatus.HIT not in found
        assert again.usage().quarantined_pages == found.count(GetStatus.CORRUPT) > 0
        check_counters(again)
    finally:
        again.close()


# ---- the segment files


def test_files_removed_between_runs_are_misses(tier: NvmeTier) -> None:
    again = reopened(tier, lambda path: (path / "segment-000000").unlink())
    try:
        found = statuses(again)
        assert set(found) == {GetStatus.ABSENT}
        assert put(again, 0, PAGES) == [PutStatus.STORED] * PAGES
        assert statuses(again) == [GetStatus.HIT] * PAGES
        check_counters(again)
    finally:
        again.close()


def test_a_file_that_leads_nowhere_is_named(tier: NvmeTier) -> None:
    def lead_nowhere(path: Path) -> None:
        (path / "segment-000000").unlink()
        (path / "segment-000000").symlink_to(path / "nowhere" / "file")

    with pytest.raises(TierPathError, match=r"segment-000000: No such file or directory; see to the device"):
        reopened(tier, lead_nowhere)
    (tier.path / "segment-000000").unlink()
    again = reopened(tier, lambda path: None)
    assert put(again, 0, PAGES) == [PutStatus.STORED] * PAGES, "the directory stays locked"
    again.close()


def test_a_file_cut_between_runs_keeps_what_is_whole(tier: NvmeTier) -> None:
    again = reopened(tier, lambda path: os.truncate(path / "segment-000000", 100_000))
    try:
        found = statuses(again)
        assert found.count(GetStatus.HIT) == 100_000 // 20_480
        assert found.count(GetStatus.ABSENT) == PAGES - 100_000 // 20_480
        check_counters(again)
    finally:
        again.close()


def test_swapped_files_are_misses(tier: NvmeTier) -> None:
    put(tier, 20, 25)

    def swap(path: Path) -> None:
        (path / "segment-000000").rename(path / "other")
        (path / "segment-000001").rename(path / "segment-000000")
        (path / "other").rename(path / "segment-000001")

    again = reopened(tier, swap)
    try:
        resident = again.usage().resident_pages
        found = statuses(again, 0, 45)
        assert GetStatus.HIT not in found
        assert again.usage().quarantined_pages == found.count(GetStatus.CORRUPT) == resident
    finally:
        again.close()


def test_files_cut_or_removed_underneath_are_misses(tier: NvmeTier) -> None:
    os.truncate(tier.path / "segment-000000", 0)
    os.truncate(tier.path / "segment-000001", 0)
    assert statuses(tier) == [GetStatus.CORRUPT] * PAGES
    assert tier.usage().quarantined_pages == PAGES
    assert put(tier, 0, PAGES) == [PutStatus.STORED] * PAGES
    assert statuses(tier) == [GetStatus.HIT] * PAGES
    for segment in tier.path.glob("segment-*"):
        segment.unlink()
    assert set(statuses(tier)) <= {GetStatus.HIT, GetStatus.CORRUPT}
    check_counters(tier)


def test_a_page_whose_bytes_are_gone_heals_the_index(tier: NvmeTier) -> None:
    """Its place is there and empty: a miss once, then known no more, and stored again."""
    (entry,) = [e for e in tier._table.entries(staged=False) if e.key == key_of(3)]
    with (tier.path / "segment-000000").open("r+b") as file:
        file.seek(entry.offset)
        file.write(bytes(20_480))
    assert statuses(tier, 3, 1) == [GetStatus.CORRUPT]
    assert tier.contains_many([key_of(3)]) == [False]
    assert put(tier, 3, 1) == [PutStatus.STORED]
    assert statuses(tier) == [GetStatus.HIT] * PAGES
    check_counters(tier)


def test_space_is_reclaimed_without_stopping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleted pages make room at once and the log is rewritten, while pages are read all the time."""
    from kvtier.storage_backends.nvme import log

    monkeypatch.setattr(log, "_COMPACT_SLACK_BYTES", 16_384)
    tier = NvmeTier(tmp_path, CAPACITY_BYTES)
    put(tier, 0, PAGES)
    stop, read = threading.Event(), []

    def reads() -> None:
        while not stop.is_set():
            read.append(statuses(tier).count(GetStatus.HIT))

    reader = threading.Thread(target=reads)
    reader.start()
    try:
        for n in range(1000, 3000, 20):
            assert put(tier, n, 20) == [PutStatus.STORED] * 20
            assert tier.delete_many([key_of(m) for m in range(n, n + 20)]) == 20
    finally:
        stop.set()
        reader.join()
    usage = tier.usage()
    assert read and set(read) == {PAGES}
    assert usage.evicted_pages == 0 and usage.resident_pages == PAGES, "room was made by evictions"
    assert sum(p.stat().st_size for p in tmp_path.glob("segment-*")) == CAPACITY_BYTES
    assert (tmp_path / "index.log").stat().st_size < 150_000, "2000 puts and deletes took 288 KB"
    check_counters(tier)
    tier.close()


# ---- the device


def test_failing_puts_do_not_empty_a_full_tier(tier: NvmeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tier, 100, 100)
    before = tier.usage().resident_pages
    monkeypatch.setattr(os, "pwritev", FailingCall(os.pwritev, errno.ENOSPC))
    for n in range(30):
        assert put(tier, 1000 + n, 1) == [PutStatus.FAILED]
    assert tier.usage().resident_pages >= before - 1
    check_counters(tier)


def test_a_failing_read_is_a_failure_and_the_page_stays(tier: NvmeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = FailingCall(os.preadv, errno.EIO)
    monkeypatch.setattr(os, "preadv", failing)
    assert statuses(tier, 0, 2) == [GetStatus.FAILED] * 2
    failing.failing = False
    assert statuses(tier) == [GetStatus.HIT] * PAGES
    assert tier.usage().quarantined_pages == 0


def test_partial_transfers_are_carried_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.preadv, os.pwritev

    def short(call: Any) -> Any:
        return lambda fd, buffers, at: call(fd, [buffers[0][:8192]], at)

    monkeypatch.setattr(os, "preadv", short(read))
    monkeypatch.setattr(os, "pwritev", short(write))
    tier = NvmeTier(tmp_path, CAPACITY_BYTES)
    put(tier, 0, 5)
    assert statuses(tier, 0, 5) == [GetStatus.HIT] * 5
    tier.close()


def test_where_direct_transfers_are_refused_the_page_cache_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused at the first transfer, as some file systems do."""
    read, write = os.preadv, os.pwritev

    def refusing(call: Any) -> Any:
        def transfer(fd: int, buffers: Any, at: int) -> Any:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "refused")
            return call(fd, buffers, at)

        return transfer

    monkeypatch.setattr(os, "preadv", refusing(read))
    monkeypatch.setattr(os, "pwritev", refusing(write))
    tier = NvmeTier(tmp_path, CAPACITY_BYTES)
    put(tier, 0, 8)
    assert statuses(tier, 0, 8) == [GetStatus.HIT] * 8
    tier.close()


def test_where_direct_opening_is_refused_the_page_cache_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refusing(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    tier = NvmeTier(tmp_path, CAPACITY_BYTES)
    put(tier, 0, 8)
    assert statuses(tier, 0, 8) == [GetStatus.HIT] * 8
    tier.close()


def test_a_get_holds_its_slot_against_eviction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that takes long while everything else in the tier is replaced."""
    tier = NvmeTier(tmp_path, 10 * 20_480)
    put(tier, 0, 10)
    real, reading, go_on = os.preadv, threading.Event(), threading.Event()

    def slow(fd: int, buffers: Any, at: int) -> int:
        reading.set()
        assert go_on.wait(10 * PATIENCE_S)
        return real(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", slow)
    found: list[GetStatus] = []
    thread = threading.Thread(target=lambda: found.extend(statuses(tier, 3, 1)))
    thread.start()
    assert reading.wait(PATIENCE_S)
    assert put(tier, 100, 50) == [PutStatus.STORED] * 50
    assert tier.contains_many([key_of(3)]) == [True]
    tier.delete_many([key_of(3)])
    assert put(tier, 200, 50) == [PutStatus.STORED] * 50
    go_on.set()
    thread.join()
    assert found == [GetStatus.HIT]
    check_counters(tier)
    tier.close()


def test_gets_are_served_during_a_flood_of_puts(tier: NvmeTier) -> None:
    stop = threading.Event()

    def flood() -> None:
        n = 1000
        while not stop.is_set():
            put(tier, n, 16)
            n += 16

    threads = [threading.Thread(target=flood) for _ in range(3)]
    for thread in threads:
        thread.start()
    waits_s: list[float] = []
    until, give_up = time.monotonic() + 1, time.monotonic() + PATIENCE_S
    try:
        while time.monotonic() < until or (len(waits_s) < 50 and time.monotonic() < give_up):
            (key,) = [key for key, _ in tier.scan()][-1:]
            started = time.monotonic()
            tier.get_many_into([key], [aligned_buffer(PAGE_BYTES)])
            waits_s.append(time.monotonic() - started)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert len(waits_s) >= 50, "gets starve"
    assert sorted(waits_s)[len(waits_s) // 2] < 1.0


def test_closing_does_not_wait_for_a_device_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = NvmeTier(tmp_path, CAPACITY_BYTES)
    put(tier, 0, 1)
    real, reading, go_on = os.preadv, threading.Event(), threading.Event()

    def hanging(fd: int, buffers: Any, at: int) -> int:
        reading.set()
        assert go_on.wait(10 * PATIENCE_S)
        return real(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", hanging)
    found: list[GetStatus] = []
    thread = threading.Thread(target=lambda: found.extend(statuses(tier, 0, 1)))
    thread.start()
    assert reading.wait(PATIENCE_S)
    started = time.monotonic()
    tier.close()
    assert time.monotonic() - started < PATIENCE_S / 2, "closing is to take 2 s, and waited for the device"
    with pytest.raises(TierPathError, match="in use"):  # a transfer may still arrive: nobody else gets the directory
        NvmeTier(tmp_path, CAPACITY_BYTES)
    go_on.set()
    thread.join()
    assert found == [GetStatus.HIT]


def test_a_log_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    NvmeTier(tmp_path, CAPACITY_BYTES).close()
    (tmp_path / "index.log").unlink()
    (tmp_path / "index.log").mkdir()
    with pytest.raises(TierPathError, match=r"index\.log cannot be used"):
        NvmeTier(tmp_path, CAPACITY_BYTES)
    (tmp_path / "index.log").rmdir()
    NvmeTier(tmp_path, CAPACITY_BYTES).close()  # neither lock nor files were left open
