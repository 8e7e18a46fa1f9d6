"""A compacted prefix served by tiny models equals the whole cache with what was removed masked and what was fitted put
in place, computed here the plain way; and with nothing removed it is the model itself, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvtier.compression.compaction.artefact import CompactPrefix
from kvtier.compression.compaction.baselines import choose
from kvtier.compression.compaction.prefix import Compaction, LayerSelection, Recipe
from kvtier.config import parse_config
from kvtier.connectors.transformers import PrefixCache, cache_argument
from kvtier.connectors.transformers.compact_serving import CompactServing
from kvtier.connectors.transformers.compaction import (
    compacted,
    heads_of,
    held_positions,
    identity_of,
    keep_windows,
    prefill,
    whole,
)
from kvtier.errors import ArtefactError, ConfigError, SpecError
from tests.compact_models import context, tiny

T = 60
NEW = context(7, seed=1)
MODELS = ("llama", "qwen3", "gemma3", "gpt_oss", "deepseek_v3", "glm_moe_dsa")
CASES = [(name, a) for name in MODELS for a in ("sdpa", "eager") if (name, a) != ("gpt_oss", "sdpa")]


def identity_prefix(model: Any, ids: list[int]) -> CompactPrefix:
    cache = prefill(model, ids)
    return compacted(identity_of(model, "tiny"), ids, cache, whole(Recipe("random", 0.0), cache, len(ids)))


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_with_nothing_removed_it_is_the_model_itself(name: str, attention: str) -> None:
    model, ids = tiny(name, attention=attention), context(T)
    prefix = CompactPrefix.from_bytes(identity_prefix(model, ids).to_bytes())
    with CompactServing(model, prefix, model_name="tiny") as serving:
        logits = serving.forward(NEW).logits
        tokens = serving.generate([NEW], max_new_tokens=12, do_sample=False)
    with torch.no_grad():
        plain = model(torch.tensor([NEW]), use_cache=True, **{cache_argument(model): prefill(model, ids)}).logits
    given = {cache_argument(model): prefill(model, ids), "attention_mask": torch.ones(1, T + len(NEW))}
    assert torch.equal(logits, plain)
    assert torch.equal(tokens, model.generate(torch.tensor([NEW]), max_new_tokens=12, do_sample=False, **given))


def selection(model: Any, cache: Any, kind: str, generator: torch.Generator) -> tuple[LayerSelection, ...]:
    """Sets of `kind` for each layer; layers with a window are left alone."""
    query_heads, layers = model.config.num_attention_heads, []
    shared = torch.randperm(T, generator=generator)[:20].sort().values
    for n, heads in enumerate(heads_of(cache)):
        held = held_positions(cache, n, T)
        if len(held) < T:
            layers.append(LayerSelection((held,) * heads))
            continue
        if kind == "uniform":
            kept: tuple[torch.Tensor, ...] = (shared,) * heads
        else:
            sizes = torch.randint(6, 30, (heads,), generator=generator).tolist()
            kept = tuple(torch.randperm(T, generator=generator)[:size].sort().values for size in sizes)
        bias, values = None, None
        if kind == "fitted":
            group = query_heads // heads
            bias = tuple(torch.randn(len(kept[h // group]), generator=generator) for h in range(query_heads))
            dim = cache.layers[n].values.shape[-1] if group_is_dense(model) else cache.layers[n].keys.shape[-1]
            values = tuple(torch.randn(len(k), dim, generator=generator) for k in kept)
        layers.append(LayerSelection(kept, bias, values))
    return tuple(layers)


def group_is_dense(model: Any) -> bool:
    return getattr(model.config, "kv_lora_rank", None) is None


@contextmanager
def whole_cache_masked(model: Any, cache: Any, layers: tuple[LayerSelection, ...], tokens: int = T) -> Iterator[None]:
    """`cache` stays whole: a mask of its full length hides what was removed, adds biases, and fitted values overwrite
    those at their positions. Compact rows are always attended to where there are biases or sets differ."""
    hooks: list[Any] = []
    query_heads = model.config.num_attention_heads
    for n, layer in enumerate(layers):
        attention = model.get_decoder().layers[n].self_attn
        held = cache.layers[n].keys.shape[-2]
        if held < tokens:
            continue  # only its window, all of it kept
        group = query_heads // len(layer.kept)
        extra = torch.full((1, query_heads, 1, held), float("-inf"))
        for h in range(query_heads):
            at = layer.kept[h // group] - (tokens - held)
            extra[0, h, 0, at] = 0.0 if layer.bias is None else layer.bias[h]

        def add(_: Any, args: Any, kwargs: Any, extra: torch.Tensor = extra, n: int = n) -> Any:
            mask, hidden = kwargs["attention_mask"], (args[0] if args else kwargs["hidden_states"])
            columns = cache.layers[n].keys.shape[-2] + hidden.shape[1]
            if mask is None:
                mask = torch.zeros(1, 1, hidden.shape[1], columns)
            elif mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, float("-inf"))
            padded = torch.zeros(1, query_heads, 1, columns)
            padded[..., : extra.shape[-1]] = extra
            return args, dict(kwargs, attention_mask=mask + padded)

        hooks.append(attention.register_forward_pre_hook(add, with_kwargs=True))
        if layer.values is not None and group_is_dense(model):
            for h, (kept, values) in enumerate(zip(layer.kept, layer.values, strict=True)):
                cache.layers[n].values[0, h, kept] = values
        elif layer.values is not None:
            nope, value = attention.qk_nope_head_dim, attention.v_head_dim
            made = attention.kv_b_proj(layer.values[0]).view(-1, query_heads, nope + value)[..., nope:].detach()

            def put(_: Any, __: Any, out: Any, kept: Any = layer.kept[0], made: Any = made, nope: int = nope) -> Any:
                out = out.clone()
                out.view(*out.shape[:-1], query_heads, -1)[0, 0, kept, :, nope:] = made
                return out

            hooks.append(attention.kv_b_proj.register_forward_hook(put))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def full_logits(model: Any, cache: Any, ids: list[int]) -> torch.Tensor:
    """Token by token and then several at once, as a prefix is used."""
    out = []
    with torch.no_grad():
        for part in (ids[:4], ids[4:5], ids[5:]):
            logits: torch.Tensor = model(torch.tensor([part]), use_cache=True, **{cache_argument(model): cache}).logits
            out.append(logits)
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("kind", ["uniform", "pair", "fitted"])
@pytest.mark.parametrize(("name", "attention"), CASES)
def test_it_equals_the_whole_cache_masked(name: str, attention: str, kind: str) -> None:
    model, ids = tiny(name, attention=attention), context(T)
    cache = prefill(model, ids)
    layers = selection(model, cache, kind, torch.Generator().manual_seed(3))
    compaction = Compaction(Recipe("am", 0.5), T, layers)
    prefix = compacted(identity_of(model, "tiny"), ids, cache, compaction)
    prefix = CompactPrefix.from_bytes(prefix.to_bytes())
    with CompactServing(model, prefix, model_name="tiny") as serving:
        live = serving.new_cache()
        got = torch.cat([serving.forward(part, live).logits for part in (NEW[:4], NEW[4:5], NEW[5:])], dim=1)
        assert live.get_seq_length() == T + len(NEW)
    with whole_cache_masked(model, cache, layers):
        expected = full_logits(model, cache, NEW)
    plain = full_logits(model, prefill(model, ids), NEW)
    assert (expected - plain).abs().max() > 1e-2, "nothing was removed: the comparison would be blind"
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
    assert not any(a._forward_pre_hooks for a in (x.self_attn for x in model.get_decoder().layers))


def test_generate_is_the_greedy_loop_over_forward() -> None:
    model, ids = tiny("llama"), context(T)
    cache = prefill(model, ids)
    compaction = choose(Recipe("random", 0.7, seed=5), T, heads_of(cache))
    prefix = compacted(identity_of(model, "tiny"), ids, cache, compaction)
    with CompactServing(model, prefix, model_name="tiny") as serving:
        tokens = serving.generate([NEW], max_new_tokens=10, do_sample=False)[0].tolist()
        live, expected, feed = serving.new_cache(), list(NEW), list(NEW)
        for _ in range(10):
            expected.append(int(serving.forward(feed, live).logits[0, -1].argmax()))
            feed = expected[-1:]
        other = context(7, seed=9)
        both = serving.generate([NEW, other], max_new_tokens=10, do_sample=False)
        alone = serving.generate([other], max_new_tokens=10, do_sample=False)
    assert tokens == expected
    assert both[0].tolist() == expected
    assert both[1].tolist() == alone[0].tolist()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_removed_positions_never_win_the_indexers_choice(attention: str) -> None:
    """More live rows than the indexer takes: over the whole cache with removed positions at minus infinity before the
    top-k, in every layer of a group, the same rows are chosen and the same logits come out."""
    model, ids = tiny("glm_moe_dsa", attention=attention, index_topk=12), context(T)
    cache = prefill(model, ids)
    kept = torch.randperm(T, generator=torch.Generator().manual_seed(2))[:30].sort().values
    layers = tuple(LayerSelection((kept,)) for _ in cache.layers)
    prefix = compacted(identity_of(model, "tiny"), ids, cache, Compaction(Recipe("kvzip", 0.5), T, layers))
    chosen: dict[str, list[torch.Tensor]] = {"compact": [], "whole": []}

    def watch(into: str) -> list[Any]:
        modules = [layer.self_attn.indexer for layer in model.get_decoder().layers]
        return [m.register_forward_hook(lambda _, __, out: chosen[into].append(out[0])) for m in modules if m]

    with CompactServing(model, prefix, model_name="tiny") as serving:
        hooks = watch("compact")
        got = torch.cat([serving.forward(p, c).logits for c in [serving.new_cache()] for p in (NEW[:4], NEW[4:])], 1)
        for hook in hooks:
            hook.remove()
    removed = torch.ones(T, dtype=torch.bool)
    removed[kept] = False

    def hide(_: Any, args: Any, kwargs: Any) -> Any:
        mask = kwargs["attention_mask"].clone()
        mask[..., torch.nonzero(removed)[:, 0]] = False if mask.dtype == torch.bool else float("-inf")
        return args, dict(kwargs, attention_mask=mask)

    hooks = [x.self_attn.register_forward_pre_hook(hide, with_kwargs=True) for x in model.get_decoder().layers]
    hooks += watch("whole")
    with torch.no_grad():
        parts = [
            model(torch.tensor([p]), use_cache=True, **{cache_argument(model): cache}).logits
            for p in (NEW[:4], NEW[4:])
        ]
    for hook in hooks:
        hook.remove()
    scale = float(got.abs().max())
    torch.testing.assert_close(got, torch.cat(parts, dim=1), rtol=0, atol=2e-5 * scale)
    positions = torch.cat([kept, torch.arange(T, T + len(NEW))])
    for compact, full in zip(chosen["compact"], chosen["whole"], strict=True):
        assert compact.shape[-1] == 12
        for mine, theirs in zip(compact, full, strict=True):
            assert set(positions[mine.long()].tolist()) == set(theirs.tolist())
            assert not bool(removed[[p for p in theirs.tolist() if p < T]].any())


def test_compact_rows_with_biases_are_beside_the_indexers_choice() -> None:
    """Then the indexer chooses among what came after: all compact rows and its choice are attended to."""
    model, ids = tiny("glm_moe_dsa", index_topk=4), context(T)
    cache = prefill(model, ids)
    layers = selection(model, cache, "fitted", torch.Generator().manual_seed(3))
    prefix = compacted(identity_of(model, "tiny"), ids, cache, Compaction(Recipe("am", 0.5), T, layers))
    seen: list[torch.Tensor] = []
    rows = max(len(layers[n].kept[0]) for n in (1, 2, 3))
    with CompactServing(model, prefix, model_name="tiny") as serving:
        indexer = model.get_decoder().layers[1].self_attn.indexer
        hook = indexer.register_forward_hook(lambda _, __, out: seen.append(out))
        serving.forward(NEW)
        hook.remove()
    last = set(seen[0][0, -1].tolist())
    assert set(range(rows)) <= last
    assert len([i for i in last if i >= rows]) == 4


def test_another_models_prefix_is_refused() -> None:
    model, other = tiny("llama"), tiny("llama", seed=1)
    prefix = identity_prefix(model, context(T))
    with pytest.raises(ArtefactError, match="compacted for model 'tiny'"):
        CompactServing(other, prefix, model_name="tiny")
    with pytest.raises(ArtefactError, match="other tokens"):
        prefix.check_tokens(context(T, seed=4))
    with pytest.raises(ConfigError, match="path"):
        CompactServing(model, prefix, model_name="./tiny")


def test_what_serving_refuses() -> None:
    model, ids = tiny("llama"), context(T)
    cache = prefill(model, ids)
    prefix = compacted(identity_of(model, "tiny"), ids, cache, choose(Recipe("recent", 0.5), T, heads_of(cache)))
    serving = CompactServing(model, prefix, model_name="tiny")
    with pytest.raises(SpecError, match="`with` block"):
        serving.forward(NEW)
    with serving:
        with pytest.raises(ConfigError, match="already serves"):
            CompactServing(model, prefix, model_name="tiny").__enter__()
        with pytest.raises(ConfigError, match="num_beams"):
            serving.generate([NEW], num_beams=2)
        with pytest.raises(ConfigError, match="at least one token"):
            serving.forward([])
        with pytest.raises(SpecError, match="new_cache"):  # a plain cache must not meet the hooks
            model(torch.tensor([NEW]))
    flex = tiny("llama", attention="flex_attention")
    with pytest.raises(ConfigError, match="flex_attention"):
        CompactServing(flex, prefix, model_name="tiny")


def test_a_prefix_cache_never_takes_compacted_rows(tmp_path: Path) -> None:
    """Its length is that of the context, but its rows are not: stored as plain KV it would poison the context."""
    model, ids = tiny("llama"), context(T)
    prefix = identity_prefix(model, ids)
    config = parse_config({"tiers": [{"type": "host", "capacity": "4MiB"}]})
    with (
        CompactServing(model, prefix, model_name="tiny") as serving,
        PrefixCache.open(model, config, model_name="tiny", page_tokens=16) as prefixes,
        pytest.raises(SpecError, match="compacted"),
    ):
        prefixes.offload(ids, serving.new_cache())


def test_layers_with_a_window_keep_their_rows() -> None:
    model, ids = tiny("gemma3"), context(T)
    cache = prefill(model, ids)
    compaction = keep_windows(choose(Recipe("random", 0.5), T, heads_of(cache)), cache)
    assert [len(layer.kept[0]) for layer in compaction.layers] == [23, 30, 23, 30]
    prefix = compacted(identity_of(model, "tiny"), ids, cache, compaction)
    with pytest.raises(SpecError, match="holds only the last 23"):
        compacted(identity_of(model, "tiny"), ids, cache, choose(Recipe("random", 0.5), T, heads_of(cache)))
    assert prefix.manifest.original_bytes == sum(2 * 2 * rows * 32 * 4 for rows in (23, 60, 23, 60))


def halved(model: Any, ids: list[int], seed: int = 5) -> CompactPrefix:
    cache = prefill(model, ids)
    compaction = keep_windows(choose(Recipe("random", 0.5, seed=seed), len(ids), heads_of(cache)), cache)
    return compacted(identity_of(model, "tiny"), ids, cache, compaction)


@pytest.mark.parametrize("name", ["llama", "gemma3", "glm_moe_dsa"])
def test_a_second_turn_goes_on_behind_the_first(name: str) -> None:
    """What its answer was, and more words, on the cache that the first turn left: as if all had been one turn."""
    model = tiny(name)
    greedy: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6}
    with CompactServing(model, halved(model, context(T)), model_name="tiny") as serving:
        cache = serving.new_cache()
        first = serving.generate([NEW], compact_cache=cache, **greedy)[0].tolist()
        assert cache.get_seq_length() == T + len(first) - 1
        more = [first[-1], *context(5, seed=8)]
        second = serving.generate([more], compact_cache=cache, **greedy)[0].tolist()
        whole = serving.generate([[*first[:-1], *more]], **greedy)[0].tolist()
    assert whole == [*first[:-1], *second]


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "glm_moe_dsa"])
def test_sequences_of_a_batch_may_be_padded(name: str) -> None:
    model, short = tiny(name), context(4, seed=9)
    padded, mask = [[0] * 3 + short, NEW], [[0] * 3 + [1] * 4, [1] * 7]
    greedy: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6}
    plain = prefill(model, context(T))
    with CompactServing(model, halved(model, context(T)), model_name="tiny") as serving:
        both = serving.generate(padded, attention_mask=mask, **greedy)[:, len(NEW) :]
        alone = [serving.generate([ids], **greedy)[0, len(ids) :].tolist() for ids in (short, NEW)]
        logits = serving.forward(padded, attention_mask=mask).logits[:, -1]
        expected = torch.cat([serving.forward([ids]).logits[:, -1] for ids in (short, NEW)])
        with pytest.raises(ConfigError, match="without the context's"):
            serving.forward(padded, attention_mask=torch.ones(2, T + 7))
        with pytest.raises(ConfigError, match=r"not one of new_cache\(2\)"):
            serving.generate(padded, compact_cache=serving.new_cache())
        with pytest.raises(ConfigError, match=r"not one of new_cache\(1\)"):
            serving.forward([NEW], plain)
    assert both.tolist() == alone
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


def test_what_generate_would_need_the_contexts_tokens_for_is_refused() -> None:
    model = tiny("llama")
    beams, plain = transformers.GenerationConfig(num_beams=2, max_new_tokens=2), prefill(model, NEW)
    with CompactServing(model, halved(model, context(T)), model_name="tiny") as serving:
        for option, value in (
            ("generation_config", beams),
            ("num_return_sequences", 2),
            ("prompt_lookup_num_tokens", 2),
            ("cache_implementation", "static"),
            ("past_key_values", plain),
            ("cache", plain),
        ):
            told = "num_beams" if option == "generation_config" else option
            with pytest.raises(ConfigError, match=f"option '{told}'"):
                serving.generate([NEW], **{option: value})
    model = tiny("gemma3")
    with CompactServing(model, halved(model, context(T)), model_name="tiny") as serving:
        assert serving.generate([NEW, NEW], attention_mask=[[1] * 7] * 2, max_new_tokens=1).shape == (2, 8)
        with pytest.raises(ConfigError, match="layers with a window"):
            serving.generate([NEW, NEW], attention_mask=[[1] * 7, [0, *[1] * 6]], max_new_tokens=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "glm_moe_dsa"])
def test_models_in_16_bits(name: str, dtype: torch.dtype) -> None:
    """With nothing removed the model itself; with something removed, close to the same rows in float32."""
    model = tiny(name).to(dtype)
    ids = context(T)
    with CompactServing(model, identity_prefix(model, ids), model_name="tiny") as serving:
        logits = serving.forward(NEW).logits
    with torch.no_grad():
        plain = model(torch.tensor([NEW]), use_cache=True, **{cache_argument(model): prefill(model, ids)}).logits
    assert torch.equal(logits, plain)
    prefix = CompactPrefix.from_bytes(halved(model, ids).to_bytes())
    with CompactServing(model, prefix, model_name="tiny") as serving:
        assert bool(torch.isfinite(serving.forward(NEW).logits).all())
    with pytest.raises(ArtefactError, match=f"another dtype, load it in that of the rows, {prefix.manifest.dtype}"):
        CompactServing(model.to(torch.float32), prefix, model_name="tiny")


def test_layers_with_a_window_keep_all_of_a_shorter_context() -> None:
    model, ids = tiny("gemma3"), context(10)
    prefix = halved(model, ids)
    assert [len(layer.kept[0]) for layer in prefix.layers] == [10, 5, 10, 5]
    with CompactServing(model, prefix, model_name="tiny") as serving:
        assert serving.generate([context(30, seed=2)], max_new_tokens=3, do_sample=False).shape == (1, 33)
