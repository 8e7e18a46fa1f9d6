"""The other kinds of cache that SGLang has, through its real pools and radix cache: what is restored was computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("engine_hooks")

CASES = [
    ("mha_fp8", 16), ("mla", 16), ("mla", 1), ("mla_fp8", 64), ("dsa", 64), ("dsa_fp8", 64),
    ("swa", 16), ("swa", 1), ("mamba", 1), ("mamba", 64), ("mamba_mla", 1), ("mamba_swa", 1),
]  # fmt: skip


PAGES = 6


def tokens_of(page: int, pages: int = PAGES) -> list[int]:
    return [(7 * n) % 400 + 5 for n in range(page * pages)]


def method(quant: str) -> dict[str, Any]:
    return {"kv_cache_compression_config": [{"algorithm": "quantization_for_cold_page", "quant": quant}], "raw": False}


@pytest.mark.parametrize(("kind", "page"), CASES)
@pytest.mark.parametrize("quant", ["none", "lossless"])
def test_pages_come_back_bit_for_bit(start_pools: Any, tiny: Path, kind: str, page: int, quant: str) -> None:
    from .harness import config
    from .pool_engines import equal

    if quant == "lossless":
        pytest.importorskip("zstandard", reason="zstandard is not installed: pip install 'kvtier[lossless]'")
    engine = start_pools(tiny, config(**method(quant)), kind, page=page)
    free = engine.free()
    tokens = tokens_of(page)
    computed = engine.fill_prefix(tokens)
    engine.flush()
    assert engine.free() == free
    partial = range(page - 1)  # tokens behind the last whole page
    restored = engine.admit(engine.request("again", [*tokens, *partial]))
    assert restored.loaded == len(tokens)
    assert equal(engine.forward(restored), computed)
    assert engine.finish(restored)
    assert engine.free() == free
    engine.assert_nothing_held()
    assert engine.counts.hits == {"host": PAGES} and not sum(engine.counts.misses.values())


@pytest.mark.parametrize(("kind", "page"), CASES)
@pytest.mark.parametrize("quant", ["nvfp4", "auto"])
def test_compressed_pages_are_those_of_the_reference(
    start_pools: Any, tiny: Path, kind: str, page: int, quant: str
) -> None:
    """What comes back of values is what the reference codec makes of them; index keys, states and packed rows are as
    they were."""
    from .harness import config

    engine = start_pools(tiny, config(**method(quant)), kind, page=page)
    tokens = tokens_of(page)
    engine.fill_prefix(tokens)
    wanted = {name: by_reference(engine, name, slots) for name, slots in engine.pages(*engine.matched(tokens))}
    engine.flush()
    restored = engine.admit(engine.request("again", tokens))
    engine.forward(restored)
    state = restored.req.kv.mamba_pool_idx.reshape(1) if engine.recurrent else None
    for name, slots in engine.pages(restored.slots, state):
        pool = engine.stored(name).pool
        got = [page_values(pool, number) for number in pool.page_ids(slots, len(slots) // pool.spec.page_tokens)]
        assert len(got) == len(wanted[name]) > 0
        for page_got, page_wanted in zip(got, wanted[name], strict=True):
            for a, b in zip(page_got, page_wanted, strict=True):
                np.testing.assert_array_equal(a, b)
    assert engine.finish(restored)
    engine.assert_nothing_held()


def page_values(pool: Any, number: int) -> list[np.ndarray[Any, Any]]:
    """Bits of each buffer of a page, ``[heads, tokens, dim]``."""
    import torch

    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    found = []
    for buffer, hot in zip(pool.spec.buffers, pool.hot.buffers, strict=True):
        owner = hot.owner
        if buffer.tokens != pool.spec.page_tokens or owner.dim() != 3:
            values = owner[number].reshape(1, 1, -1)
        else:
            first = number * buffer.tokens
            values = owner[first : first + buffer.tokens].permute(1, 0, 2)
        kind = {1: np.uint8, 2: np.uint16, 4: np.float32}[owner.element_size()]
        found.append(values.contiguous().view(bits[owner.element_size()]).numpy().view(kind).copy())
    return found


def by_reference(engine: Any, name: str, slots: Any) -> list[list[np.ndarray[Any, Any]]]:
    """Pages in `slots`, encoded and decoded by the reference codec."""
    from kvtier.kernels.nvfp4 import page_reference
    from kvtier.testing.codecs import reference_parts

    stored = engine.stored(name)
    pool, layout, tokens = stored.pool, stored.codec.layout(stored.pool.spec), stored.pool.spec.page_tokens
    pages = []
    for number in pool.page_ids(slots, len(slots) // tokens):
        values = page_values(pool, number)
        parts = reference_parts(layout, values)
        cold, refused = page_reference.encode_page(
            parts, tokens, tokens, layout.cold_page_bytes, layout.scale_table_offset
        )
        assert not refused
        decoded = page_reference.decode_page(cold, parts, tokens, tokens, layout.scale_table_offset)
        for at, part in zip(layout.parts, decoded, strict=True):
            values[at.buffer][:, :, at.column : at.column + at.columns] = part
        pages.append(values)
    return pages


def test_the_pages_of_sparse_attention_have_their_index_keys_losslessly(start_pools: Any, tiny: Path) -> None:
    from kvtier.spec import Coding, Role

    from .harness import config

    engine = start_pools(tiny, config(**method("nvfp4")), "dsa", page=64)
    stored = engine.stored("kv")
    index = [b for b in stored.pool.spec.buffers if b.role is Role.INDEX_KEY]
    assert [b.layer for b in index] == [0, 2, 3]  # layer 1 uses the choice of layer 0
    assert {b.hot_bytes for b in index} == {64 * 128 + 64 * 4}
    layout = stored.codec.layout(stored.pool.spec)
    codings = {stored.pool.spec.buffers[p.buffer].role: p.coding for p in layout.parts}
    assert codings == {Role.LATENT: Coding.NVFP4, Role.INDEX_KEY: Coding.RAW}


@pytest.mark.parametrize(
    ("kind", "replicated"), [("mla", True), ("dsa", True), ("swa", False), ("mamba_mla", False), ("mha_fp8", False)]
)
def test_what_all_ranks_hold_alike_is_stored_once(start_pools: Any, tiny: Path, kind: str, replicated: bool) -> None:
    """Latent rows are the same on all ranks; states beside them are not, and then neither is the page."""
    from .harness import config

    engine = start_pools(tiny, config(), kind, page=64 if kind == "dsa" else 1)
    shards = {stored.namespace.shard for stored in engine.linker._stored}
    assert shards == ({"replicated"} if replicated else {"tp0/1"})


def test_ranks_with_the_same_pages_write_shared_tiers_once(tmp_path: Path) -> None:
    from kvtier.config import parse_config
    from kvtier.connectors.sglang.movers import shared_by_one

    tiers = [
        {"type": "host", "capacity": "16MiB"},
        {"type": "nvme", "path": str(tmp_path), "capacity": "64MiB"},
        {"type": "redis", "url": "redis://127.0.0.1:1/0"},
    ]
    config = parse_config({"tiers": tiers})
    assert shared_by_one(config, 0) == config
    other = shared_by_one(config, 3)
    assert [getattr(tier, "write", None) for tier in other.tiers] == [None, "through", "none"]
    assert [tier.type for tier in other.tiers] == ["host", "nvme", "redis"]


@pytest.mark.parametrize(("kind", "page"), [("swa", 16), ("mamba", 1), ("mamba", 64), ("mamba_swa", 1), ("dsa", 64)])
def test_a_new_engine_restores_from_the_directory_of_the_old_one(
    start_pools: Any, tiny: Path, tmp_path: Path, kind: str, page: int
) -> None:
    from .harness import config
    from .pool_engines import equal

    first = start_pools(tiny, config(tmp_path), kind, page=page)
    tokens = tokens_of(page)
    computed = first.fill_prefix(tokens)
    first.close()
    second = start_pools(tiny, config(tmp_path), kind, page=page)
    restored = second.admit(second.request("again", tokens))
    assert restored.loaded == len(tokens)
    assert equal(second.forward(restored), computed) and second.finish(restored)
    assert second.counts.hits == {"host": 0, "nvme": PAGES}
    second.assert_nothing_held()


def test_a_new_engine_with_another_geometry_beside_finds_nothing(
    start_pools: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The KV pages are the same, and the window's are not."""
    from .harness import config
    from .pool_engines import PoolEngine

    first = start_pools(tiny, config(tmp_path), "swa", page=16)
    tokens = tokens_of(16)
    first.fill_prefix(tokens)
    first.close()
    monkeypatch.setattr(PoolEngine, "window_dim", 48)
    second = start_pools(tiny, config(tmp_path), "swa", page=16)
    assert second.admit(second.request("again", tokens)).loaded == 0
    assert second.counts.hits == {"host": 0, "nvme": 0} and second.counts.misses["partial"] == PAGES
    second.assert_nothing_held()


@pytest.mark.parametrize(("kind", "page"), CASES)
def test_a_restored_prefix_joins_the_radix_cache(start_pools: Any, tiny: Path, kind: str, page: int) -> None:
    """What was restored and inserted is matched on the device by the next request, all of it: no tombstones."""
    from .harness import config
    from .pool_engines import equal

    engine = start_pools(tiny, config(), kind, page=page)
    tokens = tokens_of(page)
    computed = engine.fill_prefix(tokens)
    engine.flush()
    restored = engine.admit(engine.request("again", tokens))
    engine.forward(restored)
    engine.keep(restored, tokens)
    assert equal(engine.contents(engine.places(*engine.matched(tokens))), computed)
    assert engine.counts.offloads["exists"] >= PAGES  # what came from the tiers is not encoded again


@pytest.mark.parametrize(("kind", "page"), [("mla", 16), ("dsa", 64), ("swa", 16), ("mamba", 1), ("mamba_swa", 1)])
def test_a_second_turn_loads_what_follows_on_what_is_there(start_pools: Any, tiny: Path, kind: str, page: int) -> None:
    """The first turn is still on the device, the second one is not."""
    from .harness import config
    from .pool_engines import equal

    engine = start_pools(tiny, config(), kind, page=page)
    turn = tokens_of(page, 12)
    engine.fill_prefix(turn[: PAGES * page])
    computed = engine.fill_prefix(turn, seed=1, known=PAGES * page)
    engine.flush()
    first = engine.admit(engine.request("first", turn[: PAGES * page]))
    assert first.loaded == PAGES * page
    engine.forward(first)
    engine.keep(first, turn[: PAGES * page])
    second = engine.admit(engine.request("second", turn))
    assert (second.device, second.loaded) == (PAGES * page, PAGES * page)
    got, tail = engine.forward(second), {}
    for name, buffers in got.items():
        tail[name] = [b[-len(a) :] for a, b in zip(buffers, computed[name], strict=True)]
    assert equal(got, tail)
    assert engine.finish(second)
    engine.assert_nothing_held()
