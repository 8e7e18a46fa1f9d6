"""Both local tiers against a plain dict, in any order of calls."""

from __future__ import annotations

from kvtier.storage_backends.host.tier import HostTier
from kvtier.storage_backends.nvme.tier import NvmeTier
from kvtier.testing.stateful_tier import tier_test_case

TestHostTierMachine = tier_test_case(lambda directory, capacity: HostTier(capacity))
TestNvmeTierMachine = tier_test_case(lambda directory, capacity: NvmeTier(directory, capacity, io_threads=2))
