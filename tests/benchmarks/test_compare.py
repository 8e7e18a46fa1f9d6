"""The comparison: its smallest run, and a page that says what the figures say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.cli import bench_codec_others
from kvtier.testing.redis_servers import find_server
from tests.benchmarks.compare import __main__ as driver
from tests.benchmarks.compare import codecs, groups, kv, page, parts
from tests.benchmarks.compare.samples import Samples

STORAGE = ("store", "load", "store one", "load one", "restart")


def result(part: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "part": part, "command": f"-m {part}", "environment": "", "kv": "kv-random (00)", "began": "2026-11-30 08:00",
        "seconds": 3.0, "load_before": 0.1, "versions": {"numpy": "2"}, "rows": rows,
        "machine": {"cpu": "a CPU", "cores": 2, "memory_gib": 8.0, "system": "Linux", "python": "3.11"},
    }  # fmt: skip


def storage(system: str, speed: float, *, at_rest: float = 1.0, error: float = 0.0) -> list[dict[str, Any]]:
    """Rows of one system that does everything at `speed`."""
    return [
        {
            "system": system, "op": op, "hot_mb_per_s": speed, "cpu_s_per_gb": 100 / speed, "p50_ms": 1e4 / speed,
            "p99_ms": 2e4 / speed, "server_cpu_s_per_gb": 1.5, "samples": 3, "at_rest": at_rest,
            "relative_error": error,
        }
        for op in STORAGE
    ]  # fmt: skip


def told(tmp_path: Path, results: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """What the page says: where others are better, and where kvtier is."""
    text = page.write(results, tmp_path).read_text()
    others, _, ours = text.partition("## Where others are better")[2].partition("## Where kvtier is better")
    return others, ours


def test_verdicts_go_both_ways_and_noise_is_none(tmp_path: Path) -> None:
    rows = [
        *storage("kvtier raw, nvme", 1000), *storage("kvtier nvfp4, nvme", 500, at_rest=0.28, error=0.1),
        *storage("fs_native", 800), *storage("fs_native, again", 720),
    ]  # fmt: skip
    others, ours = told(tmp_path, [result("lmcache", rows)])
    # Twins differ 1.11 times: 800 is not 1000, nor 500; of raw nothing is better elsewhere.
    assert "- store, MB/s: fs_native (800) against kvtier nvfp4, nvme (500, 1.60 times)" in others
    assert "kvtier raw" not in others
    assert "- store, MB/s: kvtier raw, nvme (1,000, 1.25 times) against fs_native (800)" in ours
    assert "- bytes at rest per hot byte: kvtier nvfp4, nvme (0.280, 3.57 times) against fs_native (1.000)" in ours
    # An error of nothing is better than any, without saying how many times.
    assert "- relative error: fs_native (0) against kvtier nvfp4, nvme (0.1000)" in others

    noisy = [row | ({"hot_mb_per_s": 500.0} if row["system"].endswith("again") else {}) for row in rows]
    others, ours = told(tmp_path, [result("lmcache", noisy)])
    # Noise of 1.6 leaves neither of the speeds; the rest stays.
    assert "MB/s" not in others and "MB/s" not in ours
    assert "restart-warm, ms: fs_native" in others and "restart-warm, ms: kvtier raw" in ours


def test_exact_figures_have_no_noise_and_times_have_a_floor() -> None:
    column = groups.Column("s")
    group = groups.Group(
        "a group", "", (column, groups.AT_REST), {"kvtier": {"s": 1.0}, "them": {"s": 1.04}, "them, again": {"s": 1.04}}
    )
    assert group.threshold(column) == groups.FLOOR and group.noise(column) == 1.0
    assert group.threshold(groups.AT_REST) == groups.EXACT_FLOOR
    other = groups.Column("another, s")
    assert groups.Group("", "", (column, other), {"us": {"s": 1.0}, "us, again": {"s": 2.0}}).threshold(other) == 2
    assert group.ours() == ["kvtier"] and group.others() == ["them"]
    assert group.advantage(column, "kvtier", "them") == pytest.approx(1.04)
    assert group.advantage(groups.AT_REST, "kvtier", "them") is None


def test_all_parts_become_tables(tmp_path: Path) -> None:
    codec = [
        {**row, "op": op}
        for name in ("kvtier nvfp4", "kvtier nvfp4, again", "torchao nvfp4")
        for op, row in zip(("encode", "decode", "encode one", "decode one"), storage(name, 100), strict=False)
    ]
    server = [
        {
            "tier": tier, "op": op, "mb_per_s": 100.0, "p99_ms": 1.0, "cpu_s_per_gb": 0.2, "baseline": 0.3,
            "peer_mb_per_s": 50.0, "peer_p99_ms": 2.0,
        }
        for tier, ops in (("server", ("set", "get")), ("client-unix", ("set", "get")), ("redis-unix", ("put", "get")))
        for op in ops
    ]  # fmt: skip
    flood = {"tier": "server", "op": "get among sets", "mb_per_s": 1.0, "p99_ms": 2.0}
    ttft = [
        {"system": system, "codec": form, "served_from": place, "ttft_s": s, "prompt_tokens": 1000}
        for system, form, place, s in (
            ("sglang", "", "recompute", 2.0), ("sglang", "", "device", 0.2), ("sglang, hicache file", "", "file", 0.4),
            ("kvtier linker", "auto", "nvme", 0.3), ("sglang", "", "recompute", 2.1),
            ("kvtier linker", "none", "nvme", 0.35),
        )
    ]  # fmt: skip
    kvzip = [
        {"system": system, "op": op, "seconds": s, "least_s": s - 0.1, "most_s": s + 0.1, "samples": 3, "tokens": 1024,
         "cpu_s": s, "agreement": 0.99}
        for system, op, s in (("transformers", "prefill", 2.0), ("kvtier", "scored", 6.0), ("kvpress", "scored", 7.0))
    ]  # fmt: skip
    rows = {
        "codecs": codec, "lmcache": [*storage("kvtier raw, redis", 10), *storage("resp", 20), *storage("fs", 10)],
        "hicache": [*storage("kvtier raw", 10), *storage("hicache file", 20)], "redis": [*server, flood], "ttft": ttft,
        "kvzip": kvzip,
    }  # fmt: skip
    assert set(rows) == {part.name for part in parts.FULL}
    path = page.write([result(part, rows[part]) for part in rows], tmp_path)
    text = path.read_text()
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## The codec alone", "## Behind LMCache, on a disk", "## Behind LMCache, on Redis",
        "## Behind SGLang's hierarchical cache, on a disk", "## The cache server beside redis-server",
        "## Clients of Redis, a unix socket", "## Time to the first token behind SGLang", "## KVzip",
        "## Where others are better", "## Where kvtier is better",
    ]  # fmt: skip
    assert (
        "CPU s per GB, Redis too" in text and "| resp | 20 | 20 | 5.00 | 5.00 |" in text and "| 6.50 | 6.50 |" in text
    )
    assert "| kvtier linker, auto | 0.300 |" in text and "| sglang, again |" in text
    assert max(map(len, (line for line in text.splitlines() if not line.startswith("|")))) <= 120
    assert json.loads((tmp_path / page.FIGURES).read_text())[0]["part"] == "codecs"
    for line in text.splitlines():
        if line.startswith("!["):
            assert (tmp_path / line.partition("(")[2].rstrip(")")).is_file()


def test_figures_of_samples() -> None:
    samples = Samples(1_000_000, [n / 1000 for n in range(100, 0, -1)], [0.01] * 100)
    assert samples.figures() == {
        "hot_mb_per_s": 19.8, "cpu_s_per_gb": 10.0, "p50_ms": 50.5, "p99_ms": 99.0, "samples": 100,
    }  # fmt: skip


def test_codecs_on_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_codec_others, "work", lambda *_, **__: {})
    values = kv.random_kv(2 * codecs.PAGE_TOKENS + 5)
    rows = codecs.run(values, 1)
    by = {(row["system"], row["op"]): row for row in rows}
    assert {name for name, _ in by} == {*(f"kvtier {form}" for form in codecs.FORMS), codecs.AGAIN, "memcpy"}
    assert by["kvtier nvfp4", "encode one"]["samples"] == 2 and by["kvtier nvfp4", "encode"]["samples"] == 1
    assert by["kvtier raw", "decode"]["relative_error"] == by["kvtier lossless", "decode"]["relative_error"] == 0
    assert 0.08 < by["kvtier nvfp4", "decode"]["relative_error"] < 0.11
    assert 0.28 < by["kvtier nvfp4", "decode"]["at_rest"] < 0.3
    assert by["kvtier lossless", "encode"]["at_rest"] < 0.8
    assert by["kvtier raw", "encode"]["at_rest"] == pytest.approx(1, abs=0.01)


def test_relative_error() -> None:
    want = kv.bf16(np.array([3.0, 4.0], np.float32))
    assert codecs.relative_error(want, want) == 0
    assert codecs.relative_error(kv.bf16(np.array([0.0, 4.0], np.float32)), want) == pytest.approx(0.6)


def test_results_are_kept_and_a_failed_part_keeps_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def measure(part: parts.Part, values: Path, kv_name: str, folder: Path) -> dict[str, Any]:
        ran.append(part.name)
        if part.name == "redis" and ran.count("redis") == 1:
            raise parts.PartError("redis: it failed")
        return result(part.name, [])

    monkeypatch.setattr(parts, "measure", measure)
    arguments = ["--smoke", "--folder", str(tmp_path / "kept"), "--json"]
    assert driver.main(arguments) == 1
    assert "redis: it failed" in capsys.readouterr().err
    assert driver.main(arguments) == 0 and ran == ["codecs", "redis", "redis"]
    assert [r["part"] for r in json.loads(capsys.readouterr().out)] == ["codecs", "redis"]
    assert driver.main([*arguments, "--parts", "codecs"]) == 0 and len(ran) == 3
    assert driver.main([*arguments, "--parts", "codecs", "--again"]) == 0 and len(ran) == 4
    monkeypatch.setattr(parts, "sources", lambda: "other code")
    assert driver.main([*arguments, "--parts", "codecs"]) == 0 and len(ran) == 5
    with pytest.raises(SystemExit, match=r"--parts nothing: use any of codecs, redis"):
        driver.main([*arguments, "--parts", "nothing"])


def test_a_command_that_fails_is_named(tmp_path: Path) -> None:
    part = parts.Part("codecs", "", ("-c", "raise SystemExit(3)"), 1)
    with pytest.raises(parts.PartError, match=r"codecs: .*status 3"):
        parts.measure(part, tmp_path / "kv.npy", "kv", tmp_path)
    part = parts.Part("codecs", "", ("-c", "print('no rows')"), 1)
    with pytest.raises(parts.PartError, match=r"printed no rows"):
        parts.measure(part, tmp_path / "kv.npy", "kv", tmp_path)


@pytest.mark.timeout(600)
def test_the_smallest_run_writes_a_page(tmp_path: Path) -> None:
    if find_server("redis") is None:
        pytest.skip("no redis-server: apt-get install redis-server")
    report = tmp_path / "report"
    assert driver.main(["--smoke", "--folder", str(tmp_path / "kept"), "--report", str(report)]) == 0
    text = (report / page.PAGE).read_text()
    for words in ("kvtier nvfp4, again", "kvtier's Redis tier", "redis-py", "memcpy", "*noise, times*"):
        assert words in text
    again = tmp_path / "again"
    assert driver.main(["--render", str(report / page.FIGURES), "--report", str(again)]) == 0
    assert (again / page.PAGE).read_text() == text
    assert sorted(path.suffix for path in (tmp_path / "kept").iterdir()) == [".json", ".json", ".npy"]
