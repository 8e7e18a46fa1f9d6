"""The suite that every tier must pass. Subclass, say how a tier is made and how its stored bytes are reached:

    class TestMyTier(TierTests):
        def make_tier(self, directory, capacity_bytes):
            return MyTier(...)

        def flip_bit(self, tier, key, nbytes, bit):
            ...  # change one stored bit behind the tier's back

Tiers whose bytes lie in this process's memory pass `kvtier.testing.staging_tiers`, too.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.abc.tier import GetResult, GetStatus, PutItem, PutStatus, Removal, Tier
from kvtier.errors import ClosedError
from kvtier.testing.pages import aligned_buffer, belongs, item_of, key_of

KIB = 1024
PATIENCE_S = 60.0
"""How long these tests wait for what must happen: long, since it says nothing about speed."""
CLOSE_MAX_S = 20.0
"""A tier's closing is to take 2 s; this tells it from one that waits for ever, on a machine that is busy."""
CAPACITY_BYTES = 2 << 20
PAGE_BYTES = 40 * KIB


def check_counters(tier: Tier) -> None:
    """The identity that holds at any time, and the hard cap."""
    u = tier.usage()
    kept = u.recovered_pages + u.stored_pages - u.evicted_pages - u.deleted_pages - u.quarantined_pages
    assert kept == u.resident_pages, u
    assert 0 <= u.used_bytes <= u.capacity_bytes, u


def get(tier: Tier, key: bytes, nbytes: int = PAGE_BYTES) -> tuple[GetResult, memoryview]:
    out = aligned_buffer(-(-nbytes // 4096) * 4096)
    (result,) = tier.get_many_into([key], [out])
    return result, out[: result.meta.nbytes] if result.meta else out[:0]


def put(tier: Tier, numbers: Sequence[int], nbytes: int = PAGE_BYTES) -> list[PutStatus]:
    return tier.put_many([item_of(key_of(n), nbytes) for n in numbers])


def resident(tier: Tier, numbers: Sequence[int]) -> list[int]:
    return [n for n, there in zip(numbers, tier.contains_many([key_of(n) for n in numbers]), strict=True) if there]


class TierTests(ABC):
    """What holds for every tier."""

    @abstractmethod
    def make_tier(self, directory: Path, capacity_bytes: int) -> Tier:
        """An open tier. `directory` is for what it keeps on disk; made again over the same one, it is a reopening."""

    @abstractmethod
    def flip_bit(self, tier: Tier, key: bytes, nbytes: int, bit: int) -> None:
        """Flip bit `bit` of the stored bytes of the page under `key`, not by way of the tier's own calls."""

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = self.make_tier(tmp_path, CAPACITY_BYTES)
        yield tier
        tier.close()

    # ---- pages come back

    @pytest.mark.parametrize("nbytes", [1, 15, 4095, 4096, 4097, 100_000, 1 << 20])
    @pytest.mark.parametrize("shift", [0, 1, 16])
    def test_a_page_comes_back_as_it_was(self, tier: Tier, nbytes: int, shift: int) -> None:
        item = item_of(key_of(7), nbytes)
        assert tier.put_many([item]) == [PutStatus.STORED]
        assert tier.length_many([item.key, key_of(8)]) == [nbytes, -1]
        out = aligned_buffer(nbytes, shift=shift)
        (result,) = tier.get_many_into([item.key], [out])
        assert result == GetResult(GetStatus.HIT, item.meta)
        assert out == item.data
        check_counters(tier)

    def test_an_aligned_source_is_stored_with_and_without_padding(self, tier: Tier) -> None:
        for number, padded in enumerate((True, False)):
            source = aligned_buffer(12 * KIB)
            item = item_of(key_of(number), 9 * KIB)
            source[: 9 * KIB] = item.data
            status = tier.put_many([PutItem(item.key, item.meta, source[: 9 * KIB], padded)])
            assert status == [PutStatus.STORED]
            result, data = get(tier, item.key)
            assert result.status is GetStatus.HIT and belongs(item.key, data)

    def test_nothing_before_the_buffer_is_touched(self, tier: Tier) -> None:
        put(tier, [1], 5000)
        out = aligned_buffer(4096 + 5000)
        (result,) = tier.get_many_into([key_of(1)], [out[4096:]])
        assert result.status is GetStatus.HIT
        assert bytes(out[:4096]) == b"\xaa" * 4096

    def test_origins_of_any_length_are_kept(self, tier: Tier) -> None:
        for number, origin in enumerate((b"", b"x", bytes(range(255)))):
            data = item_of(key_of(number), 100)
            meta = data.meta._replace(origin=origin)
            assert tier.put_many([PutItem(data.key, meta, data.data)]) == [PutStatus.STORED]
            assert get(tier, data.key)[0].meta == meta

    def test_answers_follow_the_order_of_the_batch(self, tier: Tier) -> None:
        assert put(tier, [1, 2, 3], 5000) == [PutStatus.STORED] * 3
        asked = [key_of(n) for n in (3, 9, 1, 3)]
        outs = [aligned_buffer(5000) for _ in asked]
        results = tier.get_many_into(asked, outs)
        assert [r.status for r in results] == [GetStatus.HIT, GetStatus.ABSENT, GetStatus.HIT, GetStatus.HIT]
        assert all(belongs(asked[i], outs[i]) for i in (0, 2, 3))
        assert tier.contains_many(asked) == [True, False, True, True]

    def test_many_pages_in_one_call(self, tier: Tier) -> None:
        numbers = list(range(40))
        assert put(tier, numbers) == [PutStatus.STORED] * 40
        outs = [aligned_buffer(PAGE_BYTES) for _ in numbers]
        results = tier.get_many_into([key_of(n) for n in numbers], outs)
        assert {r.status for r in results} == {GetStatus.HIT}
        assert all(belongs(key_of(n), out) for n, out in zip(numbers, outs, strict=True))

    def test_empty_batches(self, tier: Tier) -> None:
        assert tier.put_many([]) == []
        assert tier.get_many_into([], []) == []
        assert tier.length_many([]) == []
        assert tier.delete_many([]) == 0

    # ---- refusals

    def test_a_key_is_stored_once(self, tier: Tier) -> None:
        assert sorted(s.value for s in put(tier, [1, 1])) == ["exists", "stored"]
        assert put(tier, [1], 5000) == [PutStatus.EXISTS]
        assert get(tier, key_of(1))[0].status is GetStatus.HIT
        assert tier.usage().stored_pages == 1

    def test_a_record_that_can_never_fit_is_too_large(self, tier: Tier) -> None:
        assert put(tier, [1], CAPACITY_BYTES + 1) == [PutStatus.TOO_LARGE]
        assert tier.usage().resident_pages == 0

    def test_past_its_deadline_nothing_is_started(self, tier: Tier) -> None:
        put(tier, [1])
        assert tier.put_many([item_of(key_of(2), 100)], deadline_s=0) == [PutStatus.DEADLINE]
        assert not tier.contains_many([key_of(2)])[0]
        out = aligned_buffer(PAGE_BYTES)
        assert tier.get_many_into([key_of(1)], [out], deadline_s=0) == [GetResult(GetStatus.DEADLINE)]
        assert put(tier, [2]) == [PutStatus.STORED]
        assert get(tier, key_of(1))[0].status is GetStatus.HIT

    def test_what_cannot_be_kept_is_refused_by_name(self, tier: Tier) -> None:
        good = item_of(key_of(1), 100)
        bad: dict[str, Any] = {"checksum": b"short", "spec": b"", "origin": bytes(256), "form": -1}
        for field, value in bad.items():
            with pytest.raises(ValueError, match=field):
                tier.put_many([PutItem(good.key, good.meta._replace(**{field: value}), good.data)])
        with pytest.raises(ValueError, match="key"):
            tier.put_many([PutItem(b"short", good.meta, good.data)])
        with pytest.raises(ValueError, match="bytes"):
            tier.put_many([PutItem(good.key, good.meta, good.data[:50])])
        assert tier.usage().resident_pages == 0
        assert tier.put_many([good]) == [PutStatus.STORED]

    def test_a_buffer_that_cannot_be_written_is_refused_and_nothing_stays_pinned(self, tier: Tier) -> None:
        put(tier, [1])
        with pytest.raises((TypeError, ValueError)):
            tier.get_many_into([key_of(1)], [memoryview(bytes(PAGE_BYTES))])
        put(tier, range(100, 100 + 2 * (CAPACITY_BYTES // PAGE_BYTES)))
        assert resident(tier, [1]) == []
        check_counters(tier)

    # ---- room

    def test_one_size_fills_the_capacity(self, tmp_path: Path) -> None:
        for number, nbytes in enumerate((4096, 40 * KIB, 200 * KIB)):
            tier = self.make_tier(tmp_path / str(number), CAPACITY_BYTES)
            try:
                fits = CAPACITY_BYTES // nbytes
                assert set(put(tier, range(2 * fits), nbytes)) == {PutStatus.STORED}
                assert fits - 1 <= tier.usage().resident_pages <= fits
                check_counters(tier)
            finally:
                tier.close()

    def test_the_least_recently_used_page_goes_first(self, tier: Tier) -> None:
        fits = CAPACITY_BYTES // PAGE_BYTES
        for n in range(fits):
            put(tier, [n])
        assert get(tier, key_of(0))[0].status is GetStatus.HIT  # now the most recent
        put(tier, [1000])
        assert resident(tier, [0, 1, 2, 1000]) == [0, 2, 1000]

    def test_looking_does_not_refresh(self, tier: Tier) -> None:
        fits = CAPACITY_BYTES // PAGE_BYTES
        for n in range(fits):
            put(tier, [n])
        tier.length_many([key_of(0)])
        put(tier, [1000])
        assert resident(tier, [0, 1]) == [1]

    def test_space_moves_between_sizes(self, tier: Tier) -> None:
        sizes = [8 * KIB, 200 * KIB, 36 * KIB, 500 * KIB, 4096]
        for turn, nbytes in enumerate(sizes):
            fits = CAPACITY_BYTES // nbytes
            for n in range(fits):
                assert put(tier, [turn * 10_000 + n], nbytes) == [PutStatus.STORED]
            check_counters(tier)
            there = resident(tier, [turn * 10_000 + n for n in range(fits)])
            assert len(there) >= 0.75 * fits, f"{len(there)} of {fits} pages of {nbytes} bytes"
            assert turn * 10_000 + fits - 1 in there
            key = key_of(turn * 10_000 + fits - 1)
            assert belongs(key, get(tier, key, nbytes)[1])

    def test_a_capacity_of_one_slot(self, tmp_path: Path) -> None:
        tier = self.make_tier(tmp_path, 4096)
        try:
            assert put(tier, [1, 2, 3], 4096) == [PutStatus.STORED] * 3
            assert tier.usage().resident_pages == 1
            assert put(tier, [4], 4097) == [PutStatus.TOO_LARGE]
            check_counters(tier)
        finally:
            tier.close()

    # ---- removal

    def test_deleted_pages_are_gone_and_their_room_is_free(self, tier: Tier) -> None:
        put(tier, range(10))
        before = tier.usage().used_bytes
        assert tier.delete_many([key_of(n) for n in (1, 2, 99)]) == 2
        assert tier.delete_many([key_of(1)]) == 0
        assert get(tier, key_of(1))[0].status is GetStatus.ABSENT
        assert tier.usage().deleted_pages == 2
        assert tier.usage().used_bytes == before - 2 * PAGE_BYTES
        check_counters(tier)
        assert put(tier, [1]) == [PutStatus.STORED]

    def test_a_deletion_is_counted_under_its_reason(self, tier: Tier) -> None:
        put(tier, range(3))
        assert tier.delete_many([key_of(0)], Removal.QUARANTINED) == 1
        assert tier.delete_many([key_of(1)], Removal.EVICTED) == 1
        u = tier.usage()
        assert (u.quarantined_pages, u.evicted_pages, u.deleted_pages) == (1, 1, 0)
        check_counters(tier)

    def test_the_listener_hears_of_every_removal(self, tier: Tier) -> None:
        heard: list[tuple[bytes, Removal]] = []

        def listener(keys: Sequence[bytes], why: Removal) -> None:
            tier.usage()  # called outside the tier's lock
            heard.extend((key, why) for key in keys)

        tier.set_removal_listener(listener)
        fits = CAPACITY_BYTES // PAGE_BYTES
        for n in range(fits + 2):
            put(tier, [n])
        tier.delete_many([key_of(5)])
        self.flip_bit(tier, key_of(6), PAGE_BYTES, 11)
        assert get(tier, key_of(6))[0].status is GetStatus.CORRUPT
        expected = [(0, Removal.EVICTED), (1, Removal.EVICTED), (5, Removal.DELETED), (6, Removal.QUARANTINED)]
        assert heard == [(key_of(n), why) for n, why in expected]

    def test_a_failing_listener_does_not_harm(self, tier: Tier) -> None:
        def listener(keys: Sequence[bytes], why: Removal) -> None:
            raise RuntimeError("listener")

        tier.set_removal_listener(listener)
        put(tier, [1])
        assert tier.delete_many([key_of(1)]) == 1
        assert put(tier, [1]) == [PutStatus.STORED]

    # ---- integrity

    @pytest.mark.parametrize("at", [0.0, 0.1, 0.5, 0.9, 1.0])
    def test_one_flipped_bit_is_a_counted_miss(self, tier: Tier, at: float) -> None:
        nbytes = 50_001
        put(tier, [1, 2], nbytes)
        self.flip_bit(tier, key_of(1), nbytes, int(at * (nbytes * 8 - 1)))
        result, _ = get(tier, key_of(1), nbytes)
        assert result == GetResult(GetStatus.CORRUPT)
        assert get(tier, key_of(1), nbytes)[0].status is GetStatus.ABSENT
        assert get(tier, key_of(2), nbytes)[0].status is GetStatus.HIT
        assert tier.usage().quarantined_pages == 1
        check_counters(tier)
        assert put(tier, [1], nbytes) == [PutStatus.STORED]
        assert get(tier, key_of(1), nbytes)[0].status is GetStatus.HIT

    def test_right_bytes_under_a_wrong_key_are_corrupt(self, tier: Tier) -> None:
        item = item_of(key_of(1), 5000)
        assert tier.put_many([PutItem(key_of(2), item.meta, item.data)]) == [PutStatus.STORED]
        assert get(tier, key_of(2))[0].status is GetStatus.CORRUPT

    def test_readers_and_writers_on_the_same_slots(self, tmp_path: Path) -> None:
        """A tier for a few pages, more keys than that, four threads: whatever is a hit is the key's own bytes."""
        tier = self.make_tier(tmp_path, 16 * 20 * KIB)
        sizes = [20 * KIB, 20 * KIB, 20 * KIB, 36 * KIB]
        until = time.monotonic() + 1.5
        give_up = time.monotonic() + PATIENCE_S
        wrong: list[str] = []
        counts = {"hit": 0, "put": 0}

        def goes_on() -> bool:
            """For a while, and on a slow machine until enough has happened."""
            now = time.monotonic()
            return not wrong and (now < until or (min(counts.values()) <= 20 and now < give_up))

        def write(seed: int) -> None:
            rng = np.random.default_rng(seed)
            while goes_on():
                numbers = rng.integers(0, 60, 4)
                items = [item_of(key_of(int(n)), sizes[int(n) % 4]) for n in numbers]
                counts["put"] += sum(s is PutStatus.STORED for s in tier.put_many(items))
                if rng.random() < 0.2:
                    tier.delete_many([key_of(int(rng.integers(0, 60)))])

        def read(seed: int) -> None:
            rng = np.random.default_rng(seed)
            outs = [aligned_buffer(36 * KIB) for _ in range(4)]
            while goes_on():
                keys = [key_of(int(n)) for n in rng.integers(0, 60, 4)]
                for key, out, result in zip(keys, outs, tier.get_many_into(keys, outs), strict=True):
                    if result.status is GetStatus.HIT:
                        counts["hit"] += 1
                        if result.meta is None or not belongs(key, out[: result.meta.nbytes]):
                            wrong.append(f"wrong bytes under {key.hex()}")
                    elif result.status is not GetStatus.ABSENT:
                        wrong.append(result.status.value)

        threads = [threading.Thread(target=f, args=(i,)) for i, f in enumerate((write, write, read, read))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        try:
            assert not wrong
            assert counts["hit"] > 20 and counts["put"] > 20
            assert tier.usage().quarantined_pages == 0
            check_counters(tier)
        finally:
            tier.close()

    # ---- closing

    def test_closed_means_closed(self, tier: Tier) -> None:
        put(tier, [1])
        started = time.monotonic()
        tier.close()
        tier.close()
        assert time.monotonic() - started < CLOSE_MAX_S
        for call in (
            lambda: tier.put_many([item_of(key_of(2), 10)]),
            lambda: tier.get_many_into([key_of(1)], [aligned_buffer(PAGE_BYTES)]),
            lambda: tier.length_many([key_of(1)]),
            lambda: tier.delete_many([key_of(1)]),
        ):
            with pytest.raises(ClosedError):
                call()

    def test_closing_waits_for_calls_under_way(self, tmp_path: Path) -> None:
        tier = self.make_tier(tmp_path, CAPACITY_BYTES)
        begun = threading.Event()
        failures: list[BaseException] = []

        def work() -> None:
            try:
                for n in range(100_000):
                    put(tier, range(4 * n, 4 * n + 4))
                    begun.set()
            except ClosedError:
                return
            except BaseException as error:  # noqa: BLE001 - asserted on below
                failures.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        assert begun.wait(PATIENCE_S)
        started = time.monotonic()
        tier.close()
        assert time.monotonic() - started < CLOSE_MAX_S
        thread.join(PATIENCE_S)
        assert not thread.is_alive() and not failures

    def test_a_persistent_tier_is_found_again(self, tmp_path: Path) -> None:
        tier = self.make_tier(tmp_path, CAPACITY_BYTES)
        put(tier, range(80))
        tier.delete_many([key_of(79)])
        there = resident(tier, range(80))
        persistent = tier.capabilities.persistent
        tier.close()
        tier = self.make_tier(tmp_path, CAPACITY_BYTES)
        try:
            assert resident(tier, range(80)) == (there if persistent else [])
            for n in resident(tier, range(80)):
                result, data = get(tier, key_of(n))
                assert result.meta == item_of(key_of(n), PAGE_BYTES).meta and belongs(key_of(n), data)
            assert tier.usage().recovered_pages == (len(there) if persistent else 0)
            check_counters(tier)
        finally:
            tier.close()

    # ---- order: for tiers that keep one; for the others these calls do nothing

    def test_order_is_told_and_absent_pages_do_not_matter(self, tier: Tier) -> None:
        put(tier, range(4))
        keys = [key_of(n) for n in range(6)]
        tier.touch_many(keys)
        tier.demote_many(keys)
        protected = tier.protect_many(keys, True)
        assert protected in (0, 4)
        tier.protect_many(keys, False)
        assert resident(tier, range(6)) == [0, 1, 2, 3]
        check_counters(tier)

    def test_touched_pages_stay_and_demoted_ones_go(self, tier: Tier) -> None:
        if tier.capabilities.shared:
            pytest.skip("this tier leaves the order to a server of its own")
        fits = CAPACITY_BYTES // PAGE_BYTES
        for n in range(fits):  # one by one: the pages of one call are stored in any order
            put(tier, [n])
        tier.touch_many([key_of(0)])
        tier.demote_many([key_of(5)])
        put(tier, [1000, 1001])
        assert resident(tier, [0, 1, 2, 5]) == [0, 2]

    def test_protected_pages_stay(self, tier: Tier) -> None:
        if tier.capabilities.shared:
            pytest.skip("this tier leaves the order to a server of its own")
        fits = CAPACITY_BYTES // PAGE_BYTES
        put(tier, range(fits))
        assert tier.protect_many([key_of(n) for n in (0, 1, 5000)], True) == 2
        put(tier, range(1000, 1000 + fits))
        assert resident(tier, [0, 1, 2]) == [0, 1]
        assert tier.protect_many([key_of(0), key_of(1)], False) == 2
        put(tier, range(2000, 2000 + fits))
        assert resident(tier, [0, 1]) == []
        check_counters(tier)

    def test_pages_of_a_lower_priority_go_first(self, tier: Tier) -> None:
        if tier.capabilities.shared:
            pytest.skip("this tier leaves the order to a server of its own")
        fits = CAPACITY_BYTES // PAGE_BYTES
        items = [item_of(key_of(n), PAGE_BYTES) for n in range(fits)]
        ranked = [i._replace(meta=i.meta._replace(priority=n % 3 - 1)) for n, i in enumerate(items)]
        assert set(tier.put_many(ranked)) == {PutStatus.STORED}
        put(tier, [1000, 1001])
        gone = set(range(fits)) - set(resident(tier, range(fits)))
        assert len(gone) == 2 and all(n % 3 == 0 for n in gone)
