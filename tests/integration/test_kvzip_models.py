"""The scoring passes of KVzip on tiny random models, against attention weights that the models themselves report."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from kvtier.compression.compaction import selection
from kvtier.compression.compaction.kvzip import RepeatPrompts
from kvtier.compression.compaction.prefix import Compaction, Recipe
from kvtier.connectors.transformers.attention import Family, SparseFamily, family_of
from kvtier.connectors.transformers.compaction import prefill
from kvtier.connectors.transformers.compat import cache_argument
from kvtier.connectors.transformers.kvzip import (
    KVzipOptions,
    compact_kvzip,
    repeat_prompts,
    score_dense,
    score_sparse,
)
from kvtier.errors import ConfigError

TOKENS, SYSTEM = 37, 6
PROMPTS = RepeatPrompts(first=(1, 2), later=(3,), suffix=(4, 5))
TOKEN_IDS = torch.randint(64, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "initializer_range": 0.3,
    "attn_implementation": "eager",
}
MLA = {
    **{name: value for name, value in SHAPE.items() if name not in ("head_dim", "num_key_value_heads")},
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "first_k_dense_replace": 4,
    "initializer_range": 0.15,
}
INDEXER = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 8}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}


def tiny(name: str) -> Any:
    models: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, SHAPE),
        "gemma2": (transformers.Gemma2ForCausalLM, transformers.Gemma2Config, {**SHAPE, **SLIDING}),
        "gpt_oss": (
            transformers.GptOssForCausalLM,
            transformers.GptOssConfig,
            {**SHAPE, **SLIDING, "num_local_experts": 4},
        ),
        "deepseek_v3": (transformers.DeepseekV3ForCausalLM, transformers.DeepseekV3Config, MLA),
        "glm_moe_dsa": (
            transformers.GlmMoeDsaForCausalLM,
            transformers.GlmMoeDsaConfig,
            {**MLA, **INDEXER, "indexer_types": ["full", "full", "shared", "shared"]},
        ),
    }
    model_class, config_class, options = models[name]
    torch.manual_seed(0)
    model = model_class(config_class(**options)).eval()
    if name == "gpt_oss":
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def own_weights(model: Any, token_ids: list[int]) -> list[torch.Tensor]:
    """``[heads, tokens, tokens]`` per layer, as the model reports them."""
    with torch.no_grad():
        return [w[0] for w in model(torch.tensor([token_ids]), output_attentions=True).attentions]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_dense_scores_are_the_models_own_where_the_softmax_sees_everything(name: str) -> None:
    """One chunk, no system prompt: the restricted softmax is the model's."""
    model = tiny(name)
    family, cache = family_of(model), prefill(model, TOKEN_IDS)
    scores = score_dense(family, cache, TOKEN_IDS, PROMPTS)
    weights = own_weights(model, [*TOKEN_IDS, *PROMPTS.first, *PROMPTS.suffix, *TOKEN_IDS])
    for layer in range(3):
        if layer in family.geometry.compactable_layers:
            expected = weights[layer][:, TOKENS:, :TOKENS].amax(dim=1).view(2, 2, TOKENS).amax(dim=1)
            torch.testing.assert_close(scores[layer], expected, rtol=1e-4, atol=1e-6)
        else:
            assert not scores[layer].any()


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "glm_moe_dsa"])
def test_sparse_scores_are_the_models_own_with_dense_attention(name: str) -> None:
    model = tiny(name)
    family = family_of(model)
    scores = score_sparse(family, TOKEN_IDS, PROMPTS, system_tokens=SYSTEM)
    turn = [*TOKEN_IDS, *PROMPTS.first, *PROMPTS.suffix]
    with family.dense_attention():
        weights = own_weights(model, [*turn, *TOKEN_IDS[SYSTEM:]])
    for layer in range(family.geometry.layers):
        expected = weights[layer][:, len(turn) :, :TOKENS].amax(dim=1)
        torch.testing.assert_close(scores[layer], expected, rtol=1e-4, atol=1e-6)
    if isinstance(family, SparseFamily):
        assert model.model.layers[0].self_attn.indexer.index_topk == INDEXER["index_topk"]
        sparse = own_weights(model, [*turn, *TOKEN_IDS[SYSTEM:]])
        assert (sparse[1][:, len(turn) :, :TOKENS].amax(dim=1) - scores[1]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v3"])
def test_scoring_leaves_the_cache_as_it_was(name: str) -> None:
    model = tiny(name)
    family, cache = family_of(model), prefill(model, TOKEN_IDS)
    before = [(layer.keys, layer.values, layer.get_seq_length()) for layer in cache.layers]
    score_dense(family, cache, TOKEN_IDS, PROMPTS, system_tokens=SYSTEM, options=KVzipOptions(chunk_tokens=10))
    for layer, (keys, values, length) in zip(cache.layers, before, strict=True):
        assert layer.keys is keys and layer.values is values and layer.get_seq_length() == length


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("name", ["llama", "glm_moe_dsa"])
def test_an_interrupted_pass_goes_on_where_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.connectors.transformers.kvzip._FEED_TOKENS", 10)
    model = tiny(name)
    family, cache = family_of(model), prefill(model, TOKEN_IDS)

    def score(**kwargs: Any) -> torch.Tensor:
        if name == "llama":
            options = KVzipOptions(chunk_tokens=10)
            return score_dense(family, cache, TOKEN_IDS, PROMPTS, system_tokens=SYSTEM, options=options, **kwargs)
        return score_sparse(family, TOKEN_IDS, PROMPTS, system_tokens=SYSTEM, **kwargs)

    told: list[tuple[int, int, str]] = []
    expected = score(progress=lambda done, total, label: told.append((done, total, label)))
    assert told[-1][0] == told[-1][1] and told == sorted(told)
    repeated = [label for _, _, label in told].count("repeating the context")
    if name == "llama":  # which tells each layer of a chunk
        repeated //= family.geometry.layers

    saved: dict[str, torch.Tensor] = {}

    def stop_after_two(state: dict[str, torch.Tensor]) -> None:
        saved.update({key: value.clone() for key, value in state.items()})
        if len(calls) == 1:
            raise StoppedError
        calls.append(1)

    calls: list[int] = []
    with pytest.raises(StoppedError):
        score(checkpoint=stop_after_two)
    captures: list[int] = []
    right = Family.capture

    def counted(self: Family, *args: Any) -> Any:
        captures.append(1)
        return right(self, *args)

    monkeypatch.setattr(Family, "capture", counted)
    assert torch.equal(score(state=saved), expected)
    assert len(captures) == repeated - 2


def recipe(selector: str, ratio: float = 0.5) -> Recipe:
    return Recipe("kvzip", ratio, selector)


def compacted(name: str, selector: str, ratio: float, **kwargs: Any) -> tuple[Family, Compaction]:
    model = tiny(name)
    family = family_of(model)
    cache = prefill(model, TOKEN_IDS)
    return family, compact_kvzip(
        family, cache, TOKEN_IDS, recipe(selector, ratio), PROMPTS, system_tokens=SYSTEM, **kwargs
    )


CASES = [
    ("llama", "pair"),
    ("llama", "uniform"),
    ("llama", "head"),
    ("gemma2", "pair"),
    ("deepseek_v3", "pair"),
    ("deepseek_v3", "log_coverage"),
    ("glm_moe_dsa", "raw_max"),
    ("glm_moe_dsa", "normalized_max"),
    ("glm_moe_dsa", "log_coverage"),
]


@pytest.mark.parametrize(("name", "selector"), CASES)
@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_sets_are_what_artefacts_are_made_of(name: str, selector: str, ratio: float) -> None:
    told: list[tuple[int, int]] = []
    family, found = compacted(
        name,
        selector,
        ratio,
        head_scores=torch.rand(3, 2) if selector == "head" else None,
        progress=lambda done, total, label: told.append((done, total)),
    )
    found.check()
    assert found.recipe == recipe(selector, ratio) and found.tokens == TOKENS
    windows = family.geometry.windows
    for layer, window in zip(found.layers, windows, strict=True):
        assert len(layer.kept) == family.geometry.kv_heads and layer.bias is None and layer.values is None
        for kept in layer.kept:
            if window is not None:
                assert kept.tolist() == list(range(TOKENS - window + 1, TOKENS))
            else:
                assert kept[:SYSTEM].tolist() == list(range(SYSTEM))
                assert ratio > 0 or len(kept) == TOKENS
    free = [layer for layer, window in zip(found.layers, windows, strict=True) if window is None]
    heads = len(free) * family.geometry.kv_heads
    assert sum(layer.rows for layer in free) == pytest.approx(heads * TOKENS * (1 - ratio), abs=heads)
    assert all(value >= 0 for value in found.figures.values())
    if selector in selection.GROUP_SELECTORS:
        for group in family.geometry.index_groups:
            assert len({tuple(found.layers[layer].kept[0].tolist()) for layer in group}) == 1
        assert 0 < found.figures["min_coverage"] <= found.figures["mean_coverage"] <= 1 + 1e-9
        assert min(found.layer_figures["min_coverage"]) == pytest.approx(found.figures["min_coverage"])
        if ratio == 0:
            assert found.figures["min_coverage"] == pytest.approx(1.0)
    if told:
        assert told[-1][0] == told[-1][1]


def test_log_coverage_covers_what_the_others_leave_out() -> None:
    """Of the product of coverages, which it maximises, greedily."""
    model = tiny("glm_moe_dsa")
    scores = score_sparse(family_of(model), TOKEN_IDS, PROMPTS, system_tokens=SYSTEM)[1:].flatten(0, 1)
    p = selection.shares_of(scores)

    def objective(selector: str) -> float:
        kept = selection.group(selector, scores, 12, 4)
        return float((selection.covered(p, kept) + 1e-6).log().sum())

    best = objective("log_coverage")
    assert best >= objective("raw_max") and best >= objective("normalized_max")


@pytest.mark.parametrize(
    ("name", "selector", "named"),
    [
        ("llama", "raw_max", "llama does not share.*pair, uniform, head"),
        ("glm_moe_dsa", "pair", "glm_moe_dsa.*one set.*raw_max, normalized_max, log_coverage"),
        ("llama", "best", "'best'.*pair.*log_coverage"),
        ("llama", "head", "--head-scores"),
    ],
)
def test_selectors_that_do_not_fit_are_refused(name: str, selector: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        compacted(name, selector, 0.5)


def test_head_scores_of_another_model_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"scores for \(2, 2\).*3 and 2"):
        compacted("llama", "head", 0.5, head_scores=torch.rand(2, 2))


class Letters:
    """A tokenizer of one token per letter, with a chat template."""

    chat_template: str | None = "yes"

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        assert options["add_generation_prompt"] and not options["tokenize"]
        return f"<system><user>{messages[0]['content']}<end><model>"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]


def test_prompts_end_the_users_turn() -> None:
    tokenizer = Letters()
    prompts = repeat_prompts(tokenizer)
    assert "".join(map(chr, prompts.suffix)) == "<end><model>"
    assert "".join(map(chr, prompts.first)).strip().startswith("Repeat")
    tokenizer.chat_template = None
    assert repeat_prompts(tokenizer).suffix == (10,)


def test_generation_goes_on_from_sets_of_one_length() -> None:
    """Rows that were chosen, packed and written back: the model goes on behind the original length."""
    model = tiny("llama")
    family, cache = family_of(model), prefill(model, TOKEN_IDS)
    found = compact_kvzip(family, cache, TOKEN_IDS, recipe("uniform"), PROMPTS, system_tokens=SYSTEM)
    packed = family.new_cache()
    for layer, sets in enumerate(found.layers):
        family.write(packed, layer, family.read(cache, layer).take(sets.kept))
    question = torch.tensor([[7, 8, 9]])
    positions = torch.arange(TOKENS, TOKENS + 3)[None]
    with torch.no_grad():
        logits = model(question, position_ids=positions, use_cache=True, **{cache_argument(model): packed}).logits
        # The same through a mask on the whole cache.
        heads = family.geometry.query_heads
        hidden = torch.full((1, heads, 3, TOKENS + 3), float("-inf"))
        masks = []
        for sets in found.layers:
            mask = hidden.clone()
            for head in range(heads):
                mask[0, head, :, sets.kept[head // family.geometry.group_heads]] = 0
            mask[:, :, :, TOKENS:] = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), float("-inf"))
            masks.append(mask)
        hooks = [
            attn.register_forward_pre_hook(
                lambda _, args, kwargs, mask=mask: (args, {**kwargs, "attention_mask": mask}), with_kwargs=True
            )
            for attn, mask in zip(family.layers, masks, strict=True)
        ]
        masked = model(question, use_cache=True, **{cache_argument(model): cache}).logits
        for hook in hooks:
            hook.remove()
    torch.testing.assert_close(logits, masked, rtol=1e-5, atol=1e-5)
