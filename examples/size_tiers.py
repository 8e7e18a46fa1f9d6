"""How much memory is worth buying? Replay a trace through tiers of several sizes, plain and in smaller pages.

Uses a public trace that comes with kvtier; `kvtier replay` does the same from the command line, with plots, for traces
of several formats and for what your own engine looked up.
"""

from __future__ import annotations

from kvtier.replay.formats import read_trace
from kvtier.replay.simulate import cache_plan, run_open
from kvtier.replay.stack import Placement, parse_tier

BYTES_PER_TOKEN = 131_072  # Llama 3.1 8B in BF16: 32 layers x 2 x 8 heads x 128 x 2 bytes
SMALLER = {"BF16": 1.0, "nvfp4_token": 3.2}


def main() -> None:
    trace = read_trace("mooncake-conversation").head(3000)
    print(f"{trace.requests} requests, {trace.unique_blocks} distinct blocks of {trace.block_tokens} tokens")
    print("blocks found, per cent   " + "".join(f"{form:>14}" for form in SMALLER))
    for gigabytes in (64, 128, 256, 512, 1024):
        rates = []
        for smaller in SMALLER.values():
            block_bytes = int(trace.block_tokens * BYTES_PER_TOKEN / smaller)
            tiers = (parse_tier(f"host:{gigabytes}GB"),)
            counts = run_open(trace, cache_plan(tiers, block_bytes, Placement.WRITE_THROUGH))
            rates.append(100 * counts.prefix.sum() / len(trace.blocks))
        print(f"host memory {gigabytes:>6} GB    " + "".join(f"{rate:>14.1f}" for rate in rates))


if __name__ == "__main__":
    main()
