"""Which rank of an engine this is, and the reductions over all ranks that must decide alike."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
import torch.distributed as dist

_SECRET_BYTES = 16


@dataclass(frozen=True, slots=True)
class Place:
    """A rank among those of its engine: tensor-parallel ranks side by side, pipeline stages one after the other.
    nodes: over which they are spread evenly, in order."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    nodes: int = 1

    @staticmethod
    def of(parallel: Any, args: Any) -> Place:
        """`parallel`: SGLang's own description of this process. `args`: a view of its resolved arguments."""
        sizes = parallel.tp_size, parallel.pp_rank, parallel.pp_size
        return Place(parallel.tp_rank, *sizes, nodes=max(1, args.nnodes))

    @property
    def ranks(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def rank(self) -> int:
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def node_ranks(self) -> int:
        """Ranks that share this node's capacities."""
        return max(1, self.ranks // self.nodes)

    @property
    def node_rank(self) -> int:
        return self.rank % self.node_ranks

    @property
    def shard(self) -> str:
        """Its part of a page, as the namespace names it."""
        stage = f".pp{self.pp_rank}/{self.pp_size}" if self.pp_size > 1 else ""
        return f"tp{self.tp_rank}/{self.tp_size}{stage}"

    @property
    def replicated_shard(self) -> str:
        """As `shard`, of pages that all tensor-parallel ranks hold alike."""
        return f"replicated.pp{self.pp_rank}/{self.pp_size}" if self.pp_size > 1 else "replicated"

    @property
    def folder(self) -> str:
        """Its folder below a tier's path, so that two topologies do not meet in one. Empty for a single rank."""
        return f"tp{self.tp_size}pp{self.pp_size}" if self.ranks > 1 else ""


class Minimum:
    """An element-wise minimum over all ranks that may still be under way."""

    def __init__(self, values: torch.Tensor, work: Any = None) -> None:
        self._values = values
        self._work = work

    def values(self) -> npt.NDArray[Any]:
        if self._work is not None:
            self._work.wait()
            self._work = None
        found: npt.NDArray[Any] = self._values.numpy()
        return found

    def result(self) -> list[Any]:
        found: list[Any] = self.values().tolist()
        return found


class RankGroup:
    """The process groups over which the engine's radix cache decides, and beside them those of the pipeline, which the
    cache leaves out. Every method is collective: all ranks call it in the same order, on the scheduler's thread.

    A stage of a pipeline must not wait for a later one: that waits for what the first sends next. But once a stage has
    gone round all of its micro-batches, the others have begun what it began then. So reductions over stages are begun
    in one step and read `lag` steps later, on all stages alike."""

    def __init__(self, params: Any, batch_depth: int = 0) -> None:
        """`params`: SGLang's CacheInitParams. batch_depth: micro-batches that a pipeline has beside one per stage."""
        attention = [g for g in (params.attn_cp_cache_group, params.attn_tp_cache_group) if _size(g) > 1]
        within = attention or [g for g in (params.tp_cache_group,) if _size(g) > 1]
        self.staged: bool = params.pp_size > 1
        self._within = within
        self._across = params.pp_cache_group if self.staged else None
        self.lag: int = params.pp_size + batch_depth if self.staged else 0

    @property
    def several(self) -> bool:
        return bool(self._within) or self.staged

    def least(self, values: torch.Tensor) -> Minimum:
        """Begin the minimum of `values`: integers on the CPU, of one shape on all ranks, not to be touched again."""
        for group in self._within:
            dist.all_reduce(values, op=dist.ReduceOp.MIN, group=group)
        if self._across is None:
            return Minimum(values)
        return Minimum(values, dist.all_reduce(values, op=dist.ReduceOp.MIN, group=self._across, async_op=True))

    def secret(self, first: bool) -> bytes:
        """Random bytes that the first rank draws, on every rank."""
        drawn = secrets.token_bytes(_SECRET_BYTES) if first else bytes([255]) * _SECRET_BYTES
        return bytes(self.least(torch.tensor(list(drawn), dtype=torch.int32)).result())


class Generations:
    """Names of the weights after each update in place. Drawn from a secret that the ranks share since their start, so
    that they need not meet during an update: the stages of a pipeline hear of it one after the other."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._updates = 0

    def next(self) -> str:
        """16 bytes as hex; another one at each call, and in each engine."""
        self._updates += 1
        return hashlib.blake2b(self._updates.to_bytes(8, "little"), key=self._secret, digest_size=16).hexdigest()


def shared_secret(ranks: int, group: Callable[[], Any]) -> bytes:
    """The same random bytes on each of `ranks` tensor-parallel ranks, which all call this at the same time. `group`:
    SGLang's coordinator of them, asked for where there are several."""
    drawn = torch.tensor(list(secrets.token_bytes(_SECRET_BYTES)), dtype=torch.int32)
    if ranks > 1:
        dist.all_reduce(drawn, op=dist.ReduceOp.MIN, group=group().cpu_group)
    return bytes(drawn.tolist())


def _size(group: Any) -> int:
    return 1 if group is None else dist.get_world_size(group=group)
