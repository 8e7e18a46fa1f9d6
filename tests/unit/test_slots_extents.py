"""The extent allocator against a plain map of what is taken."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from kvtier.storage_backends.slots.extents import Extent, ExtentAllocator, Region, slot_bytes_of

KIB = 1024


@pytest.mark.parametrize(("nbytes", "slot"), [(0, 4096), (1, 4096), (4096, 4096), (4097, 8192), (1_327_104, 1_327_104)])
def test_slots_are_whole_blocks(nbytes: int, slot: int) -> None:
    assert slot_bytes_of(nbytes) == slot


def check(slots: ExtentAllocator, taken: dict[int, tuple[Extent, int]], regions: list[Region]) -> None:
    """Slots in use neither overlap nor cross a region's edge, and no byte is lost or counted twice."""
    spans = sorted((offset, offset + extent.slot_bytes) for extent, offset in taken.values())
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    for start, end in spans:
        assert start % 4096 == 0
        assert any(r.start <= start and end <= r.start + r.size for r in regions)
    used = sum(end - start for start, end in spans)
    assert used + slots.free_bytes() == sum(r.size // 4096 * 4096 for r in regions)
    assert sorted(row for e in slots.extents() for row in e.members()) == sorted(taken)


@pytest.mark.parametrize("seed", range(5))
def test_random_use_neither_overlaps_nor_leaks(seed: int) -> None:
    rng = random.Random(seed)
    regions = [Region(0, 300 * KIB), Region(512 * KIB, 512 * KIB), Region(1024 * KIB, 130 * KIB + 100)]
    slots = ExtentAllocator(regions)
    taken: dict[int, tuple[Extent, int]] = {}
    for row in range(1500):
        if taken and rng.random() < 0.45:
            extent, offset = taken.pop(rng.choice(list(taken)))
            slots.release(extent.start, offset)
        else:
            got = slots.take(rng.choice([4, 8, 12, 40, 100, 200]) * KIB, row)
            if got is not None:
                taken[row] = got
        if row % 10 == 0:
            check(slots, taken, regions)
    for extent, offset in taken.values():
        slots.release(extent.start, offset)
    check(slots, {}, regions)
    assert slots.extents() == []
    # Everything is joined again: the largest slots that the regions can hold, at once.
    assert all(slots.take(r.size // 4096 * 4096, i) for i, r in enumerate(sorted(regions, key=lambda r: -r.size)))


@pytest.mark.parametrize("capacity", [2 << 20, 64 << 20, 3 << 30])
@pytest.mark.parametrize("slot", [4 * KIB, 400 * KIB, 1_327_104])
def test_one_size_uses_all_but_less_than_a_slot(capacity: int, slot: int) -> None:
    slots = ExtentAllocator([Region(0, capacity)])
    count = 0
    while count <= 2000 and slots.take(slot, count) is not None:
        count += 1
    assert count == min(2001, capacity // slot)


def test_a_class_that_is_little_used_holds_little() -> None:
    slots = ExtentAllocator([Region(0, 64 << 20)])
    slots.take(4 * KIB, 0)
    assert sum(e.end - e.start for e in slots.extents()) <= (64 << 20) // 128


def test_neighbours_are_joined_only_as_far_as_needed() -> None:
    slots = ExtentAllocator([Region(0, 10 * 100 * KIB)])
    taken = [slots.take(100 * KIB, row) for row in range(10)]
    extents = [t[0] for t in taken if t is not None]
    cost = {e.start: row for row, e in enumerate(extents)}
    chosen = slots.neighbourhood(extents[4], 250 * KIB, lambda e: cost[e.start])
    assert chosen is not None
    assert [cost[e.start] for e in chosen] == [4, 3, 2], "the cheaper side first"
    chosen = slots.neighbourhood(extents[4], 250 * KIB, lambda e: None if cost[e.start] == 3 else 0)
    assert chosen is not None and [cost[e.start] for e in chosen] == [4, 5, 6]
    assert slots.neighbourhood(extents[4], 250 * KIB, lambda e: None if cost[e.start] in (3, 5) else 0) is None
    assert slots.neighbourhood(extents[4], 1001 * KIB, lambda e: 0) is None


def test_regions_are_never_joined() -> None:
    slots = ExtentAllocator([Region(0, 100 * KIB), Region(100 * KIB, 100 * KIB)])
    assert slots.take(104 * KIB, 0) is None
    a, b = slots.take(100 * KIB, 0), slots.take(100 * KIB, 1)
    assert a is not None and b is not None
    assert slots.neighbourhood(a[0], 104 * KIB, lambda e: 0) is None
    slots.release(a[0].start, a[1])
    slots.release(b[0].start, b[1])
    assert slots.take(104 * KIB, 0) is None


def test_a_restored_extent_is_as_it_was() -> None:
    regions = [Region(0, 256 * KIB)]
    slots = ExtentAllocator(regions)
    extent = slots.restore(16 * KIB, 8 * KIB, [5, -1, 6])
    check(slots, {5: (extent, 16 * KIB), 6: (extent, 32 * KIB)}, regions)
    assert slots.take(8 * KIB, 7) == (extent, 24 * KIB)
    with pytest.raises(ValueError, match="not free"):
        slots.restore(16 * KIB, 8 * KIB, [1])
