"""The shipped suites against the two local tiers."""

from __future__ import annotations

import contextlib
from pathlib import Path

from kvtier.abc.tier import Tier
from kvtier.storage_backends.host.tier import HostTier
from kvtier.storage_backends.nvme.striped import StripedNvmeTier
from kvtier.storage_backends.nvme.tier import NvmeTier
from kvtier.testing.pages import data_of
from kvtier.testing.staging_tiers import StagingTierTests
from kvtier.testing.tiers import TierTests


def flip_on_disk(directory: Path, key: bytes, nbytes: int, bit: int) -> None:
    """Find the page's bytes in the segment files, wherever they lie, and flip one bit."""
    data = data_of(key, nbytes)
    for segment in sorted(directory.glob("segment-*")):
        at = segment.read_bytes().find(data)
        if at >= 0:
            with segment.open("r+b", buffering=0) as file:
                file.seek(at + bit // 8)
                old = file.read(1)[0]
                file.seek(at + bit // 8)
                file.write(bytes([old ^ (1 << bit % 8)]))
            return
    raise LookupError("the page's bytes are in no segment file")


class TestHostTier(StagingTierTests):
    def make_tier(self, directory: Path, capacity_bytes: int) -> HostTier:
        return HostTier(capacity_bytes)

    def flip_bit(self, tier: Tier, key: bytes, nbytes: int, bit: int) -> None:
        assert isinstance(tier, HostTier)
        at = tier.arena.tobytes().find(data_of(key, nbytes))
        assert at >= 0
        tier.arena[at + bit // 8] ^= 1 << bit % 8


class TestNvmeTier(TierTests):
    def make_tier(self, directory: Path, capacity_bytes: int) -> NvmeTier:
        return NvmeTier(directory, capacity_bytes)

    def flip_bit(self, tier: Tier, key: bytes, nbytes: int, bit: int) -> None:
        assert isinstance(tier, NvmeTier)
        flip_on_disk(tier.path, key, nbytes, bit)


class TestNvmeTierInSmallSegments(TestNvmeTier):
    """Several files, the last one shorter."""

    def make_tier(self, directory: Path, capacity_bytes: int) -> NvmeTier:
        return NvmeTier(directory, capacity_bytes, segment_bytes=(1 << 20) + (64 << 10), io_threads=2)


class TestStripedNvmeTier(TierTests):
    """Two directories. What goes first is exact among the pages of one of them only: `tests/integration/
    test_nvme_striped.py` has what these say of a whole tier."""

    test_the_least_recently_used_page_goes_first = None  # type: ignore[assignment]
    test_looking_does_not_refresh = None  # type: ignore[assignment]
    test_the_listener_hears_of_every_removal = None  # type: ignore[assignment]
    test_a_capacity_of_one_slot = None  # type: ignore[assignment]
    test_touched_pages_stay_and_demoted_ones_go = None  # type: ignore[assignment]
    test_protected_pages_stay = None  # type: ignore[assignment]
    test_pages_of_a_lower_priority_go_first = None  # type: ignore[assignment]

    def make_tier(self, directory: Path, capacity_bytes: int) -> StripedNvmeTier:
        return StripedNvmeTier([directory / "a", directory / "b"], capacity_bytes, io_threads=2)

    def flip_bit(self, tier: Tier, key: bytes, nbytes: int, bit: int) -> None:
        assert isinstance(tier, StripedNvmeTier)
        for path in tier.paths:
            with contextlib.suppress(LookupError):
                return flip_on_disk(path, key, nbytes, bit)
        raise LookupError("the page's bytes are in no directory")
