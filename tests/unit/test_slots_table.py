"""The slot table: exact recency against an OrderedDict, recovery, and growth."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.abc.tier import PageMeta, PutStatus, Removal
from kvtier.errors import ConfigError, SpecError
from kvtier.replay.reference import _Tier as ReferenceTier
from kvtier.replay.stack import Policy
from kvtier.storage_backends.slots.columns import Entry, PageColumns
from kvtier.storage_backends.slots.extents import Region, slot_bytes_of
from kvtier.storage_backends.slots.order import order_of
from kvtier.storage_backends.slots.table import SlotTable
from kvtier.testing.pages import item_of, key_of


def meta_of(nbytes: int = 4096, tag: int = 0) -> PageMeta:
    return PageMeta(nbytes, 2, tag % 1000, bytes([tag % 256]) * 16, bytes([tag % 3]) * 16, b"o" * (tag % 5))


def add(table: SlotTable, number: int, nbytes: int = 4096) -> int:
    row = table.reserve(key_of(number), nbytes)
    assert isinstance(row, int), row
    table.stage(row, meta_of(nbytes, number))
    table.publish(row)
    table.unpin([row])
    return row


@pytest.mark.parametrize("pages", [1, 5, 64, 65, 300, 3000])
def test_eviction_is_exactly_least_recently_used(pages: int) -> None:
    rng = random.Random(pages)
    table = SlotTable([Region(0, pages * 4096)], 4096)
    oracle: OrderedDict[int, None] = OrderedDict()
    for number in range(4 * pages + 200):
        for used in rng.sample(list(oracle), min(len(oracle), rng.choice([0, 0, 1, 3]))):
            one = table.pin_one(key_of(used)) if number % 2 else None
            table.unpin(table.pin([key_of(used)]) if one is None else [one[0]])
            oracle.move_to_end(used)
        if oracle and rng.random() < 0.05:
            gone = rng.choice(list(oracle))
            assert table.remove(key_of(gone), Removal.DELETED)
            del oracle[gone]
            table.take_removed()
        add(table, number)
        removed = [r.key for r in table.take_removed()]
        expected = []
        if len(oracle) == pages:
            expected = [key_of(oracle.popitem(last=False)[0])]
        oracle[number] = None
        assert removed == expected, number
    assert len(table) == len(oracle)


def test_a_batch_is_used_in_its_order() -> None:
    table = SlotTable([Region(0, 4 * 4096)], 4096)
    for number in range(4):
        add(table, number)
    pins = table.pin([key_of(n) for n in (2, 0, 9, 3, 1)])
    assert pins[2] == -1
    table.unpin([pin for pin in pins if pin >= 0])
    for number in range(10, 14):
        add(table, number)
    assert [r.key for r in table.take_removed()] == [key_of(n) for n in (2, 0, 3, 1)]


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_many_are_committed_as_one_after_the_other(policy: str) -> None:
    """Every column, the order and the counts are the same."""
    tables = [SlotTable([Region(0, 64 * 4096)], 4096, order_of(policy)) for _ in range(2)]
    keys = [key_of(n) for n in range(7)]
    metas = [meta_of(100 + n, n)._replace(priority=n % 3 - 1) for n in range(7)]
    for many, table in enumerate(tables):
        rows = [row for key in keys if isinstance(row := table.reserve(key, 4096), int)]
        assert len(rows) == 7
        if many:
            table.commit(rows, keys, metas, 5)
        else:
            for row, meta in zip(rows, metas, strict=True):
                table.stage(row, meta)
                table.publish(row, meta.priority, 5)
    one, other = ([table.pages(table.find(keys)), table.kept(4, 7), table.entries(staged=True)] for table in tables)
    assert one == other
    for column in ("fixed", "extents", "stamps", "pins", "states", "keeps", "lanes", "uses", "useds"):
        assert getattr(tables[0].rows, column).tolist() == getattr(tables[1].rows, column).tolist(), column
    usages = [table.usage(capacity_bytes=64 * 4096, put_bytes=0, get_bytes=0) for table in tables]
    assert usages[0] == usages[1] and usages[0].stored_pages == 7


@pytest.mark.parametrize(
    "bad",
    [
        {"checksum": b"short"},
        {"spec": b"short"},
        {"origin": b"o" * 256},
        {"priority": 2},
        {"form": 1 << 16},
        {"valid_tokens": -1},
        {"nbytes": -1},
        {"nbytes": 101},  # of a slot for 100
    ],
)
def test_of_many_all_are_committed_or_none(bad: dict[str, Any]) -> None:
    table = SlotTable([Region(0, 8 * 4096)], 4096)
    keys = [key_of(1), key_of(2)]
    rows = [row for key in keys if isinstance(row := table.reserve(key, 100), int)]
    with pytest.raises(SpecError):
        table.commit(rows, keys, [meta_of(100, 1), meta_of(100, 2)._replace(**bad)])
    with pytest.raises(SpecError, match="not reserved"):
        table.commit(rows, keys[::-1], [meta_of(100, 1), meta_of(100, 2)])
    assert table.find(keys) == [-1, -1] and not table.stored_pages
    table.commit(rows, keys, [meta_of(100, 1), meta_of(100, 2)])
    assert table.find(keys) == rows
    with pytest.raises(SpecError, match="not reserved"):
        table.commit(rows, keys, [meta_of(100, 1), meta_of(100, 2)])


def test_descriptions_survive_growth() -> None:
    count = 5000
    table = SlotTable([Region(0, count * 4096)], 4096)
    for number in range(count):
        add(table, number)
    pages = table.pages(table.pin([key_of(n) for n in range(count)]))
    offsets = set()
    for number, page in enumerate(pages):
        assert page is not None and page[1] == meta_of(4096, number)
        assert page[0].offset not in offsets
        offsets.add(page[0].offset)
    assert table.lengths([key_of(0), key_of(count)]) == [4096, -1]


def test_what_is_recovered_is_what_was() -> None:
    rng = random.Random(1)
    regions = [Region(0, 1 << 20), Region(1 << 20, 1 << 20)]
    table = SlotTable(regions, 1 << 20)
    for number in range(300):
        add(table, number, rng.choice([4096, 5000, 20_000, 20_000, 100_000]))
    entries = table.entries(staged=False)
    again = SlotTable(regions, 1 << 20)
    again.recover(PageColumns.of(entries))
    assert again.entries(staged=False) == entries
    assert (again.recovered_pages, len(again), again.used_bytes) == (len(entries), len(table), table.used_bytes)
    for number in range(1000, 1400):  # no slot is given out twice
        add(again, number, rng.choice([4096, 5000, 20_000, 100_000]))
        spans = sorted((e.offset, e.offset + e.meta.nbytes) for e in again.entries(staged=False))
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
    usage = again.usage(capacity_bytes=2 << 20, put_bytes=0, get_bytes=0)
    assert usage.recovered_pages + usage.stored_pages - usage.evicted_pages == usage.resident_pages


def test_staged_pages_are_part_of_a_snapshot_that_asks_for_them() -> None:
    table = SlotTable([Region(0, 1 << 20)], 1 << 20)
    add(table, 1)
    row = table.reserve(key_of(2), 100)
    assert isinstance(row, int)
    assert [e.key for e in table.entries(staged=True)] == [key_of(1)]
    table.stage(row, meta_of(100))
    assert {e.key for e in table.entries(staged=True)} == {key_of(1), key_of(2)}
    assert [e.key for e in table.entries(staged=False)] == [key_of(1)]
    assert table.abort(row) == key_of(2)
    assert [e.key for e in table.entries(staged=True)] == [key_of(1)]


def test_a_full_table_stays_full_until_something_changes() -> None:
    table = SlotTable([Region(0, 4 * 4096)], 4 * 4096)
    rows = [table.reserve(key_of(n), 4096) for n in range(4)]
    assert table.reserve(key_of(9), 4096) is PutStatus.FULL
    assert table.reserve(key_of(9), 8192) is PutStatus.FULL
    for row in rows[:2]:
        assert isinstance(row, int)
        table.abort(row)
    assert isinstance(table.reserve(key_of(9), 8192), int)


def test_entries_hold_an_items_description() -> None:
    item = item_of(key_of(1), 5000)
    table = SlotTable([Region(0, 1 << 20)], 1 << 20)
    table.recover(PageColumns.of([Entry(item.key, item.meta, 4096)]))
    assert table.entries(staged=False) == [Entry(item.key, item.meta, 4096)]


@pytest.mark.parametrize("pages", [1, 5, 10, 64, 65, 130, 700])
@pytest.mark.parametrize(("policy", "plain"), [("lru", Policy.LRU), ("s3fifo", Policy.S3FIFO)])
def test_eviction_equals_the_plain_policy(pages: int, policy: str, plain: Policy) -> None:
    """The simulator's reference of the same policies, which shares no code with the table."""
    rng = random.Random(pages)
    table = SlotTable([Region(0, pages * 4096)], 4096, order_of(policy))
    reference = ReferenceTier(pages, plain, math.inf)
    for step in range(6 * pages + 300):
        number = int(rng.paretovariate(0.6)) % (5 * pages)
        hit = reference.use(number, 0.0)
        one = table.pin_one(key_of(number)) if step % 2 else None
        found = [-1 if one is None else one[0]] if step % 2 else table.pin([key_of(number)])
        assert (found[0] >= 0) == hit, step
        if hit:
            table.unpin(found)
            continue
        victim = reference.insert(number, 0.0)
        add(table, number)
        assert [r.key for r in table.take_removed()] == ([] if victim is None else [key_of(victim[0])]), step


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_pages_that_must_stay_are_passed_over(policy: str) -> None:
    rng = random.Random(5)
    table = SlotTable([Region(0, 200 * 4096)], 4096, order_of(policy))
    for number in range(200):
        add(table, number)
    stay = rng.sample(range(200), 150)
    pins = table.pin([key_of(n) for n in stay[:80]], use=False)
    assert table.keep([key_of(n) for n in stay[80:]], 1) == 70
    for number in range(1000, 1600):
        add(table, number)
    assert all(row >= 0 for row in table.find([key_of(n) for n in stay]))
    assert sorted(table.kept(1, 1000)) == sorted(key_of(n) for n in stay[80:])
    assert table.kept(1, 1000, last_first=True) == table.kept(1, 1000)[::-1]
    assert table.kept(1, 10) == table.kept(1, 1000)[:10]
    table.unpin(pins)
    table.let_go(table.find([key_of(n) for n in stay[80:]]), 1)
    for number in range(2000, 2600):
        add(table, number)
    assert not table.kept(0xFF, 1) and not any(row >= 0 for row in table.find([key_of(n) for n in range(200)]))


def test_where_everything_must_stay_there_is_no_room() -> None:
    for policy in ("lru", "s3fifo"):
        table = SlotTable([Region(0, 300 * 4096)], 300 * 4096, order_of(policy))
        for number in range(300):
            add(table, number)
        table.keep([key_of(n) for n in range(300)], 2)
        assert table.reserve(key_of(999), 4096) is PutStatus.FULL
        assert table.reserve(key_of(999), 9000) is PutStatus.FULL
        table.let_go(table.find([key_of(7)]), 2)
        assert isinstance(table.reserve(key_of(999), 4096), int)
        assert [r.key for r in table.take_removed()] == [key_of(7)]


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_demoted_pages_go_first_and_used_ones_do_not(policy: str) -> None:
    table = SlotTable([Region(0, 20 * 4096)], 4096, order_of(policy))
    for number in range(20):
        add(table, number)
    table.demote([key_of(n) for n in (15, 16, 17)])
    table.touch([key_of(16), key_of(16)])
    if policy == "s3fifo":
        return  # a queue, not a stack: what was used is passed over when its turn comes, and that is tested above
    for number in range(100, 103):
        add(table, number)
    assert {r.key for r in table.take_removed()} == {key_of(15), key_of(17), key_of(0)}


def test_priorities_are_lanes_of_their_own() -> None:
    for policy in ("lru", "s3fifo"):
        table = SlotTable([Region(0, 30 * 4096)], 4096, order_of(policy))
        for number in range(30):
            row = table.reserve(key_of(number), 4096)
            assert isinstance(row, int)
            table.stage(row, meta_of(4096, number))
            table.publish(row, number % 3 - 1)
            table.unpin([row])
        for number in range(100, 120):
            row = table.reserve(key_of(number), 4096)
            assert isinstance(row, int)
            table.stage(row, meta_of(4096, number))
            table.publish(row, 1)
            table.unpin([row])
        gone = [r.key for r in table.take_removed()]
        assert sorted(gone[:10]) == sorted(key_of(n) for n in range(0, 30, 3))
        assert sorted(gone[10:]) == sorted(key_of(n) for n in range(1, 30, 3))


def steps_of(*sizes: int) -> st.SearchStrategy[list[tuple[int, int, int, int]]]:
    """Name, what to do, bytes, priority."""
    one = st.tuples(st.integers(0, 11), st.integers(0, 3), st.sampled_from(sizes), st.integers(-1, 1))
    return st.lists(one, max_size=60)


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
@settings(max_examples=60, deadline=None)
@given(steps=steps_of(0, 1, 4095))
def test_replacing_in_one_step_is_what_its_parts_are(policy: str, steps: list[tuple[int, int, int, int]]) -> None:
    """Values of twelve names, each under a page of its own, in a table with room for nine of them."""
    one, parts = tables = [SlotTable([Region(0, 9 * 4096)], 8192, order_of(policy)) for _ in range(2)]
    names: dict[int, bytes] = {}
    held: list[list[list[int]]] = []
    for step, (name, what, nbytes, priority) in enumerate(steps):
        old, key = names.get(name, b""), key_of(100 + step)
        if what == 0 and old:
            pins = [table.pin([old]) for table in tables]
            assert (pins[0][0] < 0) == (pins[1][0] < 0)
            if pins[0][0] >= 0:
                held.append(pins)
            continue
        if what == 1 and held:
            for table, pin in zip(tables, held.pop(), strict=True):
                table.unpin(pin)
            continue
        first, second = (table.reserve(key, nbytes + 1) for table in tables)
        assert one.take_removed() == parts.take_removed()
        if not isinstance(first, int) or not isinstance(second, int):
            assert first is second
            continue
        meta = meta_of(nbytes, step)._replace(priority=priority)
        parts.stage(second, meta)
        parts.publish(second, priority)
        parts.unpin([second])
        gone = parts.remove(old, Removal.DELETED)
        assert one.publish_over(first, key, meta, old) == gone
        assert not one.take_removed()
        assert [r.key for r in parts.take_removed()] == ([old] if gone else [])
        names[name] = key
        with pytest.raises(SpecError):
            one.publish_over(first, key, meta, b"")
    described = [[(e.key, e.meta) for e in table.entries(staged=True)] for table in tables]
    assert described[0] == described[1]
    usages = [table.usage(capacity_bytes=9 * 4096, put_bytes=0, get_bytes=0) for table in tables]
    assert usages[0] == usages[1]
    for pins in held:
        for table, pin in zip(tables, pins, strict=True):
            table.unpin(pin)
    assert one.used_bytes == parts.used_bytes
    for key in list(names.values()):
        assert one.remove(key, Removal.DELETED) == parts.remove(key, Removal.DELETED)
    assert one.used_bytes == parts.used_bytes == 0


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
@settings(max_examples=60, deadline=None)
@given(steps=steps_of(1, 4096, 4097, 20_000, 70_000))
def test_replaced_pages_of_all_sizes_leave_their_space(policy: str, steps: list[tuple[int, int, int, int]]) -> None:
    capacity = 30 * 4096
    table = SlotTable([Region(0, capacity)], capacity, order_of(policy))
    names: dict[int, bytes] = {}
    for step, (name, what, nbytes, priority) in enumerate(steps):
        key = key_of(100 + step)
        row = table.reserve(key, nbytes)
        assert isinstance(row, int), row
        if what == 0:
            table.abort(row)
            continue
        table.publish_over(row, key, meta_of(nbytes, step)._replace(priority=priority), names.get(name, b""))
        names[name] = key
        entries = table.entries(staged=True)
        spans = sorted((e.offset, e.offset + slot_bytes_of(e.meta.nbytes)) for e in entries)
        assert all(a[1] <= b[0] for a, b in pairwise(spans)) and (not spans or spans[-1][1] <= capacity)
        assert table.used_bytes == sum(end - start for start, end in spans)
        assert key in {e.key for e in entries}
    whole = table.reserve(key_of(1), capacity)
    assert isinstance(whole, int) and len(table) == 0, "every slot joins the others again"


def test_replacing_refuses_what_its_parts_refuse() -> None:
    table = SlotTable([Region(0, 1 << 20)], 1 << 20)
    add(table, 1)
    row = table.reserve(key_of(2), 100)
    assert isinstance(row, int)
    for meta in (meta_of(101), meta_of(100)._replace(checksum=b"short"), meta_of(100)._replace(priority=9)):
        with pytest.raises(SpecError):
            table.publish_over(row, key_of(2), meta, key_of(1))
    assert table.find([key_of(1), key_of(2)])[0] >= 0 and table.abort(row) == key_of(2)


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ConfigError, match="policy = 'fifo': must be one of lru, s3fifo"):
        order_of("fifo")
