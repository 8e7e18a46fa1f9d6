"""FP8 caches: SGLang's real pools and their writes bit for bit, and a whole engine with one."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from .engine_process import EngineProcess

RAW = {"quant": "none"}
LAYERS, HEADS, DIM, TOKENS, PAGES = 3, 2, 32, 16, 6


def device_pool(kind: str, dtype: torch.dtype = torch.float8_e4m3fn) -> Any:
    """`plain`: as on GPUs, in buffers of bytes. `cpu`: as SGLang makes it for CPUs."""
    from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import get_kv_cache_quant_method
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    names = {"plain": None, "cpu": "cpu_fp8_e4m3"}
    return MHATokenToKVPool(
        size=PAGES * TOKENS,
        page_size=TOKENS,
        dtype=dtype,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
        quant_method=None if names[kind] is None else get_kv_cache_quant_method(names[kind]),
    )


def written(pool: Any, scale: float) -> list[torch.Tensor]:
    """Every page but the engine's own page 0 as the engine writes them; the bytes of all buffers, K and V by layer."""
    draw = torch.Generator().manual_seed(7)
    slots = torch.arange(TOKENS, (PAGES + 1) * TOKENS)
    for layer in range(LAYERS):
        k, v = (torch.randn(len(slots), HEADS, DIM, generator=draw) * 3 * scale for _ in "kv")
        pool.set_kv_buffer(SimpleNamespace(layer_id=layer), slots, k, v, scale, scale)
    return contents(pool)


def contents(pool: Any) -> list[torch.Tensor]:
    pairs = zip(pool.k_buffer, pool.v_buffer, strict=True)
    return [b.view(torch.uint8).clone() for pair in pairs for b in pair]


@pytest.mark.parametrize("kind", ["plain", "cpu"])
@pytest.mark.parametrize("quant", ["none", "lossless", "auto", "nvfp4", "k8v4"])
def test_pages_of_the_engines_own_pool_come_back(kind: str, quant: str) -> None:
    from kvtier.build import open_codec, open_store
    from kvtier.config import parse_config
    from kvtier.connectors.sglang.pools import DevicePool
    from kvtier.keys import Namespace
    from kvtier.mover import PageMover, policy_of
    from kvtier.spec import DType, Role

    if quant == "lossless":
        pytest.importorskip("zstandard", reason="zstandard is not installed: pip install 'kvtier[lossless]'")
    scale = 0.75
    scales = {role: dict.fromkeys(range(LAYERS), scale) for role in (Role.K, Role.V)}
    pool = device_pool(kind)
    before = written(pool, scale)
    described = DevicePool.of(pool, TOKENS, fp8_scales=scales)
    assert {(b.dtype, b.fp8_scale) for b in described.spec.buffers} == {(DType.FP8_E4M3, scale)}
    config = parse_config(
        {
            "tiers": [{"type": "host", "capacity": "4MiB"}],
            "kv_cache_compression_config": [{"algorithm": "quantization_for_cold_page", "quant": quant}],
        }
    )
    which = open_codec(config, described.spec)
    namespace = Namespace.of(described.spec, policy_of(which), model="m", weights="00", dtype="fp8_e4m3")
    mover = PageMover(open_store(config), described.spec, namespace, which)
    hashes, pages = [b"page %d" % n for n in range(PAGES)], range(1, PAGES + 1)
    try:
        assert mover.offload(described.hot, hashes, pages).result(30.0).ok
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.view(torch.uint8).fill_(0x7F)  # NaN
        lookup = mover.store.lookup("r", mover.namespace.page_keys(hashes))
        assert mover.store.wait(lookup) == PAGES
        assert mover.onboard(lookup, described.hot, pages).result(30.0).ok
        mover.store.settle("r")
    finally:
        mover.close()
        mover.store.close()
    for got, exact in zip(contents(pool), before, strict=True):
        assert (got[:TOKENS] == 0x7F).all(), "the engine's own page was written"
        got, exact = got[TOKENS:], exact[TOKENS:]
        if quant in ("none", "lossless"):
            assert torch.equal(got, exact)
        else:
            a, b = (x.view(torch.float8_e4m3fn).float() for x in (got, exact))
            assert 0 < (a - b).norm() / b.norm() < 0.12


def test_other_narrow_caches_are_refused_by_name() -> None:
    from kvtier.connectors.sglang.pools import DevicePool
    from kvtier.errors import EngineError

    with pytest.raises(EngineError, match=r"KV cache has dtype float8_e5m2.*Set --kv-cache-dtype to one of them"):
        DevicePool.of(device_pool("plain", torch.float8_e5m2), TOKENS)
    scaled = device_pool("cpu")
    scaled.quant_method = SimpleNamespace(name="nvfp4")
    with pytest.raises(EngineError, match=r"quantized as 'nvfp4'.*Set --kv-cache-dtype"):
        DevicePool.of(scaled, TOKENS)


@pytest.mark.parametrize("stored", [-1.0, 0.0, float("nan")])
def test_scales_that_the_engine_does_not_take_are_one(
    tiny: Path, tmp_path: Path, stored: float, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang takes scales that are not positive for missing ones and starts: so must its connector."""
    from kvtier.connectors.sglang.identity import cache_values
    from kvtier.connectors.sglang.pools import DevicePool

    head = b'{"model.layers.0.self_attn.k_proj.k_scale":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}'
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(head).to_bytes(8, "little") + head + struct.pack("<f", stored))
    model = SimpleNamespace(model_path=str(tmp_path), hf_text_config=SimpleNamespace(), head_dim=DIM)
    pool = device_pool("cpu")
    told = cache_values(model, SimpleNamespace(load_format="auto"), pool)
    assert {b.fp8_scale for b in DevicePool.of(pool, TOKENS, **told).spec.buffers} == {1.0}
    (record,) = [r for r in caplog.records if "FP8" in r.getMessage()]
    assert "k_scale" in record.getMessage() and record.levelname == "WARNING"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Starts engines with an FP8 cache, one at a time, and ends the last."""
    monkeypatch.setenv("KVTIER_TEST_FP8", "1")
    running: list[EngineProcess] = []

    def start(model: Path, method: dict[str, Any]) -> EngineProcess:
        for engine in running:
            engine.kill()
        tiers = [
            {"type": "host", "capacity": "64MiB"},
            {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": "256MiB"},
        ]
        methods = [{"algorithm": "quantization_for_cold_page", **method}]
        block = {"tiers": tiers, "kv_cache_compression_config": methods, "promote_deadline": "60s", "break_even": False}
        options: dict[str, Any] = {"page_size": 16, "dtype": "float32", "kv_cache_dtype": "fp8_e4m3"}
        running.append(EngineProcess(model, block, tmp_path / "run", **options))
        return running[-1]

    yield start
    for engine in running:
        engine.kill()


@pytest.mark.timeout(1200)
def test_an_engine_with_an_fp8_cache_restores_its_pages(run: Any, tiny: Path) -> None:
    """Raw pages give the same tokens; pages of the default form, beside them after a crash, are smaller and come back
    too. A page is 4 layers x K and V x 16 tokens x 2 heads x 16 values."""
    asked = [(37 + i * 4) % 500 + 5 for i in range(200)]
    engine = run(tiny, RAW)
    cold = engine.one("cold", asked)
    assert cold["cached"] == 0 and len(set(cold["ids"])) > 1
    engine.stored(12)
    assert engine.flush()
    warm = engine.one("warm", asked)
    assert warm["ids"] == cold["ids"] and warm["details"] == {"device": 0, "host": 192}
    metrics = engine.metrics()
    assert metrics['kvtier_cold_bytes_total{direction="offload"}'] % (4 * 2 * 16 * 2 * 16) == 0
    assert metrics['kvtier_offload_pages_total{outcome="stored"}'] >= 12

    second = run(tiny, {"quant": "auto"})
    first = second.one("first", asked)
    assert first["cached"] == 0 and first["ids"] == cold["ids"]  # pages of another policy are not met
    second.stored(24)
    assert second.flush()
    assert second.one("again", asked)["details"] == {"device": 0, "host": 192}
    metrics = second.metrics()
    assert metrics['kvtier_hits_total{tier="host"}'] == 12
    hot, cold_bytes = (metrics[f'kvtier_{kind}_bytes_total{{direction="offload"}}'] for kind in ("hot", "cold"))
    assert 1.2 < hot / cold_bytes < 1.8
    assert metrics['kvtier_errors_total{site="engine"}'] == 0
