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

    model = write_model(folder / "model", seed=1)
    for pages in (16, 64, 500, 2000):
        engine = Engine(model, config(host="512MiB"), page=16, pages=pages + 16)
        linker = engine.linker
        tokens = list(range(pages * 16))
        hashes = [f"{n:064x}" for n in range(pages)]
        slots = engine.allocator.alloc(pages * 16)
        tail = [PoolTransfer(name=PoolName.KV, keys=hashes, device_indices=slots)]
        missed, settled = [], []
        for n in range(20):
            missed.append(first_lookup(engine, f"miss{n}", tail))
            settled.append(timed(linker.request_started, f"miss{n}"))
        offloaded = []
        for _ in range(10):
            offloaded.append(timed(linker.offload, tail))
            linker._offloads.pop()
        found, again, loaded, started, ended = [], [], [], [], []
        for n in range(20):
            found.append(first_lookup(engine, f"hit{n}", tail))
            again += [timed(linker.lookup, f"hit{n}", tail) for _ in range(5)]
            loaded.append(timed(linker.load, f"hit{n}", tail))
            started.append(timed(linker.start_layer_wise_loading))
            (batch,) = linker._loads.batches()
            for ticket in linker._loads._batches[batch].tickets:
                ticket.result()  # the forward is over
            ended.append(timed(linker.finish_layer_wise_loading, batch))
        idle = [timed(linker.num_completed_offloads) for _ in range(100)]
        engine.allocator.free(slots)
        slots = engine.allocator.alloc(pages * 16)
        whole = timed(engine.cache.insert, InsertParams(key=key_of(tokens), value=slots))
        for name, steps in (("nothing found", missed), ("everything in the host tier", found)):
            show(f"{pages} pages: first lookup, {name}, all steps", [sum(each) for each in steps])
            show(f"{pages} pages: first lookup, {name}, longest of {len(steps[0])}", [max(each) for each in steps])
        show(f"{pages} pages: start of a request without a hit", settled)
        show(f"{pages} pages: repeated lookup of the same request", again)
        show(f"{pages} pages: load", loaded)
        show(f"{pages} pages: start of the loads", started)
        show(f"{pages} pages: end of the loads", ended)
        show(f"{pages} pages: offload", offloaded)
        show(f"{pages} pages: poll for results of offloads", idle)
        print(f"{pages} pages: the engine's own insert with one offload in it {whole * 1e6:.0f} us")
        engine.close()


def timed(call: Callable[..., Any], *arguments: Any) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def first_lookup(engine: Any, rid: str, tail: list[Any]) -> list[float]:
    """Seconds of the connector's part of each scheduling step, from the first until the request may be admitted."""
    from types import SimpleNamespace

    from kvtier.connectors.sglang import hold

    def look_up(cache: Any, cow_mamba: bool) -> None:  # without SGLang's own matching and hashing
        engine.linker.lookup(rid, tail)

    tokens = len(tail[0].device_indices)
    req = SimpleNamespace(rid=rid, origin_input_ids=range(tokens), output_ids=(), init_next_round_input=look_up)
    scheduler = SimpleNamespace(tree_cache=engine.cache, waiting_queue=[req], mbs=[])
    engine.linker.request_queued(rid)
    steps: list[float] = []
    ready: list[Any] = []

    def nothing(scheduler: Any, delayer: Any, running: Any) -> Any:
        ready.extend(scheduler.waiting_queue)
        return None, running

    while not ready:
        steps.append(timed(hold.build_batch, nothing, scheduler, None, SimpleNamespace(is_empty=lambda: False)))
    return steps


if __name__ == "__main__":
    main()
