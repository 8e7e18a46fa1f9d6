"""``kvtier bench sglang`` without SGLang: what it computes from times, and the page that it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kvtier.cli import bench_sglang, bench_sglang_cost, bench_sglang_report
from kvtier.cli.bench_sglang_process import Served
from kvtier.errors import ConfigError, MissingExtraError


def served(ttft_s: float, thread_cpu_s: float = 0.0, workers_cpu_s: float = 0.0, **details: int) -> Served:
    return Served(ttft_s, 7, details, thread_cpu_s, 0.0, 0.0, thread_cpu_s, workers_cpu_s)


def test_prompts_share_no_page_and_are_long_enough() -> None:
    prompts = [bench_sglang.prompt(n) for n in (*range(120), 900, 901)]
    assert all(len(p) == bench_sglang.PROMPT_TOKENS and 0 < min(p) <= max(p) < 512 for p in prompts)
    assert len({tuple(p[: bench_sglang.PAGE_TOKENS]) for p in prompts}) == len(prompts)


@pytest.mark.parametrize(("count", "first"), [(1, 0), (5, 0), (6, 0), (9, 1), (12, 2), (20, 5)])
def test_the_interval_of_a_median_is_that_of_order_statistics(count: int, first: int) -> None:
    """Binomial tables: of 9 pairs the second from either side, of 20 the sixth."""
    values = [float(n) for n in range(count)]
    assert bench_sglang_cost.median_interval(values) == (values[first], values[count - 1 - first])


def test_the_cost_is_that_of_pairs() -> None:
    """A machine that becomes twice as slow during the run changes nothing."""
    without = [served(1.0 * 2**n, 0.001) for n in range(9)]
    runs = [served(1.01 * 2**n, 0.002, 0.05 * 2**n) for n in range(9)]
    cost = bench_sglang_cost.differences(runs, without)
    assert cost["cost_percent"] == cost["cost_least_percent"] == cost["cost_most_percent"] == 1.0
    assert 0 < float(cost["thread_percent"]) < 0.1
    assert cost["workers_percent"] == 5.0


def test_two_engines_without_kvtier_must_look_alike_before_it_is_enough() -> None:
    first = [served(1.0)] * 9
    assert bench_sglang_cost.enough([served(1.0 + 0.019 * (-1) ** n) for n in range(9)], first)
    assert not bench_sglang_cost.enough([served(1.0 + 0.021 * (-1) ** n) for n in range(9)], first)
    assert not bench_sglang_cost.enough([served(1.03)] * 9, first)  # one of the two is always slower
    assert not bench_sglang_cost.enough([served(1.0)] * 8, first[:8])


def test_the_page(tmp_path: Path) -> None:
    row: dict[str, Any] = {
        "model": "smollm2", "system": "kvtier linker", "codec": "auto", "served_from": "nothing",
        "prompt_tokens": 1000, "reused_tokens": 0, "ttft_s": 3.0, "least_s": 2.9, "most_s": 3.1, "runs": 9,
        "scheduler_ms": 1.5, "queue_ms": 0.5, "schedule_ms": 0.5, "finish_ms": 0.5, "attention_replaced": True,
        "cost_percent": 0.5, "cost_least_percent": -1.0, "cost_most_percent": 1.5, "thread_percent": 0.01,
        "lookup_us": 120.0,
    }  # fmt: skip
    with patch.object(bench_sglang_report, "version", lambda _: "0.5.23"):
        page = bench_sglang_report.write([row, {**row, "system": "kvtier staged", "served_from": "nvme"}], tmp_path)
    text = page.read_text()
    assert "| kvtier linker | auto | +0.5 % | -1.0 to +1.5 % | +0.01 % | 120 |  |  |" in text
    assert "| kvtier staged | auto | nvme | 0 | 3.000 | 2.900 to 3.100 | 9 |" in text
    assert max(len(line) for line in text.splitlines() if not line.startswith("|")) <= 120


def test_the_page_of_the_cost(tmp_path: Path) -> None:
    pairs = [served(1.01, 0.0011, 0.02)] * 12, [served(1.0, 0.001)] * 12
    row: dict[str, Any] = {
        "model": "tiny", "system": "sglang", "codec": "", "served_from": "recompute", "prompt_tokens": 1000,
        "ttft_s": 1.0, "runs": 12,
    }  # fmt: skip
    again = {**row, "system": bench_sglang_cost.AGAIN, **bench_sglang_cost.differences(pairs[1], pairs[1])}
    ours = {**row, "system": "kvtier linker", "codec": "none", **bench_sglang_cost.differences(*pairs)}
    with patch.object(bench_sglang_report, "version", lambda _: "0.5.23"):
        page = bench_sglang_report.write([row, again, {**ours, "lookup_us": 99.6}], tmp_path)
    text = page.read_text()
    assert page.name == "sglang-miss.md"
    assert "| sglang |  | 12 | 1.000 |  |  |  |  |" in text
    assert "| sglang again |  | 12 | 1.000 | +0.0 % (+0.0 to +0.0) | +0.00 % (+0.00 to +0.00) | +0.00 %" in text
    assert (
        "| kvtier linker | none | 12 | 1.000 | +1.0 % (+1.0 to +1.0) | +0.01 % (" in text
        and "| +2.00 % (" in text
        and "lookup 100 |" in text
    )
    assert max(len(line) for line in text.splitlines() if not line.startswith("|")) <= 120


def test_what_is_missing_is_a_message() -> None:
    with patch("importlib.util.find_spec", lambda _: None), pytest.raises(MissingExtraError, match="env-engine"):
        bench_sglang.run()
    with patch("importlib.util.find_spec", lambda _: True), pytest.raises(ConfigError, match="--model large"):
        bench_sglang.run(models=["large"])
