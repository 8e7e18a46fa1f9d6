"""The replay command: its figures, its sentence, its plot, the live check, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from kvtier.replay.formats import read_trace
from kvtier.replay.live import run_live
from kvtier.replay.page import ReplayCodec
from kvtier.replay.stack import Placement, parse_tier
from kvtier.replay.sweep import Metric, Sweep, advice, decimal, default_sizes
from tests.refusals import assert_refused


def run(capsys: pytest.CaptureFixture[str], args: str) -> str:
    with pytest.raises(SystemExit) as done:
        main(["replay", *args.split()])
    captured = capsys.readouterr()
    assert done.value.code in (0, None), captured.err
    return captured.out


def as_json(capsys: pytest.CaptureFixture[str], args: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(run(capsys, f"{args} --json"))
    return report


def test_one_tier(capsys: pytest.CaptureFixture[str]) -> None:
    got = as_json(capsys, "mooncake-conversation --bytes-per-token 147456 --codec nvfp4 --tier host:400GB")
    assert (got["requests"], got["blocks"]) == (12_031, 288_500)
    assert got["hit_rate"]["total"] == got["hit_rate"]["host"] == pytest.approx(28.3, abs=0.1)
    assert got["block_bytes"] == 147_456 * 512 * 9 // 32
    assert got["capacity_blocks"]["host"] == 400 * 10**9 // got["block_bytes"]
    hits = round(got["hit_rate"]["host"] / 100 * got["blocks"])
    assert got["bytes_moved"]["host"]["read"] == pytest.approx(hits * got["block_bytes"], rel=1e-4)
    assert got["bytes_moved"]["host"]["written"] == pytest.approx((got["blocks"] - hits) * got["block_bytes"], rel=1e-4)
    assert 0 < got["ttft_s"]["p50"] < got["ttft_s"]["p90"]
    assert set(got["prefix_hit_rate"]) == {"total", "host"}


def test_two_tiers_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    stack = "--tier host:200GB --tier nvme:800GB"
    through = as_json(capsys, f"mooncake-synthetic --bytes-per-token 147456 --codec raw {stack}")["hit_rate"]
    back = as_json(capsys, f"mooncake-synthetic --bytes-per-token 147456 --codec raw {stack} --placement write-back")
    assert through["host"] == pytest.approx(17.6, abs=0.1)
    assert through["total"] == pytest.approx(through["host"] + through["nvme"], abs=0.002)
    # Written back, two tiers of one policy are one of their joint size.
    joint = as_json(capsys, "mooncake-synthetic --bytes-per-token 147456 --codec raw --tier host:1000GB")["hit_rate"]
    assert back["hit_rate"]["total"] == pytest.approx(joint["total"], abs=0.05)
    assert through["total"] < back["hit_rate"]["total"]


def test_without_a_tier_memory_has_no_end(capsys: pytest.CaptureFixture[str]) -> None:
    got = as_json(capsys, "mooncake-synthetic")
    assert got["hit_rate"]["total"] == pytest.approx(64.0, abs=0.1)
    assert "unlimited" in run(capsys, "mooncake-synthetic")


def test_ttft_follows_the_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    args = "mooncake-synthetic --requests 300 --tier host:100GB,bandwidth=1000TB/s,latency=1us"
    slow = as_json(capsys, f"{args} --prefill-measured 1000:1s")
    fast = as_json(capsys, f"{args} --prefill-s-per-token 0.0001")
    for q in ("p50", "p90"):
        assert slow["ttft_s"][q] == pytest.approx(10 * fast["ttft_s"][q], rel=1e-3)


def test_closed_loop(capsys: pytest.CaptureFixture[str]) -> None:
    args = "mooncake-synthetic --tier host:{} --sessions 32 --duration 300s"
    small, large = (as_json(capsys, args.format(size)) for size in ("20GB", "2TB"))
    loops = small["closed_loop"], large["closed_loop"]
    assert loops[0]["requests_completed"] < loops[1]["requests_completed"] <= large["requests"]
    assert loops[0]["output_tokens_per_s"] < loops[1]["output_tokens_per_s"]
    assert loops[1]["duration_s"] == 300
    assert small["ttft_s"]["p90"] > large["ttft_s"]["p90"]
    assert "requests completed" in run(capsys, args.format("2TB"))


def test_a_closed_loop_without_end_completes_the_trace(capsys: pytest.CaptureFixture[str]) -> None:
    got = as_json(capsys, "mooncake-synthetic --requests 100 --sessions 4")
    assert got["closed_loop"]["requests_completed"] == got["requests"] == 100
    assert got["closed_loop"]["duration_s"] > 0


def test_sweep(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    args = "mooncake-synthetic --bytes-per-token 147456 --sweep --sizes 200GB,400GB,800GB,1600GB"
    got = as_json(capsys, args)
    assert got["sizes_bytes"] == [200 * 10**9, 400 * 10**9, 800 * 10**9, 1600 * 10**9]
    assert got["hit_rate"]["raw"] == pytest.approx([17.6, 28.6, 43.7, 58.3], abs=0.1)
    assert got["hit_rate"]["fp8"] == pytest.approx([28.6, 43.7, 58.3, 64.0], abs=0.1)
    assert got["hit_rate"]["nvfp4"] == pytest.approx([41.2, 56.0, 63.8, 64.0], abs=0.1)
    assert got["unlimited_hit_rate"] == pytest.approx(64.0, abs=0.1)
    out = run(capsys, args)
    assert out.rstrip().endswith(got["advice"])
    assert got["advice"].startswith("Buy 800 GB of host and store NVFP4: 63.8 %")
    assert "R raw   F fp8   N nvfp4" in out


def test_sweep_of_the_lower_tier_keeps_the_upper(capsys: pytest.CaptureFixture[str]) -> None:
    got = as_json(capsys, "mooncake-synthetic --sweep --tier host:100GB --tier nvme:1TB")
    assert got["tier"] == "nvme"
    assert len(got["sizes_bytes"]) == 12
    for rates in got["hit_rate"].values():
        assert list(rates) == sorted(rates)


def test_a_sweep_of_a_closed_loop(capsys: pytest.CaptureFixture[str]) -> None:
    args = (
        "mooncake-synthetic --sweep --tier host:20GB --tier nvme:1TB --sizes 50GB,800GB --sessions 32 --duration 300s"
    )
    got = as_json(capsys, args)
    for codec in ("raw", "fp8", "nvfp4"):
        few, many = got["requests_completed"][codec]
        assert few < many
        assert got["ttft_p99"][codec][0] > got["ttft_p99"][codec][1]
        assert 0 < got["tier_share"][codec][0] < 100
    assert got["requests_completed"]["raw"][0] < got["requests_completed"]["nvfp4"][0]
    shown = run(capsys, f"{args} --show requests_completed")
    assert str(got["requests_completed"]["nvfp4"][1]) in shown


def test_the_plot_is_a_png(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'kvtier[demo]'")
    path = tmp_path / "curve.png"
    run(capsys, f"mooncake-synthetic --sweep --sizes 200GB,400GB --plot {path}")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_advice_where_the_sweep_is_too_small() -> None:
    rates: dict[ReplayCodec, tuple[float, ...]] = dict.fromkeys(ReplayCodec, (1.0, 2.0))
    result = Sweep("nvme", (10**9, 10**10), {Metric.HIT_RATE: rates}, 50.0)
    assert "buy more than this sweep covers" in advice(result)
    rates[ReplayCodec.NVFP4] = (1.0, 49.0)
    assert "need more than 10 GB" in advice(result)


def test_sizes_reach_from_a_small_part_to_all_blocks() -> None:
    trace = read_trace("mooncake-synthetic")
    sizes = default_sizes(trace, 1000)
    assert len(sizes) == 12
    assert sizes[-1] >= trace.unique_blocks * 1000 > sizes[-2]
    assert sizes[0] == pytest.approx(trace.unique_blocks * 1000 / 128, rel=0.1)
    assert [decimal(n) for n in (999, 400 * 10**9, 1_600 * 10**9)] == ["999 B", "400 GB", "1.6 TB"]


@pytest.mark.parametrize("stack", [("host:40GB",), ("host:20GB", "nvme:60GB")])
def test_simulator_and_ledger_agree(stack: tuple[str, ...]) -> None:
    trace = read_trace("mooncake-synthetic").head(120)
    tiers = tuple(parse_tier(text) for text in stack)
    seen: list[int] = []
    result = run_live(trace, tiers, 147_456 * 512, Placement.WRITE_THROUGH, progress=seen.append)
    assert result.blocks == len(trace.blocks)
    assert sum(result.misses.values()) + round(result.ledger["total"] / 100 * result.blocks) == result.blocks
    assert 0 < result.simulated["host"] < result.simulated["total"] or len(tiers) == 1
    assert result.largest_difference <= 0.5
    assert seen == list(range(1, 121))


def test_the_live_command(capsys: pytest.CaptureFixture[str]) -> None:
    got = as_json(capsys, "mooncake-synthetic --requests 30 --codec raw --tier host:20GB --live")
    assert got["largest_difference"] <= 0.5
    assert set(got["simulated"]) == set(got["ledger"]) == {"total", "host"}


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ("nowhere.jsonl", ("nowhere.jsonl", "mooncake-conversation")),
        ("mooncake-synthetic --bytes-per-token 0", ("--bytes-per-token 0", "from 1 up")),
        ("mooncake-synthetic --model Qwen/Qwen3-8B --page mha:1x1x64", ("--model", "--page", "one of them")),
        ("mooncake-synthetic --bytes-per-token 1 --page-tokens 64", ("--page-tokens 64", "--model")),
        ("mooncake-synthetic --tier host:1MB", ("host", "1,000,000 bytes", "more")),
        ("mooncake-synthetic --sweep --live", ("--sweep", "--live", "remove")),
        ("mooncake-synthetic --show ttft_p99", ("--show ttft_p99", "--sweep")),
        ("mooncake-synthetic --sweep --show requests_completed", ("--show requests_completed", "--sessions")),
        ("mooncake-synthetic --plot x.png", ("--plot x.png", "--sweep")),
        ("mooncake-synthetic --duration 5s", ("--duration 5s", "--sessions")),
        ("mooncake-synthetic --sessions 2 --duration soon", ("--duration soon", "such as")),
        ("mooncake-synthetic --sessions 0", ("--sessions 0", "from 1 up")),
        ("mooncake-synthetic --sweep --sizes 1GB", ("--sizes 1GB", "two or more")),
        ("mooncake-synthetic --sweep --sizes 1GB,x", ("--sizes 1GB,x", "64GiB")),
        ("mooncake-synthetic --prefill-measured 8192", ("--prefill-measured 8192", "8192:650ms")),
        ("mooncake-synthetic --prefill-s-per-token -1", ("--prefill-s-per-token -1", "from 0 up")),
        ("mooncake-synthetic --live", ("--live", "host:SIZE")),
        ("mooncake-synthetic --live --tier host:unlimited", ("--live", "host", "size")),
        ("mooncake-synthetic --live --tier host:20GB --live-page-bytes 100", ("--live-page-bytes 100", "4096")),
        ("mooncake-synthetic --live --tier host:20GB,ttl=1h", ("--live", "ttl")),
        ("mooncake-synthetic --live --tier host:20GB,policy=fifo", ("--live", "policy=lru")),
        ("mooncake-synthetic --tier host:20GB,admission=never", ("admission", "second_use")),
    ],
)
def test_bad_values_are_one_line(capsys: pytest.CaptureFixture[str], args: str, named: tuple[str, ...]) -> None:
    assert_refused(capsys, f"replay {args}", named)
