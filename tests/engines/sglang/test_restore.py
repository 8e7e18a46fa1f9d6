"""Pages through the engine's real radix cache and pools: what is restored is what was computed, bit for bit."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("engine_hooks")


@pytest.mark.parametrize("hnd", [False, True], ids=["nhd", "hnd"])
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_raw_pages_come_back_bit_for_bit(start: Any, tiny: Path, hnd: bool, page: int, dtype: str) -> None:
    import torch

    from .harness import config, same

    engine = start(tiny, config(), page=page, hnd=hnd, dtype=getattr(torch, dtype), pages=512 if page == 1 else 32)
    tokens = list(range(5, 5 + 4 * 64))
    computed = engine.compute(tokens)
    engine.flush()

    restored = engine.admit(engine.request("again", tokens))
    assert restored.loaded == len(tokens)
    assert same(restored.forward(), computed, len(tokens))
    assert restored.finish()
    pages = len(tokens) // page
    assert engine.counts.hits == {"host": pages} and engine.counts.lookups == pages
    engine.assert_nothing_held()


def test_nvfp4_pages_come_back_close(start: Any, tiny: Path) -> None:
    import torch

    from .harness import config

    engine = start(tiny, config(raw=False))
    tokens = list(range(5, 133))
    computed = engine.compute(tokens)
    engine.flush()
    restored = engine.admit(engine.request("again", tokens))
    got = restored.forward()
    assert restored.finish()
    for (k, v), (want_k, want_v) in zip(got, computed, strict=True):
        for a, b in ((k, want_k), (v, want_v)):
            error = (a.float() - b.float()).norm() / b.float().norm()
            assert 0.001 < error < 0.15
            assert torch.isfinite(a.float()).all()
    counts = engine.counts
    assert 3.0 < counts.hot_bytes["onboard"] / counts.cold_bytes["onboard"] < 3.6


def test_only_the_part_that_is_not_on_the_device_is_loaded(start: Any, tiny: Path) -> None:
    from .harness import config, same

    engine = start(tiny, config())
    tokens = list(range(5, 101))
    computed = engine.compute(tokens)
    engine.flush()
    head = engine.compute(tokens[:32], seed=3)  # recomputed by somebody else meanwhile

    restored = engine.admit(engine.request("again", tokens))
    assert (restored.device, restored.loaded) == (32, 64)
    assert same(restored.forward(), [(k[32:], v[32:]) for k, v in computed], 64)
    assert restored.finish()
    assert head  # the pages on the device are the engine's own and were not touched


def test_several_requests_of_one_batch_load_together(start: Any, tiny: Path) -> None:
    from .harness import config, same

    engine = start(tiny, config())
    prompts = {f"r{i}": [i * 100 + j for j in range(48)] for i in range(1, 4)}
    computed = {rid: engine.compute(tokens, seed=n) for n, (rid, tokens) in enumerate(prompts.items())}
    engine.flush()
    from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

    requests = {rid: engine.request(rid, tokens) for rid, tokens in prompts.items()}
    for req in requests.values():
        loaded, req.last_node = engine.cache.init_load_back(
            InitLoadBackParams(best_match_node=req.best_match_node, host_hit_length=req.host_hit_length, req=req)
        )
        assert loaded == 48
    slots = {rid: engine.cache.linker.private_load_indices[rid] for rid in requests}
    counter = engine.cache.linker.layer_done_counter
    counter.set_consumer(engine.cache.ready_to_load_host_cache())
    for rid in requests:
        assert same(engine.read(slots[rid], waiting=True), computed[rid], 48)
    assert engine.cache.finish_external_linker_loads(list(requests.values())) == []
    engine.assert_nothing_held()


def test_another_salt_extra_key_or_adapter_finds_nothing(start: Any, tiny: Path) -> None:
    from .harness import config

    engine = start(tiny, config())
    tokens = list(range(5, 69))
    engine.compute(tokens, salt="a", extra_key="x")
    engine.flush()
    for rid, salt, extra in (("1", "b", "x"), ("2", None, "x"), ("3", "a", "y"), ("4", "a", None)):
        restored = engine.admit(engine.request(rid, tokens, salt=salt, extra_key=extra))
        assert restored.loaded == 0
    assert engine.admit(engine.request("5", tokens, salt="a", extra_key="x")).loaded == 64


def test_requests_of_another_adapter_find_nothing(start: Any, tiny: Path) -> None:
    from .harness import config

    engine = start(tiny, config())
    tokens = list(range(5, 69))
    adapter, another = "a" * 32, "b" * 32
    engine.compute(tokens, extra_key=adapter)  # what SGLang keys the pages of a request with this adapter by
    engine.flush()
    assert engine.admit(engine.request("1", tokens, lora=another)).loaded == 0
    assert engine.admit(engine.request("2", tokens)).loaded == 0
    found = engine.admit(engine.request("3", tokens, lora=adapter))
    found.forward()
    assert found.loaded == 64 and found.finish()


def test_an_adapter_is_known_by_its_content(tiny: Path, other: Path, tmp_path: Path) -> None:
    import shutil
    from types import SimpleNamespace

    from kvtier.connectors.sglang.identity import lora_fingerprint

    def fingerprint(content: Path) -> str:
        folder = tmp_path / "adapter"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(content, folder)
        return lora_fingerprint([SimpleNamespace(lora_id="1" * 32, lora_name="x", lora_path=str(folder))])

    assert fingerprint(tiny) == fingerprint(tiny) != fingerprint(other)
    assert lora_fingerprint([]) != fingerprint(tiny)


def test_an_engine_with_adapters_restores_unless_one_of_them_changed(
    start: Any, tiny: Path, other: Path, tmp_path: Path
) -> None:
    import json
    import shutil

    from .harness import config

    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}))
    tokens = list(range(5, 133))

    def run(content: Path) -> int:
        shutil.copy(content / "model.safetensors", adapter / "adapter_model.safetensors")
        engine = start(
            tiny,
            config(tmp_path / "kv"),
            enable_lora=True,
            lora_paths=[f"x={adapter}"],
            max_lora_rank=8,
            lora_target_modules=["q_proj"],
        )
        restored = engine.admit(engine.request("r", tokens))
        restored.forward()
        assert restored.finish()
        if not restored.loaded:
            engine.compute(tokens)
        engine.close()
        loaded: int = restored.loaded
        return loaded

    assert [run(tiny), run(tiny), run(other)] == [0, len(tokens), 0]


@pytest.mark.parametrize("change", ["model", "salt", "dtype", "page", "codec"])
def test_another_engine_finds_nothing(start: Any, tiny: Path, other: Path, tmp_path: Path, change: str) -> None:
    import torch

    from .harness import config

    first = start(tiny, config(tmp_path))
    tokens = list(range(5, 133))
    first.compute(tokens)
    first.close()

    more: dict[str, Any] = {"page": 32} if change == "page" else {"dtype": torch.float16} if change == "dtype" else {}
    block = config(tmp_path, raw=change != "codec", **({"salt": "tenant"} if change == "salt" else {}))
    second = start(other if change == "model" else tiny, block, **more)
    assert second.linker._store.lower[0].usage().resident_pages == 8
    restored = second.admit(second.request("again", tokens))
    assert restored.loaded == 0
    assert sum(second.counts.misses.values()) == second.counts.lookups > 0


def test_a_new_engine_restores_from_the_directory_of_the_old_one(start: Any, tiny: Path, tmp_path: Path) -> None:
    from .harness import config, same

    first = start(tiny, config(tmp_path))
    tokens = list(range(5, 133))
    computed = first.compute(tokens)
    first.close()

    second = start(tiny, config(tmp_path))
    req = second.request("again", tokens)
    restored = second.admit(req)
    assert restored.loaded == len(tokens)
    assert same(restored.forward(), computed, len(tokens))
    assert restored.finish()
    assert second.counts.hits == {"host": 0, "nvme": 8}
    second.assert_nothing_held()


def test_a_copied_checkpoint_is_the_same_model(start: Any, tiny: Path, tmp_path: Path) -> None:
    import shutil

    from .harness import config

    copy = Path(shutil.copytree(tiny, tmp_path / "elsewhere"))
    first = start(tiny, config(tmp_path / "kv"))
    tokens = list(range(5, 133))
    first.compute(tokens)
    first.close()
    second = start(copy, config(tmp_path / "kv"))
    assert second.admit(second.request("again", tokens)).loaded == len(tokens)


def test_dummy_weights_are_never_found_again(start: Any, tiny: Path, tmp_path: Path) -> None:
    from .harness import config

    tokens = list(range(5, 133))
    first = start(tiny, config(tmp_path), load_format="dummy")
    first.compute(tokens)
    first.close()
    second = start(tiny, config(tmp_path), load_format="dummy")
    assert second.admit(second.request("again", tokens)).loaded == 0


def test_options_that_change_the_weights_are_part_of_the_model(start: Any, tiny: Path, tmp_path: Path) -> None:
    from .harness import config

    first = start(tiny, config(tmp_path))
    tokens = list(range(5, 133))
    first.compute(tokens)
    first.close()
    second = start(tiny, config(tmp_path), custom_weight_loader=["some.module.load"])
    assert second.admit(second.request("again", tokens)).loaded == 0


def test_every_update_of_the_weights_is_noticed() -> None:
    """A session may write weights without any call between its begin and its end. A method that is in neither set is
    new: find out what it does to the weights."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Updater

    from kvtier.connectors.sglang import hooks

    hooked = {hook.target.rpartition(".")[2] for hook in hooks.scheduler_hooks() if Updater.__name__ in hook.target}
    harmless = {
        "destroy_weights_update_group",
        "flush_cache_after_weight_update",
        "get_weights_by_name",
        "init_weights_update_group",
        "record_weight_version_after_update",
        "save_remote_model",
        "save_sharded_model",
    }
    methods = {n for n, value in vars(Updater).items() if inspect.isfunction(value) and not n.startswith("_")}
    assert hooked == methods - harmless


def test_an_update_of_the_weights_in_place_hides_what_was_stored(start: Any, tiny: Path) -> None:
    from .harness import config

    engine = start(tiny, config())
    tokens = list(range(5, 69))
    engine.compute(tokens)
    engine.flush()
    waiting = engine.request("waiting", tokens)  # found its pages before the update
    engine.linker.weights_changed()
    assert engine.admit(waiting).loaded == 0
    engine.flush()  # SGLang does at the end of the update
    computed = engine.compute(list(range(200, 264)))
    engine.flush()
    assert computed and engine.admit(engine.request("after", list(range(200, 264)))).loaded == 64
    engine.linker.weights_changed()
    assert engine.admit(engine.request("later", list(range(200, 264)))).loaded == 0
