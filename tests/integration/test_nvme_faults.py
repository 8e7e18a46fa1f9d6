"""What happens to an NVMe tier's files and device while it runs and between runs: never wrong bytes, never a raise."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.abc.tier import GetStatus, PutItem, PutStatus
from kvtier.errors import ConfigError, TierPathError
from kvtier.storage_backends.host.tier import HostTier
from kvtier.storage_backends.nvme.tier import NvmeTier
from kvtier.testing.pages import aligned_buffer, belongs, item_of, key_of
from kvtier.testing.tiers import check_counters

CAPACITY_BYTES = 1 << 20
PATIENCE_S = 60.0
"""How long is waited for what must happen: long, since it says nothing about speed."""
PAGE_BYTES = 20_000
PAGES = 20


def put(tier: NvmeTier, first: int, count: int) -> list[PutStatus]:
    return tier.put_many([item_of(key_of(n), PAGE_BYTES) for n in range(first, first + count)])


def statuses(tier: NvmeTier, first: int = 0, count: int = PAGES) -> list[GetStatus]:
    """Get pages one by one; a hit must be the key's own bytes."""
    found = []
    for n in range(first, first + count):
        out = aligned_buffer(PAGE_BYTES)
        (result,) = tier.get_many_into([key_of(n)], [out])
        assert result.status is not GetStatus.HIT or belongs(key_of(n), out), "wrong bytes were served"
        found.append(result.status)
    return found


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[NvmeTier]:
    tier = NvmeTier(tmp_path, CAPACITY_BYTES, segment_bytes=CAPACITY_BYTES // 2)
    put(tier, 0, PAGES)
    yield tier
    tier.close()


def reopened(tier: NvmeTier, change: Callable[[Path], object]) -> NvmeTier:
    tier.close()
    change(tier.path)
    return NvmeTier(tier.path, CAPACITY_BYTES)


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


class FailingCall:
    """Stands in for an `os` function: raises `code` while `failing`."""

    def __init__(self, real: Callable[..., Any], code: int) -> None:
        self.real, self.code, self.failing, self.calls = real, code, True, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        if self.failing:
            raise OSError(self.code, os.strerror(self.code))
        return self.real(*args)


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


# ---- the directory


def test_files_are_private(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    tier = NvmeTier(directory, CAPACITY_BYTES)
    put(tier, 0, 1)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    names = {p.name: stat.S_IMODE(p.stat().st_mode) for p in directory.iterdir()}
    assert names == dict.fromkeys(("FORMAT", "LOCK", "index.log", "segment-000000"), 0o600)
    assert (directory / "segment-000000").stat().st_size == CAPACITY_BYTES
    tier.close()


def test_a_directory_serves_one_process(tier: NvmeTier) -> None:
    script = (
        "import sys\nfrom kvtier.storage_backends.nvme.tier import NvmeTier\n"
        f"try:\n NvmeTier(sys.argv[1], {CAPACITY_BYTES})\nexcept OSError as e:\n print(e); sys.exit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tier.path], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert str(os.getpid()) in done.stdout and "in use by process" in done.stdout
    assert statuses(tier) == [GetStatus.HIT] * PAGES
    with pytest.raises(TierPathError, match="in use"):
        NvmeTier(tier.path, CAPACITY_BYTES)


@pytest.mark.parametrize("capacity", [-1, 0, 4095])
def test_a_capacity_without_a_slot_is_refused(tmp_path: Path, capacity: int) -> None:
    with pytest.raises(ConfigError, match=f"capacity = {capacity}"):
        NvmeTier(tmp_path / "d", capacity)
    assert not (tmp_path / "d").exists()


def test_a_capacity_beyond_the_disk_is_refused_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.posix_fallocate
    calls = []

    def full(fd: int, at: int, size: int) -> None:
        calls.append(fd)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, at, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TierPathError, match=r"capacity = 1048576 .* lower the capacity"):
        NvmeTier(tmp_path, CAPACITY_BYTES, segment_bytes=CAPACITY_BYTES // 4)
    assert not list(tmp_path.glob("segment-*"))
    monkeypatch.undo()
    NvmeTier(tmp_path, CAPACITY_BYTES).close()


@pytest.mark.parametrize("capacity", ["1GiB", 4096.5, None, True])
def test_a_capacity_that_is_no_number_of_bytes_is_refused(tmp_path: Path, capacity: Any) -> None:
    with pytest.raises(ConfigError, match="no whole number of bytes"):
        NvmeTier(tmp_path / "d", capacity)
    with pytest.raises(ConfigError, match="no whole number of bytes"):
        HostTier(capacity)


def test_a_capacity_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"capacity = 1\d{30} bytes cannot be addressed; set at most"):
        NvmeTier(tmp_path / "d", 10**30)


def test_a_capacity_that_takes_too_many_files_is_refused_at_once(tmp_path: Path) -> None:
    NvmeTier(tmp_path, CAPACITY_BYTES, segment_bytes=4096).close()
    with pytest.raises(ConfigError, match=r"capacity = 1099511627776 .* 268435456 open files.* name a new directory"):
        NvmeTier(tmp_path, 1 << 40)
    NvmeTier(tmp_path, CAPACITY_BYTES).close()


def test_a_file_is_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(TierPathError, match="is a file"):
        NvmeTier(tmp_path / "f", CAPACITY_BYTES)
    with pytest.raises(TierPathError, match="cannot be used"):
        NvmeTier(tmp_path / "f" / "below", CAPACITY_BYTES)


def test_an_unwritable_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in: the superuser, who may run these tests, can write anywhere."""
    monkeypatch.setattr(os, "open", FailingCall(os.open, errno.EACCES))
    with pytest.raises(TierPathError, match="Permission denied; name a directory"):
        NvmeTier(tmp_path, CAPACITY_BYTES)


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(TierPathError, match=r"thesis\.tex"):
        NvmeTier(tmp_path, CAPACITY_BYTES)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    "text",
    [b'{"kvtier_nvme_format": 2, "segment_bytes": 1048576}', b"", b"garbage", b'{"kvtier_nvme_format": 1}', b"[]"],
)
def test_another_format_is_refused_and_left_as_it_is(tier: NvmeTier, text: bytes) -> None:
    tier.close()
    (tier.path / "FORMAT").write_bytes(text)
    log = (tier.path / "index.log").read_bytes()
    with pytest.raises(TierPathError, match="format"):
        NvmeTier(tier.path, CAPACITY_BYTES)
    assert (tier.path / "index.log").read_bytes() == log and len(log) > 0


def test_the_segment_size_belongs_to_the_directory(tier: NvmeTier) -> None:
    tier.close()
    with pytest.raises(ConfigError, match="segment_bytes"):
        NvmeTier(tier.path, CAPACITY_BYTES, segment_bytes=CAPACITY_BYTES)
    with pytest.raises(ConfigError, match="segment_bytes = 5000"):
        NvmeTier(tier.path, CAPACITY_BYTES, segment_bytes=5000)
    again = NvmeTier(tier.path, CAPACITY_BYTES)
    assert statuses(again) == [GetStatus.HIT] * PAGES
    again.close()


@pytest.mark.parametrize(
    ("option", "value"), [("io_threads", 0), ("max_record_bytes", 0), ("max_record_bytes", 1 << 21)]
)
def test_other_options_are_refused_by_name(tmp_path: Path, option: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{option} = {value}"):
        NvmeTier(tmp_path, CAPACITY_BYTES, **{option: value})  # type: ignore[arg-type]
    NvmeTier(tmp_path, CAPACITY_BYTES).close()  # nothing stayed locked


def test_a_lowered_capacity_is_kept_from_the_start(tier: NvmeTier) -> None:
    put(tier, 100, 100)
    resident = tier.usage().resident_pages
    tier.close()
    small = NvmeTier(tier.path, CAPACITY_BYTES // 4)
    usage = small.usage()
    assert usage.recovered_pages == resident and usage.evicted_pages > 0
    assert usage.used_bytes <= CAPACITY_BYTES // 4
    assert sum(p.stat().st_size for p in tier.path.glob("segment-*")) == CAPACITY_BYTES // 4
    check_counters(small)
    kept = dict(small.scan())
    assert all(belongs(k, o) for k in kept for o in [_read(small, k)])
    small.close()
    large = NvmeTier(tier.path, 4 * CAPACITY_BYTES)
    assert large.usage().resident_pages == len(kept)
    assert put(large, 1000, 100) == [PutStatus.STORED] * 100
    assert large.usage().evicted_pages == 0
    large.close()


def _read(tier: NvmeTier, key: bytes) -> memoryview:
    out = aligned_buffer(PAGE_BYTES)
    assert tier.get_many_into([key], [out])[0].status is GetStatus.HIT
    return out


def test_recency_of_puts_survives(tmp_path: Path) -> None:
    tier = NvmeTier(tmp_path, 10 * 20_480)
    for n in range(10):
        put(tier, n, 1)
    tier.close()
    tier = NvmeTier(tmp_path, 10 * 20_480)
    put(tier, 100, 4)
    assert tier.contains_many([key_of(n) for n in range(10)]) == [False] * 4 + [True] * 6
    tier.close()


def test_the_log_is_rewritten_before_it_grows_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.storage_backends.nvme import log

    monkeypatch.setattr(log, "_COMPACT_SLACK_BYTES", 16_384)
    tier = NvmeTier(tmp_path, CAPACITY_BYTES)
    sizes = []
    for n in range(0, 1500, 10):
        put(tier, n, 10)
        sizes.append((tmp_path / "index.log").stat().st_size)
    assert max(sizes) < 160_000, "1500 puts and evictions take more than 250 KB"
    there = tier.contains_many([key_of(n) for n in range(1500)])
    tier.close()
    assert not (tmp_path / "index.log.new").exists()
    tier = NvmeTier(tmp_path, CAPACITY_BYTES)
    assert tier.contains_many([key_of(n) for n in range(1500)]) == there
    assert statuses(tier, 1490, 10) == [GetStatus.HIT] * 10
    tier.close()


def test_padding_behind_an_unaligned_record_is_not_the_callers_memory(tier: NvmeTier) -> None:
    """Only what the record covers may reach the disk unless the caller says that it is padded."""
    source = aligned_buffer(8192)
    source[:] = b"\x5e" * 8192
    item = item_of(key_of(500), 5000)
    source[:5000] = item.data
    tier.put_many([PutItem(item.key, item.meta, source[:5000])])
    files = b"".join(p.read_bytes() for p in sorted(tier.path.glob("segment-*")))
    at = files.find(bytes(item.data))
    assert at >= 0 and at % 4096 == 0
    assert files[at + 5000 : at + 8192] == bytes(3192)
