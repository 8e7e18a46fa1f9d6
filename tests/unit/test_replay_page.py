"""What blocks weigh, and how tiers are written on the command line."""

from __future__ import annotations

import math

import pytest

from kvtier.errors import ConfigError
from kvtier.replay.page import (
    MODELS,
    Geometry,
    ReplayCodec,
    from_bytes_per_token,
    from_geometry,
    geometry_of_model,
    parse_geometry,
)
from kvtier.replay.stack import UNLIMITED, Policy, TierPlan, check_stack, parse_tier
from kvtier.spec import DType, GlobalScale

RAW, FP8, NVFP4 = ReplayCodec


@pytest.mark.parametrize(
    ("model", "tokens", "dtype", "hot", "cold"),
    [
        ("Qwen/Qwen3-8B", 32, DType.BF16, 4_718_592, 1_327_104),
        ("Qwen/Qwen3-8B", 32, DType.FP8_E4M3, 2_359_296, 1_327_104),
        ("Qwen/Qwen3.5-397B-A17B", 64, DType.FP8_E4M3, 1_048_576, 589_824),
        ("zai-org/GLM-5.2", 64, DType.FP8_E4M3, 3_098_112, 1_824_000),
        ("deepseek-ai/DeepSeek-V3.2", 64, DType.FP8_E4M3, 2_764_032, 1_780_224),
    ],
)
def test_golden_pages(model: str, tokens: int, dtype: DType, hot: int, cold: int) -> None:
    for pages in (1, 8):
        weight = from_geometry(
            geometry_of_model(model),
            pages * tokens,
            page_tokens=tokens,
            dtype=dtype,
            global_scale=GlobalScale.IDENTITY,
        )
        assert (weight(RAW), weight(NVFP4)) == (pages * hot, pages * cold)
        if dtype is DType.FP8_E4M3:
            assert weight(FP8) == weight(RAW)


def test_the_default_scale_and_page() -> None:
    weight = from_geometry(geometry_of_model("qwen3-8b"), 512)
    assert weight(RAW) == 512 * 147_456
    assert weight(FP8) == 512 * 73_728
    assert weight(NVFP4) == 8 * (2 * 1_327_104 + 80)


def test_bytes_per_token_are_of_16_bit_values() -> None:
    weight = from_bytes_per_token(147_456, 512)
    assert (weight(RAW), weight(FP8), weight(NVFP4)) == (75_497_472, 37_748_736, 21_233_664)
    assert from_bytes_per_token(1, 1)(NVFP4) == 1  # rounded up


def test_geometries_on_the_command_line() -> None:
    assert parse_geometry("mha:36x8x128") == MODELS["Qwen/Qwen3-8B"]
    assert parse_geometry("mla:61x576").page(64, DType.BF16) == MODELS["deepseek-ai/DeepSeek-V3"].page(64, DType.BF16)
    assert parse_geometry("mla:79x576+22x132") == MODELS["zai-org/GLM-5.2"]
    assert Geometry(2, 1, 32, True, 1, 10).page(5, DType.BF16).hot_page_bytes == 2 * 5 * 32 * 2 + 50


@pytest.mark.parametrize("text", ["mha:36x8", "gqa:36x8x128", "mla:2x576+3x132", "36x8x128"])
def test_bad_geometries_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--page {text.replace('+', '.')}"):
        parse_geometry(text)


def test_an_unknown_model_shows_the_ways_out() -> None:
    with pytest.raises(ConfigError, match=r"--model nano.*--page.*--bytes-per-token.*Qwen/Qwen3-8B"):
        geometry_of_model("nano")


def test_pages_must_fill_a_block() -> None:
    with pytest.raises(ConfigError, match=r"--page-tokens 48.*512"):
        from_geometry(MODELS["Qwen/Qwen3-8B"], 512, page_tokens=48)
    assert from_geometry(MODELS["Qwen/Qwen3-8B"], 48)(RAW) == 48 * 147_456  # no 64 in it: one page


def test_tiers() -> None:
    assert parse_tier("host:400GB") == TierPlan("host", 400 * 10**9, 25e9, 20e-6)
    assert parse_tier("nvme:1GiB,bandwidth=7GB/s,latency=500us,ttl=2h,policy=s3fifo") == TierPlan(
        "nvme", 1 << 30, 7e9, 500 * 1e-6, 7200.0, Policy.S3FIFO
    )
    assert parse_tier("redis:unlimited").capacity_bytes == UNLIMITED
    assert parse_tier("pool:1TB,bandwidth=1GB/s").latency_s == 0.0
    assert [t.name for t in check_stack([])] == ["unlimited"]
    assert math.isinf(check_stack([])[0].ttl_s)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("host", "NAME:SIZE"),
        ("host:much", "size 'much' must be a size"),
        ("host:-1GB", "larger than 0"),
        ("total:1GB", "taken"),
        ("pool:1GB", "how fast 'pool'.*bandwidth=6GB/s"),
        ("host:1GB,speed=3", "'speed=3'"),
        ("host:1GB,ttl=1h,ttl=2h", "once each"),
        ("host:1GB,bandwidth=fast", "bandwidth 'fast'"),
        ("host:1GB,latency=soon", "latency 'soon'"),
        ("host:1GB,policy=mru", "policy 'mru'.*lru, fifo, s3fifo"),
    ],
)
def test_bad_tiers_are_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_tier(text)


def test_two_tiers_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="host, host"):
        check_stack([parse_tier("host:1GB"), parse_tier("host:2GB")])
