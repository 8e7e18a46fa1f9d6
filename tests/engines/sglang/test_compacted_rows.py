"""Compacted prefixes of MLA and of sparse attention in SGLang's real pools: what a forward finds there is what SGLang's
own functions make of the model's rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.errors import ArtefactError

pytestmark = pytest.mark.usefixtures("engine_hooks")

PAGE, ROWS = 64, 128
GROUPS = ["full", "shared", "full", "full"]  # as the pools of `pool_engines` have them


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from .compact_examples import latent_model

    return latent_model(tmp_path_factory.mktemp("glm"), indexer_types=GROUPS)


def by_group(rows: int = ROWS, **other: int) -> list[Any]:
    """Sets of 4 layers, the first two alike. other: seeds of layers by name, ``layer1`` say."""
    from .compact_examples import drawn

    return [drawn(other.get(f"layer{n}", seed), rows) for n, seed in enumerate((0, 0, 2, 3))]


def form_of(folder: Path, device: str = "cpu") -> Any:
    import transformers

    from kvtier.connectors.sglang.compacted_rows import LatentForm

    return LatentForm.of(transformers.AutoConfig.from_pretrained(folder), device)


def serve(engine: Any, path: Path, folder: Path, form: Any) -> Any:
    """Have an engine that runs serve the prefix in `path`."""
    from kvtier.checkpoint import fingerprint_checkpoint
    from kvtier.connectors.sglang.compacted import Compacted, EngineRank, load

    stored = engine.stored("kv")
    served = load([path], stored, EngineRank(fingerprint_checkpoint(folder), form=form))
    engine.linker.compacted = Compacted(served, stored, positions=4096)
    engine.linker.compacted.put(engine.linker._store, engine.linker._config)
    engine.linker._movers.close()
    engine.linker._open_movers()
    return served[0]


def captured(model: Any, tokens: list[int]) -> list[dict[str, Any]]:
    """By layer, what a model has before it turns it: its key's rotary part, and its index key. And with what it turns
    both, for each token."""
    import torch

    found: list[dict[str, Any]] = [{} for _ in model.model.layers]
    hooks = []
    for kept, layer in zip(found, model.model.layers, strict=True):
        attention = layer.self_attn

        def rotary(
            _: Any, __: Any, out: Any, kept: dict[str, Any] = kept, latent: int = attention.kv_lora_rank
        ) -> None:
            kept["rotary"] = out[0, :, latent:]

        def index(_: Any, __: Any, out: Any, kept: dict[str, Any] = kept) -> None:
            kept["index"] = out[0]

        hooks.append(attention.kv_a_proj_with_mqa.register_forward_hook(rotary))
        if getattr(attention, "indexer", None) is not None:
            hooks.append(attention.indexer.k_norm.register_forward_hook(index))
    with torch.no_grad():
        model(torch.tensor([tokens]))
        cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(len(tokens))[None])
    for hook in hooks:
        hook.remove()
    half = cos.shape[-1] // 2
    return [{**kept, "cos": cos[0, :, :half], "sin": sin[0, :, :half]} for kept in found]


def turned(values: Any, seen: dict[str, Any]) -> Any:
    """`values` ``[tokens, dim]`` as SGLang turns pairs."""
    from sglang.srt.layers.rotary_embedding.utils import apply_rotary_emb

    return apply_rotary_emb(values[:, None], seen["cos"], seen["sin"], False)[:, 0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_layers_of_other_groups_keep_other_rows_in_the_same_slots(
    start_pools: Any, tiny: Path, glm: Path, tmp_path: Path, device: str
) -> None:
    """device: whose form of index keys is written; turned by a Hadamard matrix or not."""
    import torch
    from sglang.srt.layers.attention.dsa.dsa_npu_indexer import _create_hadamard_128_cpu

    from .compact_examples import CONTEXT, compact, model_of
    from .harness import config

    model, path, sets = model_of(glm), tmp_path / "prefix.safetensors", by_group()
    prefix = compact(glm, path, sets, model)
    engine = start_pools(tiny, config(), "dsa", page=PAGE)
    form = form_of(glm, device)
    assert form.pairs and form.index_pairs and form.index_turned == (device == "cpu")
    served = serve(engine, path, glm, form)
    assert served.rows == ROWS and served.tokens == len(CONTEXT)
    restored = engine.admit(engine.request("named", [0] * ROWS, extra_key=served.key))
    assert (restored.device, restored.loaded) == (0, ROWS)
    found = engine.forward(restored)

    seen = captured(model, CONTEXT)
    for n, bits in enumerate(found["kv"]):
        rotary = turned(seen[n]["rotary"], seen[n])[sets[n].kept[0]]
        rows = torch.cat([prefix.layers[n].rows["latent"][0], rotary], dim=1)
        # Of two forwards of the model: on another machine, or with other threads, they differ by some 1e-5.
        torch.testing.assert_close(bits.view(torch.bfloat16), rows.to(torch.bfloat16), rtol=1e-2, atol=1e-4)
    hadamard = _create_hadamard_128_cpu().float() * 128**-0.5
    for n, bits in zip((0, 2, 3), found["index"], strict=True):
        raw, rotary_dim = seen[n]["index"], 2 * seen[n]["cos"].shape[1]
        keys = torch.cat([turned(raw[:, :rotary_dim], seen[n]), raw[:, rotary_dim:]], dim=1)[sets[n].kept[0]]
        keys = keys @ hadamard if form.index_turned else keys
        split = PAGE * 128
        scales = bits[:, split:].contiguous().view(torch.float32).reshape(ROWS, 1)
        read = bits[:, :split].contiguous().view(torch.float8_e4m3fn).float().reshape(ROWS, 128) * scales
        assert float(((read - keys).abs() / scales).max()) <= 16.1  # half a step of e4m3 at its largest
        torch.testing.assert_close(keys.abs().amax(dim=1), scales[:, 0] * 448, rtol=1e-4, atol=1e-6)
    assert engine.finish(restored)
    engine.assert_nothing_held()
    again = engine.admit(engine.request("plain", [0] * ROWS))
    assert again.loaded == 0  # the ids alone name nothing
    assert engine.finish(again)


def test_rows_without_an_indexer_are_restored_by_every_rank(start_pools: Any, tiny: Path, tmp_path: Path) -> None:
    import torch

    from .compact_examples import compact, drawn, latent_model
    from .harness import config

    folder, path = latent_model(tmp_path / "v3"), tmp_path / "prefix.safetensors"
    prefix = compact(folder, path, [drawn(n, ROWS) for n in range(4)])
    engine = start_pools(tiny, config(), "mla", page=16)
    form = form_of(folder)
    assert form.pairs and not form.index_turned
    served = serve(engine, path, folder, form)
    restored = engine.admit(engine.request("named", [0] * ROWS, extra_key=served.key))
    assert restored.loaded == ROWS
    for layer, bits in zip(prefix.layers, engine.forward(restored)["kv"], strict=True):
        found = bits.view(torch.bfloat16)
        assert torch.equal(found[:, :32], layer.rows["latent"][0].to(torch.bfloat16))
        first, second = layer.rows["rotary_key"][0].to(torch.bfloat16).chunk(2, dim=1)
        assert torch.equal(found[:, 32::2], first) and torch.equal(found[:, 33::2], second)
    assert engine.finish(restored)
    engine.assert_nothing_held()


def test_packed_rows_are_those_that_the_engine_would_pack(start_pools: Any, tiny: Path, tmp_path: Path) -> None:
    import torch
    from sglang.test.kernels.dsa_k_cache_reference import _quantize_k_cache_ref

    from .compact_examples import compact, latent_model
    from .harness import config

    folder, path = latent_model(tmp_path / "glm", latent=512, rotary=64, indexer_types=GROUPS), tmp_path / "prefix"
    prefix = compact(folder, path, by_group())
    engine = start_pools(tiny, config(), "dsa_fp8", page=PAGE)
    served = serve(engine, path, folder, form_of(folder))
    restored = engine.admit(engine.request("named", [0] * ROWS, extra_key=served.key))
    assert restored.loaded == ROWS
    for layer, bits in zip(prefix.layers, engine.forward(restored)["kv"], strict=True):
        first, second = layer.rows["rotary_key"][0].chunk(2, dim=1)
        rows = [layer.rows["latent"][0], torch.stack([first, second], dim=2).reshape(ROWS, -1)]
        wanted = _quantize_k_cache_ref(torch.cat(rows, dim=1).view(1, ROWS, 1, -1))
        scales = wanted[0, :, 0, 512:528].view(torch.float32)
        assert torch.equal(bits[:, :512], wanted[0, :, 0, :512].view(torch.uint8))
        assert torch.equal(bits[:, 512:528].contiguous().view(torch.float32), scales)
        assert torch.equal(bits[:, 528:].view(torch.bfloat16), rows[1].to(torch.bfloat16))
    assert engine.finish(restored)


def test_pages_of_index_keys_have_the_layout_in_which_the_engine_moves_tokens(start_pools: Any, tiny: Path) -> None:
    import torch

    from kvtier.connectors.sglang.compacted_rows import LatentForm, index_pages

    from .harness import config

    engine = start_pools(tiny, config(), "dsa", page=PAGE)
    cache, form = engine.pool.index_key_cache, LatentForm(True, True, True)
    keys = torch.randn(2 * PAGE, 128, generator=torch.Generator().manual_seed(1))
    order = torch.randperm(2 * PAGE, generator=torch.Generator().manual_seed(2))
    cache.buffer[0][1:3] = index_pages(keys, 16, PAGE, form)
    cache.move(torch.arange(3 * PAGE, 5 * PAGE), PAGE + order)
    assert torch.equal(cache.buffer[0][3:5], index_pages(keys[order], 16, PAGE, form))


def test_what_does_not_fit_is_refused_with_the_way_out(start_pools: Any, tiny: Path, glm: Path, tmp_path: Path) -> None:
    from .compact_examples import compact
    from .harness import config

    path, form = tmp_path / "prefix.safetensors", form_of(glm)
    engine = start_pools(tiny, config(), "dsa", page=PAGE)
    compact(glm, path, by_group(layer1=7))
    with pytest.raises(ArtefactError, match=r"layers 0 and 1 share the choice of one indexer.*--method kvzip"):
        serve(engine, path, glm, form)
    compact(glm, path, by_group(rows=96))
    with pytest.raises(ArtefactError, match="--page-tokens 64"):
        serve(engine, path, glm, form)
    compact(glm, path, by_group())
    with pytest.raises(ArtefactError, match=r"neither plain K and V .* nor rows of MLA"):
        serve(start_pools(tiny, config(), "mha_fp8", page=16), path, glm, form)
    with pytest.raises(ArtefactError, match="fp8_e4m3: use --kv-cache-dtype auto"):
        serve(start_pools(tiny, config(), "mla_fp8", page=16), path, glm, form)


def test_index_keys_that_transformers_turns_otherwise_are_refused() -> None:
    from kvtier.connectors.sglang.compacted_rows import LatentForm

    def read(architecture: str, **more: Any) -> Any:
        return SimpleNamespace(architectures=[architecture], index_topk=2048, **more)

    assert LatentForm.of(read("DeepseekV32ForCausalLM"), "cuda") == LatentForm(True, False, True)
    with pytest.raises(ArtefactError, match="indexer_rope_interleave = False in the configuration of a GlmMoeDsa"):
        LatentForm.of(read("GlmMoeDsaForCausalLM"), "cuda")
    with pytest.raises(ArtefactError, match="indexer_rope_interleave = True in the configuration of a DeepseekV32"):
        LatentForm.of(read("DeepseekV32ForCausalLM", indexer_rope_interleave=True), "cuda")
    with pytest.raises(ArtefactError, match="this model is a DeepseekV2ForCausalLM"):
        LatentForm.of(SimpleNamespace(architectures=["DeepseekV2ForCausalLM"]), "cuda")


def test_each_rank_knows_which_heads_are_its_own() -> None:
    from kvtier.connectors.sglang.compacted_rows import Heads

    assert [Heads.of(rank, 4, 2, 8).first for rank in range(4)] == [0, 2, 4, 6]
    assert [Heads.of(rank, 4, 1, 2).first for rank in range(4)] == [0, 0, 1, 1]  # fewer heads than ranks
