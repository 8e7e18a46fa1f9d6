"""Pools beside KV that lack something: a page is all of its buffers or a miss, and nothing of it leaks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from .test_pools import PAGES, tokens_of

pytestmark = pytest.mark.usefixtures("engine_hooks")


def keys_of(engine: Any, name: str, tokens: list[int]) -> list[bytes]:
    """Under which the store has the pages of a pool."""
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    from kvtier.connectors.sglang.pools import page_hashes

    from .harness import key_of

    hashes = page_hashes(get_storage_hash_str(key_of(tokens), None, page_size=engine.page))
    keys: list[bytes] = engine.stored(name).namespace.page_keys(hashes)
    return keys


def spoil(engine: Any, key: bytes) -> None:
    """Change a byte of a page in host memory."""
    host = engine.linker._store.host
    (pin,) = host.pin_many([key])
    slot, _ = host.pinned_many([pin])[0]
    host.arena[slot.offset + 3] ^= 0xFF
    host.unpin_many([pin])


@pytest.mark.parametrize(
    ("kind", "page", "pool", "lost", "left"),
    [
        ("dsa", 64, "kv", 4, 4),  # latent rows and index keys are one page
        ("swa", 16, "swa", 5, 5),  # the window, two pages, may end before it
        ("swa", 16, "swa", 4, 4),
        ("swa", 16, "swa", 0, 6),  # not in the window
        ("swa", 16, "kv", 3, 3),
        ("mamba", 1, "mamba", 5, 0),  # there is no other state
        ("mamba_swa", 1, "swa", 5, 0),
    ],
)
def test_a_page_that_lacks_one_pool_is_a_miss(
    start_pools: Any, tiny: Path, kind: str, page: int, pool: str, lost: int, left: int
) -> None:
    from .harness import config
    from .pool_engines import equal

    engine = start_pools(tiny, config(), kind, page=page)
    free, tokens = engine.free(), tokens_of(page)
    computed = engine.fill_prefix(tokens)
    engine.flush()
    engine.linker._store.delete([keys_of(engine, pool, tokens)[lost]])
    restored = engine.admit(engine.request("again", tokens))
    assert restored.loaded == left * page
    if left == PAGES:
        assert equal(engine.forward(restored), computed)
    elif left:
        engine.forward(restored)
    assert engine.finish(restored) and engine.free() == free
    counts = engine.counts
    assert counts.hits == {"host": left} and sum(counts.misses.values()) == PAGES - left == counts.lookups - left
    if pool != "kv":
        assert counts.misses["partial"] == PAGES - left
    engine.assert_nothing_held()


def test_a_shorter_prefix_has_the_state_where_it_ends(start_pools: Any, tiny: Path) -> None:
    """Two turns, each with a state; the second one's is lost."""
    from .harness import config
    from .pool_engines import equal

    engine = start_pools(tiny, config(), "mamba", page=1)
    turn = tokens_of(1, 2 * PAGES)
    first = engine.fill_prefix(turn[:PAGES])
    engine.fill_prefix(turn, seed=1, known=PAGES)
    engine.flush()
    engine.linker._store.delete([keys_of(engine, "mamba", turn)[-1]])
    restored = engine.admit(engine.request("again", turn))
    assert restored.loaded == PAGES
    assert equal(engine.forward(restored), first) and engine.finish(restored)
    assert engine.counts.hits == {"host": PAGES} and engine.counts.misses["partial"] == PAGES
    engine.assert_nothing_held()


def test_of_a_window_only_what_lies_in_it_is_read(start_pools: Any, tiny: Path, tmp_path: Path) -> None:
    from .harness import config

    first = start_pools(tiny, config(tmp_path), "swa", page=16)
    tokens = tokens_of(16)
    first.fill_prefix(tokens)
    first.close()
    second = start_pools(tiny, config(tmp_path), "swa", page=16)
    restored = second.admit(second.request("again", tokens))
    second.forward(restored)
    assert restored.loaded == len(tokens) and second.finish(restored)
    here = second.linker._store.host.contains_many(keys_of(second, "swa", tokens))
    assert here == [False] * 4 + [True] * 2
    moved = second.counts.hot_bytes["onboard"]
    kv, window = (second.stored(name).pool.spec.hot_page_bytes for name in ("kv", "swa"))
    assert moved == PAGES * kv + 2 * window
    second.assert_nothing_held()


@pytest.mark.parametrize(
    ("kind", "page", "pool"), [("mla", 16, "kv"), ("dsa", 64, "kv"), ("swa", 16, "swa"), ("mamba", 1, "mamba")]
)
def test_what_is_found_bad_after_the_start_fails_the_batch(
    start_pools: Any, tiny: Path, kind: str, page: int, pool: str
) -> None:
    """Of any pool: 503, nothing is inserted, nothing leaks, and the next request is right."""
    from .harness import config
    from .pool_engines import equal

    engine = start_pools(tiny, config(), kind, page=page)
    free, tokens = engine.free(), tokens_of(page)
    computed = engine.fill_prefix(tokens)
    engine.flush()
    spoil(engine, keys_of(engine, pool, tokens)[-1])
    restored = engine.admit(engine.request("bad", tokens))
    assert restored.loaded == len(tokens)
    engine.forward(restored)
    assert not engine.finish(restored) and engine.free() == free
    assert engine.counts.load_failures == 1
    again = engine.admit(engine.request("next", tokens))
    assert again.loaded < len(tokens)
    if again.loaded:
        engine.forward(again)
    assert engine.finish(again)
    engine.assert_nothing_held()
    engine.fill_prefix(tokens)
    engine.flush()
    healed = engine.admit(engine.request("healed", tokens))
    assert equal(engine.forward(healed), computed) and engine.finish(healed)
    engine.assert_nothing_held()


@pytest.mark.parametrize(("kind", "page"), [("mla", 16), ("swa", 16), ("mamba", 1), ("mamba_swa", 1)])
def test_a_request_that_goes_away_leaves_nothing(start_pools: Any, tiny: Path, kind: str, page: int) -> None:
    """Queued, promised, and while others are loading."""
    from .harness import config
    from .pool_engines import equal

    engine = start_pools(tiny, config(), kind, page=page)
    free, tokens = engine.free(), tokens_of(page)
    computed = engine.fill_prefix(tokens)
    engine.flush()
    queued = engine.request("queued", tokens)
    engine.abort(queued)
    other = engine.request("other", tokens)
    other.init_next_round_input(engine.cache)
    restored = engine.admit(engine.request("stays", tokens))
    engine.abort(other)
    engine.linker.request_dropped("other")
    engine.linker.request_dropped("queued")
    assert equal(engine.forward(restored), computed) and engine.finish(restored)
    assert engine.free() == free
    engine.assert_nothing_held()


@pytest.mark.parametrize(("kind", "page"), [("mla", 16), ("swa", 16), ("mamba", 1)])
def test_loads_make_room_on_the_device(start_pools: Any, tiny: Path, kind: str, page: int) -> None:
    """A device with room for two prompts and a little: others leave the radix cache, while one is loading."""
    from .harness import config
    from .pool_engines import equal

    engine = start_pools(tiny, config(), kind, page=page, pages=2 * PAGES + 2)
    prompts = [[n + seed for n in tokens_of(page)] for seed in (0, 1000, 2000, 3000)]
    computed = []
    for seed, tokens in enumerate(prompts):
        if min(engine.free()["kv"], engine.free().get("swa", 1 << 30)) < len(tokens):
            evict(engine, len(tokens))
        computed.append(engine.fill_prefix(tokens, seed=seed))
    first = engine.admit(engine.request("first", prompts[0]))
    assert first.loaded == len(prompts[0])
    second = engine.admit(engine.request("second", prompts[1]))  # while the first one's pages are being written
    assert second.loaded == len(prompts[1])
    assert equal(engine.forward(second), computed[1]) and equal(engine.forward(first), computed[0])
    engine.linker.finish_layer_wise_loading(first.index)
    for restored in (first, second):
        engine.finish(restored)
    engine.assert_nothing_held()


def evict(engine: Any, tokens: int) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    wanted = {"swa_num_tokens": tokens} if engine.windowed else {}
    engine.cache.evict(EvictParams(num_tokens=tokens, **wanted))


def test_an_offload_of_several_pools_is_done_when_all_are(
    start_pools: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtier.mover import PageMover

    from .harness import config, until

    engine = start_pools(tiny, config(), "mamba", page=1)
    go, real = threading.Event(), PageMover._encode

    def gated(self: PageMover, *args: Any) -> Any:
        if self is not engine.linker._mover:
            assert go.wait(60.0)
        return real(self, *args)

    monkeypatch.setattr(PageMover, "_encode", gated)
    monkeypatch.setattr(engine, "offloaded", lambda: None)
    engine.fill_prefix(tokens_of(1))
    until(lambda: engine.counts.offloads["stored"] == PAGES, 60.0)
    assert engine.linker.num_completed_offloads() == 0
    go.set()
    until(lambda: engine.linker.num_completed_offloads() == 1, 60.0)
    assert engine.linker.pop_completed_offload()
    engine.cache.linker.commit_completed_offloads([True])


def test_a_state_that_finds_no_room_leaves_the_node_unstored(
    start_pools: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtier.mover import PageMover

    from .harness import config

    engine = start_pools(tiny, config(), "mamba", page=1)
    real = PageMover._encode

    def failing(self: PageMover, *args: Any) -> Any:
        if self is not engine.linker._mover:
            raise OSError("injected")
        return real(self, *args)

    monkeypatch.setattr(PageMover, "_encode", failing)
    engine.fill_prefix(tokens_of(1))
    assert engine.counts.offloads["stored"] == PAGES and engine.counts.offloads["failed"] == 1
    engine.flush()
    assert engine.admit(engine.request("again", tokens_of(1))).loaded == 0
    assert engine.counts.misses["partial"] == PAGES
    engine.assert_nothing_held()
