"""Several directories, one per device: pages spread over them, and what becomes of the others when one fails."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.abc.tier import LENGTH_UNKNOWN, GetStatus, PutStatus, Removal
from kvtier.build import open_store
from kvtier.cli import serve_options
from kvtier.config import parse_config
from kvtier.errors import ClosedError, ConfigError, TierPathError
from kvtier.storage_backends.nvme.health import DeviceState
from kvtier.storage_backends.nvme.striped import StripedNvmeTier, open_nvme
from kvtier.storage_backends.nvme.tier import NvmeTier
from kvtier.testing.faulty_device import Fault, FaultyDevice, failing
from kvtier.testing.pages import aligned_buffer, belongs, item_of, key_of
from kvtier.testing.redis_servers import wait_for
from kvtier.testing.tiers import check_counters
from tests.nvme_tiers import PAGE_BYTES, PATIENCE_S, put

CAPACITY_BYTES = 2 << 20
PAGES = 40


@pytest.fixture
def device() -> FaultyDevice:
    return FaultyDevice()


@pytest.fixture
def tier(tmp_path: Path, device: FaultyDevice) -> Iterator[StripedNvmeTier]:
    tier = opened(tmp_path, device)
    assert put(tier, 0, PAGES) == [PutStatus.STORED] * PAGES
    yield tier
    device.set()
    tier.close()


def opened(where: Path, device: FaultyDevice | None = None, names: str = "ab") -> StripedNvmeTier:
    return StripedNvmeTier(
        [where / name for name in names], CAPACITY_BYTES, device=device or FaultyDevice(), retry_s=0.02
    )


def statuses(tier: StripedNvmeTier, first: int = 0, count: int = PAGES) -> list[GetStatus]:
    """Get pages in one call; a hit must be the key's own bytes."""
    keys = [key_of(n) for n in range(first, first + count)]
    outs = [aligned_buffer(PAGE_BYTES) for _ in keys]
    results = tier.get_many_into(keys, outs)
    for key, out, result in zip(keys, outs, results, strict=True):
        assert result.status is not GetStatus.HIT or belongs(key, out), "wrong bytes were served"
    return [result.status for result in results]


def in_directory(tier: StripedNvmeTier, i: int) -> set[int]:
    """Numbers of the pages that lie in directory `i`."""
    member = tier._members[i]
    assert member is not None
    there = {key for key, _ in member.scan()}
    return {n for n in range(2000) if key_of(n) in there}


def wait_until_serving(tier: StripedNvmeTier) -> None:
    wait_for(
        lambda: {state for _, state, _ in tier.directories()} == {DeviceState.SERVING},
        "not every directory came back",
        PATIENCE_S,
    )


# ---- in good health


def test_every_directory_takes_its_share(tier: StripedNvmeTier) -> None:
    shares = [in_directory(tier, i) for i in range(2)]
    assert shares[0] | shares[1] == set(range(PAGES)) and not shares[0] & shares[1]
    assert min(map(len, shares)) >= PAGES // 4
    assert statuses(tier) == [GetStatus.HIT] * PAGES
    usage = tier.usage()
    assert usage.capacity_bytes == CAPACITY_BYTES and usage.resident_pages == usage.stored_pages == PAGES
    assert {meta.nbytes for _, meta in tier.scan()} == {PAGE_BYTES} and len(list(tier.scan())) == PAGES
    check_counters(tier)


def test_the_capacity_is_used_before_anything_goes(tmp_path: Path) -> None:
    """Whatever the keys are: a page whose directory has no room goes to the other."""
    tier = opened(tmp_path)
    fits = CAPACITY_BYTES // 2 // 20_480 * 2
    for n in range(fits):
        assert put(tier, n, 1) == [PutStatus.STORED]
    assert tier.usage().evicted_pages == 0 and statuses(tier, 0, fits) == [GetStatus.HIT] * fits
    put(tier, 1000, 2 * fits)
    assert tier.usage().used_bytes <= CAPACITY_BYTES
    assert statuses(tier, 1000 + 2 * fits - 20, 20) == [GetStatus.HIT] * 20
    check_counters(tier)
    tier.close()


def test_restarts_find_every_page_in_whatever_order_the_directories_are_named(
    tier: StripedNvmeTier, tmp_path: Path
) -> None:
    tier.close()
    for names in ("ab", "ba"):
        again = opened(tmp_path, names=names)
        assert statuses(again) == [GetStatus.HIT] * PAGES
        assert put(again, 0, PAGES) == [PutStatus.EXISTS] * PAGES, "a page is stored once, wherever it lies"
        check_counters(again)
        again.close()
    wider = StripedNvmeTier([tmp_path / "a", tmp_path / "b", tmp_path / "c"], CAPACITY_BYTES * 3 // 2)
    assert statuses(wider) == [GetStatus.HIT] * PAGES
    assert put(wider, 100, 30) == [PutStatus.STORED] * 30 and in_directory(wider, 2)
    wider.close()
    alone = NvmeTier(tmp_path / "a", CAPACITY_BYTES // 2)
    assert {key for key, _ in alone.scan()} <= {key_of(n) for n in range(200)}
    alone.close()


def test_what_goes_first_is_exact_within_a_directory(tier: StripedNvmeTier) -> None:
    put(tier, 100, 200)  # both are full
    for i in range(2):
        member = tier._members[i]
        assert member is not None
        oldest, second = [key for key, _ in member.scan()][:2]
        assert tier.get_many_into([oldest], [aligned_buffer(PAGE_BYTES)])[0].status is GetStatus.HIT
        tier.length_many([second])
        gone = member.usage().evicted_pages
        number = 1000
        while member.usage().evicted_pages == gone:
            put(tier, number, 1)
            number += 1
        assert tier.contains_many([oldest, second]) == [True, False]
    check_counters(tier)


def test_protecting_reaches_every_directory(tier: StripedNvmeTier) -> None:
    keys = [key_of(n) for n in range(PAGES)]
    assert tier.protect_many(keys, True) == PAGES
    put(tier, 100, 200)
    assert tier.contains_many(keys) == [True] * PAGES
    assert tier.protect_many(keys, False) == PAGES
    tier.demote_many(keys)
    put(tier, 299, 1)  # above, several threads put at once: it may have made room
    tier.touch_many([key_of(299)])
    put(tier, 400, 60)
    assert tier.contains_many([*keys, key_of(299)]) == [False] * PAGES + [True]
    check_counters(tier)


def test_the_listener_hears_of_every_removal_in_every_directory(tier: StripedNvmeTier) -> None:
    heard: dict[Removal, list[bytes]] = {why: [] for why in Removal}
    tier.set_removal_listener(lambda keys, why: heard[why].extend(keys))
    for path in tier.paths:
        with (path / "segment-000000").open("r+b") as file:
            file.write(b"x" * 10)
    found = statuses(tier)
    assert tier.delete_many([key_of(n) for n in range(PAGES)]) == found.count(GetStatus.HIT)
    put(tier, 100, 200)
    usage = tier.usage()
    assert len(heard[Removal.QUARANTINED]) == usage.quarantined_pages == found.count(GetStatus.CORRUPT) == 2
    assert len(heard[Removal.DELETED]) == usage.deleted_pages == PAGES - 2
    assert len(heard[Removal.EVICTED]) == usage.evicted_pages > 0
    assert len({key for keys in heard.values() for key in keys}) == sum(map(len, heard.values()))
    check_counters(tier)


def test_a_capacity_of_one_slot_each(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="less than one slot"):
        StripedNvmeTier([tmp_path / "a", tmp_path / "b"], 4096)
    tier = StripedNvmeTier([tmp_path / "a", tmp_path / "b"], 8192)
    assert tier.put_many([item_of(key_of(n), 4096) for n in range(6)]) == [PutStatus.STORED] * 6
    assert tier.usage().resident_pages == 2
    check_counters(tier)
    tier.close()


@pytest.mark.parametrize("names", [[], ["a"], ["a", "a"], ["a", "b", "x/../a"]])
def test_directories_that_are_not_several_are_refused(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(ConfigError, match="must name different directories"):
        StripedNvmeTier([tmp_path / name for name in names], CAPACITY_BYTES)
    assert not list(tmp_path.iterdir())


def test_one_path_is_the_plain_tier(tmp_path: Path) -> None:
    tier = open_nvme([tmp_path / "a"], CAPACITY_BYTES)
    assert isinstance(tier, NvmeTier)
    tier.close()


def test_a_store_over_two_directories(tmp_path: Path) -> None:
    tiers = [
        {"type": "host", "capacity": "1MiB"},
        {"type": "nvme", "path": [str(tmp_path / "a"), str(tmp_path / "b")], "capacity": "4MiB"},
    ]
    store = open_store(parse_config({"tiers": tiers}), shard="tp0", rank=1, ranks=2)
    try:
        assert (tmp_path / "a/tp0/rank1/FORMAT").exists() and (tmp_path / "b/tp0/rank1/FORMAT").exists()
        assert store.lower[0].usage().capacity_bytes == 2 << 20
        shown = {
            s.labels["directory"] for f in store.ledger.registry.collect() for s in f.samples if "directory" in s.labels
        }
        assert shown == {str(tmp_path / "a/tp0/rank1"), str(tmp_path / "b/tp0/rank1")}
    finally:
        store.close()


def test_the_command_line_names_several(tmp_path: Path) -> None:
    assert serve_options._nvme(["/a:1GiB", "/b:1024MiB"]) == {"type": "nvme", "path": ["/a", "/b"], "capacity": 2 << 30}
    assert serve_options._nvme(["C:/a:1GiB"]) == {"type": "nvme", "path": ["C:/a"], "capacity": 1 << 30}


# ---- one device fails


def test_pages_of_a_device_that_cannot_be_read_are_misses_and_the_other_goes_on(
    tier: StripedNvmeTier, tmp_path: Path, device: FaultyDevice
) -> None:
    lost, kept = in_directory(tier, 0), in_directory(tier, 1)
    device.set(failing(errno.EIO, under=tmp_path / "a"))
    expected = [GetStatus.FAILED if n in lost else GetStatus.HIT for n in range(PAGES)]
    for _ in range(3):
        assert statuses(tier) == expected
    assert [state for _, state, _ in tier.directories()] == [DeviceState.OUT, DeviceState.SERVING]
    assert tier.length_many([key_of(min(lost)), key_of(min(kept)), key_of(999)]) == [LENGTH_UNKNOWN, PAGE_BYTES, -1]
    assert put(tier, 100, 10) == [PutStatus.STORED] * 10
    assert put(tier, min(lost), 1) == [PutStatus.STORED], "a page that cannot be had may be stored again"
    assert statuses(tier, 100, 10) == [GetStatus.HIT] * 10
    assert statuses(tier, min(lost), 1) == [GetStatus.HIT]
    device.set()
    wait_until_serving(tier)
    assert statuses(tier) == [GetStatus.HIT] * PAGES
    assert tier.usage().quarantined_pages == 0
    assert tier.delete_many([key_of(min(lost))]) == 2 and statuses(tier, min(lost), 1) == [GetStatus.ABSENT]
    check_counters(tier)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_what_a_full_device_does_not_take_the_other_one_does(
    tier: StripedNvmeTier, tmp_path: Path, device: FaultyDevice, code: int
) -> None:
    device.set(failing(code, "write", "append", under=tmp_path / "b"))
    for n in range(100, 160, 4):
        assert put(tier, n, 4) == [PutStatus.STORED] * 4
    assert [state for _, state, _ in tier.directories()] == [DeviceState.SERVING, DeviceState.NO_WRITES]
    assert not in_directory(tier, 1) & set(range(100, 160))
    assert statuses(tier, 120, 40) == [GetStatus.HIT] * 40
    device.set()
    wait_until_serving(tier)
    assert put(tier, 200, 40) == [PutStatus.STORED] * 40
    assert in_directory(tier, 1) & set(range(200, 240))
    check_counters(tier)


def test_with_every_device_failing_nothing_is_taken_and_nothing_raises(
    tier: StripedNvmeTier, device: FaultyDevice
) -> None:
    device.set(failing(errno.EIO))
    for _ in range(3):
        assert set(statuses(tier)) == {GetStatus.FAILED}
    assert put(tier, 100, 4) == [PutStatus.FAILED] * 4
    assert sum(counters.refused_puts for _, _, counters in tier.directories()) >= 4
    device.set()
    wait_until_serving(tier)
    assert statuses(tier) == [GetStatus.HIT] * PAGES


def test_a_directory_lost_between_runs_costs_its_own_pages(tier: StripedNvmeTier, tmp_path: Path) -> None:
    lost = in_directory(tier, 0)
    tier.close()
    shutil.rmtree(tmp_path / "a")
    again = opened(tmp_path)
    assert statuses(again) == [GetStatus.ABSENT if n in lost else GetStatus.HIT for n in range(PAGES)]
    assert put(again, 0, PAGES).count(PutStatus.STORED) == len(lost)
    check_counters(again)
    again.close()


def test_swapped_directories_are_no_other_directories(tier: StripedNvmeTier, tmp_path: Path) -> None:
    tier.close()
    (tmp_path / "a").rename(tmp_path / "x")
    (tmp_path / "b").rename(tmp_path / "a")
    (tmp_path / "x").rename(tmp_path / "b")
    again = opened(tmp_path)
    assert statuses(again) == [GetStatus.HIT] * PAGES
    again.close()


def test_swapped_segments_of_two_directories_are_misses(tier: StripedNvmeTier, tmp_path: Path) -> None:
    tier.close()
    one, other = tmp_path / "a" / "segment-000000", tmp_path / "b" / "segment-000000"
    one.rename(tmp_path / "x")
    other.rename(one)
    (tmp_path / "x").rename(other)
    again = opened(tmp_path)
    found = statuses(again)
    assert GetStatus.HIT not in found and again.usage().quarantined_pages == found.count(GetStatus.CORRUPT) == PAGES
    check_counters(again)
    again.close()


# ---- opening and closing


def test_a_device_that_fails_at_opening_is_opened_later(
    tier: StripedNvmeTier, tmp_path: Path, device: FaultyDevice
) -> None:
    lost = in_directory(tier, 0)
    tier.close()
    device.set(failing(errno.EIO, under=tmp_path / "a"))
    again = opened(tmp_path, device)
    heard: list[bytes] = []
    again.set_removal_listener(lambda keys, why: heard.extend(keys))
    try:
        assert again.directories()[0][1] is DeviceState.OUT
        assert statuses(again) == [GetStatus.ABSENT if n in lost else GetStatus.HIT for n in range(PAGES)]
        assert put(again, 100, 8) == [PutStatus.STORED] * 8
        assert again.usage().capacity_bytes == CAPACITY_BYTES
        device.set()
        wait_until_serving(again)
        assert statuses(again) == [GetStatus.HIT] * PAGES
        check_counters(again)
        assert again.delete_many([key_of(n) for n in range(PAGES)]) == PAGES and len(heard) == PAGES
    finally:
        again.close()


def test_with_no_directory_to_open_the_first_failure_is_told(tmp_path: Path, device: FaultyDevice) -> None:
    device.set(failing(errno.EIO))
    with pytest.raises(TierPathError, match="Input/output error"):
        opened(tmp_path, device)


def test_a_directory_in_use_is_a_mistake_and_not_a_failure(tmp_path: Path) -> None:
    other = NvmeTier(tmp_path / "b", CAPACITY_BYTES)
    with pytest.raises(TierPathError, match=f"'.*b' is in use by process {os.getpid()}"):
        opened(tmp_path)
    NvmeTier(tmp_path / "a", CAPACITY_BYTES // 2).close()  # nothing stayed locked
    other.close()


def test_closing_does_not_wait_for_the_device_that_hangs(
    tier: StripedNvmeTier, tmp_path: Path, device: FaultyDevice
) -> None:
    go_on = threading.Event()
    device.set(Fault(("read",), under=tmp_path / "a", hold=go_on))
    found: list[GetStatus] = []
    caught = threading.Thread(target=lambda: found.extend(statuses(tier)))
    caught.start()
    wait_for(lambda: device.struck > 0, "nothing was read", PATIENCE_S)
    started = time.monotonic()
    tier.close()
    assert time.monotonic() - started < PATIENCE_S / 2, "closing is to take 2 s, and waited for the device"
    with pytest.raises(ClosedError):
        tier.length_many([key_of(0)])
    with pytest.raises(TierPathError, match="in use"):
        NvmeTier(tmp_path / "a", CAPACITY_BYTES // 2)
    go_on.set()
    caught.join(PATIENCE_S)
    assert len(found) == PAGES and GetStatus.HIT in found
