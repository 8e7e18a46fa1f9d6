"""The chunks that ``kvtier bench lmcache`` stores and loads, in LMCache's own memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError, KVTierError

TOKENS = 256
"""LMCache's default."""

_DIM = 128
"""Of one KV head, as a tensor-parallel shard of many models has it."""


class Chunks:
    """Chunks to be stored, and memory to load them into, in LMCache's L1: ``(2, layers, 256, heads * dim)``, BF16.

    values: ``[count, 2, layers, 256, heads * dim]``, bits of BF16 values as uint16. Use it in a with statement."""

    def __init__(self, values: npt.NDArray[np.uint16]) -> None:
        self._values = values
        self.count, self.nbytes = len(values), values[0].nbytes

    @staticmethod
    def random(nbytes: int, round_bytes: int) -> Chunks:
        """Normal values in chunks of about `nbytes`."""
        layers = max(1, nbytes // (2 * TOKENS * _DIM * 2))
        shape = (max(1, round_bytes // nbytes), 2, layers, TOKENS, _DIM)
        draw = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
        return Chunks((draw.view(np.uint32) >> np.uint32(16)).astype(np.uint16))

    @staticmethod
    def of(path: Path) -> Chunks:
        """Of a model's K and V, see `bench_lmcache.run`. What is behind the last whole chunk is left out."""
        kv = np.load(path, mmap_mode="r")
        if kv.ndim != 5 or kv.dtype != np.uint16 or kv.shape[2] < TOKENS:
            raise ConfigError(
                f"{path} holds {kv.dtype} of the shape {kv.shape}; K and V are [2, layers, tokens, heads, dim], bits "
                f"of BF16 values as uint16, of {TOKENS} tokens at least"
            )
        two, layers, tokens, heads, dim = kv.shape
        count = tokens // TOKENS
        whole = kv[:, :, : count * TOKENS].reshape(two, layers, count, TOKENS, heads * dim)
        return Chunks(np.ascontiguousarray(whole.transpose(2, 0, 1, 3, 4)))

    def __enter__(self) -> Chunks:
        import torch
        from lmcache.v1.distributed.api import MemoryLayoutDesc
        from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
        from lmcache.v1.distributed.l1_manager import L1Manager

        self._torch = torch
        self.layout = MemoryLayoutDesc([torch.Size(self._values.shape[1:])], [torch.bfloat16])
        room = 4 * self.nbytes * self.count + (64 << 20)  # a serde needs as much again
        config = L1MemoryManagerConfig(size_in_bytes=room, use_lazy=False, shm_name="")
        self.l1 = L1Manager(L1ManagerConfig(memory_config=config))
        self.source, self.target = (self._reserve(name) for name in ("source", "target"))
        for item, values in zip(self.source, self._values, strict=True):
            item.tensor.copy_(torch.from_numpy(values.view(np.int16)).view(torch.bfloat16))
        return self

    def __exit__(self, *_: object) -> None:
        self.l1.clear(force=True)
        self.l1.close()

    def _reserve(self, name: str) -> list[Any]:
        keys = keys_named(name, self.count)
        found = self.l1.reserve_write(keys, [True] * len(keys), self.layout)
        items = [found[key][1] for key in keys]
        if None in items:
            raise KVTierError(f"LMCache gave no memory for {len(keys)} chunks: {found[keys[-1]][0]}")
        return items

    def clear(self) -> None:
        """Of what was loaded."""
        with self._one_thread():
            for item in self.target:
                item.raw_data.zero_()

    def error(self, *, exact: bool) -> float:
        """Of what was loaded, the largest of a chunk: the norm of the difference over that of what was stored. exact:
        infinite unless every byte is the same."""
        with self._one_thread():
            return max(self._error(got, want, exact) for got, want in zip(self.target, self.source, strict=True))

    @contextmanager
    def _one_thread(self) -> Iterator[None]:
        """For what is not measured: torch's other threads go on spinning for milliseconds after their work, on cores
        that what is measured next should have."""
        threads = self._torch.get_num_threads()
        self._torch.set_num_threads(1)
        try:
            yield
        finally:
            self._torch.set_num_threads(threads)

    def _error(self, got: Any, want: Any, exact: bool) -> float:
        if exact:
            return 0.0 if self._torch.equal(got.tensor, want.tensor) else float("inf")
        a, b = got.tensor.float(), want.tensor.float()
        return float((a - b).norm() / b.norm())


def keys_named(name: str, count: int) -> list[Any]:
    from lmcache.v1.distributed.api import ObjectKey

    return [ObjectKey(i.to_bytes(16, "big"), f"bench {name}".replace(" ", "-"), 0, 0, "") for i in range(count)]
