"""Attention Matching on tiny models: what is fitted is the model's own attention, later layers are fitted to what the
served ones lead to, and ratio 0, seeds and interruptions change nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.compression.compaction import matching_reference as reference
from kvtier.compression.compaction.artefact import ModelIdentity
from kvtier.compression.compaction.attention_block import AttentionBlock, probabilities
from kvtier.compression.compaction.kvzip import RepeatPrompts
from kvtier.compression.compaction.matching import MatchingOptions
from kvtier.compression.compaction.prefix import Compaction
from kvtier.compression.compaction.recipe import Recipe, budget_tokens
from kvtier.connectors.transformers.attention import SparseFamily, family_of, restore, snapshot
from kvtier.connectors.transformers.compact_serving import CompactServing
from kvtier.connectors.transformers.compaction import compacted, prefill
from kvtier.connectors.transformers.compat import cache_argument
from kvtier.connectors.transformers.fitting_queries import (
    STUDY_REQUESTS,
    FittingSequence,
    context_queries,
    given_sequences,
    repeat_sequences,
    study_sequences,
)
from kvtier.connectors.transformers.layer_steps import LayerSteps
from kvtier.connectors.transformers.matching import MatchingPlan, match_context
from kvtier.connectors.transformers.matching_layer import blocks_of
from kvtier.errors import ConfigError
from tests.compact_models import context, tiny

TOKENS = 60
IDS = context(TOKENS)
PROMPTS = RepeatPrompts((7, 8, 9), (7, 10), (11,))
DENSE = ("llama", "qwen3", "gemma3", "gpt_oss")
LATENT = ("deepseek_v3", "glm_moe_dsa")


def texts(count: int = 2, tokens: int = 20) -> list[FittingSequence]:
    return given_sequences([context(tokens, seed=100 + n) for n in range(count)])


def model_of(name: str, **changes: Any) -> Any:
    """glm_moe_dsa with an indexer that has something to choose."""
    own: dict[str, dict[str, Any]] = {"glm_moe_dsa": {"index_topk": 24}, "gpt_oss": {"attention": "eager"}}
    return tiny(name, **own.get(name, {}), **changes)


def recipe(ratio: float = 0.7, selector: str = "omp") -> Recipe:
    return Recipe("am", ratio, selector, 0, "given")


def matched(
    name: str, ratio: float = 0.7, selector: str = "omp", *, model: Any = None, **plan: Any
) -> tuple[Any, Any, Compaction]:
    model = model_of(name) if model is None else model
    cache = prefill(model, IDS)
    options = MatchingOptions(selector, max_queries=plan.pop("max_queries", 50_000))
    how = MatchingPlan(options, **plan)
    found = match_context(family_of(model), cache, IDS, recipe(ratio, selector), texts(), plan=how)
    return model, cache, found


def equal(first: Compaction, second: Compaction) -> bool:
    """Bit for bit."""
    for a, b in zip(first.layers, second.layers, strict=True):
        for name in ("kept", "bias", "values"):
            mine, other = getattr(a, name), getattr(b, name)
            if (mine is None) != (other is None):
                return False
            if mine is not None and not all(torch.equal(x, y) for x, y in zip(mine, other, strict=True)):
                return False
    return True


@pytest.mark.parametrize("name", LATENT)
def test_latent_blocks_reproduce_the_layers_output(name: str) -> None:
    """All rows, no bias: from captured queries, through the block's passes, to what the output projection reads."""
    dense: dict[str, dict[str, Any]] = {
        "deepseek_v3": {"first_k_dense_replace": 4},
        "glm_moe_dsa": {"mlp_layer_types": ["dense"] * 4},
    }
    model = model_of(name, **dense[name]).double()  # their experts know no fp64
    family, cache = family_of(model), prefill(model, IDS)
    seen: dict[int, torch.Tensor] = {}
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args, n=n: seen.update({n: args[0][0]}))
        for n, layer in enumerate(model.get_decoder().layers)
    ]
    with torch.no_grad(), family.capture() as captured:
        model(torch.tensor([context(20, seed=5)]), use_cache=True, **{cache_argument(model): cache})
    for hook in hooks:
        hook.remove()
    for layer in range(family.geometry.layers):
        rows, queries = family.read(cache, layer), captured[layer]
        block = AttentionBlock(
            queries.queries * family.geometry.scales[layer],
            rows.keys[0],
            rows.values[0],
            family.visible(layer, queries, rows),
            working_bytes=1 << 16,
        )
        out = torch.zeros(family.geometry.query_heads, 20, block.values.shape[1], dtype=torch.float64)
        for head, part in block.chunks():
            out[head, part] = probabilities(block.seen(part, block.logits(head, part))) @ block.values
        heads = family.head_outputs(layer, out).transpose(0, 1).reshape(20, -1)
        assert (heads - seen[layer]).abs().max() < 1e-6


@pytest.mark.parametrize("name", [*DENSE, *LATENT])
def test_sets_are_complete_and_valid(name: str) -> None:
    model, cache, found = matched(name)
    found.check()
    family = family_of(model)
    geometry = family.geometry
    for layer, selection in enumerate(found.layers):
        if layer not in geometry.compactable_layers:
            assert selection.bias is None and selection.values is None
            continue
        assert {len(k) for k in selection.kept} == {budget_tokens(TOKENS, 0.7)}
        assert all(torch.equal(k[:4], torch.arange(4)) for k in selection.kept)
        assert selection.bias is not None and len(selection.bias) == geometry.query_heads
        values = family.read(cache, layer).values
        assert selection.values is not None and selection.values[0].shape[1] == values.shape[-1]
    assert 0 < found.figures["output_error"] < 1.0 and found.figures["mass_error"] < 1.0
    assert len(found.layer_figures["output_error"]) == geometry.layers
    assert cache.get_seq_length() == TOKENS  # as it was


@pytest.mark.parametrize("name", ["llama", "gpt_oss", *LATENT])
@pytest.mark.parametrize("selector", ["hak", "omp"])
def test_nothing_removed_is_the_identity(name: str, selector: str) -> None:
    model, cache, found = matched(name, 0.0, selector)
    for selection in found.layers:
        assert selection.bias is None and selection.values is None
    identity = ModelIdentity("mla" if name in LATENT else "dense", "model", "")
    prefix = compacted(identity, IDS, cache, found)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    question = torch.tensor([context(9, seed=3)])
    with CompactServing(model, prefix, model_name="model", identity=identity) as serving:
        rows = serving.new_cache()
        for layer, (keys, values) in zip(rows.layers, before, strict=True):
            assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
        served = serving.forward(question, rows).logits
    with torch.no_grad():
        plain = model(question, use_cache=True, **{cache_argument(model): cache}).logits
    assert torch.equal(served, plain)


@pytest.mark.parametrize("name", ["llama", "gemma3", *LATENT])
def test_later_layers_are_fitted_to_what_is_served(name: str) -> None:
    """A text's hidden states, layer by layer, are those of serving the finished object: also the last layer's input,
    which has all compacted layers but one before it."""
    model = model_of(name)
    family, cache = family_of(model), prefill(model, IDS)
    reached: list[dict[str, torch.Tensor]] = []
    plan = MatchingPlan(MatchingOptions("omp"))
    found = match_context(
        family, cache, IDS, recipe(), texts(), plan=plan, checkpoint=lambda s: reached.append(dict(s))
    )
    identity = ModelIdentity("mla" if name in LATENT else "dense", "model", "")
    prefix = compacted(identity, IDS, cache, found)
    before = snapshot(cache)
    for n, text in enumerate(texts()):
        with torch.no_grad():
            given = {cache_argument(model): cache, "use_cache": True, "output_hidden_states": True}
            plain = model(torch.tensor([text.token_ids]), **given).hidden_states
        restore(cache, before)
        with CompactServing(model, prefix, model_name="model", identity=identity) as serving:
            hidden = serving.forward(text.token_ids, output_hidden_states=True).hidden_states
        for layer in range(family.geometry.layers - 1):
            got = reached[layer][f"text.{n}.hidden"]
            torch.testing.assert_close(got, hidden[layer + 1], rtol=2e-4, atol=2e-5)
            if layer in family.geometry.compactable_layers:
                assert not torch.allclose(got, plain[layer + 1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "glm_moe_dsa"])
def test_a_model_in_bf16(name: str) -> None:
    """Fits are fp32 whatever the model computes in, and its own sets are served."""
    model = model_of(name).bfloat16()
    _, cache, found = matched(name, model=model)
    found.check()
    assert 0 < found.figures["output_error"] < 1.0
    assert all(layer.keys.dtype == torch.bfloat16 for layer in cache.layers)


def test_off_policy_uses_the_models_own_queries() -> None:
    model, cache, on_policy = matched("llama")
    _, _, off_policy = matched("llama", model=model, on_policy=False)
    first = (on_policy.layers[0], off_policy.layers[0])
    assert torch.equal(first[0].kept[0], first[1].kept[0]) and not equal(on_policy, off_policy)
    # And these are what a plain pass captures.
    family = family_of(model)
    steps, before = LayerSteps(family, cache, texts()[0].token_ids), snapshot(cache)
    given = steps.first()
    with family.capture() as captured:
        for layer in range(family.geometry.layers):
            given = steps.run(layer, given, cache)
    restore(cache, before)
    with torch.no_grad(), family.capture() as plain:
        model(torch.tensor([texts()[0].token_ids]), use_cache=True, **{cache_argument(model): cache})
    for layer in range(family.geometry.layers):
        assert torch.equal(captured[layer].queries, plain[layer].queries)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "glm_moe_dsa"])
def test_a_run_goes_on_where_it_was_interrupted(name: str) -> None:
    model = model_of(name)
    family, cache = family_of(model), prefill(model, IDS)
    states: list[dict[str, torch.Tensor]] = []

    def keep(state: dict[str, torch.Tensor]) -> None:
        states.append({key: tensor.clone() for key, tensor in state.items()})

    whole = match_context(family, cache, IDS, recipe(), texts(), checkpoint=keep)
    assert len(states) == family.geometry.layers
    done: list[int] = []

    def tell(n: int, total: int, label: str) -> None:
        if label == "fitting layers":
            done.append(n)

    for state in (states[1], states[-1]):
        again = match_context(family, cache, IDS, recipe(), texts(), state=state, progress=tell)
        assert equal(whole, again)
    assert done == list(range(3, family.geometry.layers + 1))
    with pytest.raises(ConfigError, match="another run"):
        match_context(family, cache, IDS, recipe(0.5), texts(), state=states[1])
    with pytest.raises(ConfigError, match="another run"):
        match_context(family, cache, IDS, recipe(), texts(3), state=states[1])


@pytest.mark.parametrize("name", ["qwen3", "glm_moe_dsa"])
def test_equal_runs_are_equal(name: str) -> None:
    assert equal(matched(name)[2], matched(name)[2])


def test_long_contexts_are_compacted_in_blocks() -> None:
    for tokens, ratio, block in ((60, 0.7, 25), (61, 0.9, 7), (10, 0.5, 2), (10, 0.9, 2), (100, 0.01, 9), (8, 0.12, 1)):
        blocks = blocks_of(tokens, ratio, block)
        assert sum(share for _, share in blocks) == budget_tokens(tokens, ratio)
        assert blocks[0][0].start == 0 and blocks[-1][0].stop == tokens
        assert all(1 <= share <= part.stop - part.start for part, share in blocks)
    _, _, found = matched("llama", block_tokens=25)
    for kept in found.layers[0].kept:
        assert all(int(((kept >= a) & (kept < b)).sum()) == 6 for a, b in ((0, 20), (20, 40), (40, 60)))
    # One block fitted to one part of the context is that part's own fit.
    assert found.figures["output_error"] < 1.0


def test_few_queries_are_an_even_subset() -> None:
    _, _, thin = matched("llama", max_queries=30)
    _, _, full = matched("llama")
    assert not equal(thin, full) and thin.figures["output_error"] > 0


def test_held_out_texts_are_measured_and_not_fitted() -> None:
    model = model_of("llama")
    family, cache = family_of(model), prefill(model, IDS)
    fitting, apart = texts(5)[:3], texts(5)[3:]
    with_measure = match_context(family, cache, IDS, recipe(), fitting, held_out=apart)
    without = match_context(family, cache, IDS, recipe(), fitting)
    assert equal(with_measure, without)
    assert with_measure.figures["held_out_output_error"] > with_measure.figures["output_error"]
    assert "held_out_output_error" not in without.figures


@pytest.mark.parametrize("selector", ["indexer_hak", "indexer_omp"])
def test_an_indexer_selects_for_its_group(selector: str) -> None:
    model, _, found = matched("glm_moe_dsa", 0.7, selector)
    family = family_of(model)
    assert isinstance(family, SparseFamily)
    assert family.geometry.index_groups == ((0,), (1, 2, 3))
    for group in family.geometry.index_groups:
        assert all(torch.equal(found.layers[n].kept[0], found.layers[group[0]].kept[0]) for n in group)
    if selector == "indexer_hak":  # layer 0 is not affected by any other: its set from the scores themselves
        cache, shares = prefill(model, IDS), []
        before = snapshot(cache)
        for text in texts():
            with torch.no_grad(), family.capture([0]) as captured:
                model(torch.tensor([text.token_ids]), use_cache=True, **{cache_argument(model): cache})
            rows = family.read(cache, 0)
            assert rows.index_keys is not None
            scores = family.index_scores(0, captured[0], rows.index_keys)
            seen = rows.positions[None] <= captured[0].positions[:, None]
            shares.append(torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=1)[:, :TOKENS])
            restore(cache, before)
        wanted = reference.hak(torch.cat(shares).double().numpy()[None], 18, (0, 1, 2, 3))
        np.testing.assert_array_equal(found.layers[0].kept[0].numpy(), wanted)


def test_sparse_layers_are_fitted_to_their_sparse_attention() -> None:
    """With an indexer that chooses a few rows, m and Y are of those alone."""
    model = model_of("glm_moe_dsa")
    _, _, sparse = matched("glm_moe_dsa", model=model, selector="hak")
    with family_of(model).dense_attention():
        _, _, dense = matched("glm_moe_dsa", model=model, selector="hak")
    assert not torch.equal(sparse.layers[0].bias[0], dense.layers[0].bias[0])  # type: ignore[index]


def test_sets_of_a_group_may_be_shared() -> None:
    _, _, shared = matched("glm_moe_dsa", shared_sets=True)
    assert all(torch.equal(shared.layers[n].kept[0], shared.layers[1].kept[0]) for n in (2, 3))
    _, _, own = matched("glm_moe_dsa")
    assert not all(torch.equal(own.layers[n].kept[0], own.layers[1].kept[0]) for n in (2, 3))


@pytest.mark.parametrize("name", ["llama", "glm_moe_dsa"])
def test_the_contexts_own_queries(name: str) -> None:
    model = model_of(name)
    family, cache = family_of(model), prefill(model, IDS)
    with torch.no_grad(), family.capture() as captured:
        model(torch.tensor([IDS]), use_cache=True, **{cache_argument(model): family.new_cache()})
    queries = context_queries(family, IDS, most=1000)
    for layer in range(family.geometry.layers):
        torch.testing.assert_close(queries[layer].queries, captured[layer].queries, rtol=1e-4, atol=1e-5)
        assert queries[layer].positions.tolist() == list(range(TOKENS)) and queries[layer].selected is None
    assert context_queries(family, IDS, most=7)[0].positions.tolist() == [n * TOKENS // 7 for n in range(7)]
    for selector in ("omp", "indexer_omp") if name == "glm_moe_dsa" else ("omp",):
        plan = MatchingPlan(MatchingOptions(selector), context=True)
        alone = match_context(family, cache, IDS, recipe(0.7, selector), [], plan=plan)
        both = match_context(family, cache, IDS, recipe(0.7, selector), texts(), plan=plan)
        alone.check()
        both.check()
        assert not equal(alone, both)


def test_texts_of_every_source() -> None:
    model = model_of("qwen3")
    family, cache = family_of(model), prefill(model, IDS)
    repeats = repeat_sequences(IDS, PROMPTS, chunk_tokens=40)
    assert [len(s.token_ids) for s in repeats] == [3 + 1 + 40, 2 + 8 + 1 + 20]
    assert repeats[1].token_ids[-20:] == tuple(IDS[40:])
    requests = {name: context(5, seed=n) for n, name in enumerate(STUDY_REQUESTS)}
    before = snapshot(cache)
    studies = [study_sequences(family, cache, IDS, requests, suffix=[11], new_tokens=6, seed=s) for s in (0, 0, 1)]
    assert studies[0] == studies[1] != studies[2]
    assert len(studies[0]) == 4 and all(len(s.token_ids) == 5 + 1 + 6 for s in studies[0])
    assert all(torch.equal(a.keys, b["keys"]) for a, b in zip(cache.layers, before.layers, strict=True))
    with pytest.raises(ConfigError, match="two tokens or more"):
        FittingSequence((1,))
    with pytest.raises(ConfigError, match="count at least one"):
        FittingSequence((1, 2, 3), 3)


def test_what_does_not_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    family, cache = family_of(model), prefill(model, IDS)
    with pytest.raises(ConfigError, match="llama has no indexer"):
        match_context(family, cache, IDS, recipe(0.5, ""), texts(), plan=MatchingPlan(MatchingOptions("indexer_omp")))
    with pytest.raises(ConfigError, match="recipe of selector 'hak'"):
        match_context(family, cache, IDS, recipe(0.5, "hak"), texts())
    with pytest.raises(ConfigError, match="no queries to fit"):
        match_context(family, cache, IDS, recipe(), [])
    with pytest.raises(ConfigError, match="the model has 1024 positions"):
        match_context(family, cache, IDS, recipe(), texts(1, 1000))
    monkeypatch.setattr(model.config, "_attn_implementation", "flex_attention")
    with pytest.raises(ConfigError, match="attn_implementation = 'flex_attention'"):
        match_context(family, cache, IDS, recipe(), texts())
    with pytest.raises(ConfigError, match="block_tokens = 1"):
        replace(MatchingPlan(), block_tokens=1)
