"""The sparse forms on a tiny GlmMoeDsa with random weights: coverage of the selectors, and errors of the fits.

Random weights say what the arithmetic does, not what a trained model would answer."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

SEEDS = 4
FIGURES = ("output_error", "mass_error", "held_out_output_error", "held_out_mass_error", "seconds")
TOKENS = 512
SELECTORS = ("raw_max", "normalized_max", "log_coverage")
SELECTOR_RATIO = 0.3
RATIOS = (0.8, 0.9, 0.95)
FITS: dict[str, tuple[str, bool]] = {
    "evict": ("hak", False),
    "hak": ("hak", True),
    "omp": ("omp", True),
    "indexer_hak": ("indexer_hak", True),
    "indexer_omp": ("indexer_omp", True),
}
"""By name the selector, and whether biases and values are fitted; ``evict`` keeps the rows as they are."""


def tiny_model(seed: int) -> Any:
    """8 layers, 8 heads, latents of 64 + 16, indexers in layers 0, 1, 2 and 6, each other layer sharing the last."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.GlmMoeDsaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=48,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        index_topk=256,
        index_n_heads=4,
        index_head_dim=32,
        indexer_types=["full", "full", "full", "shared", "shared", "shared", "full", "shared"],
        mlp_layer_types=["dense"] * 3 + ["sparse"] * 5,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # as initialised, attention would be nearly uniform
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                parameter.mul_(4.0)
    return model.eval()


def _context(seed: int) -> list[int]:
    """Token ids with the repetitions of a text: drawn with unequal weights."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    weights = 1.0 / torch.arange(1, 511, dtype=torch.float64)
    return [int(t) + 2 for t in torch.multinomial(weights, TOKENS, replacement=True, generator=generator)]


def _prompts() -> Any:
    from kvtier.compression.compaction.kvzip import RepeatPrompts

    return RepeatPrompts((3, 4, 5, 6), (3, 4, 5, 7), (8, 9))


def coverage(seed: int) -> dict[str, dict[str, float]]:
    """Per selector at 30 % removed: coverage over layers and heads, and seconds of choosing, for one seed."""
    import torch

    from kvtier.compression.compaction.recipe import Recipe
    from kvtier.connectors.transformers import kvzip
    from kvtier.connectors.transformers.attention import family_of

    family = family_of(tiny_model(seed))
    with torch.no_grad():
        scores = kvzip.score_sparse(family, _context(seed), _prompts())
    return {
        name: dict(kvzip.select_groups(family, scores, Recipe("kvzip", SELECTOR_RATIO, name, seed), 0).figures)
        for name in SELECTORS
    }


def coverage_table(found: Sequence[Mapping[str, Mapping[str, float]]]) -> list[dict[str, Any]]:
    """Means of `coverage` over seeds, and the spread of each (standard deviation)."""
    return [
        {
            "selector": name,
            **_mean_and_spread([one[name]["mean_coverage"] for one in found], "mean_coverage"),
            **_mean_and_spread([one[name]["min_coverage"] for one in found], "min_coverage"),
            **_mean_and_spread([one[name]["select_s"] for one in found], "seconds"),
        }
        for name in (SELECTORS if found else ())
    ]


def errors(seed: int) -> list[dict[str, Any]]:
    """Per way of fitting and ratio, for one seed: relative errors of attention mass and output, on the queries that
    were fitted and on others."""
    from kvtier.compression.compaction.matching import MatchingOptions
    from kvtier.compression.compaction.recipe import Recipe
    from kvtier.connectors.transformers.attention import family_of
    from kvtier.connectors.transformers.compaction import prefill
    from kvtier.connectors.transformers.fitting_queries import FittingSequence, repeat_sequences
    from kvtier.connectors.transformers.matching import MatchingPlan, match_context

    family = family_of(tiny_model(seed))
    ids = _context(seed)
    cache = prefill(family.model, ids)
    sequences = repeat_sequences(ids, _prompts())
    held_out = [FittingSequence(tuple(_context(seed + 1000)[:128]))]
    rows = []
    for name, (selector, fitted) in FITS.items():
        plan = MatchingPlan(MatchingOptions(selector, bias=fitted, values=fitted))
        for ratio in RATIOS:
            recipe = Recipe("am", ratio, selector, seed, "repeat")
            answer = match_context(family, cache, ids, recipe, sequences, plan=plan, held_out=held_out)
            rows.append({"method": name, "ratio": ratio, **{n: answer.figures.get(n) for n in FIGURES}})
    return rows


def error_table(found: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Means of `errors` over seeds, and the spread of each."""
    groups: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for row in (row for rows in found for row in rows):
        groups.setdefault((str(row["method"]), float(row["ratio"])), []).append(row)
    return [
        {"method": name, "ratio": ratio}
        | {k: v for n in FIGURES for k, v in _mean_and_spread([r[n] for r in rows if r[n] is not None], n).items()}
        for (name, ratio), rows in groups.items()
    ]


def _mean_and_spread(values: list[float], name: str) -> dict[str, float]:
    if not values:
        return {}
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return {name: round(statistics.fmean(values), 6), f"{name}_spread": round(spread, 6)}
