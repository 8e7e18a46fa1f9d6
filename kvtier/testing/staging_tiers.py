"""The suite of tiers whose bytes lie in this process's memory, on top of that of every tier. Used as `TierTests`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvtier.abc.tier import GetResult, GetStatus, PutStatus, Removal, Slot, StagingTier
from kvtier.errors import SpecError
from kvtier.testing.pages import belongs, item_of, key_of
from kvtier.testing.tiers import CAPACITY_BYTES, KIB, PAGE_BYTES, TierTests, check_counters, get, put, resident


class StagingTierTests(TierTests):
    """What holds for a tier that codecs write into and read from, besides `TierTests`."""

    @abstractmethod
    def make_tier(self, directory: Path, capacity_bytes: int) -> StagingTier: ...

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[StagingTier]:
        tier = self.make_tier(tmp_path, CAPACITY_BYTES)
        yield tier
        tier.close()

    @staticmethod
    def fill(tier: StagingTier, numbers: Sequence[int], nbytes: int = PAGE_BYTES) -> list[Slot]:
        """Reserve, fill and commit; the slots stay pinned by their writer."""
        items = [item_of(key_of(n), nbytes) for n in numbers]
        slots = tier.reserve_many([i.key for i in items], [nbytes] * len(items))
        taken = [s for s in slots if isinstance(s, Slot)]
        assert len(taken) == len(items), slots
        for item, slot in zip(items, taken, strict=True):
            tier.view(slot)[:] = item.data
        tier.commit_many([i.key for i in items], taken, [i.meta for i in items])
        return taken

    def test_slots_are_aligned_apart_and_padded_with_zeros(self, tier: StagingTier) -> None:
        tier.arena[:] = 0xFF
        slots = tier.reserve_many([key_of(n) for n in range(5)], [5000, 4096, 1, 4097, 12_288])
        ends = []
        for slot in sorted(s for s in slots if isinstance(s, Slot)):
            assert slot.offset % 4096 == 0
            ends.append((slot.offset, slot.offset + -(-slot.nbytes // 4096) * 4096))
            assert not tier.arena[slot.offset + slot.nbytes : ends[-1][1]].any()
            assert len(tier.view(slot)) == slot.nbytes and not tier.view(slot).readonly
        ends.sort()
        assert len(ends) == 5 and all(a[1] <= b[0] for a, b in pairwise(ends))
        assert tier.arena.ndim == 1 and tier.arena.dtype == np.uint8 and tier.arena.ctypes.data % 4096 == 0

    def test_a_reserved_page_is_invisible_until_committed(self, tier: StagingTier) -> None:
        key = key_of(1)
        (slot,) = tier.reserve_many([key], [PAGE_BYTES])
        assert isinstance(slot, Slot)
        assert not tier.contains_many([key])[0] and tier.pin_many([key]) == [-1]
        assert get(tier, key)[0].status is GetStatus.ABSENT
        assert tier.delete_many([key]) == 0
        assert tier.reserve_many([key], [PAGE_BYTES]) == [PutStatus.EXISTS]
        assert put(tier, [1]) == [PutStatus.EXISTS]
        assert tier.usage().resident_pages == 0
        item = item_of(key, PAGE_BYTES)
        tier.view(slot)[:] = item.data
        tier.commit_many([key], [slot], [item.meta])
        tier.unpin_many([slot.id])
        assert get(tier, key)[0] == GetResult(GetStatus.HIT, item.meta)

    def test_a_page_takes_the_place_of_another_in_one_step(self, tier: StagingTier) -> None:
        told: list[tuple[list[bytes], Removal]] = []
        tier.set_removal_listener(lambda keys, why: told.append((list(keys), why)))
        old, new, last = (item_of(key_of(n), PAGE_BYTES) for n in range(3))
        put(tier, [0])
        (pin,) = tier.pin_many([old.key])
        for item, replaces, gone in ((new, old.key, True), (last, old.key, False)):
            slot = tier.reserve_one(item.key, PAGE_BYTES)
            assert isinstance(slot, Slot) and tier.reserve_one(item.key, PAGE_BYTES) is PutStatus.EXISTS
            tier.view(slot)[:] = item.data
            assert tier.commit_over(item.key, slot, item.meta, replaces) == gone
            assert get(tier, item.key)[0] == GetResult(GetStatus.HIT, item.meta)
            with pytest.raises(SpecError):
                tier.unpin_many([slot.id])  # nobody holds it
        assert not tier.contains_many([old.key])[0]
        ((slot, meta),) = tier.pinned_many([pin])
        assert meta == old.meta and tier.view(slot) == old.data, "whoever reads the old page still has it"
        tier.unpin_many([pin])
        assert not told, "who replaces a page knows"
        check_counters(tier)

    def test_one_page_is_pinned_as_several_are(self, tier: StagingTier) -> None:
        put(tier, [1, 2])
        assert tier.pin_one(key_of(3)) is None
        pinned = tier.pin_one(key_of(1))
        assert pinned is not None
        slot, offset, nbytes, checksum = pinned
        ((found, meta),) = tier.pinned_many([slot])
        assert (found.offset, meta.nbytes, meta.checksum) == (offset, nbytes, checksum)
        assert belongs(key_of(1), tier.memory[offset : offset + nbytes])
        tier.delete_many([key_of(1)])
        assert belongs(key_of(1), tier.memory[offset : offset + nbytes]), "it stays for whoever pinned it"
        tier.unpin_one(slot)
        with pytest.raises(SpecError):
            tier.unpin_one(slot)
        check_counters(tier)

    def test_an_aborted_page_leaves_nothing(self, tier: StagingTier) -> None:
        slots = tier.reserve_many([key_of(1), key_of(2)], [PAGE_BYTES] * 2)
        tier.abort_many([key_of(1), key_of(2)], [s for s in slots if isinstance(s, Slot)])
        assert tier.usage().used_bytes == 0
        check_counters(tier)
        assert put(tier, [1, 2]) == [PutStatus.STORED] * 2

    def test_a_committed_record_may_be_shorter_than_its_slot(self, tier: StagingTier) -> None:
        item = item_of(key_of(1), 5000)
        (slot,) = tier.reserve_many([item.key], [PAGE_BYTES])
        assert isinstance(slot, Slot)
        tier.view(slot)[:5000] = item.data
        tier.commit_many([item.key], [slot], [item.meta])
        tier.unpin_many([slot.id])
        assert tier.length_many([item.key]) == [5000]
        pins = tier.pin_many([item.key])
        ((page, _),) = tier.pinned_many(pins)
        assert page.nbytes == 5000 and belongs(item.key, tier.view(page))
        tier.unpin_many(pins)

    def test_committing_longer_than_reserved_is_refused(self, tier: StagingTier) -> None:
        (slot,) = tier.reserve_many([key_of(1)], [100])
        assert isinstance(slot, Slot)
        with pytest.raises(ValueError, match="reserved for 100"):
            tier.commit_many([key_of(1)], [slot], [item_of(key_of(1), 101).meta])
        tier.abort_many([key_of(1)], [slot])

    def test_a_pinned_page_gives_its_bytes_and_description(self, tier: StagingTier) -> None:
        put(tier, [1, 2])
        pins = tier.pin_many([key_of(2), key_of(9), key_of(1), key_of(2)])
        assert [pin < 0 for pin in pins] == [False, True, False, False] and pins[0] == pins[3]
        del pins[1]
        for number, (slot, meta) in zip((2, 1, 2), tier.pinned_many(pins), strict=True):
            assert meta == item_of(key_of(number), PAGE_BYTES).meta
            assert belongs(key_of(number), tier.view(slot))
        tier.unpin_many(pins)

    def test_pinned_pages_stay_whatever_comes(self, tier: StagingTier) -> None:
        fits = CAPACITY_BYTES // PAGE_BYTES
        put(tier, range(fits))
        pins = tier.pin_many([key_of(0), key_of(1), key_of(1)])
        slots = [slot for slot, _ in tier.pinned_many(pins)]
        put(tier, range(1000, 1000 + 2 * fits))
        put(tier, range(2000, 2000 + 4 * fits), 8 * KIB)
        assert resident(tier, [0, 1, 2]) == [0, 1]
        assert all(belongs(key_of(n), tier.view(slot)) for n, slot in zip((0, 1, 1), slots, strict=True))
        tier.unpin_many(pins[:2])  # key 1 is still pinned once
        put(tier, range(3000, 3000 + 4 * fits), 8 * KIB)
        assert resident(tier, [0, 1]) == [1]
        tier.unpin_many(pins[2:])
        put(tier, range(4000, 4000 + 6 * fits), 8 * KIB)
        assert resident(tier, [0, 1]) == []
        check_counters(tier)

    def test_with_everything_pinned_the_tier_is_full(self, tier: StagingTier) -> None:
        fits = CAPACITY_BYTES // PAGE_BYTES
        slots = self.fill(tier, range(fits))
        assert put(tier, [1000, 1001]) == [PutStatus.FULL] * 2
        assert tier.reserve_many([key_of(1000)], [400 * KIB]) == [PutStatus.FULL]
        assert tier.usage().evicted_pages == 0
        tier.unpin_many([slots[0].id])
        assert put(tier, [1000, 1001]) == [PutStatus.STORED] * 2
        tier.unpin_many([slot.id for slot in slots[1:]])

    def test_a_writer_holds_its_page_until_it_lets_go(self, tier: StagingTier) -> None:
        (slot,) = self.fill(tier, [1])
        put(tier, range(100, 100 + 2 * (CAPACITY_BYTES // PAGE_BYTES)))
        assert resident(tier, [1]) == [1]
        tier.unpin_many([slot.id])
        put(tier, range(300, 300 + 2 * (CAPACITY_BYTES // PAGE_BYTES)))
        assert resident(tier, [1]) == []

    def test_a_deleted_page_keeps_its_slot_while_pinned(self, tier: StagingTier) -> None:
        put(tier, [1])
        used = tier.usage().used_bytes
        pins = tier.pin_many([key_of(1)])
        ((page, _),) = tier.pinned_many(pins)
        assert tier.delete_many([key_of(1)]) == 1
        assert not tier.contains_many([key_of(1)])[0] and tier.pin_many([key_of(1)]) == [-1]
        assert tier.usage().used_bytes == used and tier.usage().resident_pages == 0
        put(tier, range(100, 100 + 2 * (CAPACITY_BYTES // PAGE_BYTES)))
        assert belongs(key_of(1), tier.view(page))
        assert put(tier, [1]) == [PutStatus.STORED]
        tier.unpin_many(pins)
        check_counters(tier)
        assert belongs(key_of(1), get(tier, key_of(1))[1])

    def test_pinning_refreshes(self, tier: StagingTier) -> None:
        fits = CAPACITY_BYTES // PAGE_BYTES
        put(tier, range(fits))
        tier.unpin_many(tier.pin_many([key_of(0)]))
        put(tier, [1000])
        assert resident(tier, [0, 1]) == [0]

    def test_holding_does_not_refresh(self, tier: StagingTier) -> None:
        fits = CAPACITY_BYTES // PAGE_BYTES
        put(tier, range(fits))
        held = tier.hold_many([key_of(0), key_of(2000)])
        assert held[0] >= 0 and held[1] == -1
        tier.unpin_many(held[:1])
        put(tier, [1000])
        assert resident(tier, [0, 1, 2]) == [1, 2]

    def test_pages_to_be_written_below_stay_until_they_were_offered(self, tier: StagingTier) -> None:
        fits = CAPACITY_BYTES // PAGE_BYTES
        put(tier, range(fits))
        keys = [key_of(n) for n in range(fits)]
        tier.expect_writing([*keys, key_of(2000)], 0b10)
        tier.expect_writing(keys[:2], 0b01)
        assert put(tier, [1000]) == [PutStatus.FULL]
        assert tier.unwritten(0b01, 9) == keys[:2] and tier.unwritten(0b10, 2, last_first=True) == keys[:-3:-1]
        held = tier.hold_many(keys[:3])
        tier.written(held, 0b10)
        tier.unpin_many(held)
        soon = tier.unwritten(0b10, fits, soon=True)
        assert soon == keys[3 : 3 + len(soon)] and 0 < len(soon) <= fits // 2
        # The first two wait for the other tier, too.
        assert put(tier, [1000]) == [PutStatus.STORED]
        assert resident(tier, [0, 1, 2, 3]) == [0, 1, 3]
        assert tier.delete_many(keys) == fits - 1 and not tier.unwritten(0b11, 1)
        check_counters(tier)

    def test_a_page_may_be_committed_as_one_to_be_written_below(self, tier: StagingTier) -> None:
        item = item_of(key_of(1), PAGE_BYTES)
        (slot,) = tier.reserve_many([item.key], [item.meta.nbytes])
        assert isinstance(slot, Slot)
        tier.view(slot)[:] = item.data
        tier.commit_many([item.key], [slot], [item.meta], 0b100)
        assert tier.unwritten(0b100, 1) == [item.key] and not tier.unwritten(0b011, 1)
        tier.written([slot.id], 0b100)
        tier.unpin_many([slot.id])
        assert not tier.unwritten(0b111, 1)

    def test_letting_go_too_often_is_refused(self, tier: StagingTier) -> None:
        (slot,) = self.fill(tier, [1])
        tier.unpin_many([slot.id])
        with pytest.raises(ValueError, match="not pinned"):
            tier.unpin_many([slot.id])
        with pytest.raises(ValueError, match="not reserved"):
            tier.abort_many([key_of(1)], [slot])

    def test_pins_may_be_let_go_after_closing(self, tier: StagingTier) -> None:
        (slot,) = self.fill(tier, [1])
        tier.close()
        tier.unpin_many([slot.id])
