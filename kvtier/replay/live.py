"""Replays a trace against the real store, with small generated pages in place of real ones, and holds what its ledger
counted against what the simulator says. Sizes shrink alike, so a tier holds as many blocks as it would."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.abc.codec import Form
from kvtier.abc.tier import KEY_BYTES, SLOT_ALIGN, PageMeta, PutStatus, Slot
from kvtier.build import open_store
from kvtier.config import parse_config
from kvtier.errors import ConfigError, KVTierError
from kvtier.keys import checksum
from kvtier.replay.report import hit_rates
from kvtier.replay.simulate import cache_plan, run_open
from kvtier.replay.stack import UNLIMITED, Placement, Policy, TierPlan
from kvtier.replay.trace import Trace
from kvtier.store import TieredStore

_WAIT_S = 10.0
_BATCH = 16
_SPEC = bytes(16)
_DISKS = ("nvme", "disk")


@dataclass(frozen=True, slots=True)
class LiveResult:
    """Per cent of blocks that hit before the first miss of their request, by tier and in all. `misses` by reason."""

    requests: int
    blocks: int
    simulated: dict[str, float]
    ledger: dict[str, float]
    misses: dict[str, int]

    @property
    def largest_difference(self) -> float:
        """In points."""
        return max(abs(self.simulated[name] - self.ledger[name]) for name in self.simulated)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "largest_difference": round(self.largest_difference, 3)}


def run_live(
    trace: Trace,
    tiers: tuple[TierPlan, ...],
    block_bytes: int,
    placement: Placement,
    page_bytes: int = SLOT_ALIGN,
    progress: Callable[[int], None] = lambda done: None,
) -> LiveResult:
    """Look up, load and store the blocks of every request in turn, `page_bytes` (a multiple of 4 KiB) for each.

    tiers: ``host``, and ``nvme`` in a temporary directory, with the policies that are given, but without a ttl.
    progress: called with the number of requests that are done. Blocks. Raises KVTierError if a page comes back changed.
    """
    plan = cache_plan(tiers, block_bytes, placement)
    _check(tiers, page_bytes)
    counts = run_open(trace, plan)
    with tempfile.TemporaryDirectory(prefix="kvtier-replay-") as directory:
        block = {
            "tiers": [
                _tier_block(t, n, page_bytes, directory, placement)
                for t, n in zip(tiers, plan.capacity_blocks, strict=True)
            ],
            "break_even": False,
        }
        store = open_store(parse_config(block))
        try:
            names = [store.host.name, *(t.name for t in store.lower)]
            for request in range(trace.requests):
                _serve(
                    store, str(request), [_key(b) for b in dict.fromkeys(trace.blocks_of(request).tolist())], page_bytes
                )
                progress(request + 1)
            ledger = store.ledger.snapshot()
        finally:
            store.close()
    hits = np.array([[ledger.hits[name] for name in names]], np.int32)
    return LiveResult(
        trace.requests,
        ledger.lookups,
        hit_rates(counts.prefix, tiers, len(trace.blocks)),
        hit_rates(hits, tiers, ledger.lookups),
        ledger.misses,
    )


def _serve(store: TieredStore, request: str, keys: Sequence[bytes], page_bytes: int) -> None:
    lookup = store.lookup(request, keys)
    ready = store.wait(lookup, _WAIT_S)
    for key, (slot, _) in zip(keys, lookup.ready_slots(ready), strict=False):
        if bytes(store.host.view(slot)[:KEY_BYTES]) != key:
            raise KVTierError(f"page {key.hex()} came back as another page")
    store.settle(request)
    missing = keys[ready:]
    fresh = [key for key, known in zip(missing, store.known_below(missing), strict=True) if not known]
    for at in range(0, len(fresh), _BATCH):
        _store(store, fresh[at : at + _BATCH], page_bytes)
    # The next request finds what this one stored, as in the simulator. What is written back stays in host memory.
    if not store.drain(_WAIT_S):
        raise KVTierError(f"pages were not written to lower tiers within {_WAIT_S} s")


def _store(store: TieredStore, keys: Sequence[bytes], page_bytes: int) -> None:
    while keys:
        answers = store.reserve(keys, [page_bytes] * len(keys), _WAIT_S)
        taken: list[tuple[bytes, Slot, PageMeta]] = []
        for key, answer in zip(keys, answers, strict=True):
            if isinstance(answer, Slot):
                view = store.host.view(answer)
                view[:KEY_BYTES] = key
                taken.append((key, answer, PageMeta(page_bytes, Form.RAW, 1, checksum(view, key), _SPEC)))
        store.commit([k for k, _, _ in taken], [s for _, s, _ in taken], [m for _, _, m in taken])
        full = [key for key, answer in zip(keys, answers, strict=True) if answer is PutStatus.FULL]
        keys = full if taken else []


def _key(block: int) -> bytes:
    return blake2b(block.to_bytes(8, "little"), digest_size=KEY_BYTES).digest()


def _check(tiers: tuple[TierPlan, ...], page_bytes: int) -> None:
    kinds = [t.name for t in tiers]
    if kinds[0] != "host" or len(kinds) > 2 or (len(kinds) == 2 and kinds[1] not in _DISKS):
        raise ConfigError(f"--live: tiers {', '.join(kinds)}; give host:SIZE, or host:SIZE and nvme:SIZE")
    for tier in tiers:
        if tier.capacity_bytes == UNLIMITED:
            raise ConfigError(f"--live: tier {tier.name} must have a size; unlimited exists in the simulator only")
        if tier.policy is Policy.FIFO or np.isfinite(tier.ttl_s):
            raise ConfigError(
                f"--live: tier {tier.name}: the real tier has policy=lru and policy=s3fifo, and time stands still; "
                "remove the other policy, or the ttl"
            )
    if page_bytes % SLOT_ALIGN or page_bytes < SLOT_ALIGN:
        raise ConfigError(
            f"--live-page-bytes {page_bytes}: give a multiple of {SLOT_ALIGN}, so that no byte is padding"
        )


def _tier_block(tier: TierPlan, blocks: int, page_bytes: int, directory: str, placement: Placement) -> dict[str, Any]:
    block: dict[str, Any] = {"capacity": blocks * page_bytes, "policy": tier.policy.name.lower()}
    if tier.name not in _DISKS:
        return {"type": "host", **block}
    return {
        "type": "nvme",
        "path": str(Path(directory) / "nvme"),
        "write": "back" if placement is Placement.WRITE_BACK else "through",
        "admission": "second_use" if tier.second_use else "always",
        "refresh": tier.refresh,
        **block,
    }
