"""What the selectors for one set per group keep, and how long they take: on a tiny random model with sparse attention,
and on the size of a real one (256 rows, 29 807 positions)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers

from kvtier.compression.compaction import selection
from kvtier.compression.compaction.kvzip import SINK_TOKENS, RepeatPrompts
from kvtier.compression.compaction.prefix import Progress, Recipe, budget_tokens
from kvtier.connectors.transformers.attention import family_of
from kvtier.connectors.transformers.kvzip import score_sparse, select_groups

ROWS, POSITIONS = 256, 29_807
RATIO = 0.3
VOCABULARY = 256


@dataclass(frozen=True, slots=True)
class SelectorFigures:
    """One selector: mean and smallest coverage over all (layer, head) rows, and the time of its choice, in seconds,
    without that of the scores."""

    selector: str
    mean_coverage: float
    min_coverage: float
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_selectors(
    token_ids: Sequence[int], *, ratio: float = RATIO, seed: int = 0, progress: Progress | None = None
) -> list[SelectorFigures]:
    """The selectors on the context `token_ids` (below `VOCABULARY`, bytes say) of `tiny_sparse_model`."""
    family = family_of(tiny_sparse_model(seed))
    newline = (10,)
    scores = score_sparse(family, token_ids, RepeatPrompts(newline, newline, newline), progress=progress)
    found = []
    for selector in selection.GROUP_SELECTORS:
        figures = select_groups(family, scores, Recipe("kvzip", ratio, selector, seed), 0).figures
        found.append(SelectorFigures(selector, figures["mean_coverage"], figures["min_coverage"], figures["select_s"]))
    return found


def measure_selection(
    rows: int = ROWS,
    positions: int = POSITIONS,
    *,
    ratio: float = RATIO,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[SelectorFigures]:
    """The selectors on one group of `rows` made-up rows: largest probabilities that scatter over some powers of ten, as
    those of models do, a third of that in common to all rows."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(positions, generator=generator)
    own = torch.randn(rows, positions, generator=generator)
    scores = torch.sigmoid(common + 1.5 * own - 5)
    p = selection.shares_of(scores)
    budget, found = budget_tokens(positions, ratio), []
    for selector in selection.GROUP_SELECTORS:

        def chosen(count: int) -> None:
            if progress is not None:
                progress(count, budget - SINK_TOKENS, "choosing positions")

        started = time.perf_counter()
        kept = selection.group(selector, scores, budget, SINK_TOKENS, chosen)
        seconds = time.perf_counter() - started
        total = selection.Coverage.of(selection.covered(p, kept))
        found.append(SelectorFigures(selector, total.mean, total.least, seconds))
    return found


def tiny_sparse_model(seed: int = 0) -> Any:
    """A random GlmMoeDsa of six layers in three index groups, two of one layer and one of four; its attention is far
    from even."""
    config = transformers.GlmMoeDsaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=8, q_lora_rank=64, kv_lora_rank=64, qk_rope_head_dim=16,
        qk_nope_head_dim=32, v_head_dim=32, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=3, index_topk=256, index_head_dim=32, index_n_heads=8, initializer_range=0.15,
        indexer_types=["full", "full", "full", "shared", "shared", "shared"], max_position_embeddings=8192,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.GlmMoeDsaForCausalLM(config).eval()
