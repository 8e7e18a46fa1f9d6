"""Time to the first token of the turn after a tool call, with and without a hint. From the root of a checkout:

    env=$(tools/env-engine.sh sglang | tail -n 1)
    $env/bin/python -m tests.engines.sglang.measure_tools

The shipped agent sessions through the real engine and SmolLM2-135M. While a session's tool runs, other requests push
its pages out of the device and out of host memory, so that only the NVMe tier has them; then its next turn comes,
announced 0.3 s before (`ToolCalls.on_tool_call_end`) or not. Prints medians and the range.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

PAGE_TOKENS = 64
TURN_TOKENS = 1500  # of the longest prompt that is replayed: the CPU computes 300 in a second
ROUNDS = 5
AHEAD_S = 0.3


def main() -> None:
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with tempfile.TemporaryDirectory(prefix="kvtier-measure-") as folder:
        measure(Path(folder))


def prefixes(encode: Any) -> list[list[int]]:
    """Of each session the longest prompt of at most TURN_TOKENS, or the beginning of its first."""
    from kvtier.cli.sessions import load_turns

    found: dict[str, list[int]] = {}
    for turn in load_turns():
        ids = encode(turn.prompt)
        if turn.session not in found or len(ids) <= TURN_TOKENS:
            found[turn.session] = ids[:TURN_TOKENS]
    return list(found.values())


def measure(folder: Path) -> None:
    from kvtier.cli.demo_model import ensure_model
    from kvtier.connectors.sglang.tool_calls import ToolCalls

    from .engine_process import EngineProcess

    block = {
        "kv_cache_compression_config": [{"algorithm": "quantization_for_cold_page", "quant": "none"}],
        "tiers": [
            # Room for little more than one session: the pages of the others push its own out.
            {"type": "host", "capacity": "90MiB"},
            {"type": "nvme", "path": str(folder / "kv"), "capacity": "2GiB"},
        ],
        "promote_deadline": "10s",
        "break_even": False,
    }
    options: dict[str, Any] = {"dtype": "float32", "page_size": PAGE_TOKENS, "max_total_tokens": 6000}
    engine = EngineProcess(ensure_model(), block, folder / "run", skip_tokenizer_init=False, **options)
    try:
        sessions = prefixes(engine.encode)
        tools = ToolCalls(f"http://127.0.0.1:{engine.port}")
        filler = [(i * 7919) % 40_000 + 100 for i in range(TURN_TOKENS)]
        engine.one("filler", filler, tokens=1)
        for n, ids in enumerate(sessions):
            engine.one(f"turn-{n}", ids, tokens=1)
            tools.on_tool_call_begin(f"turn-{n}")
        took: dict[str, list[float]] = {"not announced": [], "announced": []}
        for n in range(ROUNDS):
            for which, ids in enumerate(sessions):
                for kind, seconds in took.items():
                    for other in (filler, *(s for s in sessions if s is not ids)):
                        engine.flush()
                        engine.one(f"push-{kind}-{n}-{which}-{len(other)}", other, tokens=1)
                    engine.flush()
                    before = engine.metrics()
                    if kind == "announced":
                        tools.on_tool_call_end(token_ids=ids)
                    time.sleep(AHEAD_S)
                    answer = engine.one(f"next-{kind}-{n}-{which}", [*ids, 11, 12, 13], tokens=1)
                    after = engine.metrics()
                    tier = "host" if kind == "announced" else "nvme"
                    name = f'kvtier_hits_total{{tier="{tier}"}}'
                    pages = len(ids) // PAGE_TOKENS
                    if after[name] - before[name] >= pages - 2 and answer["cached"] >= (pages - 1) * PAGE_TOKENS:
                        seconds.append(answer["ttft_s"])
        prefix_pages = [len(ids) // PAGE_TOKENS for ids in sessions]
        print(f"{len(sessions)} sessions, prefixes of {prefix_pages} pages of {PAGE_TOKENS} tokens, on NVMe alone")
        for kind, seconds in took.items():
            if not seconds:
                raise SystemExit(f"{kind}: no turn began with pages from where they were meant to be")
            print(
                f"next turn {kind:<14} time to first token, median {statistics.median(seconds):.3f} s "
                f"({min(seconds):.3f} to {max(seconds):.3f}, n = {len(seconds)})"
            )
    finally:
        engine.kill()


if __name__ == "__main__":
    main()
