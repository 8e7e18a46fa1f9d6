"""Row packing with one gather and one scatter per pool tensor and uniform batch of sequences. Any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier.kernels.rowpack.sequences import Packed, PagedSequence, check, freed_pages


def pack(pools: Sequence[Sequence[torch.Tensor]], sequences: Sequence[PagedSequence]) -> list[Packed]:
    """As ``reference.pack``, with the same bytes as result. Sequences whose kept sets have one shape move together."""
    groups = [list(group) for group in pools]
    for sequence in sequences:
        check(groups, sequence)
    batches: dict[tuple[int, int, int], list[PagedSequence]] = {}
    for sequence in sequences:
        shape = sequence.kept.shape
        key = (int(shape[0]), int(shape[1]), int(shape[2]) + sequence.tail_rows)
        batches.setdefault(key, []).append(sequence)
    for (_, _, moved), batch in batches.items():
        if moved:
            _pack_batch(groups, batch)
    page_tokens = int(groups[0][0].shape[1])
    return [freed_pages(sequence, page_tokens) for sequence in sequences]


def _pack_batch(pools: list[list[torch.Tensor]], batch: list[PagedSequence]) -> None:
    page_tokens, heads = pools[0][0].shape[1:3]
    device = pools[0][0].device
    sources = torch.stack([s.sources().to(device) for s in batch])  # [sequences, groups or 1, heads or 1, moved]
    first = torch.tensor([s.first_row for s in batch], device=device)
    targets = first[:, None] + torch.arange(sources.shape[-1], device=device)
    if device.type == "cpu":
        # Rows in front that stay where they are need no copy; on an accelerator, looking would wait for it.
        moves = (sources != targets[:, None, None]).flatten(0, 2).any(0).nonzero()
        skip = int(moves[0]) if len(moves) else sources.shape[-1]
        sources, targets = sources[..., skip:], targets[:, skip:]
        if not sources.shape[-1]:
            return
    tables = torch.nn.utils.rnn.pad_sequence([s.pages.to(device) for s in batch], batch_first=True)
    sequence = torch.arange(len(batch), device=device)[:, None, None]
    source_pages = tables[sequence[..., None], sources // page_tokens]
    source_slots = sources % page_tokens
    target_pages = tables[sequence[..., 0], targets // page_tokens]
    target_slots = targets % page_tokens
    per_head = sources.shape[2] > 1
    head = torch.arange(int(heads), device=device)[:, None]
    for group, tensors in enumerate(pools):
        g = group if sources.shape[1] > 1 else 0
        for pool in tensors:
            if per_head:
                rows = pool[source_pages[:, g], source_slots[:, g], head]
                pool[target_pages[:, None], target_slots[:, None], head] = rows
            else:
                pool[target_pages, target_slots] = pool[source_pages[:, g, 0], source_slots[:, g, 0]]
