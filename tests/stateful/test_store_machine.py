"""The tiered store over the real local tiers, beside a dict."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings

from kvtier.ledger import Ledger
from kvtier.observe import ObserveOptions, Watch
from kvtier.placement import Admission, TierRules, Write
from kvtier.storage_backends.host.tier import HostTier
from kvtier.storage_backends.nvme.tier import NvmeTier
from kvtier.store import TieredStore
from kvtier.testing.store_machine import StoreMachine, page_bytes


class HostAndNvme(StoreMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="kvtier-machine-"))

    policy = "lru"
    tier_rules = TierRules()

    def open(self) -> TieredStore:
        tiers = (
            HostTier(16 * 4096, policy=self.policy),
            NvmeTier(self.directory, 40 * 4096, io_threads=2, policy=self.policy),
        )
        ledger = Ledger([tier.name for tier in tiers])
        # Every sum is checked at each request, and every request's outcomes page by page.
        watch = Watch(ObserveOptions(explain_sample=1.0, debug=True), ledger, {t.name: t.usage for t in tiers})
        return TieredStore(
            tiers[0],
            tiers[1:],
            ledger,
            promote_deadline_s=30.0,
            rules={"nvme": self.tier_rules},
            observer=watch,
        )

    def corrupt(self, page: int) -> bool:
        """Flip one byte of the page's content wherever a file holds it, behind the tier's back."""
        needle = page_bytes(page)[:32]
        for path in self.directory.rglob("*"):
            if path.is_file():
                at = path.read_bytes().find(needle)
                if at >= 0:
                    with path.open("r+b") as file:
                        file.seek(at + 7)
                        file.write(bytes([needle[7] ^ 1]))
                    return True
        return False

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)


class WrittenBack(HostAndNvme):
    tier_rules = TierRules(Write.BACK)


class WrittenBackS3Fifo(WrittenBack):
    policy = "s3fifo"


class SecondUse(HostAndNvme):
    policy = "s3fifo"
    tier_rules = TierRules(Write.THROUGH, Admission.SECOND_USE)


class SecondUseBack(HostAndNvme):
    tier_rules = TierRules(Write.BACK, Admission.SECOND_USE)


for machine in (HostAndNvme, WrittenBack, WrittenBackS3Fifo, SecondUse, SecondUseBack):
    machine.TestCase.settings = settings(
        max_examples=15, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
TestHostAndNvme = HostAndNvme.TestCase
TestWrittenBack = WrittenBack.TestCase
TestWrittenBackS3Fifo = WrittenBackS3Fifo.TestCase
TestSecondUse = SecondUse.TestCase
TestSecondUseBack = SecondUseBack.TestCase
