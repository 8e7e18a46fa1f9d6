"""Attention over one block of a context, read in chunks of queries: what Attention Matching fits and measures.

Words: T keys of the block; n queries; H heads that share the keys (a KV head's whole group concatenated into one, or
every head of MLA). For a query, ``z`` are its scaled logits, ``E = exp(z - rowmax)`` with the maximum over all T keys,
``m`` the sum of E over the keys that the original attention saw, ``a`` the original attention probabilities and
``Y = a V`` its output. Nothing of the size H x n x T exists at any time: every pass makes E anew, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from kvtier.errors import ConfigError

WORKING_BYTES = 64 << 20
"""Temporary tensors of a pass."""
_BYTES_PER_CELL = 32
"""Of one (query, key) pair in a pass: logits, weights and probabilities in fp32 or fp64, and their copies."""


class MassRows(Protocol):
    """Rows ``E`` (one per head and query) and their sums ``m``, which a few columns of E shall reproduce."""

    @property
    def heads(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def rows(self, columns: torch.Tensor | None = None) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """``(head, E, m)`` in chunks, in the same order each time: fp64 ``[chunk, columns]`` and ``[chunk]``; columns
        None: all T."""
        ...

    def scores(self) -> torch.Tensor:
        """fp64 ``[T]``: root mean square of the normalised rows (a) over heads and queries."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Inputs of one block.

    queries: ``[H, n, dim]``, multiplied by the softmax scale, rotated; keys: ``[T, dim]``, rotated, as cached; values:
    ``[T, value_dim]``. fp32 or fp64. visible: bool ``[n, T]``: keys that the original attention of a query saw, the
    same for every head; None: all. softcap: logits are ``softcap * tanh(z / softcap)``; 0: as they are.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    visible: torch.Tensor | None = None
    softcap: float = 0.0
    working_bytes: int = WORKING_BYTES

    def __post_init__(self) -> None:
        (_, n, dim), tokens = self.queries.shape, self.keys.shape[0]
        if self.keys.shape != (tokens, dim) or self.values.shape[0] != tokens or not tokens or not n:
            raise ConfigError(
                f"queries {tuple(self.queries.shape)}, keys {tuple(self.keys.shape)} and values "
                f"{tuple(self.values.shape)} do not belong together"
            )
        if self.visible is not None and self.visible.shape != (n, tokens):
            raise ConfigError(f"visible is {tuple(self.visible.shape)}, and should be {(n, tokens)}")
        for name in ("queries", "keys", "values"):
            if getattr(self, name).dtype not in (torch.float32, torch.float64):
                raise ConfigError(f"{name} are {getattr(self, name).dtype}; convert them to float32")

    @property
    def heads(self) -> int:
        return int(self.queries.shape[0])

    @property
    def tokens(self) -> int:
        return int(self.keys.shape[0])

    def chunks(self) -> Iterator[tuple[int, slice]]:
        """Head and query rows, head by head."""
        n = int(self.queries.shape[1])
        rows = max(1, min(n, self.working_bytes // (_BYTES_PER_CELL * self.tokens)))
        for head in range(self.heads):
            for first in range(0, n, rows):
                yield head, slice(first, min(n, first + rows))

    def logits(self, head: int, rows: slice, columns: torch.Tensor | None = None) -> torch.Tensor:
        """``[rows, columns]``."""
        keys = self.keys if columns is None else self.keys[columns]
        z = self.queries[head, rows] @ keys.T
        return z if not self.softcap else self.softcap * torch.tanh(z / self.softcap)

    def seen(self, rows: slice, z: torch.Tensor) -> torch.Tensor:
        """Logits of the original attention: minus infinity where it did not look."""
        return z if self.visible is None else z.masked_fill(~self.visible[rows], -torch.inf)


def probabilities(z: torch.Tensor) -> torch.Tensor:
    """Softmax of the rows; zeros for a row that is minus infinity throughout."""
    return torch.softmax(z, dim=-1).nan_to_num_(0.0) if bool(torch.isneginf(z).any()) else torch.softmax(z, dim=-1)


class MeasuredBlock:
    """A block after its first pass: the maximum and the mass of every row, and the scores of its keys."""

    def __init__(self, block: AttentionBlock) -> None:
        self.block = block
        shape, device = block.queries.shape[:2], block.keys.device
        self.row_max = torch.empty(shape, dtype=torch.float64, device=device)
        self.mass = torch.empty(shape, dtype=torch.float64, device=device)
        squares = torch.zeros(block.tokens, dtype=torch.float64, device=device)
        for head, rows in block.chunks():
            z = block.logits(head, rows)
            top = z.amax(dim=1)
            seen = block.seen(rows, z)
            self.row_max[head, rows] = top
            self.mass[head, rows] = torch.exp(seen.double() - top[:, None].double()).sum(1)
            squares += probabilities(seen).double().square_().sum(0)
        self._scores = (squares / (shape[0] * shape[1])).sqrt_()

    @property
    def heads(self) -> int:
        return self.block.heads

    @property
    def tokens(self) -> int:
        return self.block.tokens

    @property
    def device(self) -> torch.device:
        return self.block.keys.device

    def scores(self) -> torch.Tensor:
        return self._scores

    def rows(self, columns: torch.Tensor | None = None) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        for head, rows in self.block.chunks():
            z = self.block.logits(head, rows, columns).double()
            yield head, torch.exp(z.sub_(self.row_max[head, rows, None])), self.mass[head, rows]


@dataclass(frozen=True, slots=True)
class MassSystem:
    """Normal equations of the mass fit on chosen columns: gram fp64 ``[H, B, B]``, rhs ``[H, B]``, norm ``[H]``."""

    gram: torch.Tensor
    rhs: torch.Tensor
    norm: torch.Tensor


def mass_system(source: MassRows, columns: torch.Tensor | None = None) -> MassSystem:
    """``E_S^T E_S``, ``E_S^T m`` and ``m^T m`` of every head. columns None: of all T keys."""
    size, device = (source.tokens if columns is None else len(columns)), source.device
    gram = torch.zeros(source.heads, size, size, dtype=torch.float64, device=device)
    rhs = torch.zeros(source.heads, size, dtype=torch.float64, device=device)
    norm = torch.zeros(source.heads, dtype=torch.float64, device=device)
    for head, e, m in source.rows(columns):
        gram[head].addmm_(e.T, e)
        rhs[head] += e.T @ m
        norm[head] += m @ m
    return MassSystem(gram, rhs, norm)


def correlations(source: MassRows, columns: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """fp64 ``[T]``: ``E^T (m - E_S w)``, summed over heads: how much mass each key would still bring. weights:
    ``[H, columns]``."""
    total = torch.zeros(source.tokens, dtype=torch.float64, device=source.device)
    for head, e, m in source.rows():
        total += e.T @ (m - e[:, columns] @ weights[head])
    return total


@dataclass(frozen=True, slots=True)
class ValueSystem:
    """Normal equations of the value fit, all heads together: gram fp64 ``[B, B]``, rhs ``[B, value_dim]``."""

    gram: torch.Tensor
    rhs: torch.Tensor


def compact_probabilities(
    block: AttentionBlock, head: int, rows: slice, columns: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """``softmax(z_S + bias)`` fp64 ``[rows, B]``: attention over the compacted block. bias: ``[H, B]``."""
    return torch.softmax(block.logits(head, rows, columns).double() + bias[head].double(), dim=-1)


def value_system(block: AttentionBlock, columns: torch.Tensor, bias: torch.Tensor) -> ValueSystem:
    """``X^T X`` and ``X^T Y`` over every head and query, where the original output Y is made chunk by chunk."""
    size, device = len(columns), block.keys.device
    gram = torch.zeros(size, size, dtype=torch.float64, device=device)
    rhs = torch.zeros(size, block.values.shape[1], dtype=torch.float64, device=device)
    for head, rows in block.chunks():
        x = compact_probabilities(block, head, rows, columns, bias)
        y = probabilities(block.seen(rows, block.logits(head, rows))) @ block.values
        if block.visible is not None:  # a query that saw nothing of the block has no output to match
            x = x * block.visible[rows].any(dim=1)[:, None]
        gram.addmm_(x.T, x)
        rhs.addmm_(x.T, y.double())
    return ValueSystem(gram, rhs)


@dataclass(frozen=True, slots=True)
class BlockErrors:
    """Relative errors of a compacted block over all heads and queries: ``|X C - Y| / |Y|`` and ``|E_S w - m| / |m|``,
    Frobenius norms; NaN where the original is zero throughout."""

    output: float
    mass: float


def block_errors(
    measured: MeasuredBlock, columns: torch.Tensor, bias: torch.Tensor, values: torch.Tensor | None = None
) -> BlockErrors:
    """Errors on the block's queries of keeping `columns` with `bias` (``[H, B]``) and `values` (``[B, value_dim]``;
    None: the original ones). A block of other queries gives the held-out error."""
    block = measured.block
    kept = (block.values[columns] if values is None else values).double()
    sums = torch.zeros(4, dtype=torch.float64, device=block.keys.device)
    for head, rows in block.chunks():
        z = block.logits(head, rows)
        y = (probabilities(block.seen(rows, z)) @ block.values).double()
        chosen = z[:, columns].double()
        x = torch.softmax(chosen + bias[head].double(), dim=-1)
        off = x @ kept - y
        if block.visible is not None:
            off = off * block.visible[rows].any(dim=1)[:, None]
        m = measured.mass[head, rows]
        carried = torch.exp(chosen - measured.row_max[head, rows, None] + bias[head].double()).sum(1)
        sums += torch.stack([off.square().sum(), y.square().sum(), (carried - m).square().sum(), m.square().sum()])
    output, norm, mass, total = sums.tolist()
    return BlockErrors((output / norm) ** 0.5 if norm else torch.nan, (mass / total) ** 0.5 if total else torch.nan)
