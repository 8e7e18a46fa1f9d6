"""Convert the Mooncake traces into the compact form that ships in kvtier/data/traces.

    python tools/convert_traces.py DIRECTORY

DIRECTORY holds conversation_trace.jsonl and synthetic_trace.jsonl of kvcache-ai/Mooncake, FAST25-release/traces. The
result is the same on every machine, byte for byte, with one version of numpy and zlib.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvtier.replay.formats import TraceFormat, bundled_path, read_trace


def main(directory: Path) -> None:
    for name in ("mooncake-conversation", "mooncake-synthetic"):
        source = directory / f"{name.removeprefix('mooncake-')}_trace.jsonl"
        trace = read_trace(str(source), TraceFormat.MOONCAKE)
        target = bundled_path(name)
        trace.save(target)
        print(f"{target.name}: {trace.requests} requests, {len(trace.blocks)} blocks, {target.stat().st_size} bytes")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
