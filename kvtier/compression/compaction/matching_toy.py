"""A small problem on which forms of Attention Matching are told apart: 512 keys in 16 clusters become 51.

Keys and queries scatter around the same centres, values are noise. Evicting by attention keeps several keys of one
cluster and none of another, and averages too few values; fits repair the one, pursuit the other."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from kvtier.compression.compaction.attention_block import AttentionBlock
from kvtier.compression.compaction.matching import MatchingOptions, fit_block
from kvtier.compression.compaction.matching_keys import Pursuit

TOKENS, KEPT, QUERIES, DIM, CLUSTERS, SPREAD = 512, 51, 1024, 64, 16, 0.6

FORMS = {
    "evict": MatchingOptions("hak", bias=False, values=False),
    "values only": MatchingOptions("hak", bias=False),
    "hak": MatchingOptions("hak"),
    "omp k1": MatchingOptions("omp", Pursuit(1, 1)),
    "omp k2 i2": MatchingOptions("omp", Pursuit(2, 2)),
    "omp k4 i2": MatchingOptions("omp", Pursuit(4, 2)),
}


@dataclass(frozen=True, slots=True)
class ToyRow:
    """Means over the draws. Errors are relative; mass_error is that of the weights that the form has."""

    output_error: float
    mass_error: float
    seconds: float


def toy_block(seed: int) -> AttentionBlock:
    """fp32, one head."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def members(count: int) -> torch.Tensor:
        return torch.randint(CLUSTERS, (count,), generator=generator)

    centres = normal(CLUSTERS, DIM)
    key_of, query_of = members(TOKENS), members(QUERIES)
    keys = centres[key_of] + SPREAD * normal(TOKENS, DIM)
    queries = centres[query_of] + SPREAD * normal(QUERIES, DIM)
    values = normal(TOKENS, DIM)
    return AttentionBlock((queries[None] / DIM**0.5).float(), keys.float(), values.float())


def toy_rows(seeds: int = 4) -> dict[str, ToyRow]:
    """Every form's row, by its name."""
    rows = {}
    for name, options in FORMS.items():
        output, mass, start = 0.0, 0.0, time.perf_counter()
        for seed in range(seeds):
            fit = fit_block(toy_block(seed), KEPT, options, label=f"toy {seed}")
            output += fit.output_error / seeds
            mass += fit.mass_error / seeds
        rows[name] = ToyRow(output, mass, (time.perf_counter() - start) / seeds)
    return rows


def main() -> None:
    """Print the rows: ``python -m kvtier.compression.compaction.matching_toy``."""
    print(f"{TOKENS} keys to {KEPT}, {QUERIES} queries, mean of 4 draws\n{'':12} output   mass  seconds")
    for name, row in toy_rows().items():
        print(f"{name:12} {row.output_error:6.3f} {row.mass_error:6.3f} {row.seconds:8.3f}")


if __name__ == "__main__":
    main()
