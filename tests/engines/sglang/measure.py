"""The figures of docs/results/sglang.md, on the real engine and the real SmolLM2-135M. From the root of a checkout:

    env=$(tools/env-engine.sh sglang | tail -n 1)
    $env/bin/python -m tests.engines.sglang.measure ttft
    $env/bin/python -m tests.engines.sglang.measure scheduler

ttft: time to the first token of a prompt of 1 000 tokens of which whole pages are reused, with the replacement of the
CPU attention in `engine_driver`; without it SGLang attends over the whole prompt again whatever was restored.
scheduler: time on the scheduler's thread, per call, with the engine's real radix cache and no model.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 1000
PAGE_TOKENS = 64
REPEATS = 5
CODECS = ("none", "nvfp4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["ttft", "scheduler"])
    what = parser.parse_args().what
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with tempfile.TemporaryDirectory(prefix="kvtier-measure-") as folder:
        ttft(Path(folder)) if what == "ttft" else scheduler(Path(folder))


def show(name: str, seconds: list[float]) -> None:
    unit, scale = ("s", 1.0) if statistics.median(seconds) > 0.05 else ("us", 1e6)
    print(
        f"{name:<58} median {statistics.median(seconds) * scale:9.3f} {unit:<2} "
        f"({min(seconds) * scale:.3f} to {max(seconds) * scale:.3f}, n = {len(seconds)})",
        flush=True,
    )


def prompt(n: int) -> list[int]:
    return [(n * 131 + i * (2 * n + 7)) % 40000 + 100 for i in range(PROMPT_TOKENS)]


def ttft(folder: Path) -> None:
    from kvtier.cli.demo_model import ensure_model

    from .engine_process import EngineProcess

    model = ensure_model()
    options: dict[str, Any] = {"dtype": "float32", "page_size": PAGE_TOKENS, "max_total_tokens": 6000}

    def cold(engine: EngineProcess, first: int) -> list[float]:
        engine.one("warm-up", prompt(999), tokens=1)
        return [engine.one(f"cold-{n}", prompt(first + n), tokens=1)["ttft_s"] for n in range(REPEATS)]

    engine = EngineProcess(model, None, folder / "plain", **options)
    try:
        show("recomputed, engine without kvtier", cold(engine, 0))
        hits = [engine.one(f"device-{n}", prompt(REPEATS - 1), tokens=1)["ttft_s"] for n in range(REPEATS)]
        show("device hit, engine without kvtier", hits)
    finally:
        engine.kill()
    for codec in CODECS:
        block = {
            "kv_cache_compression_config": [{"algorithm": "quantization_for_cold_page", "quant": codec}],
            "tiers": [
                # Room for one prompt's pages, so that another prompt pushes them out: 15 of 2.8 MiB raw, 0.4 MiB NVFP4.
                {"type": "host", "capacity": "46MiB" if codec == "none" else "6600KiB"},
                {"type": "nvme", "path": str(folder / codec), "capacity": "2GiB"},
            ],
            "promote_deadline": "10s",
        }
        engine = EngineProcess(model, block, folder / f"run-{codec}", **options)
        try:
            show(f"{codec}: recomputed, looked up and not found", cold(engine, 100))
            engine.flush()
            a, b = prompt(100), prompt(101)
            from_host: list[float] = []
            from_nvme: list[float] = []
            for n in range(REPEATS):
                for which, ids in (("a", a), ("b", b)):
                    for hits, tier in ((from_nvme, "nvme"), (from_host, "host")):
                        before = engine.metrics()
                        answer = engine.one(f"{which}-{tier}-{n}", ids, tokens=1)
                        after = engine.metrics()
                        name = f'kvtier_hits_total{{tier="{tier}"}}'
                        pages = PROMPT_TOKENS // PAGE_TOKENS
                        # A page or two may have stayed in the host tier.
                        if after[name] - before[name] >= pages - 2 and answer["cached"] == pages * PAGE_TOKENS:
                            hits.append(answer["ttft_s"])
                        engine.flush()
            show(f"{codec}: 960 tokens from the host tier", from_host)
            show(f"{codec}: 960 tokens from the NVMe tier, held meanwhile", from_nvme)
            metrics = engine.metrics()
            for call in ("lookup", "load", "offload"):
                total = metrics[f'kvtier_engine_thread_seconds_sum{{call="{call}"}}']
                count = metrics[f'kvtier_engine_thread_seconds_count{{call="{call}"}}']
                print(
                    f"{codec}: scheduler's thread in {call}: {total / count * 1e6:.0f} us per call, {count:.0f} calls"
                )
        finally:
            engine.kill()


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
            engine.linker._offloads.popleft().result()
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
