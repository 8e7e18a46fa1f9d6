"""Pools of recurrent state (Mamba, GDN, KDA): one state per node of the radix cache, valid where the node ends."""

from __future__ import annotations

import math
from typing import Any

from kvtier.connectors.sglang.pools.rows import check_device
from kvtier.errors import EngineError
from kvtier.hot import HotBuffer, HotPool, dtype_of
from kvtier.spec import BufferSpec, PageSpec, Role

POOL_CLASS = "MambaPool"


def states_of(requests: Any, what: str) -> tuple[PageSpec, HotPool]:
    """The states of a `HybridReqToTokenPool`: per layer the temporal state, where it has one, then each convolution's.
    A page is one slot. All of it is stored as it is. Raises EngineError."""
    pool = requests.mamba_pool
    kind = type(pool).__name__
    if kind != POOL_CLASS:
        raise EngineError(f"the {what} is a {kind}: kvtier serves {POOL_CLASS}. Start without --kv-connector")
    extra = {
        "--enable-int8-mamba-checkpoint": requests.mamba_ckpt_pool is not None,
        "short convolutions beside": requests.short_conv_pool.enabled,
        "n-gram contexts beside": requests.ngram_pool.enabled,
        "--enable-linear-replayssm": pool.mamba_cache.replayssm_g is not None,
    }
    beside = [name for name, there in extra.items() if there]
    if beside:
        raise EngineError(
            f"the {what} has more than its states ({', '.join(beside)}), which kvtier does not serve. Turn that off, "
            "or start without --kv-connector"
        )
    states = [s for s in (pool.mamba_cache.temporal, *pool.mamba_cache.conv) if s.numel()]
    check_device(states[0], what)
    buffers, places = [], []
    for layer in range(pool.num_mamba_layers):
        for state in states:
            here = state[layer]
            values = math.prod(here.shape[1:])
            _check_dense(here, values, what)
            buffers.append(BufferSpec(Role.STATE, layer, 1, 1, values, dtype_of(here)))
            stride = here.stride(0) * here.element_size()
            places.append(HotBuffer(here.data_ptr(), stride, 0, stride, here.shape[0], here))
    spec = PageSpec(1, tuple(buffers))
    return spec, HotPool(spec, tuple(places), str(states[0].device))


def _check_dense(state: Any, values: int, what: str) -> None:
    """A slot's bytes must lie side by side, in the order of its axes or, where a kernel wants it so, another one."""
    steps = sorted(zip(state.stride()[1:], state.shape[1:], strict=True))
    reach = 1 + sum(step * (size - 1) for step, size in steps)
    if reach != values:
        raise EngineError(
            f"the {what} has states of {values} values spread over {reach}: kvtier serves states in one piece. "
            "Start without --kv-connector"
        )


def order_of(requests: Any) -> str:
    """How the axes of the states lie in memory, where that is not their own order: part of what makes two pages
    interchangeable. Empty otherwise."""
    orders = []
    for state in (requests.mamba_pool.mamba_cache.temporal, *requests.mamba_pool.mamba_cache.conv):
        steps = state.stride()[2:]
        axes = sorted(range(len(steps)), key=lambda axis: -steps[axis])
        orders.append("".join(map(str, axes)))
    plain = all(order == "".join(map(str, range(len(order)))) for order in orders)
    return "" if plain else ".".join(orders)
