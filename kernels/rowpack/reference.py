"""Row packing, one row at a time: the oracle of the fast version. Ascending destinations that never pass their sources
make moving in place safe."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier.kernels.rowpack.sequences import Packed, PagedSequence, check, freed_pages


def pack(pools: Sequence[Sequence[torch.Tensor]], sequences: Sequence[PagedSequence]) -> list[Packed]:
    """Pack every sequence in place. ``pools[group]`` holds the tensors of one group (K and V of a layer, say), each
    ``[pages, page_tokens, heads, dim]``, any strides. Sequences share no page. Raises ValueError before anything
    moves."""
    groups = [list(group) for group in pools]
    for sequence in sequences:
        check(groups, sequence)
    page_tokens, heads = groups[0][0].shape[1:3]
    for sequence in sequences:
        sources = sequence.sources().expand(len(groups), heads, -1).tolist()
        pages = sequence.pages.tolist()
        for group, tensors in enumerate(groups):
            for head in range(heads):
                for n, source in enumerate(sources[group][head]):
                    target = sequence.first_row + n
                    for pool in tensors:
                        row = pool[pages[source // page_tokens], source % page_tokens, head].clone()
                        pool[pages[target // page_tokens], target % page_tokens, head] = row
    return [freed_pages(sequence, page_tokens) for sequence in sequences]
