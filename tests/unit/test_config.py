"""The configuration block: what is accepted, and that a refusal names the option, the value and the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier.config import (
    HostTierConfig,
    NvmeTierConfig,
    TriAttentionConfig,
    load_compression,
    load_config,
    parse_bytes,
    parse_compression,
    parse_config,
    parse_seconds,
)
from kvtier.errors import ConfigError
from kvtier.spec import GlobalScale

HOST = {"type": "host", "capacity": "1GiB"}
NVME = {"type": "nvme", "path": "/var/lib/kvtier", "capacity": "1TB"}
COLD = "quantization_for_cold_page"
TRIATTENTION = {"algorithm": "triattention", "calibration_path": "stats.safetensors"}


def test_a_full_block() -> None:
    config = parse_config(
        {
            "kv_cache_compression_config": [{"algorithm": COLD, "quant": "nvfp4", "global_scale": "identity"}],
            "tiers": [HOST, NVME],
            "http": {"port": 9400},
            "promote_deadline": "500ms",
            "salt": "tenant",
        }
    )
    assert [getattr(t, "capacity", None) for t in config.tiers] == [2**30, 10**12]
    assert config.cold_page is not None and config.cold_page.global_scale is GlobalScale.IDENTITY
    assert config.promote_deadline == 0.5
    assert config.http is not None and config.http.host == "127.0.0.1"


def test_defaults_quantize_and_an_empty_list_does_not() -> None:
    default = parse_config({"tiers": [HOST]}).cold_page
    assert default is not None and default.quant == "auto" and default.global_scale is GlobalScale.PAGE
    assert parse_config({"tiers": [HOST], "kv_cache_compression_config": []}).cold_page is None


def test_both_methods_at_once() -> None:
    methods = [{"algorithm": COLD}, {**TRIATTENTION, "budget": 64, "eviction_mode": "per_head"}]
    config = parse_config({"tiers": [HOST], "kv_cache_compression_config": methods})
    assert config.cold_page is not None
    assert [m.algorithm for m in config.kv_cache_compression_config] == [COLD, "triattention"]
    reverse = parse_config({"tiers": [HOST], "kv_cache_compression_config": methods[::-1]})
    assert reverse.cold_page == config.cold_page
    assert parse_compression({"kv_cache_compression_config": methods}) == config.kv_cache_compression_config
    assert parse_config({"tiers": [HOST], "kv_cache_compression_config": methods[1:]}).cold_page is None


def test_a_block_of_methods_alone(tmp_path: Path) -> None:
    path = tmp_path / "methods.yaml"
    path.write_text("kv_cache_compression_config:\n  - {algorithm: triattention, calibration_path: a.pt, beta: 32}\n")
    (method,) = load_compression(path)
    assert isinstance(method, TriAttentionConfig)
    assert (method.budget, method.beta, method.eviction_mode, method.normalize_scores) == (2048, 32, "union", True)
    with pytest.raises(ConfigError, match="unknown option 'workers'"):
        parse_compression({"kv_cache_compression_config": [], "workers": 2})
    with pytest.raises(ConfigError, match="once"):
        parse_compression({"kv_cache_compression_config": [TRIATTENTION, TRIATTENTION]})
    with pytest.raises(ConfigError, match="'kv_cache_compression_config' is missing"):
        parse_compression({})


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({}, ["'tiers'", "missing"]),
        ({"tiers": []}, ["tiers = []", "first tier must be of type host"]),
        ({"tiers": [NVME]}, ["tiers = ['nvme']", "put {type: host"]),
        ({"tiers": [HOST, HOST]}, ["tiers = ['host', 'host']"]),
        ({"tiers": [{"type": "host", "capacity": -1}]}, ["tiers[0].capacity", "-1", "larger than 0"]),
        ({"tiers": [{"type": "host", "capacity": "4 lightyears"}]}, ["tiers[0].capacity", "4 lightyears", "64GiB"]),
        ({"tiers": [{"type": "tape", "capacity": 1}]}, ["tiers[0]", "tape", "'host', 'nvme'"]),
        ({"tiers": [HOST, NVME, NVME]}, ["tiers = ['host', 'nvme', 'nvme']", "each type may be given once"]),
        ({"tiers": 5}, ["'tiers' = 5", "must be a list"]),
        ({"tiers": [5]}, ["'tiers[0]' = 5", "must be a mapping"]),
        ({"tiers": [{"capacity": 5}]}, ["'tiers[0]'", "'type' is missing"]),
        ({"tiers": [HOST, {**NVME, "path": ""}]}, ["'tiers[1].path' = ''", "must name a directory"]),
        ({"tiers": [HOST, {**NVME, "path": "a\0b"}]}, ["tiers[1].path", "must name a directory"]),
        ({"tiers": [HOST, {**NVME, "path": []}]}, ["'tiers[1].path' = []", "or a list of them"]),
        ({"tiers": [HOST, {**NVME, "path": ["/a", ""]}]}, ["tiers[1].path", "must name a directory"]),
        ({"tiers": [HOST, {**NVME, "path": ["/a", "/b", "/a"]}]}, ["tiers[1].path", "names a directory twice"]),
        ({"tiers": [HOST, {**NVME, "path": [1]}]}, ["tiers[1].path[0]' = 1"]),
        ({"tiers": [HOST], "http": 5}, ["'http' = 5", "must be a mapping"]),
        ({"tiers": [HOST], "promote_deadline": float("inf")}, ["promote_deadline", "inf", "at most 3650d"]),
        ({"tiers": [HOST], "offload_wait": float("nan")}, ["offload_wait", "nan", "larger than 0"]),
        ({"tiers": [{**HOST, "colour": 1}]}, ["unknown option", "tiers[0].colour", "1"]),
        ({"tiers": [HOST], "teirs": 3}, ["unknown option", "teirs"]),
        ({"tiers": [HOST], "workers": 0}, ["workers", "0", "greater than or equal to 1"]),
        ({"tiers": [HOST], "workers": "2"}, ["workers", "'2'", "integer"]),
        ({"tiers": [HOST], "lease": "soon"}, ["lease", "soon", "500ms"]),
        ({"tiers": [HOST], "http": {"port": 70000}}, ["http.port", "70000", "65535"]),
        (
            {"tiers": [HOST], "kv_cache_compression_config": [{"algorithm": COLD, "quant": "int2"}]},
            ["kv_cache_compression_config[0].quant", "int2", "'lossless' or 'none'"],
        ),
        (
            {
                "tiers": [HOST],
                "kv_cache_compression_config": [{"algorithm": COLD, "quant": "k8v4", "rope_quant": "fp8"}],
            },
            ["kv_cache_compression_config[0]", "rope_quant", "'k8v4'", "leave it out"],
        ),
        (
            {
                "tiers": [HOST],
                "kv_cache_compression_config": [
                    {"algorithm": COLD, "skip_rope_quantization": True, "rope_quant": "fp8"}
                ],
            },
            ["skip_rope_quantization", "rope_quant", "give one"],
        ),
        (
            {
                "tiers": [HOST],
                "kv_cache_compression_config": [{"algorithm": COLD, "quant": "lossless", "max_relative_error": 0.1}],
            },
            ["max_relative_error = 0.1", "'lossless'", "leave it out"],
        ),
        (
            {
                "tiers": [HOST],
                "kv_cache_compression_config": [{"algorithm": COLD, "quant": "none", "quality_budget": 0.1}],
            },
            ["quality_budget = 0.1", "'none'", "leave it out"],
        ),
        (
            {"tiers": [HOST], "kv_cache_compression_config": [{"algorithm": COLD, "max_relative_error": 0}]},
            ["max_relative_error", "0", "greater than 0"],
        ),
        (
            {"tiers": [HOST], "kv_cache_compression_config": [{"algorithm": COLD}, {"algorithm": COLD}]},
            ["kv_cache_compression_config", "once"],
        ),
        (
            {"tiers": [HOST], "kv_cache_compression_config": [TRIATTENTION, TRIATTENTION]},
            ["kv_cache_compression_config: triattention", "once"],
        ),
        (
            {"tiers": [HOST], "kv_cache_compression_config": [{**TRIATTENTION, "budget": 0}]},
            ["'kv_cache_compression_config[0].budget' = 0", "greater than or equal to 1"],
        ),
        (
            {"tiers": [HOST], "kv_cache_compression_config": [{**TRIATTENTION, "beta": "128"}]},
            ["'kv_cache_compression_config[0].beta' = '128'", "integer"],
        ),
        (
            {"tiers": [HOST], "kv_cache_compression_config": [{**TRIATTENTION, "eviction_mode": "both"}]},
            ["kv_cache_compression_config[0].eviction_mode", "both", "'union', 'per_head' or 'per_layer_perhead'"],
        ),
        (
            {"tiers": [HOST], "kv_cache_compression_config": [{**TRIATTENTION, "window": 3}]},
            ["unknown option 'kv_cache_compression_config[0].window'"],
        ),
        (
            {"tiers": [HOST], "kv_cache_compression_config": [{"algorithm": "triattention"}]},
            ["'kv_cache_compression_config[0].calibration_path' is missing"],
        ),
        (
            {"tiers": [HOST], "kv_cache_compression_config": [{"algorithm": "magic"}]},
            ["kv_cache_compression_config[0]", "magic", "'triattention'"],
        ),
    ],
)
def test_refusals_name_option_value_and_way_out(block: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(block)
    for word in words:
        assert word in str(caught.value)


def test_a_path_is_one_directory_or_several() -> None:
    for given, paths in (("/a", ("/a",)), (Path("/a"), ("/a",)), (["/a", Path("/b")], ("/a", "/b"))):
        tier = parse_config({"tiers": [HOST, {**NVME, "path": given}]}).tiers[1]
        assert isinstance(tier, NvmeTierConfig) and tier.path == tuple(map(Path, paths))


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "kvtier.yaml"
    path.write_text("tiers:\n  - {type: host, capacity: 64MiB}\n")
    assert load_config(path).tiers[0] == HostTierConfig(type="host", capacity=64 * 2**20)
    path.write_text("- just\n- a list\n")
    with pytest.raises(ConfigError, match="must hold a mapping"):
        load_config(path)
    path.write_text("tiers: [")
    with pytest.raises(ConfigError, match="is not YAML"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"absent\.yaml.*cannot be read"):
        load_config(tmp_path / "absent.yaml")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not text in UTF-8"):
        load_config(path)


@pytest.mark.parametrize("block", [None, 5, "tiers", ["tiers"]])
def test_a_block_that_is_no_mapping_is_named(block: Any) -> None:
    with pytest.raises(ConfigError, match="give a mapping of options"):
        parse_config(block)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1GiB", 2**30), ("1GB", 10**9), ("1.5 MiB", 3 * 2**19), (4096, 4096), ("200", 200), ("2tb", 2 * 10**12)],
)
def test_sizes(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "1 Gb/s", "-3MiB", 0, True, None, 1.5])
def test_bad_sizes(text: object) -> None:
    with pytest.raises(ValueError, match="64GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(("text", "expected"), [("250ms", 0.25), ("2s", 2.0), ("1d", 86400.0), (3, 3.0)])
def test_times(text: str | int, expected: float) -> None:
    assert parse_seconds(text) == expected


def test_what_lower_tiers_are_given() -> None:
    default = parse_config({"tiers": [HOST, NVME]})
    (_, nvme) = default.tiers
    assert isinstance(nvme, NvmeTierConfig)
    assert (nvme.write, nvme.admission, nvme.refresh, nvme.policy, nvme.ttl) == ("through", "always", True, "lru", None)
    assert (default.priority, default.break_even, default.prefill_s_per_token) == ("normal", True, None)
    other = parse_config(
        {
            "tiers": [
                {**HOST, "policy": "s3fifo", "ttl": "1d", "budget": {"path": "/dev/shm/budget", "capacity": "64GiB"}},
                {**NVME, "write": "back", "admission": "second_use", "refresh": False, "policy": "s3fifo", "ttl": "7d"},
            ],
            "priority": "low",
            "break_even": False,
            "prefill_s_per_token": 0.00002,
        }
    )
    host = other.tiers[0]
    assert isinstance(host, HostTierConfig) and host.budget is not None
    assert (host.policy, host.ttl, host.budget.capacity) == ("s3fifo", 86400.0, 64 << 30)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"tiers": [HOST, {**NVME, "write": "behind"}]}, r"tiers\[1\].write' = 'behind'.*'through', 'back' or 'none'"),
        ({"tiers": [HOST, {**NVME, "admission": "twice"}]}, r"tiers\[1\].admission' = 'twice'.*'second_use'"),
        ({"tiers": [{**HOST, "policy": "fifo"}]}, r"tiers\[0\].policy' = 'fifo'.*'lru' or 's3fifo'"),
        ({"tiers": [{**HOST, "write": "back"}]}, r"unknown option 'tiers\[0\].write'"),
        ({"tiers": [{**HOST, "budget": {"capacity": "1GiB"}}]}, r"'tiers\[0\].budget.path' is missing"),
        ({"tiers": [HOST], "priority": "urgent"}, r"'priority' = 'urgent'.*'low', 'normal' or 'high'"),
        ({"tiers": [HOST], "prefill_s_per_token": 0}, r"'prefill_s_per_token' = 0.*greater than 0"),
    ],
)
def test_policies_that_do_not_exist_are_named(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(option)
