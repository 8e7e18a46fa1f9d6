"""One pool whose pages are stored together, and the slots that are its pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.connectors.sglang.pools import mha, mla
from kvtier.connectors.sglang.pools.rows import Rows, Told
from kvtier.errors import EngineError
from kvtier.hot import HotPool
from kvtier.spec import PageSpec, Role

KV = "kv"


@dataclass(frozen=True, slots=True)
class DevicePool:
    """Page 0 belongs to the engine's padding and never comes up.

    name: what SGLang calls it. counted_as: of each layer of `spec`, its number in the counter on which the engine's
    forward waits. replicated: every tensor-parallel rank holds the same bytes. variant: what else two pools must have
    in common for their pages to be interchangeable."""

    spec: PageSpec
    hot: HotPool
    name: str = KV
    counted_as: tuple[int, ...] = ()
    replicated: bool = False
    variant: str = ""

    @staticmethod
    def of(
        pool: Any,
        page_tokens: int,
        *,
        rotary_dim: int = 0,
        fp8_scales: Mapping[Role, Mapping[int, float]] | None = None,
        name: str = KV,
        counted_as: Sequence[int] | None = None,
        model_layers: Sequence[int] | None = None,
    ) -> DevicePool:
        """Describe a pool with rows for each token. EngineError names what this connector cannot serve.

        rotary_dim, fp8_scales: see `Told`. counted_as, model_layers: of each layer of the pool, its number in the
        counter and in the model, where they are not consecutive."""
        told = Told(rotary_dim, fp8_scales or {})
        what = f"{name.upper()} pool"
        kind = type(pool).__name__
        first = getattr(pool, "start_layer", None) or 0
        if kind == mha.POOL_CLASS:
            in_model = range(first, first + len(pool.k_buffer)) if model_layers is None else model_layers
            rows = mha.rows_of(pool, page_tokens, told, in_model, what)
        elif kind in (mla.POOL_CLASS, mla.SPARSE_CLASS):
            rows = mla.rows_of(pool, page_tokens, what)
        else:
            served = ", ".join((mha.POOL_CLASS, mla.POOL_CLASS, mla.SPARSE_CLASS))
            raise EngineError(
                f"the {what} is a {kind}: kvtier serves {served}, alone and in hybrid models (docs/sglang.md). Start "
                "this model without --kv-connector"
            )
        return _described(rows, page_tokens, name, counted_as)

    @property
    def layers(self) -> int:
        """Layers of this pool."""
        return self.spec.num_layers

    @property
    def compressible(self) -> bool:
        """Whether a codec may do more with it than copy bytes."""
        return any(b.role.attention for b in self.spec.buffers)

    def page_ids(self, slots: Any, pages: int) -> npt.NDArray[np.int64]:
        """Page ids ``[pages]`` of `slots`, an int64 tensor with one slot per token; waits for the device where it lies
        on one. EngineError if the slots are not whole pages: nothing may then be read or written."""
        tokens = self.spec.page_tokens
        flat = np.asarray(slots.cpu() if hasattr(slots, "cpu") else slots, dtype=np.int64)
        if flat.shape != (pages * tokens,):
            raise EngineError(f"{self.name} pool: {flat.shape} slots for {pages} pages of {tokens} tokens")
        table = flat.reshape(pages, tokens)
        ids = table[:, 0] // tokens
        if not np.array_equal(table, ids[:, None] * tokens + np.arange(tokens)):
            raise EngineError(f"{self.name} pool: slots do not form whole pages of {tokens} tokens")
        return ids


def page_hashes(keys: Iterable[str]) -> list[bytes]:
    """The engine's page hashes, hex as it hands them out, as bytes."""
    return [bytes.fromhex(key) for key in keys]


def _described(rows: Rows, page_tokens: int, name: str, counted_as: Sequence[int] | None) -> DevicePool:
    spec = PageSpec(page_tokens, rows.buffers)
    numbers = tuple(range(spec.num_layers) if counted_as is None else counted_as)
    return DevicePool(spec, HotPool.of(spec, rows.arrays, rows.layout), name, numbers, rows.replicated)
