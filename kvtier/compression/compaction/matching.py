"""Attention Matching (arXiv 2602.16284): a block of cached keys shrinks to some of them, with biases that keep the
block's attention mass and fitted values that keep its output.

One KV head of a dense model and one layer of MLA are the same problem here: H heads share keys and values. A dense
group is one head, the queries of all its query heads in one list; MLA has every head apart, with biases of its own and
latent values that serve all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvtier.compression.compaction.attention_block import (
    AttentionBlock,
    MassRows,
    MeasuredBlock,
    block_errors,
    mass_system,
    value_system,
)
from kvtier.compression.compaction.mass import Box, fit_mass
from kvtier.compression.compaction.matching_keys import (
    HELD_BYTES,
    Pursuit,
    highest_attention,
    matching_pursuit,
)
from kvtier.compression.compaction.values import RIDGE, fit_values
from kvtier.errors import ConfigError

SELECTORS = ("hak", "omp", "indexer_hak", "indexer_omp")
HAK_BOX = Box(math.exp(-3), math.exp(3))
OMP_BOX = Box(1e-12, math.exp(7))
MAX_QUERIES = 50_000
"""Queries of one head's fit (dense: of a whole group)."""


@dataclass(frozen=True, slots=True)
class MatchingOptions:
    """How blocks are fitted.

    selector: ``hak``, ``omp``, or one of these on the index scores of DeepSeek Sparse Attention (``indexer_hak``,
    ``indexer_omp``). pursuit: steps of OMP; None: by the budget. bias, values: whether they are fitted; without both
    the selected rows are merely kept. ridge: of the value fit. held_bytes: Gram matrices that may be kept at a time;
    beyond, queries are read again. max_queries: of more, an even subset is taken.
    """

    selector: str = "omp"
    pursuit: Pursuit | None = None
    bias: bool = True
    values: bool = True
    ridge: float = RIDGE
    held_bytes: int = HELD_BYTES
    max_queries: int = MAX_QUERIES

    def __post_init__(self) -> None:
        if self.selector not in SELECTORS:
            raise ConfigError(f"selector = {self.selector!r}: Attention Matching knows {', '.join(SELECTORS)}")
        if self.ridge < 0:
            raise ConfigError(f"ridge = {self.ridge}: give 0 or more")
        if self.max_queries < 1:
            raise ConfigError(f"max_queries = {self.max_queries}: give 1 or more")

    @property
    def pursues(self) -> bool:
        return self.selector.endswith("omp")

    @property
    def by_index(self) -> bool:
        return self.selector.startswith("indexer_")

    @property
    def box(self) -> Box:
        """Bounds of the weights, whose logarithms are the biases."""
        return OMP_BOX if self.pursues else HAK_BOX


@dataclass(frozen=True, slots=True)
class BlockFit:
    """A compacted block. kept: int64 ``[B]`` ascending. bias: fp32 ``[H, B]``. values: fp32 ``[B, value_dim]``, or
    None for the original rows. mass_error, output_error: on the queries of the fit, see `BlockErrors`. select_s, fit_s:
    seconds of selecting keys, and of everything after it."""

    kept: torch.Tensor
    bias: torch.Tensor
    values: torch.Tensor | None
    mass_error: float
    output_error: float
    select_s: float
    fit_s: float


def thinned(queries: int, most: int) -> torch.Tensor:
    """int64: `most` of `queries` rows at even distances, or all."""
    if queries <= most:
        return torch.arange(queries)
    return (torch.arange(most, dtype=torch.int64) * queries) // most


def select_keys(
    source: MassRows,
    budget: int,
    options: MatchingOptions,
    protected: torch.Tensor | None = None,
    *,
    on_keys: Callable[[int], None] | None = None,
) -> torch.Tensor:
    """int64 ``[budget]`` ascending: the keys of `source` that stay, `protected` ones first of all."""
    if not options.pursues:
        return highest_attention(source, budget, protected)
    return matching_pursuit(
        source, budget, options.box, options.pursuit, protected, held_bytes=options.held_bytes, on_keys=on_keys
    )


def fit_block(
    block: AttentionBlock,
    budget: int,
    options: MatchingOptions,
    *,
    protected: torch.Tensor | None = None,
    source: MassRows | None = None,
    kept: torch.Tensor | None = None,
    label: str = "block",
    on_keys: Callable[[int], None] | None = None,
) -> BlockFit:
    """`block` as `budget` of its keys. protected: positions that stay whatever they score. source: what keys are
    selected by instead of the block's attention (index scores). kept: the selection, where it was made before (for
    several layers at once). With a budget of all keys nothing changes.

    FitError, naming `label` (a layer and a head), for attention that is not finite."""
    if not 1 <= budget <= block.tokens:
        raise ConfigError(f"{label}: a budget of {budget} of {block.tokens} keys; give 1 to {block.tokens}")
    device = block.keys.device
    if kept is None and budget == block.tokens:
        kept = torch.arange(block.tokens, device=device)
    if kept is not None and len(kept) == block.tokens:
        return BlockFit(kept, torch.zeros(block.heads, len(kept), device=device), None, 0.0, 0.0, 0.0, 0.0)
    if kept is None and source is None and options.by_index:
        raise ConfigError(f"{label}: selector = {options.selector!r} needs index scores to choose by")
    start = time.perf_counter()
    measured = MeasuredBlock(block)
    if kept is None:
        kept = select_keys(measured if source is None else source, budget, options, protected, on_keys=on_keys)
    selected = time.perf_counter()
    bias = torch.zeros(block.heads, len(kept), device=device)
    if options.bias:
        system = mass_system(measured, kept)
        bias = fit_mass(system.gram, system.rhs, system.norm, options.box, label=label).weights.log().float()
    values = None
    if options.values:
        normal = value_system(block, kept, bias)
        values = fit_values(normal.gram, normal.rhs, block.values[kept], ridge=options.ridge, label=label)
    errors = block_errors(measured, kept, bias, values)
    done = time.perf_counter()
    return BlockFit(kept, bias, values, errors.mass, errors.output, selected - start, done - selected)
