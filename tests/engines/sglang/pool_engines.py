"""The harness with the other kinds of cache of SGLang: its real pools, allocators and parts of the radix cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from .harness import Engine, Restored, key_of

LATENT, ROPE = 32, 16
PACKED = 656  # of a DSA row in FP8: 512 values, 4 scales, 64 rotary columns in 16 bits
Bytes = dict[str, list[torch.Tensor]]
"""By pool and buffer, ``[rows, bytes]``."""

DENSE = ("mha_fp8", "mla", "mla_fp8", "dsa", "dsa_fp8")
WINDOWED = ("swa",)
RECURRENT = ("mamba", "mamba_mla", "mamba_swa")
KINDS = DENSE + WINDOWED + RECURRENT


class PoolEngine(Engine):
    """`kind`: one of KINDS. window: tokens. Layers: 4, of which hybrids have 2 (3 with both) of each sort, mixed."""

    window_dim = 32

    def __init__(
        self, model: Path, block: dict[str, Any], kind: str, *, page: int = 16, window: int = 32, **options: Any
    ) -> None:
        self.kind, self.window = kind, window
        self.requests: Any = None
        super().__init__(model, block, page=page, **options)

    # -- what there is ------------------------------------------------------------------------------------------

    @property
    def windowed(self) -> bool:
        return "swa" in self.kind

    @property
    def recurrent(self) -> bool:
        return "mamba" in self.kind

    def parts(self, size: int, dtype: torch.dtype, groups: Mapping[str, Any]) -> CacheInitParams:
        components = [ComponentType.FULL]
        self.full_layers, self.window_layers, self.state_layers = list(range(4)), [], []
        if self.windowed:
            components.append(ComponentType.SWA)
            self.full_layers, self.window_layers = [1, 3], [0, 2]
        if self.recurrent:
            components.append(ComponentType.MAMBA)
            self.full_layers, self.state_layers = [1, 3], [0, 2]
        if self.kind == "mamba_swa":
            self.full_layers, self.window_layers, self.state_layers = [1, 4], [3], [0, 2]
        self.requests = self._requests(size)
        self.pool = self._pool(size, dtype)
        if self.windowed:
            self.allocator: Any = SWATokenToKVPoolAllocator(size, size, self.page, dtype, "cpu", self.pool, False)
        elif self.page == 1:
            self.allocator = TokenToKVPoolAllocator(size, dtype, "cpu", self.pool, False)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(size, self.page, dtype, "cpu", self.pool, False)
        return CacheInitParams(
            disable=False,
            req_to_token_pool=self.requests,
            token_to_kv_pool_allocator=self.allocator,
            page_size=self.page,
            tree_components=tuple(components),
            sliding_window_size=self.window if self.windowed else None,
            enable_mamba_extra_buffer=self.recurrent and self.page > 1,
            **groups,
        )

    def _requests(self, size: int) -> Any:
        common: dict[str, Any] = {"size": 8, "max_context_len": size, "device": "cpu", "enable_memory_saver": False}
        if not self.recurrent:
            return ReqToTokenPool(**common)
        shape = Mamba2StateShape.create(
            tp_world_size=1, intermediate_size=32, n_groups=1, num_heads=2, head_dim=16, state_size=8, conv_kernel=4
        )
        return HybridReqToTokenPool(
            **common,
            mamba_size=12,
            mamba_spec_state_size=0,
            cache_params=Mamba2CacheParams(
                shape=shape,
                layers=self.state_layers,
                dtype=Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32),
            ),
            mamba_layer_ids=self.state_layers,
            enable_mamba_extra_buffer=self.page > 1,
        )

    def _pool(self, size: int, dtype: torch.dtype) -> Any:
        common: dict[str, Any] = {"size": size, "page_size": self.page, "device": "cpu", "enable_memory_saver": False}
        heads = {"head_num": self.heads, "head_dim": self.dim}
        latent = {"kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE}
        fp8 = torch.float8_e4m3fn
        if self.windowed:
            common["dtype"] = dtype
            return SWAKVPool(
                size_swa=size,
                swa_attention_layer_ids=self.window_layers,
                full_attention_layer_ids=self.full_layers,
                swa_head_num=1,
                swa_head_dim=self.window_dim,
                **heads,
                **common,
            )
        if self.recurrent:
            common["full_attention_layer_ids"] = self.full_layers
            mla = {"use_mla": True, **latent} if self.kind == "mamba_mla" else {}
            return HybridLinearKVPool(dtype=dtype, mamba_pool=self.requests.mamba_pool, **heads, **mla, **common)
        common["layer_num"] = 4
        if self.kind == "mha_fp8":
            return MHATokenToKVPool(dtype=fp8, **heads, **common)
        if self.kind in ("mla", "mla_fp8"):
            return MLATokenToKVPool(dtype=fp8 if self.kind == "mla_fp8" else dtype, **latent, **common)
        packed = self.kind == "dsa_fp8"
        return DSATokenToKVPool(
            dtype=fp8 if packed else dtype,
            index_head_dim=128,
            kv_cache_dim=PACKED if packed else LATENT + ROPE,
            skip_topk_layers=[False, True, False, False],
            **latent,
            **common,
        )

    # -- device pages -------------------------------------------------------------------------------------------

    def _buffers(self) -> dict[str, list[torch.Tensor]]:
        """Buffers of each pool, first axis a slot, or a page of index keys, or a state."""
        full = getattr(self.pool, "full_kv_pool", self.pool)
        found = {"kv": list(full.kv_buffer) if hasattr(full, "kv_buffer") else [*full.k_buffer, *full.v_buffer]}
        if self.kind.startswith("dsa"):
            found["index"] = [b for b in self.pool.index_k_with_scale_buffer if len(b)]
        if self.windowed:
            found["swa"] = [*self.pool.swa_kv_pool.k_buffer, *self.pool.swa_kv_pool.v_buffer]
        if self.recurrent:
            cache = self.requests.mamba_pool.mamba_cache
            found["mamba"] = [state[n] for state in (cache.temporal, *cache.conv) for n in range(len(state))]
        return found

    def contents(self, places: Mapping[str, torch.Tensor]) -> Bytes:
        """Bytes at `places`: by pool, slots, pages or states, of every pool."""
        assert places.keys() == self._buffers().keys()
        return self.contents_of(places)

    def contents_of(self, places: Mapping[str, torch.Tensor]) -> Bytes:
        """As `contents`, of some pools."""
        return {
            name: [b[at].contiguous().view(torch.uint8).reshape(len(at), -1) for b in self._buffers()[name]]
            for name, at in places.items()
        }

    def fill(self, places: Mapping[str, torch.Tensor], seed: int) -> None:
        """Random values: normal ones, or bytes that are no NaN."""
        draw = torch.Generator().manual_seed(seed)
        for name, buffers in self._buffers().items():
            for buffer in buffers:
                shape = (len(places[name]), *buffer.shape[1:])
                if buffer.dtype is torch.uint8:
                    buffer[places[name]] = torch.randint(0, 0x7E, shape, generator=draw, dtype=torch.uint8)
                else:
                    buffer[places[name]] = torch.randn(shape, generator=draw).to(buffer.dtype)

    def places(self, slots: torch.Tensor, state: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Where a prefix in `slots` lies in each pool. Of a window: what lies in it."""
        found = {"kv": slots}
        if self.kind.startswith("dsa"):
            found["index"] = slots[:: self.page] // self.page
        if self.windowed:
            inside = -(-self.window // self.page) * self.page
            found["swa"] = self.allocator.full_to_swa_index_mapping[slots[-inside:]]
        if self.recurrent:
            assert state is not None
            found["mamba"] = state
        return found

    def fill_prefix(self, tokens: Sequence[int], *, seed: int = 0, known: int = 0) -> Bytes:
        """Stand in for a prefill, of which `known` tokens are in the cache: random values in new slots, inserted and
        offloaded. What a request with this prefix needs, as it lies on the device."""
        count = len(tokens) - known
        state = self.requests.mamba_allocator.alloc(1) if self.recurrent else None
        if self.windowed:
            slots, window = (a.alloc(count) for a in (self.allocator.full_attn_allocator, self.window_allocator))
            self.allocator.set_full_to_swa_mapping(slots, window)
        else:
            slots = self.allocator.alloc(count)
        if known:
            slots = torch.cat([self.matched(tokens[:known])[0], slots])
        everywhere = self.places(slots, state)
        new = {**everywhere, "kv": slots[known:]}
        if "index" in new:
            new["index"] = everywhere["index"][known // self.page :]
        if self.windowed:
            new["swa"] = self.allocator.full_to_swa_index_mapping[slots[known:]]
        self.fill(new, seed)
        before = self.contents(everywhere)
        self.cache.insert(InsertParams(key=key_of(tokens), value=slots, mamba_value=state, prev_prefix_len=known))
        self.offloaded()
        return before

    def keep(self, restored: Restored, tokens: Sequence[int]) -> None:
        """End of a restored request whose prefix joins the radix cache."""
        assert not self.cache.finish_external_linker_loads([restored.req])
        params = InsertParams(key=key_of(tokens), value=restored.slots)
        if self.windowed:
            params.component_evicted_seqlens = dict(restored.req.kv.component_evicted_seqlens)
        if self.recurrent:
            params.mamba_value = restored.req.kv.mamba_pool_idx.reshape(1)
        self.cache.insert(params)
        self.offloaded()

    def stored(self, name: str) -> Any:
        """How the linker names and writes the pages of a pool."""
        (found,) = (s for s in self.linker._stored if s.pool.name == name)
        return found

    def pages(self, slots: torch.Tensor, state: torch.Tensor | None) -> list[tuple[str, torch.Tensor]]:
        """Slots of a prefix by the linker's pools."""
        return [(name, slots) for name, slots in self.places(slots, state).items() if name != "index"]

    def matched(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Slots, and the place of the state, of a prefix that the radix cache has on the device, all of it."""
        found = self.cache.match_prefix(MatchPrefixParams(key=key_of(tokens)))
        assert found.device_prefix_len == len(tokens)
        slots: torch.Tensor = self.cache.path_device_indices(found.last_device_node)
        if not self.recurrent:
            return slots, None
        state = self.cache.tree_core.get_component_device_value(found.best_match_node, ComponentType.MAMBA)
        return slots, state.reshape(1)

    @property
    def window_allocator(self) -> Any:
        return self.allocator.swa_attn_allocator

    def flush(self) -> None:
        self.cache.reset()
        self.allocator.clear()
        self.requests.clear()
        for buffers in self._buffers().values():
            for buffer in buffers:
                buffer.fill_(3)

    # -- requests -----------------------------------------------------------------------------------------------

    def gates(self) -> list[Callable[[], Any]]:
        """What the forward calls, layer by layer, before it reads a pool."""
        calls: dict[int, list[Callable[[], Any]]] = {}
        for layer in (*self.full_layers, *self.window_layers):
            calls.setdefault(layer, []).append(partial(self.pool.get_key_buffer, layer))
            if self.kind.startswith("dsa"):
                calls[layer].append(partial(self.pool.index_key_cache.get_buffer, layer))
        for layer in self.state_layers:
            calls.setdefault(layer, []).append(partial(self.requests.mamba2_layer_cache, layer))
        return [call for layer in sorted(calls) for call in calls[layer]]

    def forward(self, restored: Restored) -> Bytes:
        """Run the forward of a restored request: wait as the engine's pools do, and return what they then hold."""
        counter = self.cache.linker.layer_done_counter
        counter.set_consumer(restored.index)
        for gate in self.gates():
            gate()
        counter.set_consumer(-1)
        return self.contents(self.places_of(restored))

    def places_of(self, restored: Restored) -> dict[str, torch.Tensor]:
        state = restored.req.kv.mamba_pool_idx.reshape(1) if self.recurrent else None
        return self.places(restored.slots, state)

    def finish(self, restored: Restored) -> bool:
        """As `Restored.finish`, for all pools."""
        failed = self.cache.finish_external_linker_loads([restored.req])
        if restored.slots is not None:
            places = self.places_of(restored)
            if self.windowed:
                self.window_allocator.free(places["swa"])
                self.allocator.full_attn_allocator.free(restored.slots)
            else:
                self.allocator.free(restored.slots)
            if self.recurrent:
                self.requests.mamba_allocator.free(places["mamba"])
        if failed:
            assert restored.req.discard_output_reason.status_code == 503
        return not failed

    def free(self) -> dict[str, int]:
        """Free slots of each allocator."""
        full = self.allocator.full_attn_allocator if self.windowed else self.allocator
        found = {"kv": full.available_size()}
        if self.windowed:
            found["swa"] = self.window_allocator.available_size()
        if self.recurrent:
            found["mamba"] = self.requests.mamba_allocator.available_size()
        return found


def equal(got: Bytes, want: Bytes) -> bool:
    return got.keys() == want.keys() and all(
        len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        for a, b in ((got[name], want[name]) for name in want)
    )
