"""PrefixCache on tiny random models: the right bytes come back, everything is counted, and nothing else can hit."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kvtier.config import Config, parse_config
from kvtier.connectors.transformers import PrefixCache, Restored, cache_argument
from kvtier.errors import ConfigError, SpecError, TierPathError
from kvtier.testing.redis_servers import wait_for
from kvtier.tickets import OffloadResult

PAGE = 16
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 1024,
}


def llama(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, **changes})).to(dtype).eval()


def block(tmp_path: Path, quant: str = "none", host: str = "4MiB", **changes: Any) -> Config:
    return parse_config(
        {
            "kv_cache_compression_config": [{"algorithm": "quantization_for_cold_page", "quant": quant}],
            "tiers": [
                {"type": "host", "capacity": host},
                {"type": "nvme", "path": str(tmp_path / "pages"), "capacity": "64MiB"},
            ],
            "promote_deadline": "120s",
            **changes,
        }
    )


def open_cache(model: Any, config: Config, name: str = "tiny") -> PrefixCache:
    return PrefixCache.open(model, config, model_name=name, page_tokens=PAGE)


def tokens(n: int, seed: int = 0) -> list[int]:
    rng = np.random.default_rng(seed)
    return [int(t) for t in rng.integers(0, SMALL["vocab_size"], n)]


def compute(model: Any, ids: list[int], cache: Any = None) -> tuple[torch.Tensor, Any]:
    """Logits of the last token ``[vocab]``, and the cache."""
    cache = cache if cache is not None else transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        out = model(torch.tensor([ids]), use_cache=True, **{cache_argument(model): cache})
    return out.logits[0, -1], cache


def store(prefixes: PrefixCache, model: Any, ids: list[int]) -> tuple[Any, OffloadResult]:
    _, cache = compute(model, ids)
    result = prefixes.offload(ids, cache).result(120.0)
    assert prefixes.store.flush(120.0)
    return cache, result


def layers(cache: Any) -> list[torch.Tensor]:
    return [t for layer in cache.layers for t in (layer.keys, layer.values)]


def balanced(prefixes: PrefixCache) -> dict[str, int]:
    """Hits and misses that are not 0; the ledger must add up, and nothing may be left pinned."""
    snapshot = prefixes.ledger.snapshot()
    assert snapshot.lookups == sum(snapshot.hits.values()) + sum(snapshot.misses.values())
    assert prefixes.store.open_requests() == []
    return {name: n for name, n in {**snapshot.hits, **snapshot.misses}.items() if n}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_raw_pages_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    model, ids = llama(dtype=dtype), tokens(5 * PAGE + 3)
    with open_cache(model, block(tmp_path)) as prefixes:
        cache, result = store(prefixes, model, ids)
        assert result.ok
        assert sum(result.outcomes.values()) == 5
        restored = prefixes.restore("r", ids)
        assert (restored.tokens, restored.pages) == (5 * PAGE, {"host": 5})
        for got, full in zip(layers(restored.cache), layers(cache), strict=True):
            assert got.dtype == dtype
            assert torch.equal(got, full[:, :, : 5 * PAGE])
        assert balanced(prefixes) == {"host": 5}


def test_the_rest_computed_on_a_restored_prefix_says_the_same(tmp_path: Path) -> None:
    model, ids = llama(), tokens(6 * PAGE + 7)
    expected, _ = compute(model, ids)
    with open_cache(model, block(tmp_path)) as prefixes:
        store(prefixes, model, ids[: 4 * PAGE])
        restored = prefixes.restore("r", ids)
        assert restored.tokens == 4 * PAGE
        got, cache = compute(model, ids[restored.tokens :], restored.cache)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        assert cache.get_seq_length() == len(ids)
        # What was computed on top can be stored and restored in turn, without storing the first pages again.
        result = prefixes.offload(ids, cache).result(120.0)
        assert {o.value: n for o, n in result.outcomes.items()} == {"exists": 4, "stored": 2}
        assert prefixes.restore("r2", ids).tokens == 6 * PAGE
        assert balanced(prefixes) == {"host": 10, "absent": 2}


def test_nvfp4_pages_are_the_rounded_bytes(tmp_path: Path) -> None:
    model, ids = llama(), tokens(3 * PAGE)
    with open_cache(model, block(tmp_path, "nvfp4")) as prefixes:
        cache, _ = store(prefixes, model, ids)
        restored = prefixes.restore("r", [*ids, 1])
        assert restored.tokens == 3 * PAGE
        for got, full in zip(layers(restored.cache), layers(cache), strict=True):
            error = torch.linalg.vector_norm(got - full) / torch.linalg.vector_norm(full)
            assert 0.03 < error < 0.13
        snapshot = prefixes.ledger.snapshot()
        assert snapshot.hot_bytes_16bit["offload"] == 3 * PAGE * 3 * 2 * 2 * 16 * 2
        assert snapshot.hot_bytes_16bit["offload"] / snapshot.cold_bytes["offload"] == pytest.approx(3.5, abs=0.06)


@pytest.mark.parametrize(
    ("length", "restored_pages"), [(0, 0), (1, 0), (PAGE, 0), (PAGE + 1, 1), (2 * PAGE, 1), (40, 2)]
)
def test_one_token_is_always_left_to_compute(tmp_path: Path, length: int, restored_pages: int) -> None:
    model, ids = llama(), tokens(4 * PAGE)
    with open_cache(model, block(tmp_path)) as prefixes:
        store(prefixes, model, ids)
        restored = prefixes.restore("r", ids[:length])
        assert restored.tokens == restored_pages * PAGE
        assert restored.cache.get_seq_length() == restored.tokens


def test_a_shared_prefix_is_found_and_the_rest_is_absent(tmp_path: Path) -> None:
    model, ids = llama(), tokens(6 * PAGE)
    other = ids[: 3 * PAGE + 5] + tokens(40, seed=9)
    with open_cache(model, block(tmp_path)) as prefixes:
        store(prefixes, model, ids)
        assert prefixes.restore("r", other).tokens == 3 * PAGE
        assert balanced(prefixes) == {"host": 3, "absent": (len(other) - 1) // PAGE - 3}


@pytest.mark.parametrize("quant", ["none", "nvfp4"])
def test_pages_spill_to_disk_and_come_back_in_another_life(tmp_path: Path, quant: str) -> None:
    model, ids = llama(), tokens(9 * PAGE + 1)
    with open_cache(model, block(tmp_path, quant)) as prefixes:
        store(prefixes, model, ids)
        before = layers(prefixes.restore("r", ids).cache)
    with open_cache(model, block(tmp_path, quant)) as prefixes:
        restored = prefixes.restore("r", ids)
        assert restored.pages == {"nvme": 9}
        for got, expected in zip(layers(restored.cache), before, strict=True):
            assert torch.equal(got, expected)
        assert prefixes.restore("again", ids).pages == {"host": 9}
        assert balanced(prefixes) == {"nvme": 9, "host": 9}


def test_a_host_tier_too_small_for_all_sequences(tmp_path: Path) -> None:
    model = llama()
    sequences = [tokens(8 * PAGE + 1, seed=s) for s in range(4)]
    page_bytes = PAGE * 3 * 2 * 2 * 16 * 4
    with open_cache(model, block(tmp_path, host=f"{10 * page_bytes}B")) as prefixes:
        caches = [store(prefixes, model, ids)[0] for ids in sequences]
        for number, (ids, cache) in enumerate(zip(sequences, caches, strict=True)):
            restored = prefixes.restore(f"r{number}", ids)
            assert restored.tokens == 8 * PAGE
            for got, full in zip(layers(restored.cache), layers(cache), strict=True):
                assert torch.equal(got, full[:, :, : 8 * PAGE])
        counts = balanced(prefixes)
        assert sum(counts.values()) == 32
        assert counts["nvme"] >= 8


def test_a_flipped_bit_is_never_used(tmp_path: Path) -> None:
    model, ids = llama(), tokens(5 * PAGE + 1)
    config = parse_config(
        {
            "kv_cache_compression_config": [{"algorithm": "quantization_for_cold_page", "quant": "none"}],
            "tiers": [{"type": "host", "capacity": "4MiB"}],
        }
    )
    with open_cache(model, config) as prefixes:
        cache, _ = store(prefixes, model, ids)
        key = prefixes.mover.namespace.page_keys(prefixes._hashes(ids, len(ids)))[2]
        pins = prefixes.store.host.pin_many([key])
        ((slot, _meta),) = prefixes.store.host.pinned_many(pins)
        prefixes.store.host.arena[slot.offset + 1000] ^= 4
        prefixes.store.host.unpin_many(pins)
        restored = prefixes.restore("r", ids)
        assert restored.tokens == 2 * PAGE
        for got, full in zip(layers(restored.cache), layers(cache), strict=True):
            assert torch.equal(got, full[:, :, : 2 * PAGE])
        assert balanced(prefixes) == {"host": 2, "corrupt": 1, "after_gap": 2}
        assert prefixes.offload(ids, cache).result(120.0).ok
        assert prefixes.restore("next", ids).tokens == 5 * PAGE


def test_closing_under_a_restore_blames_no_page(tmp_path: Path) -> None:
    model, ids = llama(), tokens(5 * PAGE + 1)
    config = parse_config({"tiers": [{"type": "host", "capacity": "4MiB"}]})
    with open_cache(model, config) as prefixes:
        store(prefixes, model, ids)
        prefixes.mover.close()
        assert prefixes.restore("r", ids).tokens == 0
        assert balanced(prefixes) == {"deadline": 5}
        assert prefixes.store.host.usage().quarantined_pages == 0


def test_a_disk_that_is_too_slow_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = llama(), tokens(4 * PAGE + 1)
    with open_cache(model, block(tmp_path)) as prefixes:
        store(prefixes, model, ids)
    with open_cache(model, block(tmp_path, promote_deadline="100ms")) as prefixes:
        (disk,) = prefixes.store.lower
        answer, go = disk.get_many_into, threading.Event()

        def slow(*args: Any) -> Any:
            go.wait(600)
            return answer(*args)

        monkeypatch.setattr(disk, "get_many_into", slow)
        start = time.monotonic()
        restored = prefixes.restore("r", ids)
        assert time.monotonic() - start < 60
        assert (restored.tokens, restored.pages) == (0, {})
        go.set()
        assert balanced(prefixes) == {"deadline": 4}
        monkeypatch.undo()
        wait_for(lambda: prefixes.restore("again", ids).tokens == 4 * PAGE, "the pages never arrive", 60.0)
        counts = balanced(prefixes)
        assert sum(counts.values()) % 4 == 0


def test_pages_that_arrive_after_the_wait_are_no_hits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = llama(), tokens(4 * PAGE + 1)
    with open_cache(model, block(tmp_path)) as prefixes:
        store(prefixes, model, ids)
        wait = prefixes.store.wait
        monkeypatch.setattr(prefixes.store, "wait", lambda lookup: min(1, wait(lookup)))
        assert prefixes.restore("r", ids).tokens == PAGE
        assert balanced(prefixes) == {"host": 1, "deadline": 3}


def test_a_failing_decoder_means_recompute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = llama(), tokens(3 * PAGE + 1)
    with open_cache(model, block(tmp_path)) as prefixes:
        store(prefixes, model, ids)

        def broken(*_: Any) -> None:
            raise RuntimeError("no")

        monkeypatch.setattr(prefixes.mover._reader, "decode", broken)
        restored = prefixes.restore("r", ids)
        assert (restored.tokens, restored.pages) == (0, {})
        assert restored.cache.get_seq_length() == 0
        counts = balanced(prefixes)
        assert "host" not in counts
        assert sum(counts.values()) == 3


@pytest.mark.parametrize("change", ["weights", "name", "salt", "codec", "dtype"])
def test_another_model_never_hits(tmp_path: Path, change: str) -> None:
    ids = tokens(3 * PAGE + 1)
    with open_cache(llama(), block(tmp_path)) as prefixes:
        store(prefixes, llama(), ids)
    model = llama(seed=1 if change == "weights" else 0, dtype=torch.float16 if change == "dtype" else torch.float32)
    config = block(tmp_path, quant="nvfp4" if change == "codec" else "none", salt="b" if change == "salt" else "")
    with open_cache(model, config, name="other" if change == "name" else "tiny") as prefixes:
        restored = prefixes.restore("r", ids)
        assert (restored.tokens, restored.pages) == (0, {})
        assert balanced(prefixes) == {"namespace": 3}, "the stored origins show it"
    with open_cache(llama(), block(tmp_path)) as prefixes:
        assert prefixes.restore("r", ids).tokens == 3 * PAGE, "the other model's run must not cost stored pages"


def test_a_mover_for_another_model_is_refused(tmp_path: Path) -> None:
    with open_cache(llama(), block(tmp_path)) as prefixes:
        with pytest.raises(SpecError, match=r"another model \(3 layers, 2 heads x 16, fp32; this model has 2 layers"):
            PrefixCache(llama(num_hidden_layers=2), prefixes.mover)
        with pytest.raises(SpecError, match="this model has 3 layers, 2 heads x 16, bf16"):
            PrefixCache(llama(dtype=torch.bfloat16), prefixes.mover)


def test_caches_that_do_not_fit_are_named(tmp_path: Path) -> None:
    model, ids = llama(), tokens(2 * PAGE)
    with open_cache(model, block(tmp_path)) as prefixes:
        _, cache = compute(model, ids)
        with pytest.raises(SpecError, match="holds 32 tokens, 31 token ids"):
            prefixes.offload(ids[:-1], cache)
        _, fewer = compute(llama(num_hidden_layers=2), ids)
        with pytest.raises(SpecError, match="2 layers, the pages 3"):
            prefixes.offload(ids, fewer)
        _, half = compute(llama(dtype=torch.float16), ids)
        with pytest.raises(SpecError, match="float16"):
            prefixes.offload(ids, half)
        _, wide = compute(llama(head_dim=32), ids)
        with pytest.raises(SpecError, match="heads x 16"):
            prefixes.offload(ids, wide)
        cache.batch_repeat_interleave(2)
        with pytest.raises(SpecError, match="batch size 2"):
            prefixes.offload(ids, cache)


def test_a_path_as_name_is_refused_and_nothing_stays_open(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="local path"):
        open_cache(llama(), block(tmp_path), name=str(tmp_path))
    with open_cache(llama(), block(tmp_path)):
        pass


def test_requests_under_one_id_never_get_each_others_pages(tmp_path: Path) -> None:
    model, prompts = llama(), [tokens(4 * PAGE + 1, seed) for seed in range(3)]
    with open_cache(model, block(tmp_path, host="128KiB")) as prefixes:
        full = [layers(store(prefixes, model, ids)[0]) for ids in prompts]
        wrong: list[str] = []

        def ask(which: int) -> None:
            for _ in range(60):
                try:
                    restored = prefixes.restore("one id", prompts[which])
                except Exception as error:  # noqa: BLE001 - reported below, from the test's own thread
                    wrong.append(repr(error))
                    return
                for got, expected in zip(layers(restored.cache), full[which], strict=True):
                    if restored.tokens and not torch.equal(got, expected[:, :, : restored.tokens]):
                        wrong.append(f"bytes of another prompt in the cache of prompt {which}")

        threads = [threading.Thread(target=ask, args=(which,)) for which in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        counts = balanced(prefixes)
        assert sum(counts.values()) == 3 * 60 * 4 and "corrupt" not in counts


def test_a_failed_opening_leaves_no_thread(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match="taken by another process"),
    ):
        open_cache(llama(), block(tmp_path, http={"port": taken.getsockname()[1]}))
    wait_for(lambda: not [t for t in threading.enumerate() if t.name.startswith("kvtier")], "threads stay")


def test_a_directory_that_is_open_elsewhere_is_named(tmp_path: Path) -> None:
    model, ids = llama(), tokens(3 * PAGE + 1)
    with open_cache(model, block(tmp_path)) as prefixes:
        store(prefixes, model, ids)
        with pytest.raises(TierPathError, match=str(tmp_path / "pages")):
            open_cache(model, block(tmp_path))
        assert prefixes.restore("r", ids).tokens == 3 * PAGE


def test_metrics_and_readiness_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = llama(), tokens(2 * PAGE + 1)
    monkeypatch.setattr("kvtier.server.probe.TIER_DEADLINE_S", 60.0)
    monkeypatch.setattr("kvtier.server.readiness.READY_TIMEOUT_S", 60.0)
    with open_cache(model, block(tmp_path, http={"port": 0})) as prefixes:
        assert prefixes.http is not None
        store(prefixes, model, ids)
        prefixes.restore("r", ids)
        with urllib.request.urlopen(f"{prefixes.http.url}/readyz", timeout=60) as answer:
            assert answer.read() == b"ok\n"
        with urllib.request.urlopen(f"{prefixes.http.url}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        assert 'kvtier_hits_total{tier="host"} 2.0' in text
        assert "kvtier_lookups_total 2.0" in text, "the readiness check is no lookup"


def test_restored_is_a_plain_value() -> None:
    restored = Restored(transformers.DynamicCache(), 0, {})
    with pytest.raises(AttributeError):
        restored.tokens = 3  # type: ignore[misc]


def test_pages_that_are_sooner_computed_than_loaded_are_left_alone(tmp_path: Path) -> None:
    model, ids = llama(), tokens(8 * PAGE + 1)
    for break_even, restored in ((True, 0), (False, 8 * PAGE)):
        with open_cache(model, block(tmp_path / str(break_even), break_even=break_even)) as prefixes:
            computed = prefixes.restore("first", ids)
            assert model(torch.tensor([ids]), **{cache_argument(model): computed.cache}).logits is not None
            assert prefixes.offload(ids, computed.cache).result(120.0).ok
            for n in range(9):
                assert prefixes.restore(f"r{n}", ids).tokens == 8 * PAGE, "nothing is known yet of what prefill costs"
            for _ in range(9):
                prefixes.prefilled(4096, 4096e-9)
            assert prefixes.restore("last", ids).tokens == restored
            misses = prefixes.ledger.snapshot().misses
            assert misses["declined"] == (8 if break_even else 0)


def test_a_protected_prompt_outlives_others(tmp_path: Path) -> None:
    model, prompt = llama(), tokens(4 * PAGE)
    config = block(tmp_path, host="64KiB", tiers=[{"type": "host", "capacity": "1MiB"}], break_even=False)
    with open_cache(model, config) as prefixes:
        for n in range(41):
            ids = prompt if not n else tokens(4 * PAGE, seed=n)
            restored = prefixes.restore(f"r{n}", ids)
            model(torch.tensor([ids[restored.tokens :]]), **{cache_argument(model): restored.cache})
            assert prefixes.offload(ids, restored.cache).result(120.0).ok
            if not n:
                assert prefixes.protect(prompt) == 4
        assert prefixes.restore("again", [*prompt, 1]).tokens == 4 * PAGE
        assert prefixes.ledger.snapshot() is not None and prefixes.store.host.usage().evicted_pages > 0
        prefixes.unprotect(prompt)
