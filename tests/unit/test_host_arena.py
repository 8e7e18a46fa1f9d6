"""The host tier's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.errors import CapacityError, ConfigError
from kvtier.storage_backends.host import arena as arena_module
from kvtier.storage_backends.host.arena import Arena
from kvtier.storage_backends.host.tier import HostTier


def resident_kib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1])
    raise LookupError("RssAnon")


@pytest.mark.parametrize("touched", [True, False])
def test_memory_is_touched_only_when_asked(touched: bool) -> None:
    before = resident_kib()
    memory = Arena(64 << 20, pretouch=touched)
    grown = resident_kib() - before
    assert grown > 44 << 10 if touched else grown < 20 << 10  # the process has other memory, which may come and go
    assert memory.bytes_.ctypes.data % 4096 == 0 and not memory.bytes_.any()
    memory.close()


def test_what_is_written_while_it_is_touched_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_IN_CONSTRUCTOR_BYTES", 0)
    monkeypatch.setattr(arena_module, "_STEP_BYTES", 1 << 20)
    memory = Arena(64 << 20, pretouch=True)
    memory.bytes_[:: 1 << 16] = 7
    assert (memory.bytes_[:: 1 << 16] == 7).all()
    memory.close()


def test_closing_stops_the_touching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_IN_CONSTRUCTOR_BYTES", 0)
    monkeypatch.setattr(arena_module, "_STEP_BYTES", 1 << 20)
    tier = HostTier(1 << 30)
    tier.close()
    assert len(tier.arena) == 0


def test_old_kernels_touch_by_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arena, "_populate", lambda self, start, length: False)
    before = resident_kib()
    memory = Arena(32 << 20, pretouch=True)
    assert resident_kib() - before > 20 << 10
    memory.close()


def test_impossible_capacities_are_refused_by_name() -> None:
    for capacity in (-5, 0, 4095):
        with pytest.raises(ConfigError, match=f"capacity = {capacity}"):
            HostTier(capacity)
    with pytest.raises(CapacityError, match=r"capacity = \d+.*lower capacity"):
        HostTier(1 << 60)
    with pytest.raises(ConfigError, match="max_record_bytes = 8192"):
        HostTier(4096, max_record_bytes=8192)


def reserved_huge_pages() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("HugePages_Free"):
            return int(line.split()[1])
    return 0


def test_reserved_huge_pages_that_are_not_there_are_refused() -> None:
    pages = reserved_huge_pages() + (1 << 20)
    with pytest.raises(CapacityError, match=f"huge_pages = 'reserved' takes {pages} of 2 MiB"):
        HostTier(pages * (2 << 20), huge_pages="reserved")


@pytest.mark.skipif(reserved_huge_pages() < 3, reason="no reserved huge pages here: sysctl vm.nr_hugepages=8")
def test_reserved_huge_pages_are_used_and_given_back() -> None:
    free = reserved_huge_pages()
    memory = Arena((5 << 20) - 4096, pretouch=True, reserved=True)
    assert len(memory.bytes_) == (5 << 20) - 4096 and not memory.bytes_.any()
    memory.bytes_[:] = 7
    assert reserved_huge_pages() == free - 3
    memory.close()
    assert reserved_huge_pages() == free
