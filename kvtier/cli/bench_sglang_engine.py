"""One engine of ``kvtier bench sglang``: a real SGLang on the CPU in a process of its own, driven by JSON lines.

Run as a module with the engine's keyword arguments as JSON in its first argument. SGLang's workers import this module
again before they load plugins, so what is registered here is registered in the scheduler too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMES = "KVTIER_BENCH_TIMES"
"""Variable with the file that the scheduler writes its times into after each batch: seconds since it started."""

BATCHES = "batches"
"""Its name for how many batches that were."""

THREAD_CPU, WORKERS_CPU = "thread_cpu", "workers_cpu"
"""Its names for the CPU time of the scheduler's thread in the calls below, and of kvtier's own threads beside it."""

_TIMED = {
    "queue": "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue",
    "schedule": "sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run",
    "finish": "sglang.srt.managers.scheduler.Scheduler.process_batch_result",
}
"""What the scheduler's thread does for a request beside its forward: look it up when it is queued; match it, start its
loads and collect what ended when a batch is built; insert what was computed, and have it copied out, at its end."""


def time_scheduler(path: Path) -> None:
    """Time these calls, hooks of every plugin included."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    spent = dict.fromkeys((*_TIMED, THREAD_CPU, WORKERS_CPU, BATCHES), 0.0)

    def timed(name: str) -> Callable[..., Any]:
        def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            counts = name != "schedule" or bool(args[0].waiting_queue)  # an idle scheduler looks, too
            start, cpu = time.perf_counter(), time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                if counts:
                    spent[name] += time.perf_counter() - start
                    spent[THREAD_CPU] += time.thread_time() - cpu
                if name == "finish":
                    spent[BATCHES] += 1
                    spent[WORKERS_CPU] = _workers_cpu_s()
                    half = path.with_suffix(".new")
                    half.write_text(json.dumps(spent))
                    half.replace(path)

        return around

    apply = HookRegistry.apply_hooks

    def last() -> None:
        if "sglang.srt.managers.scheduler" in sys.modules and not any(
            target in HookRegistry._patched for target in _TIMED.values()
        ):
            for name, target in _TIMED.items():
                HookRegistry.register(target, timed(name), HookType.AROUND)
        apply()

    HookRegistry.apply_hooks = last


def _workers_cpu_s() -> float:
    """CPU seconds that kvtier's threads of this process have had since they began: encoding, decoding, tiers."""
    spent_ns = 0
    for thread in threading.enumerate():
        if thread.name.startswith("kvtier"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                spent_ns += int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0])
    return spent_ns / 1e9


def _prepare() -> None:
    from kvtier.cli import sglang_on_cpu

    sglang_on_cpu.replace_attention()
    sglang_on_cpu.allow_host_pools()
    time_scheduler(Path(os.environ[TIMES]))


if TIMES in os.environ:
    _prepare()


class Engine:
    def __init__(self, options: dict[str, Any]) -> None:
        import sglang

        self.engine = sglang.Engine(**options)

    def generate(self, rid: str, ids: list[int]) -> dict[str, Any]:
        """Time to the first token, and where SGLang says its prefix was."""

        async def run() -> dict[str, Any]:
            start = time.perf_counter()
            stream = await self.engine.async_generate(
                input_ids=ids,
                rid=rid,
                sampling_params={"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
                stream=True,
            )
            answer: dict[str, Any] = {}
            async for chunk in stream:
                if not answer:
                    answer["ttft_s"] = time.perf_counter() - start
                answer["token"] = chunk["output_ids"][0]
                answer["details"] = chunk["meta_info"].get("cached_tokens_details") or {}
            return answer

        return dict(self.engine.loop.run_until_complete(run()))

    def flush(self) -> bool:
        """False while a request is being wound up."""
        return bool(self.engine.flush_cache().success)


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints goes to standard error
    engine = Engine(json.loads(sys.argv[1]))
    sys.stdout.flush()
    out.write("{}\n")
    out.flush()
    for line in sys.stdin:
        command = json.loads(line)
        out.write(json.dumps(getattr(engine, command.pop("do"))(**command)) + "\n")
        out.flush()
    engine.engine.shutdown()


if __name__ == "__main__":
    asyncio.set_event_loop(asyncio.new_event_loop())
    main()
