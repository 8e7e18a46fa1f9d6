"""Every attention family: attention from captured queries and a cache's rows is the model's own, on tiny random
models."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import transformers

from kvtier.connectors.transformers.attention import (
    FAMILIES,
    Family,
    FamilyKind,
    LayerQueries,
    LayerRows,
    SparseFamily,
    family_of,
    restore,
    snapshot,
)
from kvtier.connectors.transformers.compat import cache_argument
from kvtier.errors import ConfigError, SpecError

TOKENS, FIRST = 30, 20
WINDOW = 8
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "initializer_range": 0.3,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 4,
    "initializer_range": 0.1,
}
INDEXER = {"index_topk": 10, "index_head_dim": 16, "index_n_heads": 8}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16}  # fmt: skip

DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-yarn": ("Llama", {"rope_parameters": {**YARN}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-sliding": ("Mistral", {"sliding_window": WINDOW}),
    "mixtral": ("Mixtral", {"sliding_window": None, "num_local_experts": 4}),
    "qwen2": ("Qwen2", {}),
    "qwen2_moe": ("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 32}),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", MOE),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", {**SLIDING, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0,
                          "attn_implementation": "eager"}),
    "gemma3_text": ("Gemma3", {**SLIDING, "query_pre_attn_scalar": 24}),
    "gpt_oss": ("GptOss", {**SLIDING, "num_local_experts": 4, "attn_implementation": "eager"}),
}  # fmt: skip
LATENT: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("DeepseekV3", {}),
    "deepseek_v3-halves": ("DeepseekV3", {"rope_interleave": False}),
    "deepseek_v3-no-query-rank": ("DeepseekV3", {"q_lora_rank": None}),
    "deepseek_v3-yarn": ("DeepseekV3", {"rope_parameters": {**YARN}}),
    "deepseek_v32": ("DeepseekV32", INDEXER),
    "deepseek_v32-eager": ("DeepseekV32", {**INDEXER, "attn_implementation": "eager"}),
    "glm_moe_dsa": ("GlmMoeDsa", {**INDEXER, "indexer_types": ["full", "full", "shared", "shared"]}),
}


MODELS = {**DENSE, **LATENT}


def tiny(name: str, dtype: torch.dtype = torch.float32) -> Any:
    prefix, changes = MODELS[name]
    config_name = f"{prefix}TextConfig" if prefix == "Gemma3" else f"{prefix}Config"
    config = getattr(transformers, config_name)(**{**(SHAPE if name in DENSE else MLA), **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval().to(dtype)
    if prefix == "GptOss":
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def token_ids(tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(64, (1, tokens), generator=torch.Generator().manual_seed(1))


def recording_cache(family: Family) -> Any:
    """A cache whose sliding layers keep everything, so that early queries can be computed again."""
    cache = family.new_cache()
    for layer in cache.layers:
        if layer.is_sliding:
            layer.activate_past_recording()
    return cache


@contextmanager
def own_outputs(family: Family) -> Iterator[dict[int, list[torch.Tensor]]]:
    """What the model's attention gave to its output projection, ``[heads, n, dim]`` per layer and pass."""
    seen: dict[int, list[torch.Tensor]] = {}
    heads = family.geometry.query_heads

    def hook(layer: int) -> Any:
        def keep(_: Any, args: Any) -> None:
            seen.setdefault(layer, []).append(args[0][0].view(args[0].shape[1], heads, -1).transpose(0, 1))

        return keep

    handles = [attn.o_proj.register_forward_pre_hook(hook(n)) for n, attn in enumerate(family.layers)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def run(family: Family, cache: Any, *parts: torch.Tensor) -> Any:
    with torch.no_grad():
        for part in parts:
            output = family.model(part, use_cache=True, **{cache_argument(family.model): cache})
    return output


def largest_error(family: Family, *, dense: bool = False) -> float:
    """Of outputs computed again, relative to the largest of the model's own."""
    ids, cache = token_ids(), recording_cache(family)
    everything = family.dense_attention() if dense else nullcontext()
    with own_outputs(family) as own, family.capture() as captured, everything:
        run(family, cache, ids[:, :FIRST], ids[:, FIRST:])
    worst = 0.0
    for layer in range(family.geometry.layers):
        rows = family.read(cache, layer)
        again = [family.head_outputs(layer, family.attention(layer, q, rows)) for q in captured.passes(layer)]
        for expected, found in zip(own[layer], again, strict=True):
            assert expected.abs().max() > 0.01
            worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
    return worst


@pytest.mark.parametrize("name", DENSE)
def test_dense_attention_is_computed_again(name: str) -> None:
    assert largest_error(family_of(tiny(name))) < 1e-5


@pytest.mark.parametrize("name", LATENT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_latent_attention_is_computed_again(name: str, dtype: torch.dtype) -> None:
    family = family_of(tiny(name, dtype))
    # The eager attention's softmax is fp32 in every case.
    limit = 1e-12 if dtype == torch.float64 and "eager" not in name else 1e-6
    assert largest_error(family) < limit
    if family.geometry.kind is FamilyKind.SPARSE:
        assert largest_error(family, dense=True) < limit


def test_every_supported_architecture_has_a_model_here() -> None:
    assert {name.partition("-")[0] for name in (*DENSE, *LATENT)} == set(FAMILIES)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "glm_moe_dsa"])
def test_the_comparison_can_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = family_of(tiny(name))
    right = Family.attention

    def wrong(self: Family, layer: int, queries: LayerQueries, rows: LayerRows) -> torch.Tensor:
        scaled = LayerQueries(queries.queries * 1.01, queries.positions, queries.first_row, selected=queries.selected)
        return right(self, layer, scaled, rows)

    monkeypatch.setattr(Family, "attention", wrong)
    assert largest_error(family) > 1e-5


@pytest.mark.parametrize(
    ("name", "attribute", "value"),
    [("gemma2", "softcap", None), ("gemma3_text", "windows", (None,) * 3), ("glm_moe_dsa", "index_groups", None)],
)
def test_what_a_family_says_of_itself_matters(
    name: str, attribute: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soft-capping, windows and the indexer's choice change the outputs: forgetting one would be seen."""
    family = family_of(tiny(name))
    if value is None and attribute == "index_groups":
        right = family.visible

        def all_rows(layer: int, queries: LayerQueries, rows: LayerRows) -> torch.Tensor:
            return right(layer, dataclasses.replace(queries, selected=None), rows)

        monkeypatch.setattr(family, "visible", all_rows)
    else:
        family.geometry = dataclasses.replace(family.geometry, **{attribute: value})
    assert largest_error(family) > 1e-3


def test_sinks_change_the_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    family = family_of(tiny("gpt_oss"))
    monkeypatch.setattr(family, "sinks", lambda layer: None)
    assert largest_error(family) > 1e-3


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_index_scores_are_those_that_chose(name: str) -> None:
    """The scores of what the indexer chose are the highest there are (ties at 0, where ReLU cut, are free)."""
    family = family_of(tiny(name))
    assert isinstance(family, SparseFamily)
    cache = family.new_cache()
    with family.capture() as captured:
        run(family, cache, token_ids())
    for group in family.geometry.index_groups:
        queries, rows = captured[group[0]], family.read(cache, group[0])
        assert queries.selected is not None and rows.index_keys is not None
        scores = family.index_scores(group[0], queries, rows.index_keys)
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -1e30)
        best = scores.topk(queries.selected.shape[1], dim=1).values
        chosen = scores.gather(1, queries.selected).sort(dim=1, descending=True).values
        torch.testing.assert_close(chosen, best, rtol=1e-5, atol=1e-6)
        for layer in group:
            assert torch.equal(captured[layer].selected, queries.selected)  # type: ignore[arg-type]
        for layer in group[1:]:
            with pytest.raises(ConfigError, match=f"layer {layer} runs no indexer.*layer {group[0]}"):
                family.index_scores(layer, captured[layer], rows.index_keys)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3", "glm_moe_dsa"])
def test_rows_that_are_read_can_be_written(name: str) -> None:
    family = family_of(tiny(name))
    ids, cache, copy = token_ids(), family.new_cache(), family.new_cache()
    run(family, cache, ids[:, :FIRST])
    for layer in range(family.geometry.layers):
        family.write(copy, layer, family.read(cache, layer))
    expected, found = (run(family, c, ids[:, FIRST:]).logits for c in (cache, copy))
    assert torch.equal(expected, found)


def test_the_rows_of_a_window_have_their_positions() -> None:
    family = family_of(tiny("gemma3_text"))
    cache = family.new_cache()
    run(family, cache, token_ids())
    assert family.read(cache, 0).positions.tolist() == list(range(TOKENS - WINDOW + 1, TOKENS))
    assert family.read(cache, 1).positions.tolist() == list(range(TOKENS))
    assert family.geometry.windows == (WINDOW, None, WINDOW)
    assert family.geometry.compactable_layers == (1,)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "glm_moe_dsa"])
def test_a_cache_returns_to_a_snapshot(name: str) -> None:
    family = family_of(tiny(name))
    ids, cache = token_ids(), family.new_cache()
    run(family, cache, ids[:, :FIRST])
    before = snapshot(cache)
    expected = run(family, cache, ids[:, FIRST:]).logits
    restore(cache, before)
    assert cache.get_seq_length() == FIRST
    assert torch.equal(run(family, cache, ids[:, FIRST:]).logits, expected)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "glm_moe_dsa"])
def test_queries_of_several_passes_are_joined_or_handed_over(name: str) -> None:
    family = family_of(tiny(name))
    ids, handed = token_ids(), []
    cache = family.new_cache()
    with family.capture([1], lambda layer, q: handed.append((layer, q, family.read(cache, layer).rows))) as nothing:
        run(family, cache, ids[:, :FIRST], ids[:, FIRST:])
    assert not nothing
    assert [(layer, q.first_row, rows) for layer, q, rows in handed] == [(1, 0, FIRST), (1, FIRST, TOKENS)]
    cache = family.new_cache()
    with family.capture([1]) as captured:
        run(family, cache, ids[:, :FIRST], ids[:, FIRST:])
    assert list(captured) == [1]
    joined = captured[1]
    assert joined.positions.tolist() == list(range(TOKENS))
    assert torch.equal(joined.queries, torch.cat([q.queries for _, q, _ in handed], dim=1))
    run(family, family.new_cache(), ids)  # hooks are gone
    assert len(captured.passes(1)) == 2


def test_positions_given_to_the_model_are_captured() -> None:
    family = family_of(tiny("llama"))
    with torch.no_grad(), family.capture([0]) as captured:
        family.model(token_ids(4), position_ids=torch.tensor([[7, 8, 9, 10]]), use_cache=True)
    assert captured[0].positions.tolist() == [7, 8, 9, 10]


def test_take_keeps_one_number_of_rows_per_head() -> None:
    family = family_of(tiny("llama"))
    cache = family.new_cache()
    run(family, cache, token_ids())
    rows = family.read(cache, 0)
    first, second = torch.tensor([0, 3, 29]), torch.tensor([1, 2, 4])
    taken = rows.take([first, second])
    assert torch.equal(taken.keys[0], rows.keys[0, first]) and torch.equal(taken.values[1], rows.values[1, second])
    with pytest.raises(SpecError, match=r"\[3, 2\]"):
        rows.take([first, second[:2]])


def evicted_rows(family: Family) -> dict[int, torch.Tensor]:
    """Other rows for each group of layers."""
    rows = torch.arange(1, FIRST)
    return {layer: rows[n % 2 :: 2] for n, group in enumerate(family.geometry.index_groups) for layer in group}


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v32-eager", "glm_moe_dsa"])
def test_evicted_rows_never_win_the_top_k(name: str) -> None:
    family = family_of(tiny(name))
    assert isinstance(family, SparseFamily)
    ids, cache, evicted = token_ids(), family.new_cache(), evicted_rows(family)
    run(family, cache, ids[:, :FIRST])
    with family.evicted(evicted), family.capture() as captured:
        run(family, cache, ids[:, FIRST:])
    unmasked = family.new_cache()
    run(family, unmasked, ids[:, :FIRST])
    with family.capture() as free:
        run(family, unmasked, ids[:, FIRST:])
    for layer, rows in evicted.items():
        chosen = captured[layer].selected
        assert chosen is not None and chosen.shape[1] == INDEXER["index_topk"]
        assert not torch.isin(chosen, rows).any()
        unhindered = free[layer].selected
        assert unhindered is not None and torch.isin(unhindered, rows).any()  # they would have won


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v32-eager", "glm_moe_dsa"])
@pytest.mark.parametrize("topk", [10, 4096])
def test_masked_rows_are_as_good_as_gone(name: str, topk: int) -> None:
    """A cache that hides evicted rows gives what a cache without them gives, also where the top-k takes everything."""
    model = tiny(name)
    for layer in model.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.index_topk = topk
    family = family_of(model)
    assert isinstance(family, SparseFamily)
    ids, whole, packed, evicted = token_ids(), family.new_cache(), family.new_cache(), evicted_rows(family)
    run(family, whole, ids[:, :FIRST])
    for layer in range(family.geometry.layers):
        kept = torch.tensor([n for n in range(FIRST) if n not in evicted[layer].tolist()][:10])
        evicted[layer] = torch.tensor([n for n in range(FIRST) if n not in kept.tolist()])
        family.write(packed, layer, family.read(whole, layer).take([kept]))
    positions = torch.arange(FIRST, TOKENS)[None]
    with torch.no_grad():
        with family.evicted(evicted):
            hidden = model(ids[:, FIRST:], use_cache=True, **{cache_argument(model): whole}).logits
        gone = model(ids[:, FIRST:], position_ids=positions, use_cache=True, **{cache_argument(model): packed}).logits
        plain = model(ids).logits[:, FIRST:]
    torch.testing.assert_close(hidden, gone, rtol=1e-5, atol=1e-5)
    assert (hidden - plain).abs().max() > 1e-3


def test_index_groups_of_a_model_with_78_layers() -> None:
    """Layers 0, 1, 2, 6, 10 ... 74 run an indexer, the others reuse the choice before them."""
    shape = {**MLA, **INDEXER, "num_hidden_layers": 78, "first_k_dense_replace": 78}
    config = transformers.GlmMoeDsaConfig(**shape, index_topk_freq=4, index_skip_topk_offset=3)
    with torch.device("meta"):
        family = family_of(transformers.GlmMoeDsaForCausalLM(config))
    assert isinstance(family, SparseFamily)
    groups = family.geometry.index_groups
    assert groups == ((0,), (1,), *(tuple(range(n, n + 4)) for n in range(2, 78, 4))) and len(groups) == 21
    assert family.leader_of(77) == 74 and family.geometry.index_topk == INDEXER["index_topk"]


def test_layers_of_a_group_must_evict_the_same_rows() -> None:
    family = family_of(tiny("glm_moe_dsa"))
    assert isinstance(family, SparseFamily)
    with pytest.raises(ConfigError, match=r"\[1, 2, 3\] share"), family.evicted({1: torch.tensor([3])}):
        pass


def test_fitted_values_have_no_place_in_a_cache_of_latents() -> None:
    family = family_of(tiny("deepseek_v3"))
    cache = family.new_cache()
    run(family, cache, token_ids())
    rows = family.read(cache, 0)
    family.write(cache, 0, LayerRows(rows.keys.clone(), rows.values.clone(), rows.positions))
    with pytest.raises(SpecError, match="fitted values"):
        family.write(cache, 0, LayerRows(rows.keys, rows.values + 1, rows.positions))


@pytest.mark.parametrize(
    "config",
    [
        transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=64),
        transformers.Phi3Config(**SHAPE, pad_token_id=0),
        transformers.MambaConfig(num_hidden_layers=1, hidden_size=16, vocab_size=64),
    ],
    ids=lambda config: config.model_type,
)
def test_unknown_families_are_refused_by_name(config: Any) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=rf"'{config.model_type}'.*deepseek_v3.*qwen3"):
        family_of(model)


def test_batches_and_passes_without_a_cache_are_refused() -> None:
    family = family_of(tiny("llama"))
    with torch.no_grad(), family.capture():
        with pytest.raises(SpecError, match="use_cache=True"):
            family.model(token_ids(), use_cache=False)
        with pytest.raises(SpecError, match="2 sequences"):
            family.model(token_ids().expand(2, -1), use_cache=True)
    with pytest.raises(SpecError, match="empty"):
        family.read(family.new_cache(), 0)
