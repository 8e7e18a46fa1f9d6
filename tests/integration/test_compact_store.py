"""Compacted prefixes in the tiers: what was stored comes back, also in a new process from NVMe, and the plain KV of the
same tokens never meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.codecs.registry import codec as codec_named
from kvtier.compression.compaction.artefact import CompactPrefix
from kvtier.compression.compaction.baselines import choose
from kvtier.compression.compaction.prefix import Compaction, LayerSelection, Recipe
from kvtier.compression.compaction.storage import _CHUNKS, CHUNK_BYTES, CompactStore, _Name
from kvtier.config import Config, parse_config
from kvtier.connectors.transformers import PrefixCache
from kvtier.connectors.transformers.compact_serving import CompactServing
from kvtier.connectors.transformers.compaction import compacted, heads_of, identity_of, prefill
from kvtier.errors import CapacityError
from tests.compact_models import context, tiny

T = 300
NEW = context(7, seed=1)
RECIPE = Recipe("am", 0.75, "omp", 3, "repeat")


def block(folder: Path, quant: str = "none", host: str = "8MiB") -> Config:
    return parse_config(
        {
            "kv_cache_compression_config": [{"algorithm": "quantization_for_cold_page", "quant": quant}],
            "tiers": [
                {"type": "host", "capacity": host},
                {"type": "nvme", "path": str(folder / "pages"), "capacity": "64MiB"},
            ],
            "promote_deadline": "30s",
        }
    )


def fitted(model: Any, ids: list[int], recipe: Recipe = RECIPE) -> CompactPrefix:
    """Sets of their own per head, biases and fitted values, all random."""
    cache = prefill(model, ids)
    generator = torch.Generator().manual_seed(recipe.seed)
    query_heads, layers = model.config.num_attention_heads, []
    for layer in cache.layers:
        heads = layer.keys.shape[1]
        kept = tuple(torch.randperm(len(ids), generator=generator)[: 60 + 9 * h].sort().values for h in range(heads))
        bias = tuple(torch.randn(len(kept[h * heads // query_heads]), generator=generator) for h in range(query_heads))
        dense = getattr(model.config, "kv_lora_rank", None) is None
        dim = (layer.values if dense else layer.keys).shape[-1]
        values = tuple(torch.randn(len(k), dim, generator=generator) for k in kept)
        layers.append(LayerSelection(kept, bias, values))
    return compacted(identity_of(model, "tiny"), ids, cache, Compaction(recipe, len(ids), tuple(layers)))


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "glm_moe_dsa"])
def test_whole_prefixes_come_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    model, ids = tiny(name), context(T)
    prefix = fitted(model, ids)
    assert len(prefix.to_bytes()) > 2 * CHUNK_BYTES
    with CompactStore.open(block(tmp_path)) as store:
        assert store.get(identity_of(model, "tiny"), ids, RECIPE) is None
        store.put(prefix)
        found = store.get(identity_of(model, "tiny"), ids, RECIPE)
        assert found is not None
        assert found.to_bytes() == prefix.to_bytes()
        snapshot = store.store.ledger.snapshot()
        assert snapshot.lookups == sum(snapshot.hits.values()) + sum(snapshot.misses.values())
        assert store.store.open_requests() == []


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "glm_moe_dsa"])
def test_coded_prefixes_keep_positions_and_biases(name: str, tmp_path: Path) -> None:
    model, ids = tiny(name), context(T)
    prefix = fitted(model, ids)
    with CompactStore.open(block(tmp_path, quant="nvfp4"), coded=True) as store:
        store.put(prefix)
        found = store.get(identity_of(model, "tiny"), ids, RECIPE)
        cold = store.store.ledger.snapshot().cold_bytes["offload"]
    assert found is not None
    assert found.manifest == prefix.manifest
    for mine, theirs in zip(found.layers, prefix.layers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.kept, theirs.kept, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(mine.bias or (), theirs.bias or (), strict=True))
        for role, heads in theirs.rows.items():
            for a, b in zip(mine.rows[role], heads, strict=True):
                exact = torch.equal(a, b)
                assert exact == (role == "index_keys")
                assert (a - b).norm() / b.norm() < 0.2
    assert cold < prefix.manifest.compact_bytes * 0.75
    with CompactServing(model, found, model_name="tiny") as serving:
        assert bool(torch.isfinite(serving.forward(NEW).logits).all())


def test_the_key_carries_everything_that_tells_prefixes_apart(tmp_path: Path) -> None:
    model, ids = tiny("llama"), context(T)
    identity = identity_of(model, "tiny")
    with CompactStore.open(block(tmp_path)) as store:
        store.put(fitted(model, ids))
        for other in (
            replace(RECIPE, method="kvzip"),
            replace(RECIPE, ratio=0.8),
            replace(RECIPE, selector="hak"),
            replace(RECIPE, seed=4),
            replace(RECIPE, queries="context"),
            replace(RECIPE, options={"ridge": "1"}),
        ):
            assert store.get(identity, ids, other) is None, other
        assert store.get(identity_of(tiny("llama", seed=1), "tiny"), ids, RECIPE) is None
        assert store.get(replace(identity, name="other"), ids, RECIPE) is None
        assert store.get(identity, [*ids[:-1], ids[-1] ^ 1], RECIPE) is None
        assert store.get(identity, ids[:-1], RECIPE) is None
        assert store.get(identity, ids, RECIPE) is not None


def test_plain_pages_and_compacted_prefixes_never_meet(tmp_path: Path) -> None:
    """In one store, both ways round: each is found as what it is, and misses as the other."""
    model, ids = tiny("llama"), context(T)
    config = block(tmp_path)
    with PrefixCache.open(model, config, model_name="tiny", page_tokens=16) as prefixes:
        compact = CompactStore(prefixes.store, config)
        compact.put(fitted(model, ids))
        assert prefixes.restore("plain", ids).tokens == 0
        cache = prefill(model, ids)
        assert prefixes.offload(ids, cache).result(30).ok
        assert prefixes.restore("plain again", ids).tokens == T // 16 * 16
        other = replace(RECIPE, ratio=0.0)
        assert compact.get(identity_of(model, "tiny"), ids, other) is None
        assert compact.get(identity_of(model, "tiny"), ids, RECIPE) is not None


def test_a_damaged_or_partial_prefix_is_a_miss(tmp_path: Path) -> None:
    model, ids = tiny("llama"), context(T)
    identity = identity_of(model, "tiny")
    with CompactStore.open(block(tmp_path, host="8MiB")) as store:
        store.put(fitted(model, ids))
        assert store.store.flush(120)
        host = store.store.host
        keys = [key for key, _ in host.scan()]
        # One of its pages is deleted everywhere: the rest must not be taken for it.
        store.store.delete(keys[-1:])
        assert store.store.drain(30)
        assert store.get(identity, ids, RECIPE) is None
        store.put(fitted(model, ids))
        assert store.get(identity, ids, RECIPE) is not None
        host.arena[:] ^= 0x40
        assert store.get(identity, ids, RECIPE) is None


def another(model: Any, ids: list[int], seed: int) -> CompactPrefix:
    """Other sets, biases and values under the very same name, as another machine's rounding may choose them."""
    prefix = fitted(model, ids, replace(RECIPE, seed=seed))
    return CompactPrefix(replace(prefix.manifest, recipe=RECIPE), prefix.layers)


def parts(store: CompactStore, prefix: CompactPrefix, part: str, pages: range) -> list[bytes]:
    """Keys of its pages of what is stored as it is."""
    name = _Name.of(prefix.manifest)
    mover = store._mover(name, _CHUNKS, codec_named("raw"))
    try:
        return mover.namespace.page_keys(name.hashes(part, pages))
    finally:
        mover.close()


@pytest.mark.parametrize("quant", ["none", "nvfp4"])
def test_two_prefixes_of_one_name_are_never_mixed(quant: str, tmp_path: Path) -> None:
    """Some pages of one went, and another one was stored in its place: none of its rows may meet the other's sets."""
    model, ids = tiny("llama"), context(T)
    identity, one, two = identity_of(model, "tiny"), another(model, ids, 1), another(model, ids, 2)
    with CompactStore.open(block(tmp_path, quant), coded=quant != "none") as store:
        store.put(one)
        last = parts(store, one, "chunk", range(2))[-1:] if quant == "none" else parts(store, one, "chunk", range(1))
        assert all(store.store.host.contains_many(last))
        store.store.delete(last)
        assert store.store.drain(30)
        store.put(two)
        found = store.get(identity, ids, RECIPE)
        if found is None:  # it was put together of both, and is gone: the next one is whole
            assert quant == "none"
            assert store.store.drain(30)
            store.put(two)
            found = store.get(identity, ids, RECIPE)
        assert found is not None
        for mine, theirs in zip(found.layers, two.layers, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine.kept, theirs.kept, strict=True))
            for a, b in zip(mine.rows["keys"], theirs.rows["keys"], strict=True):
                assert (a - b).norm() / b.norm() < 0.2


def test_what_finds_no_room_is_told(tmp_path: Path) -> None:
    model, ids = tiny("llama"), context(T)
    config = parse_config({"tiers": [{"type": "host", "capacity": "48KiB"}], "offload_wait": "1s"})
    with CompactStore.open(config) as store, pytest.raises(CapacityError, match="host tier"):
        store.put(fitted(model, ids))


NEW_PROCESS = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from tests.compact_models import context, tiny
from tests.integration.test_compact_store import NEW, RECIPE, T, block
from kvtier.compression.compaction.storage import CompactStore
from kvtier.connectors.transformers.compact_serving import CompactServing
from kvtier.connectors.transformers.compaction import identity_of
model, ids = tiny("llama"), context(T)
with CompactStore.open(block(Path(sys.argv[2]), quant=sys.argv[3]), coded=sys.argv[3] != "none") as store:
    prefix = store.get(identity_of(model, "tiny"), ids, RECIPE)
    hits = {tier: n for tier, n in store.store.ledger.snapshot().hits.items() if n}
with CompactServing(model, prefix, model_name="tiny") as serving:
    tokens = serving.generate([NEW], max_new_tokens=16, do_sample=False)[0].tolist()
    logits = serving.forward(NEW).logits[0, -1].double().tolist()
print(json.dumps({"tokens": tokens, "logits": logits, "hits": hits}))
"""


@pytest.mark.parametrize("quant", ["none", "nvfp4"])
def test_stored_evicted_to_nvme_and_continued_in_a_new_process(quant: str, tmp_path: Path) -> None:
    """Compacted, stored, pushed out of host memory, the process ended, read from NVMe by another: the same tokens."""
    model, ids = tiny("llama"), context(T)
    prefix: CompactPrefix | None = fitted(model, ids)
    assert prefix is not None
    with CompactStore.open(block(tmp_path, quant, host="1MiB"), coded=quant != "none") as store:
        store.put(prefix)
        if quant != "none":  # what its own rows are after the codec, once, is what must come back
            prefix = store.get(identity_of(model, "tiny"), ids, RECIPE)
            assert prefix is not None
        assert store.store.flush(120)
        before = {key for key, _ in store.store.host.scan()}
        for seed in range(100, 150):  # others take its room
            store.put(fitted(model, ids, replace(RECIPE, seed=seed)))
            assert store.store.flush(120)
            if not before & {key for key, _ in store.store.host.scan()}:
                break
        else:
            pytest.fail("it is still in host memory")
    with CompactServing(model, prefix, model_name="tiny") as serving:
        tokens = serving.generate([NEW], max_new_tokens=16, do_sample=False)[0].tolist()
        logits = serving.forward(NEW).logits[0, -1].double().tolist()
    done = subprocess.run(
        [sys.executable, "-c", NEW_PROCESS, str(Path(__file__).parents[2]), str(tmp_path), quant],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["tokens"] == tokens
    assert told["logits"] == logits
    assert set(told["hits"]) == {"nvme"}


def test_random_rows_of_a_longer_context_are_stored_and_served(tmp_path: Path) -> None:
    model, ids = tiny("llama"), context(T)
    cache = prefill(model, ids)
    recipe = Recipe("random", 0.9, seed=2)
    prefix = compacted(identity_of(model, "tiny"), ids, cache, choose(recipe, T, heads_of(cache)))
    with CompactStore.open(block(tmp_path)) as store:
        store.put(prefix)
        found = store.get(identity_of(model, "tiny"), ids, recipe)
    assert found is not None
    assert found.manifest.tokens_removed == pytest.approx(0.9)
    # Keys and values stay whole: what is saved in bytes is what is saved in rows, less four bytes of position each.
    assert found.manifest.bytes_removed == pytest.approx(1 - 0.1 * (128 + 4) / 128)
