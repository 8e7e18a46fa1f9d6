"""All pools of one engine: those that its radix cache moves, each with pages of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier.connectors.sglang.pools import state
from kvtier.connectors.sglang.pools.device_pool import KV, DevicePool
from kvtier.errors import EngineError

SWA, MAMBA = "swa", "mamba"
_WINDOW_CLASS, _LINEAR_CLASS = "SWAKVPool", "HybridLinearKVPool"
_SERVED = {"FULL": KV, "SWA": SWA, "MAMBA": MAMBA}
"""Parts of the radix cache by name, and the pool that each of them moves."""
_DRAFTS = ("mtp_draft_device_pools", "sidecar_draft_device_pools", "mtp_draft_mamba_pools")


@dataclass(frozen=True, slots=True)
class EnginePools:
    """`kv` holds the pages that a prefix is made of; `beside` what must be there too at the place where it ends.

    beside: with rows per token, of a window of pages that ends there; with one slot per state, the state there."""

    kv: DevicePool
    beside: tuple[DevicePool, ...]

    @property
    def all(self) -> tuple[DevicePool, ...]:
        return (self.kv, *self.beside)

    @property
    def counted_layers(self) -> int:
        """Layers of the counter on which the engine's forward waits."""
        return 1 + max(number for pool in self.all for number in pool.counted_as)

    @property
    def replicated(self) -> bool:
        """Whether every tensor-parallel rank holds the same, of all pools."""
        return all(pool.replicated for pool in self.all)

    @property
    def has_states(self) -> bool:
        return any(pool.name == MAMBA for pool in self.beside)

    @staticmethod
    def of(params: Any, components: set[str], told: Mapping[str, Any]) -> EnginePools:
        """Describe what `params`, SGLang's CacheInitParams, refer to. components: names of the radix cache's parts.
        told: `DevicePool.of`'s rotary_dim and fp8_scales. EngineError names what is not served."""
        others = sorted(components - set(_SERVED))
        if others:
            raise EngineError(
                f"this model's cache has {', '.join(others)} pages beside attention: kvtier serves "
                f"{', '.join(_SERVED)}. Start it without --kv-connector"
            )
        _refuse_drafts(params)
        pool, page_tokens = params.token_to_kv_pool_allocator.get_kvcache(), params.page_size
        kind = type(pool).__name__
        beside: list[DevicePool] = []
        if kind == _WINDOW_CLASS:
            full, window = _split(pool)
            kv = _part(KV, pool.full_kv_pool, full, pool.start_layer, page_tokens, told)
            beside.append(_part(SWA, pool.swa_kv_pool, window, pool.start_layer, page_tokens, told))
        elif kind == _LINEAR_CLASS:
            layers = {index: layer for layer, index in pool.full_attention_layer_id_mapping.items()}
            kv = _part(KV, pool.full_kv_pool, layers, pool.start_layer, page_tokens, told)
        else:
            kv = DevicePool.of(pool, page_tokens, **told)
        if "MAMBA" in components:
            beside.append(_states(params.req_to_token_pool))
        described = {KV, *(p.name for p in beside)}
        wanted = {_SERVED[name] for name in components}
        if described != wanted:
            raise EngineError(
                f"the KV pool is a {kind} with pools {', '.join(sorted(described))}, and the radix cache moves "
                f"{', '.join(sorted(wanted))}: kvtier does not serve that. Start this model without --kv-connector"
            )
        return EnginePools(kv, tuple(beside))


def _refuse_drafts(params: Any) -> None:
    for option in _DRAFTS:
        drafts = getattr(params, option, ())
        if drafts:
            names = ", ".join(sorted({type(pool).__name__ for pool in drafts}))
            raise EngineError(
                f"speculative decoding keeps pages of its draft model in a {names}: kvtier does not store draft pages. "
                "Start without --speculative-algorithm, or without --kv-connector"
            )


def _split(pool: Any) -> tuple[dict[int, int], dict[int, int]]:
    """The model's layers by their index in the pool of full attention, and in that of the window."""
    full = {index: layer for layer, (index, windowed) in pool.layers_mapping.items() if not windowed}
    window = {index: layer for layer, (index, windowed) in pool.layers_mapping.items() if windowed}
    if not full or not window:
        raise EngineError(
            f"all layers of this model have {'a sliding window' if not full else 'full attention'} and its KV pool is "
            f"a {_WINDOW_CLASS}: kvtier serves models that have both. Start this model without --kv-connector"
        )
    return full, window


def _part(
    name: str, pool: Any, layers: Mapping[int, int], start_layer: int, page_tokens: int, told: Mapping[str, Any]
) -> DevicePool:
    in_model = [layers[index] for index in range(len(layers))]
    counted_as = [layer - start_layer for layer in in_model]
    return DevicePool.of(pool, page_tokens, **told, name=name, counted_as=counted_as, model_layers=in_model)


def _states(requests: Any) -> DevicePool:
    spec, hot = state.states_of(requests, f"{MAMBA.upper()} pool")
    layers = {index: layer for layer, index in requests.mamba_map.items()}
    counted_as = tuple(layers[index] - requests.start_layer for index in range(len(layers)))
    return DevicePool(spec, hot, MAMBA, counted_as, variant=state.order_of(requests))
