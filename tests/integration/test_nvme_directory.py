"""The folder of an NVMe tier: who may use it, what is refused, and what it keeps over a restart."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.abc.tier import GetStatus, PutItem, PutStatus
from kvtier.errors import ConfigError, TierPathError
from kvtier.storage_backends.host.tier import HostTier
from kvtier.storage_backends.nvme.tier import NvmeTier
from kvtier.testing.pages import aligned_buffer, belongs, item_of, key_of
from kvtier.testing.tiers import check_counters
from tests.nvme_tiers import CAPACITY_BYTES, PAGE_BYTES, PAGES, FailingCall, put, statuses


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[NvmeTier]:
    tier = NvmeTier(tmp_path, CAPACITY_BYTES, segment_bytes=CAPACITY_BYTES // 2)
    put(tier, 0, PAGES)
    yield tier
    tier.close()


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
