"""What is refused at start, by the name of the pool, and what is set."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.errors import ConfigError, EngineError

pytestmark = pytest.mark.usefixtures("engine_hooks")


def described(engine: Any, components: set[str] | None = None, **change: Any) -> Any:
    """The pools of an engine's parameters, some of them changed."""
    from kvtier.connectors.sglang.pools.engine import EnginePools

    params = {
        "req_to_token_pool": engine.requests,
        "token_to_kv_pool_allocator": engine.allocator,
        "page_size": engine.page,
        **change,
    }
    return EnginePools.of(SimpleNamespace(**params), components or {"FULL", "SWA", "MAMBA"}, {})


@pytest.fixture
def engine(start_pools: Any, tiny: Path) -> Any:
    from .harness import config

    return start_pools(tiny, config(), "mamba_swa", page=1)


@pytest.mark.parametrize("option", ["mtp_draft_device_pools", "sidecar_draft_device_pools", "mtp_draft_mamba_pools"])
def test_draft_pools_are_refused_by_name(engine: Any, option: str) -> None:
    draft = type("SomeDraftPool", (), {})()
    with pytest.raises(EngineError, match=r"draft model in a SomeDraftPool.*without --speculative-algorithm"):
        described(engine, None, **{option: (draft,)})


def test_speculation_is_refused_before_anything_starts() -> None:
    from kvtier.connectors.sglang.options import linker_options

    with pytest.raises(ConfigError, match=r"--speculative-algorithm = 'EAGLE'.*draft model's KV pool"):
        linker_options({"kv_connector": "kvtier", "speculative_algorithm": "EAGLE"})


def test_parts_of_the_radix_cache_that_are_not_known_are_refused(engine: Any) -> None:
    with pytest.raises(EngineError, match="has C128 pages beside attention"):
        described(engine, {"FULL", "SWA", "MAMBA", "C128"})
    with pytest.raises(EngineError, match="the radix cache moves kv, mamba: kvtier does not serve that"):
        described(engine, {"FULL", "MAMBA"})


@pytest.mark.parametrize(
    "kind", ["QSATokenToKVPool", "MiniMaxSparseKVPool", "DeepSeekV4TokenToKVPool", "MHATokenToKVPoolMXFP8"]
)
def test_pools_of_other_kinds_are_refused_by_name(engine: Any, kind: str) -> None:
    pool = type(kind, (), {})()
    allocator = SimpleNamespace(get_kvcache=lambda: pool)
    with pytest.raises(EngineError, match=f"KV pool is a {kind}: kvtier serves MHATokenToKVPool, MLATokenToKVPool"):
        described(engine, {"FULL"}, token_to_kv_pool_allocator=allocator)


def test_a_model_of_windows_only_is_refused(engine: Any) -> None:
    pool = type("SWAKVPool", (), {"layers_mapping": {0: (0, True), 1: (1, True)}})()
    allocator = SimpleNamespace(get_kvcache=lambda: pool)
    with pytest.raises(EngineError, match="all layers of this model have a sliding window"):
        described(engine, {"FULL", "SWA"}, token_to_kv_pool_allocator=allocator)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mamba_ckpt_pool": object()}, "--enable-int8-mamba-checkpoint"),
        ({"ngram_pool": SimpleNamespace(enabled=True)}, "n-gram contexts"),
        ({"mamba_pool": type("UnifiedMambaPool", (), {})()}, "MAMBA pool is a UnifiedMambaPool"),
    ],
)
def test_states_with_more_beside_them_are_refused(engine: Any, change: dict[str, Any], words: str) -> None:
    requests = SimpleNamespace(**{**vars(engine.requests), **change})
    with pytest.raises(EngineError, match=words):
        described(engine, req_to_token_pool=requests)


def test_states_in_another_order_of_axes_are_other_pages(engine: Any) -> None:
    """As kernels for Intel AMX have them: the bytes are dense, in another order."""
    import torch

    from kvtier.connectors.sglang.pools.state import order_of

    pools = described(engine)
    assert pools.beside[1].variant == "" and pools.has_states and pools.counted_layers == 5
    cache = engine.requests.mamba_pool.mamba_cache
    conv = [c.transpose(2, 3).contiguous().transpose(2, 3) for c in cache.conv]
    other = SimpleNamespace(mamba_cache=SimpleNamespace(temporal=cache.temporal, conv=conv))
    assert order_of(SimpleNamespace(mamba_pool=other)) == "012.10"
    spread = torch.zeros(2, 13, 40, 6)[..., ::2]
    kind = type("MambaPool", (), {})()
    kind.mamba_cache = SimpleNamespace(temporal=spread, conv=[], replayssm_g=None)
    kind.num_mamba_layers = 2
    with pytest.raises(EngineError, match="spread over"):
        described(engine, req_to_token_pool=SimpleNamespace(**{**vars(engine.requests), "mamba_pool": kind}))


def test_a_state_for_each_token_needs_pages_of_one() -> None:
    from kvtier.connectors.sglang.options import linker_options

    asked = {"kv_connector": "kvtier", "mamba_radix_cache_strategy": "no_buffer"}
    assert linker_options(asked)["page_size"] == 1
    assert linker_options({**asked, "mamba_radix_cache_strategy": "extra_buffer"})["page_size"] == 64
    assert linker_options({**asked, "page_size": 32})["page_size"] == 32  # SGLang says what is wrong with that


def test_pools_on_a_device_are_described_and_others_refused(tiny: Path) -> None:
    import torch

    from kvtier.connectors.sglang.pools.rows import check_device

    check_device(torch.zeros(1), "KV pool")
    check_device(SimpleNamespace(device=SimpleNamespace(type="cuda")), "KV pool")
    with pytest.raises(EngineError, match="KV pool lies on 'npu'"):
        check_device(SimpleNamespace(device=SimpleNamespace(type="npu")), "KV pool")
