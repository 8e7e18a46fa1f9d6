"""What is packed: sequences over a paged pool, and the rows of each that stay."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PagedSequence:
    """One sequence and the rows of it that stay.

    pages: int64 ``[n]``, its page table; ordinal i lies in ``pages[i // page_tokens]``. rows: rows in use, tail
    included. first_row: rows before it do not move. kept: int64 ``[groups or 1, heads or 1, k]``, strictly ascending,
    relative to `first_row`; 1 stands for all. tail_rows: that many last rows move behind the kept ones as they are.
    """

    pages: torch.Tensor
    rows: int
    first_row: int
    kept: torch.Tensor
    tail_rows: int = 0

    @property
    def packed_rows(self) -> int:
        return self.first_row + int(self.kept.shape[-1]) + self.tail_rows

    def sources(self) -> torch.Tensor:
        """int64 ``[groups or 1, heads or 1, k + tail_rows]``: the row that goes to ``first_row + i``."""
        kept = self.kept + self.first_row
        if self.tail_rows == 0:
            return kept
        tail = torch.arange(self.rows - self.tail_rows, self.rows, device=kept.device)
        return torch.cat([kept, tail.expand(*kept.shape[:2], -1)], dim=-1)


@dataclass(frozen=True, slots=True)
class Packed:
    """rows: rows in use now. freed_pages: int64, pages of the table that hold none of them any more, in table order.
    On an accelerator the moves are queued on the current stream: reuse the pages on it, or after it."""

    rows: int
    freed_pages: torch.Tensor


def freed_pages(sequence: PagedSequence, page_tokens: int) -> Packed:
    rows = sequence.packed_rows
    return Packed(rows, sequence.pages[-(-rows // page_tokens) :])


def check(pools: list[list[torch.Tensor]], sequence: PagedSequence) -> None:
    """Raise ValueError where `sequence` does not fit `pools`. Values are read only on the CPU: reading an accelerator's
    would wait for it."""
    page_tokens, heads = pools[0][0].shape[1:3]
    kept = sequence.kept
    if kept.ndim != 3 or kept.dtype != torch.int64:
        raise ValueError(f"kept must be int64 [groups, heads, k], got {kept.dtype} {tuple(kept.shape)}")
    if kept.shape[0] not in (1, len(pools)) or kept.shape[1] not in (1, heads):
        raise ValueError(f"kept {tuple(kept.shape)} does not fit {len(pools)} groups of {heads} heads")
    evictable = sequence.rows - sequence.first_row - sequence.tail_rows
    if sequence.first_row < 0 or sequence.tail_rows < 0 or evictable < 0 or kept.shape[2] > evictable:
        raise ValueError(
            f"{kept.shape[2]} kept of {sequence.rows} rows, {sequence.first_row} before and {sequence.tail_rows} behind"
        )
    if sequence.rows > len(sequence.pages) * page_tokens:
        raise ValueError(f"{sequence.rows} rows do not fit {len(sequence.pages)} pages of {page_tokens}")
    if kept.device.type == "cpu" and kept.shape[2]:
        if int(kept.min()) < 0 or int(kept.max()) >= evictable:
            raise ValueError(f"kept ordinals must lie in [0, {evictable})")
        if bool((kept[..., 1:] <= kept[..., :-1]).any()):
            raise ValueError("kept ordinals must be strictly ascending")
