"""Benches measure what they can where an optional package or a program is missing, and say what they left out."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import bench_codec, bench_codec_others, bench_server, bench_tier
from kvtier.kernels import _native
from kvtier.testing.redis_servers import find_server

SERVER: dict[str, Any] = {"block_bytes": (100_000,), "rounds": 1, "batch_bytes": 1_000_000}
CODEC: dict[str, Any] = {"codecs": ("nvfp4",), "shapes": ("mha",), "rounds": 1, "input_bytes": 4 << 20}
SERVER_OPS = ["set", "get", "get among sets"]


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """As if these packages and programs were not installed."""
    find_spec, which = importlib.util.find_spec, shutil.which
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in names else find_spec(name))
    monkeypatch.setattr("shutil.which", lambda name: None if name in names else which(name))


def left_out(captured: pytest.CaptureFixture[str]) -> list[tuple[str, str]]:
    """What, and why, of each line on stderr."""
    lines = [line.removeprefix("left out: ").partition(": ") for line in captured.readouterr().err.splitlines()]
    return [(what, why) for what, _, why in lines]


def test_the_cache_server_is_measured_without_a_redis_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_server, "find_server", lambda kind: None)
    rows = bench_server.run(**SERVER)
    assert [(row["tier"], row["op"]) for row in rows] == [("server", op) for op in SERVER_OPS]
    for row in rows[:2]:
        assert row["cpu_s_per_gb"] is not None and row["p99_ms"]
        assert [row[name] for name in ("baseline", "over_baseline", "peer_mb_per_s", "peer_p99_ms")] == [None] * 4
    ((what, why),) = left_out(capsys)
    assert what == "redis-server's side, and the clients" and "apt-get install redis-server" in why


@pytest.mark.parametrize("missing", ["redis", "openssl"])
def test_what_clients_need_is_left_out_by_name(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if find_server("redis") is None:
        pytest.skip("no redis-server: apt-get install redis-server")
    if missing == "openssl":
        pytest.importorskip("redis", reason="the clients are measured beside redis-py")
    hide(monkeypatch, missing)
    rows = bench_server.run(**SERVER)
    assert [(row["tier"], row["op"]) for row in rows[:3]] == [("server", op) for op in SERVER_OPS]
    assert rows[0]["peer_mb_per_s"] and rows[1]["peer_mb_per_s"]
    told = dict(left_out(capsys))
    if missing == "redis":
        assert len(rows) == 3
        assert "kvtier[redis]" in told["the clients"]
    else:
        assert {row["tier"] for row in rows[3:]} == {"client-unix", "redis-unix", "client-tcp", "redis-tcp"}
        assert "apt-get install openssl" in told["clients over TLS"]


@pytest.mark.parametrize("package", ["torch", "torchao"])
def test_codecs_are_measured_without_others_packages(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide(monkeypatch, package, "lmcache")
    rows = bench_codec.run(dtypes=("bf16",), **CODEC)
    assert {row["codec"] for row in rows} == {"nvfp4"}
    assert all(row["gb_per_s"] > 0 and row["over_torchao"] is row["over_lmcache_fp8"] is None for row in rows)
    told = left_out(capsys)
    assert [what for what, _ in told] == [bench_codec_others.TORCHAO, bench_codec_others.LMCACHE]
    assert told[0][1].startswith(f"{package} is not installed here: pip install {package}")
    bench_codec.run(dtypes=("fp16",), impls=(_native.isas()[0],), **CODEC)
    assert left_out(capsys) == [], "they take no FP16 in any case"


def test_a_package_that_cannot_be_imported_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: pip install torchao")
    monkeypatch.setitem(sys.modules, "torchao.prototype.mx_formats.nvfp4_tensor", None)
    hide(monkeypatch, "lmcache")
    rows = bench_codec.run(dtypes=("bf16",), impls=(_native.isas()[0],), **CODEC)
    assert {row["codec"] for row in rows} == {"nvfp4"}
    why = dict(left_out(capsys))[bench_codec_others.TORCHAO]
    assert why.startswith("this torchao cannot be used, pip install torchao") and "nvfp4_tensor" in why


def test_nvme_is_measured_without_fio(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    hide(monkeypatch, "fio")
    rows = bench_tier.run(tmp_path, rounds=1, block_bytes=(64 << 10,), batch_bytes=4 << 20)
    assert [(row["tier"], row["op"]) for row in rows] == [(t, op) for t in ("host", "nvme") for op in ("put", "get")]
    assert all(row["mb_per_s"] > 0 for row in rows)
    assert [row["baseline"] is None for row in rows] == [False, False, True, True]
    assert left_out(capsys) == [("fio beside NVMe", "it is not installed here: apt-get install fio")]
