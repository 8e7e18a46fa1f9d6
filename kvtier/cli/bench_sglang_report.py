"""The page that ``kvtier bench sglang --report`` writes."""

from __future__ import annotations

import datetime
import os
import platform
import textwrap
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvtier.cli import bench_sglang_cost
from kvtier.cli.bench_sglang_cost import AGAIN

NAME, COST_NAME = "sglang-ttft.md", "sglang-miss.md"
_MODELS = {"tiny": "a random Llama of 4 layers", "smollm2": "SmolLM2-135M-Instruct"}
_WIDTH = 120
_CALLS = ("lookup_us", "offload_us", "load_us")
_PLACES = {"recompute": "computed", "nothing": "computed, looked up and not found"}


def write(rows: Sequence[dict[str, Any]], folder: Path) -> Path:
    """Write `NAME` into `folder`, or `COST_NAME` where only this cost was asked for; returns its path."""
    cost = any(row["system"] == AGAIN for row in rows)
    path = folder / (COST_NAME if cost else NAME)
    path.write_text("\n".join(_cost_lines(rows) if cost else _lines(rows)) + "\n")
    return path


def _cost_lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "# What kvtier costs SGLang where nothing is found"
    yield ""
    yield from textwrap.wrap(
        f"{datetime.date.today().isoformat()}. SGLang {version('sglang')} in FP32 on {os.cpu_count()} CPUs "
        f"({_processor()}), no accelerator; new prompts of {rows[0]['prompt_tokens']:,} tokens in pages of 64, which "
        "are looked up, computed, and copied out. All engines of a table ran at once and took turns with the same "
        f"prompts, another one first each time. `{AGAIN}` is a second engine without kvtier: how far two that are "
        "alike differ is what can be told apart. Prompts were added until that was within "
        f"{bench_sglang_cost.ENOUGH_PERCENT:.0f} %, or to the number allowed. SGLang's attention for CPUs was replaced "
        "by one that pays for new tokens only.",
        _WIDTH,
    )
    yield ""
    yield "    env=$(tools/env-engine.sh sglang | tail -n 1)"
    yield "    $env/bin/kvtier bench sglang --cost --report docs/results"
    for model in dict.fromkeys(row["model"] for row in rows):
        yield ""
        yield f"## {_MODELS.get(model, model)}"
        yield from _cost_table([row for row in rows if row["model"] == model])


def _cost_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield ""
    yield from textwrap.wrap(
        "By pairs of the same prompt, in percent of the time to the first token without kvtier, medians and the "
        "interval that holds the median with 95 percent: the time to the first token; CPU time that the scheduler's "
        "thread spent beside its forward, SGLang's own work subtracted; and CPU time of kvtier's own threads, which "
        "encode and store what was computed. Were nothing of this to run beside the forward, a first token would come "
        "later by the sum of the two. Two processes alike may differ for good by more than a few percent of the clock, "
        "since each has memory of its own; then their CPU time alone tells. kvtier's own calls on the scheduler's "
        "thread are means, in microseconds.",
        _WIDTH,
    )
    yield ""
    yield "| system | pages as | pairs | first token, s | later by | scheduler's thread | kvtier's threads | calls |"
    yield "|---|---|---:|---:|---:|---:|---:|---|"
    for row in rows:
        calls = ", ".join(f"{name[:-3]} {row[name]:.0f}" for name in _CALLS if name in row)
        yield (
            f"| {row['system']} | {row['codec']} | {row['runs']} | {row['ttft_s']:.3f} | {_percents(row, 'cost', 1)} | "
            f"{_percents(row, 'thread', 2)} | {_percents(row, 'workers', 2)} | {calls} |"
        )


def _percents(row: dict[str, Any], name: str, digits: int) -> str:
    if f"{name}_percent" not in row:
        return ""
    median, least, most = (f"{row[f'{name}{which}_percent']:+.{digits}f}" for which in ("", "_least", "_most"))
    return f"{median} % ({least} to {most})"


def _lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "# Time to the first token behind SGLang: recomputed, its own cache, and both connectors"
    yield ""
    yield from textwrap.wrap(
        f"{datetime.date.today().isoformat()}. SGLang {version('sglang')} in FP32 on {os.cpu_count()} CPUs "
        f"({_processor()}), no accelerator; prompts of {rows[0]['prompt_tokens']:,} tokens in pages of 64. All engines "
        "of a table ran at once and took turns with the same prompts. SGLang's attention for CPUs was replaced by one "
        "that pays for the new tokens of a prefill only, as an accelerator's does, and the copies of its host pools by "
        "plain ones. The host tier of kvtier holds one prompt's pages, so that another prompt's come from NVMe. "
        "Medians, and the range.",
        _WIDTH,
    )
    yield ""
    yield "    env=$(tools/env-engine.sh sglang | tail -n 1)"
    yield "    $env/bin/kvtier bench sglang --report docs/results"
    for model in dict.fromkeys(row["model"] for row in rows):
        yield from _table(model, [row for row in rows if row["model"] == model])


def _table(model: str, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield ""
    yield f"## {_MODELS.get(model, model)}"
    yield ""
    yield "| system | pages as | prefix from | tokens reused | first token, s | range | n |"
    yield "|---|---|---|---:|---:|---:|---:|"
    for row in rows:
        yield (
            f"| {row['system']} | {row['codec']} | {_place(row)} | {row['reused_tokens']} | {row['ttft_s']:.3f} | "
            f"{row['least_s']:.3f} to {row['most_s']:.3f} | {row['runs']} |"
        )
    yield ""
    yield "Milliseconds of the scheduler's thread beside the forward, SGLang's own work included, per request:"
    yield ""
    yield "| system | pages as | prefix from | queued, looked up | until its batch is built | inserted, copied out |"
    yield "|---|---|---|---:|---:|---:|"
    for row in rows:
        yield (
            f"| {row['system']} | {row['codec']} | {_place(row)} | {row['queue_ms']:.2f} | {row['schedule_ms']:.2f} | "
            f"{row['finish_ms']:.2f} |"
        )
    costs = [row for row in rows if "cost_percent" in row]
    if costs:
        yield ""
        yield from textwrap.wrap(
            "What it costs when nothing is found, of the time to the first token, by pairs of the same prompt with and "
            "without; the part of it that the scheduler's thread spent; and kvtier's own calls on that thread, "
            "microseconds each:",
            _WIDTH,
        )
        yield ""
        yield "| system | pages as | median of pairs | 95 % interval | scheduler's thread | lookup | offload | load |"
        yield "|---|---|---:|---:|---:|---:|---:|---:|"
        for row in costs:
            calls = " | ".join(f"{row[name]:.0f}" if name in row else "" for name in _CALLS)
            yield (
                f"| {row['system']} | {row['codec']} | {row['cost_percent']:+.1f} % | "
                f"{row['cost_least_percent']:+.1f} to {row['cost_most_percent']:+.1f} % | "
                f"{row['thread_percent']:+.2f} % | {calls} |"
            )


def _place(row: dict[str, Any]) -> str:
    return str(_PLACES.get(row["served_from"], row["served_from"]))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
