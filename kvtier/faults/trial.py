"""One trial of a fault: where it happens, what it counts, and how pages are read so that wrong bytes show."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.abc.tier import GetStatus, PutStatus, Tier
from kvtier.storage_backends.nvme.striped import StripedNvmeTier, open_nvme
from kvtier.storage_backends.nvme.tier import NvmeTier
from kvtier.testing.pages import aligned_buffer, belongs, item_of, key_of

LocalTier = NvmeTier | StripedNvmeTier
RETRY_S = 0.02
PATIENCE_S = 60.0
"""How long a trial waits for what must happen: long, since it says nothing about speed."""


class PromiseError(Exception):
    """A promise was broken; the text says which and how."""


class UnavailableError(Exception):
    """The fault cannot be had on this machine; the text says why."""


@dataclass(slots=True)
class Trial:
    """folder: empty, for this trial alone. rng: where all chance comes from. number: of trials of this check before
    this one. opens: makes the tier that is put to the test. seen: what happened, by name. outside: ends what the
    trial has outside its folder, servers, mounts, processes; each call may be made again, and from another thread."""

    folder: Path
    rng: random.Random
    number: int = 0
    opens: Callable[..., LocalTier] = open_nvme
    seen: Counter[str] = field(default_factory=Counter)
    outside: list[Callable[[], object]] = field(default_factory=list)

    def end_outside(self) -> None:
        """Where the trial is broken off, or hangs: what it has outside its folder, the latest first."""
        for end in reversed(list(self.outside)):
            end()

    def open(self, names: Sequence[str], capacity_bytes: int, **options: object) -> LocalTier:
        """The tier over the folders of these names."""
        return self.opens([self.folder / name for name in names], capacity_bytes, **{"retry_s": RETRY_S, **options})

    def some_names(self) -> list[str]:
        """One directory, or two, or three."""
        return list("abc"[: 1 + self.number % 3])

    def put(self, tier: Tier, numbers: Sequence[int], nbytes: int) -> list[PutStatus]:
        statuses = tier.put_many([item_of(key_of(n), nbytes) for n in numbers])
        self.seen["pages put"] += statuses.count(PutStatus.STORED)
        return statuses

    def get(self, tier: Tier, numbers: Sequence[int], nbytes: int) -> list[GetStatus]:
        """Read pages that `put` wrote. Raises PromiseError where a hit's bytes are not the page's own."""
        keys = [key_of(n) for n in numbers]
        outs = [aligned_buffer(nbytes) for _ in keys]
        results = tier.get_many_into(keys, outs)
        self.seen["pages read"] += len(keys)
        for key, out, result in zip(keys, outs, results, strict=True):
            if result.status is GetStatus.HIT and not belongs(key, out):
                raise PromiseError(f"wrong bytes were served as page {key.hex()[:16]}")
            self.seen["hits" if result.status is GetStatus.HIT else "misses"] += 1
        return [result.status for result in results]

    def get_all(self, tier: LocalTier) -> dict[bytes, GetStatus]:
        """Read every page that the tier lists, with its description."""
        found = {}
        for key, meta in list(tier.scan()):
            out = aligned_buffer(meta.nbytes)
            (result,) = tier.get_many_into([key], [out])
            self.seen["pages read"] += 1
            self.seen["hits" if result.status is GetStatus.HIT else "misses"] += 1
            if result.status is GetStatus.HIT and not (belongs(key, out) and meta == item_of(key, meta.nbytes).meta):
                raise PromiseError(f"wrong bytes or a wrong description were served as page {key.hex()[:16]}")
            found[key] = result.status
        return found


def expect(holds: bool, promise: str) -> None:
    """Raise PromiseError unless `holds`."""
    if not holds:
        raise PromiseError(promise)


def expect_counters(tier: Tier) -> None:
    """The sum that every tier promises."""
    u = tier.usage()
    resident = u.recovered_pages + u.stored_pages - u.evicted_pages - u.deleted_pages - u.quarantined_pages
    expect(resident == u.resident_pages, f"the counters do not add up: {u}")
    expect(u.used_bytes <= u.capacity_bytes, f"{u.used_bytes} bytes are in use, the capacity is {u.capacity_bytes}")
