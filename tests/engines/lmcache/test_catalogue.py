"""What is listed is what the tiers hold, and listing much of it is quick."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest


def test_pages_of_many_chunks_while_they_change() -> None:
    from kvtier.connectors.lmcache.catalogue import Catalogue, Known

    told: dict[bytes, int] = {}

    def stored(chunks: Any) -> None:
        for known in chunks:
            told[known.origin] = told.get(known.origin, 0) + known.nbytes

    def removed(chunks: Any) -> None:
        for known in chunks:
            told[known.origin] -= known.nbytes
            assert told[known.origin] >= 0, "told in order"

    catalogue = Catalogue(stored, removed)
    draw = random.Random(0)
    all_keys = [draw.randbytes(16) for _ in range(100_000)]
    begin = time.process_time()
    assert all(catalogue.add((key, Known(key, 5)) for key in all_keys))
    gone = set(all_keys[::3])
    seen: list[bytes] = []
    after, n = b"", 0
    while page := catalogue.behind(after, 500):
        seen += [key for key, _ in page]
        after = page[-1][0]
        catalogue.remove(all_keys[3 * n : 3 * n + 1])  # the list changes all the time
        catalogue.add([(b"\0" + n.to_bytes(4, "big"), Known(b"x", 1))])
        n += 1
    assert time.process_time() - begin < 20.0, "about 1 s"
    assert seen == sorted(set(seen)) and set(seen) >= set(all_keys) - gone
    assert catalogue.stored_under([b"x"]) == {b"\0" + i.to_bytes(4, "big") for i in range(n)}
    catalogue.remove(list(gone))
    assert [key for key, known in catalogue.behind(b"", 1 << 30) if known.nbytes == 5] == sorted(set(all_keys) - gone)
    assert catalogue.add([(all_keys[0], Known(all_keys[0], 5)), (all_keys[1], Known(all_keys[1], 5))]) == [True, False]
    catalogue.remove([all_keys[0], all_keys[0], b"never there"])
    assert {origin for origin, nbytes in told.items() if nbytes == 5} == set(all_keys) - gone


def test_listeners_hear_in_order_from_several_threads() -> None:
    from kvtier.connectors.lmcache.catalogue import Catalogue, Known

    here: set[bytes] = set()
    wrong: list[str] = []

    def stored(chunks: Any) -> None:
        for known in chunks:
            if known.origin in here:
                wrong.append("stored twice")
            here.add(known.origin)

    def removed(chunks: Any) -> None:
        for known in chunks:
            if known.origin not in here:
                wrong.append("removed before it was stored")
            here.discard(known.origin)

    catalogue = Catalogue(stored, removed)

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(3000):
            key = bytes([draw.randrange(8)])
            if draw.random() < 0.5:
                catalogue.add([(key, Known(key, 1))])
            else:
                catalogue.remove([key])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert not wrong and here == {key for key, _ in catalogue.behind(b"", 100)}


def test_a_chunk_that_leaves_while_it_is_being_listed_is_not_listed(
    drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from .storage import keys

    driver = drive()
    chunks = driver.adapter._chunks
    add = chunks.catalogue.add

    def late(listed: Any) -> Any:
        listed = list(listed)
        chunks.store.host.delete_many([key for key, _ in listed])
        return add(listed)

    with monkeypatch.context() as patch:
        patch.setattr(chunks.catalogue, "add", late)
        driver.store(keys(3), driver.objects(3, fill=1))
    assert not chunks.known() and not driver.adapter.get_usage().bytes_by_cache_salt
    driver.store(keys(3), driver.objects(3, fill=1))
    assert len(chunks.known()) == 3


def test_what_is_listed_is_what_two_tiers_hold(drive: Any, tmp_path: Path) -> None:
    """Chunks written back, evicted from either tier, deleted and promoted again."""
    from .storage import keys, until

    tiers = [{"type": "host", "capacity": "1MiB"}, {"type": "nvme", "path": str(tmp_path), "capacity": "3MiB"}]
    driver = drive(tiers=tiers, promote_deadline="60s")
    adapter, store = driver.adapter, driver.adapter._chunks.store
    draw = random.Random(3)
    universe = keys(30) + keys(30, salt="tenant")
    for _ in range(40):
        some = draw.sample(range(60), 4)
        driver.store([universe[i] for i in some], [driver.objects(1, fill=i)[0] for i in some])
        asked = [universe[i] for i in draw.sample(range(60), 4)]
        found = driver.lookup(asked)
        driver.load([asked[i] for i in found], driver.objects(len(found)))
        if draw.random() < 0.2:
            adapter.delete([universe[draw.randrange(60)]])
    assert store.flush(60.0)

    def right() -> bool:
        listed = dict(adapter._chunks.known())
        layout = adapter._layout_of(driver.desc)
        from kvtier.connectors.lmcache.identity import encode_key

        every = adapter._chunks.keys_of(layout, [encode_key(key) for key in universe])
        here = store.host.contains_many(every)
        below = store.known_below(every)
        return set(listed) == {key for key, a, b in zip(every, here, below, strict=True) if a or b}

    until(right)
    listed = adapter.list_l2_keys().entries
    by_salt: dict[str, int] = {}
    for entry in listed:
        salt = entry.key.cache_salt
        by_salt[salt] = by_salt.get(salt, 0) + entry.size_bytes
    usage = adapter.get_usage()
    assert dict(usage.bytes_by_cache_salt) == by_salt and len(by_salt) == 2
    assert 0 < usage.total_bytes_used <= usage.total_capacity_bytes
