"""Host pools of every kind and layout, read and written in place: what comes back is the page, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.connectors.sglang.hicache_pools import LAYOUTS, describe
from kvtier.errors import EngineError
from kvtier.spec import Role

pytestmark = pytest.mark.usefixtures("engine_hooks")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_round_trips_to_the_bit(lab: Any, opened: Callable[..., Any], layout: str, dtype: str) -> None:
    pool = lab.mha_pool(layout, dtype=dtype)
    storage = opened(pool)
    before = {page: lab.page_of(pool, page) for page in range(8)}
    assert storage.batch_set_v1(lab.names(3), lab.slots([3, 1, 6])) == [True] * 3
    pool.kv_buffer.fill_(-7.0)
    assert storage.batch_get_v1(lab.names(3), lab.slots([0, 5, 2])) == [True] * 3
    for at, was in ((0, 3), (5, 1), (2, 6)):
        assert torch.equal(lab.page_of(pool, at), before[was]), (layout, at)
    untouched = torch.full_like(before[0], -7.0)
    assert all(torch.equal(lab.page_of(pool, page), untouched) for page in (1, 3, 4, 6, 7))


def test_a_page_stored_under_one_layout_is_restored_into_another(
    lab: Any, opened: Callable[..., Any], tmp_path: Path
) -> None:
    block = lab.config(tmp_path / "kv")
    first = lab.mha_pool("layer_first")
    storage = opened(first, block)
    assert storage.batch_set_v1(lab.names(4), lab.slots([0, 1, 2, 3])) == [True] * 4
    lab.end(storage)
    for layout in LAYOUTS[1:]:
        other = lab.mha_pool(layout)
        other.kv_buffer.zero_()
        storage = opened(other, block)
        assert storage.batch_get_v1(lab.names(4), lab.slots([4, 5, 6, 7])) == [True] * 4
        for n in range(4):
            for layer in range(3):
                for role in range(2):
                    want = first.kv_buffer[role, layer, n * 16 : (n + 1) * 16]
                    assert torch.equal(_rows(other, role, layer, 4 + n), want), (layout, n, layer, role)
        lab.end(storage)


def _rows(pool: Any, role: int, layer: int, page: int) -> torch.Tensor:
    buffer = pool.kv_buffer[role]
    here: torch.Tensor
    if pool.layout == "page_first":
        here = buffer[page * 16 : (page + 1) * 16, layer]
    elif pool.layout == "page_first_direct":
        here = buffer[page, layer]
    else:
        here = buffer[page, :, :, layer].transpose(0, 1)
    return here


@pytest.mark.parametrize("layout", LAYOUTS)
def test_codecs_work_in_the_engines_own_memory(lab: Any, layout: str) -> None:
    pool = lab.mha_pool(layout)
    (memory,) = lab.buffers_of(pool)
    begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    staged = describe("kv", pool)
    assert all(begin <= b.address < end for b in staged.hot.buffers)
    assert len({b.address for b in staged.hot.buffers}) == 6 and staged.hot.num_pages == pool.page_num


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_mla_and_the_index_keys_beside_it(lab: Any, opened: Callable[..., Any], layout: str) -> None:
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
    from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl

    pool = lab.mla_pool(layout, page=64)
    device = DSATokenToKVPool(
        size=512, page_size=64, kv_lora_rank=64, dtype=torch.bfloat16, qk_rope_head_dim=16, layer_num=3, device="cpu",
        index_head_dim=128, enable_memory_saver=False, kv_cache_dim=80,
    )  # fmt: skip
    index = DSAIndexerPoolHost(make_dsa_indexer_pool_decl(device), pool, pin_memory=False)
    lab.fill(index, 1)
    storage = opened(pool, page=64, beside={lab.PoolName.INDEXER: index})
    assert storage._pools["kv"].staged.spec.buffers[0].role is Role.LATENT
    want = lab.page_of(pool, 2, 64), lab.page_of(index, 2, 64)
    assert storage.batch_set_v1(lab.names(1), lab.slots([2], 64)) == [True]
    assert storage.batch_set_v2([lab.transfer(lab.PoolName.INDEXER, lab.names(1), lab.slots([2], 64))]) == {
        lab.PoolName.INDEXER: [True]
    }
    for buffer in (*lab.buffers_of(pool), *lab.buffers_of(index)):
        buffer.zero_()
    assert storage.batch_get_v1(lab.names(1), lab.slots([4], 64)) == [True]
    assert storage.batch_get_v2([lab.transfer(lab.PoolName.INDEXER, lab.names(1), lab.slots([4], 64))]) == {
        lab.PoolName.INDEXER: [True]
    }
    assert torch.equal(lab.page_of(pool, 4, 64), want[0]) and torch.equal(lab.page_of(index, 4, 64), want[1])


def test_keys_and_values_of_different_width_and_a_sliding_window_beside(lab: Any, opened: Callable[..., Any]) -> None:
    """Two pools whose pages have one geometry, under the same hashes, do not meet."""
    pool, window = lab.mha_pool("page_first", v_dim=16), lab.mha_pool("page_first", v_dim=16)
    lab.fill(window, 2)
    storage = opened(pool, beside={lab.PoolName.SWA: window})
    before = [[b.clone() for b in lab.buffers_of(p)] for p in (pool, window)]
    both = [lab.transfer(lab.PoolName.SWA, lab.names(2), lab.slots([1, 2]))]
    assert storage.batch_set_v1(lab.names(2), lab.slots([1, 2])) == [True, True]
    assert storage.batch_set_v2(both) == {lab.PoolName.SWA: [True, True]}
    for p in (pool, window):
        for buffer in lab.buffers_of(p):
            buffer.zero_()
    assert storage.batch_get_v1(lab.names(2), lab.slots([1, 2])) == [True, True]
    assert storage.batch_get_v2(both) == {lab.PoolName.SWA: [True, True]}
    for p, was in zip((pool, window), before, strict=True):
        for buffer, saved in zip(lab.buffers_of(p), was, strict=True):
            assert torch.equal(buffer[16:48], saved[16:48])


class _States:
    """Recurrent states: slots of one index, of which the pool names the bytes."""

    layout, page_size, size, layer_num = "page_first", 1, 12, 2

    def __init__(self) -> None:
        self.temporal_buffer = torch.zeros(12, 2, 40)
        self.conv_buffer = [torch.zeros(12, 2, 7, dtype=torch.bfloat16)]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        parts = [(b, b[0].nbytes) for b in (self.temporal_buffer, *self.conv_buffer)]
        addresses = [b.data_ptr() + int(i) * n for i in indices for b, n in parts]
        return addresses, [n for _ in indices for _, n in parts]


def test_states_are_restored_where_a_prefix_has_one(lab: Any, opened: Callable[..., Any]) -> None:
    pool, states = lab.mha_pool("page_first"), _States()
    lab.fill(states)
    storage = opened(pool, beside={lab.PoolName.MAMBA: states})
    keys = lab.names(6)
    assert storage.batch_set_v1(keys, lab.slots(range(6))) == [True] * 6
    saved = states.temporal_buffer[3].clone(), states.conv_buffer[0][3].clone()
    # Only pages 1 and 4 (the second and the fifth) end at a state.
    stored = lab.transfer(lab.PoolName.MAMBA, [keys[1], keys[4]], torch.tensor([2, 3]))
    assert storage.batch_set_v2([stored]) == {lab.PoolName.MAMBA: [True, True]}
    query = lab.transfer(lab.PoolName.MAMBA, ["placeholder"], None, hit_policy=lab.PoolHitPolicy.TRAILING_PAGES)
    found = storage.batch_exists_v2(keys, [query])
    assert found.kv_hit_pages == 5 and found.restorable_prefix_pages == [2, 5]
    assert found.extra_pool_hit_pages == {"kv": 6, lab.PoolName.MAMBA: 5}
    lab.fill(states, 9)
    fetched = storage.batch_get_v2([lab.transfer(lab.PoolName.MAMBA, [keys[4]], torch.tensor([7]))])
    assert fetched == {lab.PoolName.MAMBA: [True]}
    assert torch.equal(states.temporal_buffer[7], saved[0]) and torch.equal(states.conv_buffer[0][7], saved[1])
    # All of it, or a prefix that has all of it.
    whole = lab.transfer(lab.PoolName.MAMBA, None, None, hit_policy=lab.PoolHitPolicy.ALL_PAGES)
    assert storage.batch_exists_v2(keys, [whole]).kv_hit_pages == 0
    groups = lab.transfer(lab.PoolName.DEEPSEEK_V4_C4, keys, None, hit_policy=lab.PoolHitPolicy.BLOCK_GROUPS)
    assert storage.batch_exists_v2(keys, [groups]).kv_hit_pages == 6


def test_pools_that_are_not_served_are_named(lab: Any) -> None:
    strange = lab.mha_pool("page_first")
    strange.layout = "page_unified"
    with pytest.raises(EngineError, match=r"page_unified.*--hicache-mem-layout"):
        describe("kv", strange)
    uneven = SimpleNamespace(layout="page_first", page_size=1, size=4)
    uneven.get_page_buffer_meta = lambda indices: ([int(indices[0]) ** 3], [8])
    with pytest.raises(EngineError, match="equal distances"):
        describe("mamba", uneven)
    silent = SimpleNamespace(layout="layer_first", page_size=1, size=4)
    with pytest.raises(EngineError, match="--hicache-mem-layout page_first"):
        describe("mamba", silent)
    pool = describe("kv", lab.mha_pool("page_first"))
    with pytest.raises(EngineError, match="whole pages"):
        pool.page_ids(torch.arange(8, 24), 1)
    with pytest.raises(EngineError, match="beyond"):
        pool.page_ids(lab.slots([4096]), 1)


@pytest.mark.parametrize("layout", ["page_first", "page_head"])
def test_what_a_linker_stored_is_staged(
    lab: Any, opened: Callable[..., Any], tiny: Path, tmp_path: Path, layout: str
) -> None:
    """The two connectors of one model are one namespace, so that either can be started on what the other left."""
    block = lab.config(tmp_path / "kv")
    engine = lab.Engine(tiny, block, page=16)
    rows = engine.compute(list(range(64)))
    stored = [meta.origin.hex() for _, meta in engine.linker._store.host.scan()]
    engine.close()
    assert len(stored) == 4
    pool = lab.mha_pool(layout, dim=16)
    storage = opened(pool, block)
    assert storage.batch_get_v1(stored, lab.slots([4, 5, 6, 7])) == [True] * 4
    # Which hash is which page: the first rows tell.
    places = {rows[0][0][n * 16 : (n + 1) * 16].float().numpy().tobytes(): n for n in range(4)}
    seen = set()
    for n in range(4, 8):
        was = places[_rows(pool, 0, 0, n).float().contiguous().numpy().tobytes()]
        seen.add(was)
        for layer in range(3):
            for role in range(2):
                assert torch.equal(_rows(pool, role, layer, n), rows[layer][role][was * 16 : (was + 1) * 16])
    assert seen == {0, 1, 2, 3}


def test_a_codec_of_values_is_used_for_values_only(lab: Any, opened: Callable[..., Any]) -> None:
    pool, states = lab.mha_pool("page_first"), _States()
    lab.fill(states)
    nvfp4 = {**lab.RAW, "quant": "nvfp4"}
    block = {**lab.config(), "kv_cache_compression_config": [nvfp4]}
    storage = opened(pool, block, beside={lab.PoolName.MAMBA: states})
    assert storage._pools["kv"].codec.id == "nvfp4" and storage._pools["mamba"].codec.id == "raw"
    want = lab.page_of(pool, 1).float()
    assert storage.batch_set_v1(lab.names(1), lab.slots([1])) == [True]
    pool.kv_buffer.zero_()
    assert storage.batch_get_v1(lab.names(1), lab.slots([1])) == [True]
    error = float((lab.page_of(pool, 1).float() - want).norm() / want.norm())
    assert 0 < error < 0.15
