"""A tier of your own, made of two others: every page is written to both, and read from whichever has it whole.
One from nothing, with the suite that it must pass: docs/writing-a-tier.md."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvtier.abc.tier import GetResult, GetStatus, PutItem, PutStatus, Removal, Tier, TierUsage
from kvtier.storage_backends.nvme.striped import open_nvme
from kvtier.testing.pages import item_of, key_of


class MirroredTier(Tier):
    name = "mirrored"

    def __init__(self, first: Tier, second: Tier) -> None:
        self.sides = (first, second)
        self.capabilities = first.capabilities

    def put_many(self, items: Sequence[PutItem], deadline_s: float | None = None) -> list[PutStatus]:
        first, second = (side.put_many(items, deadline_s) for side in self.sides)
        there = (PutStatus.STORED, PutStatus.EXISTS)
        return [a if a in there else b for a, b in zip(first, second, strict=True)]

    def get_many_into(
        self, keys: Sequence[bytes], outs: Sequence[memoryview], deadline_s: float | None = None
    ) -> list[GetResult]:
        results = self.sides[0].get_many_into(keys, outs, deadline_s)
        for i, result in enumerate(results):
            if result.status is not GetStatus.HIT:
                results[i] = self.sides[1].get_many_into([keys[i]], [outs[i]], deadline_s)[0]
        return results

    def length_many(self, keys: Sequence[bytes]) -> list[int]:
        return [max(pair) for pair in zip(*(side.length_many(keys) for side in self.sides), strict=True)]

    def delete_many(self, keys: Sequence[bytes], removal: Removal = Removal.DELETED) -> int:
        return max(side.delete_many(keys, removal) for side in self.sides)

    def usage(self) -> TierUsage:
        return self.sides[0].usage()

    def close(self) -> None:
        self.sides[0].close()
        self.sides[1].close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        tier = MirroredTier(*(open_nvme([Path(folder) / side], 8 << 20) for side in ("left", "right")))
        keys = list(map(key_of, range(4)))
        print("put:", [status.value for status in tier.put_many([item_of(key, 4096) for key in keys])])
        tier.sides[0].delete_many(keys[:2])  # one side loses two pages
        found = tier.get_many_into(keys, [memoryview(bytearray(4096)) for _ in keys])
        print("get:", [result.status.value for result in found])
        tier.close()
