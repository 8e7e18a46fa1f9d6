"""``kvtier bench lmcache`` at its smallest: every system stores and loads real chunks, which the bench compares."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier.testing.redis_servers import find_server


@pytest.mark.timeout(600)
def test_every_system_is_measured_in_both_directions(tmp_path: Path) -> None:
    if find_server() is None:
        pytest.skip("no Redis server is installed: apt-get install redis-server")
    from kvtier.cli.bench_lmcache import run

    ours = {"kvtier raw, nvme", "kvtier nvfp4, redis"}
    theirs = {"fs_native, fp8", "fs", "resp", "resp, kvtier_nvfp4"}
    rows = run(directory=tmp_path, chunk_bytes=(1 << 20,), rounds=1, round_bytes=4 << 20, names=[*ours, *theirs])
    assert {frozenset(row) for row in rows} == {
        frozenset(
            {
                "system", "op", "chunk_bytes", "hot_mb_per_s", "cpu_s_per_gb", "server_cpu_s_per_gb", "p50_ms",
                "p99_ms", "samples", "at_rest", "relative_error",
            }
        )
    }  # fmt: skip
    assert all(float(row["hot_mb_per_s"]) > 0 and float(row["p99_ms"]) >= float(row["p50_ms"]) > 0 for row in rows)
    assert {(row["system"], row["op"]) for row in rows} == {
        *((system, op) for system in ours | theirs for op in ("store", "load", "store one", "load one", "restart")),
        *((system, "store, answered") for system in ours),
    }
    assert {row["samples"] for row in rows if row["op"] == "load one"} == {4}
    served = {row["system"] for row in rows if row["op"] == "store" and float(row["server_cpu_s_per_gb"]) > 0}
    assert served == {"kvtier nvfp4, redis", "resp", "resp, kvtier_nvfp4"}
    at_rest = {row["system"]: float(row["at_rest"]) for row in rows}
    assert 0.26 < at_rest["kvtier nvfp4, redis"] < 0.36 and 0.26 < at_rest["resp, kvtier_nvfp4"] < 0.36
    assert 0.49 < at_rest["fs_native, fp8"] < 0.55 and at_rest["fs"] >= 1 and at_rest["kvtier raw, nvme"] >= 1
    errors = {row["system"]: float(row["relative_error"]) for row in rows}
    assert errors["fs"] == errors["resp"] == errors["kvtier raw, nvme"] == 0
    assert 0.01 < errors["fs_native, fp8"] < errors["kvtier nvfp4, redis"] < 0.15
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_chunks_of_a_model_are_its_tokens_in_order(tmp_path: Path) -> None:
    from kvtier.cli.bench_lmcache_chunks import TOKENS, Chunks

    layers, tokens, heads, dim = 2, 2 * TOKENS + 3, 3, 16
    kv = np.arange(2 * layers * tokens * heads * dim, dtype=np.uint32).astype(np.uint16)
    kv = kv.reshape(2, layers, tokens, heads, dim)
    np.save(tmp_path / "kv.npy", kv)
    with Chunks.of(tmp_path / "kv.npy") as chunks:
        assert (chunks.count, chunks.nbytes) == (2, 2 * layers * TOKENS * heads * dim * 2)
        for n, item in enumerate(chunks.source):
            assert tuple(item.tensor.shape) == (2, layers, TOKENS, heads * dim)
            want = kv[:, :, n * TOKENS : (n + 1) * TOKENS].reshape(item.tensor.shape)
            assert (item.tensor.view(torch.int16).numpy() == want.view(np.int16)).all()


def test_what_is_no_kv_is_told(tmp_path: Path) -> None:
    from kvtier.cli.bench_lmcache_chunks import Chunks
    from kvtier.errors import ConfigError

    np.save(tmp_path / "kv.npy", np.zeros((2, 3), np.float32))
    with pytest.raises(ConfigError, match=r"float32 of the shape \(2, 3\)"):
        Chunks.of(tmp_path / "kv.npy")


def test_systems_that_are_compared(tmp_path: Path) -> None:
    """Each has its own folder, and those that run twice are the same but for it."""
    from kvtier.cli.bench_lmcache_systems import AGAIN, systems

    by_name = {system.name: system for system in systems(tmp_path, ("127.0.0.1", 1))}
    forms = ("raw", "nvfp4", "k8v4", "lossless")
    assert set(by_name) == {
        *(f"kvtier {form}, {where}" for form in forms for where in ("nvme", "redis")),
        *("fs", "fs_native", "fs_native, fp8", "resp", "resp, fp8", "resp, kvtier_nvfp4"),
        *(f"{name}{AGAIN}" for name in ("kvtier nvfp4, nvme", "fs_native", "resp")),
    }
    folders = [system.folder for system in by_name.values() if system.folder is not None]
    assert len(set(folders)) == len(folders)
    for name, system in by_name.items():
        if name.endswith(AGAIN):
            first = by_name[name.removesuffix(AGAIN)]
            assert str(system.options).replace(str(system.folder), "") == str(first.options).replace(
                str(first.folder), ""
            )
