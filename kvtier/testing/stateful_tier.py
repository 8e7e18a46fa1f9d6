"""A tier against a plain dict, driven by Hypothesis: put, get, delete, damage, reopen in any order.

The dict knows what was stored and drops what the listener reports as gone. It shares no code with a tier.

    class TestMyTier(TierMachine.TestCase): ...   # by way of `tier_test_case(make_tier)`
"""

from __future__ import annotations

import shutil
import tempfile
import unittest
from collections.abc import Callable, Sequence
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier.abc.tier import GetStatus, PutStatus, Removal, Tier
from kvtier.testing.pages import aligned_buffer, data_of, item_of, key_of

MakeTier = Callable[[Path, int], Tier]

CAPACITY_BYTES = 128 << 10
_NUMBERS = st.integers(0, 25)
_SIZES = st.sampled_from([0, 1, 4095, 4096, 4097, 12_288, 20_000, 40_960, CAPACITY_BYTES, CAPACITY_BYTES + 1])


class TierMachine(RuleBasedStateMachine):
    """`make_tier` is set by `tier_test_case`."""

    make_tier: MakeTier

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="kvtier-machine-"))
        self.pages: dict[bytes, int] = {}
        self.removed: dict[Removal, int] = dict.fromkeys(Removal, 0)
        self.stored = self.recovered = 0
        self.tier = self._open()

    @rule(numbers=st.lists(_NUMBERS, min_size=1, max_size=5, unique=True), nbytes=_SIZES)
    def put(self, numbers: list[int], nbytes: int) -> None:
        keys = [key_of(n) for n in numbers]
        known = dict(self.pages)
        statuses = self.tier.put_many([item_of(key, nbytes) for key in keys])
        for key, status in zip(keys, statuses, strict=True):
            if nbytes > CAPACITY_BYTES and key not in known:
                assert status is PutStatus.TOO_LARGE
            elif status is PutStatus.EXISTS:
                assert key in known
            else:
                assert status is PutStatus.STORED, "nothing is pinned: room can always be made"
                self.stored += 1
                # It may have been evicted for another page of the same call: the tier says which are left.
                if self.tier.contains_many([key])[0]:
                    self.pages[key] = nbytes
        lengths = self.tier.length_many(keys)
        assert all(n == self.pages.get(key, -1) for key, n in zip(keys, lengths, strict=True))

    @rule(number=_NUMBERS, shift=st.sampled_from([0, 1]))
    def get(self, number: int, shift: int) -> None:
        key = key_of(number)
        nbytes = self.pages.get(key)
        out = aligned_buffer(nbytes or 1, shift=shift)
        (result,) = self.tier.get_many_into([key], [out])
        if nbytes is None:
            assert result.status is GetStatus.ABSENT
        else:
            assert result.status is GetStatus.HIT
            assert result.meta == item_of(key, nbytes).meta
            assert bytes(out[:nbytes]) == data_of(key, nbytes)

    @rule(numbers=st.lists(_NUMBERS, min_size=1, max_size=3, unique=True))
    def delete(self, numbers: list[int]) -> None:
        keys = [key_of(n) for n in numbers]
        there = sum(key in self.pages for key in keys)
        assert self.tier.delete_many(keys) == there
        assert not any(self.tier.contains_many(keys))

    @rule(number=_NUMBERS, nbytes=st.sampled_from([100, 5000]))
    def put_bad(self, number: int, nbytes: int) -> None:
        """Bytes that are not what their checksum says: found at the first get, and gone."""
        key = key_of(number)
        if key in self.pages:
            return
        item = item_of(key, nbytes)
        assert self.tier.put_many([item._replace(data=memoryview(bytes(nbytes)))]) == [PutStatus.STORED]
        self.stored += 1
        self.pages[key] = nbytes
        assert self.tier.get_many_into([key], [aligned_buffer(nbytes)])[0].status is GetStatus.CORRUPT
        assert key not in self.pages

    @rule()
    def reopen(self) -> None:
        self.tier.close()
        if not self.tier.capabilities.persistent:
            self.pages.clear()
        self.stored = 0
        self.removed = dict.fromkeys(Removal, 0)
        self.recovered = len(self.pages)
        self.tier = self._open()

    @invariant()
    def counts(self) -> None:
        u = self.tier.usage()
        assert u.resident_pages == len(self.pages)
        assert (u.recovered_pages, u.stored_pages) == (self.recovered, self.stored)
        assert u.evicted_pages == self.removed[Removal.EVICTED]
        assert u.deleted_pages == self.removed[Removal.DELETED]
        assert u.quarantined_pages == self.removed[Removal.QUARANTINED]
        assert u.used_bytes == sum(max(1, -(-n // 4096)) * 4096 for n in self.pages.values())
        assert u.used_bytes <= u.capacity_bytes

    def teardown(self) -> None:
        self.tier.close()
        shutil.rmtree(self.directory)

    def _open(self) -> Tier:
        tier = type(self).make_tier(self.directory, CAPACITY_BYTES)
        tier.set_removal_listener(self._on_removed)
        return tier

    def _on_removed(self, keys: Sequence[bytes], why: Removal) -> None:
        self.removed[why] += len(keys)
        for key in keys:
            self.pages.pop(key, None)


def tier_test_case(make_tier: MakeTier, *, max_examples: int = 30, steps: int = 40) -> type[unittest.TestCase]:
    """A test case to assign to a module-level name beginning with ``Test``."""
    machine: type[TierMachine] = type("Machine", (TierMachine,), {"make_tier": staticmethod(make_tier)})
    case: type[unittest.TestCase] = machine.TestCase
    case.settings = settings(max_examples=max_examples, stateful_step_count=steps, deadline=None)  # type: ignore[attr-defined]
    return case
