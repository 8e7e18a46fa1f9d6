"""Parts of the comparison as short as they go, where their own command cannot be that short.

python -m tests.benchmarks.compare.smoke redis"""

from __future__ import annotations

import json
import sys


def main() -> None:
    if sys.argv[1:] != ["redis"]:
        raise SystemExit(f"{' '.join(sys.argv[1:])}: there is redis")
    from kvtier.cli.bench_server import run

    sys.stdout.write(json.dumps(run(block_bytes=(100_000,), rounds=1, batch_bytes=4_000_000)) + "\n")


if __name__ == "__main__":
    main()
