"""Time on the scheduler's thread, per call, with the engine's real radix cache and no model: a table of
docs/results/sglang.md. Whole engines: ``kvtier bench sglang``. From the root of a checkout:

    env=$(tools/env-engine.sh sglang | tail -n 1)
    $env/bin/python -m tests.engines.sglang.measure
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with tempfile.TemporaryDirectory(prefix="kvtier-measure-") as folder:
        scheduler(Path(folder))


def show(name: str, seconds: list[float]) -> None:
    unit, scale = ("s", 1.0) if statistics.median(seconds) > 0.05 else ("us", 1e6)
    print(
        f"{name:<58} median {statistics.median(seconds) * scale:9.3f} {unit:<2} "
        f"({min(seconds) * scale:.3f} to {max(seconds) * scale:.3f}, n = {len(seconds)})",
        flush=True,
    )


def scheduler(folder: Path) -> None:
    import sglang.srt.managers.scheduler  # noqa: F401
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from .harness import Engine, config, key_of
    from .tiny_model import write_model

    def timed(call: Callable[..., Any], *arguments: Any) -> float:
        start = time.perf_counter()
        call(*arguments)
        return time.perf_counter() - start

    model = write_model(folder / "model", seed=1)
    for pages in (16, 64, 500, 2000):
        engine = Engine(model, config(host="512MiB"), page=16, pages=pages + 16)
        tokens = list(range(pages * 16))
        hashes = [f"{n:064x}" for n in range(pages)]
        lookup = [PoolTransfer(name=PoolName.KV, keys=hashes)]
        missed = [timed(engine.linker.lookup, f"miss{n}", lookup) for n in range(20)]
        slots = engine.allocator.alloc(pages * 16)
        offload = PoolTransfer(name=PoolName.KV, keys=hashes, device_indices=slots)
        offloaded = []
        for _ in range(10):
            offloaded.append(timed(engine.linker.offload, [offload]))
            engine.linker._offloads.pop()
        found = [timed(engine.linker.lookup, f"hit{n}", lookup) for n in range(20)]
        again = [timed(engine.linker.lookup, "hit0", lookup) for _ in range(100)]
        idle = [timed(engine.linker.num_completed_offloads) for _ in range(100)]
        for rid in list(engine.linker._asked):
            engine.linker.request_dropped(rid)
        engine.allocator.free(slots)
        slots = engine.allocator.alloc(pages * 16)
        whole = timed(engine.cache.insert, InsertParams(key=key_of(tokens), value=slots))
        show(f"{pages} pages: first lookup, nothing found", missed)
        show(f"{pages} pages: first lookup, everything in the host tier", found)
        show(f"{pages} pages: repeated lookup of the same request", again)
        show(f"{pages} pages: offload", offloaded)
        show(f"{pages} pages: poll for results of offloads", idle)
        print(f"{pages} pages: the engine's own insert with one offload in it {whole * 1e6:.0f} us")
        engine.close()


if __name__ == "__main__":
    main()
