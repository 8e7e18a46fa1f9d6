"""``kvtier bench lmcache`` at its smallest: every system stores and loads real chunks, which the bench compares."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.testing.redis_servers import find_server


@pytest.mark.timeout(300)
def test_every_system_is_measured_in_both_directions(tmp_path: Path) -> None:
    if find_server() is None:
        pytest.skip("no Redis server is installed: apt-get install redis-server")
    from kvtier.cli.bench_lmcache import run

    rows = run(directory=tmp_path, chunk_bytes=(1 << 20,), rounds=1, round_bytes=8 << 20)
    assert {frozenset(row) for row in rows} == {
        frozenset({"system", "op", "chunk_bytes", "hot_mb_per_s", "cpu_s_per_gb"})
    }
    assert all(float(row["hot_mb_per_s"]) > 0 and float(row["cpu_s_per_gb"]) > 0 for row in rows)
    ours = {"kvtier raw, nvme", "kvtier nvfp4, nvme", "kvtier raw, redis", "kvtier nvfp4, redis"}
    theirs = {"fs_native", "fs_native, fp8", "resp", "resp, fp8", "resp, kvtier_nvfp4"}
    assert {(row["system"], row["op"]) for row in rows} == {
        *((system, op) for system in ours | theirs for op in ("store", "load")),
        *((system, "store, answered") for system in ours),
    }
    assert not list(tmp_path.iterdir()), "nothing is left behind"
