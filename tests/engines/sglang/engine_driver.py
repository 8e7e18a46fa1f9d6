"""A real engine in a process of its own, driven by JSON lines on standard input; answers on standard output.

Run as a script, with the engine's keyword arguments as JSON in its first argument. SGLang's workers import this file
again before they load plugins, so what is patched at module level is patched in the scheduler too:

KVTIER_TEST_SDPA=1     replaces the CPU attention of prefills
KVTIER_TEST_HOST=1     lets a CPU have the host pools of the hierarchical cache
KVTIER_TEST_FP8=1      lets a CPU without Intel AMX have an FP8 cache, see `allow_fp8`
KVTIER_TEST_POOLS=1    lets a CPU attend over latent rows and sliding windows, see `attend_over_pools`
KVTIER_TEST_FAIL=FILE  the next load fails in its second layer after FILE was created (and removes it)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvtier.cli import sglang_on_cpu


def allow_fp8() -> None:
    """SGLang gives CPUs an FP8 cache only where its AMX kernels read it. Its own torch backend reads it as well: the
    cache, its writes and its scales are the engine's, what is passed over is the check in front of them."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def configure(original: Any, *arguments: Any, **named: Any) -> Any:
        from sglang.srt.mem_cache import kv_cache_configurator as module

        with (
            patch.object(module, "cpu_has_amx_support", lambda: True),
            patch.object(module, "attention_backends", lambda: ("intel_amx", "intel_amx")),
        ):
            return original(*arguments, **named)

    target = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.configure"
    HookRegistry.register(target, configure, HookType.AROUND)


def attend_over_pools() -> None:
    """Two things that SGLang's torch attention lacks. Over latent rows: it is told to attend in their space always,
    where it would compute keys and values and then read them from a pool that has none. Over a sliding window: its
    rows are read at their own slots, where it reads them at those of the pool of full attention."""
    from types import SimpleNamespace

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def absorbed(original: Any, *arguments: Any, **named: Any) -> Any:
        from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
        from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

        AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
        return original(*arguments, **named)

    def windowed(original: Any, backend: Any, q: Any, k: Any, v: Any, layer: Any, *more: Any, **named: Any) -> Any:
        if not backend.use_sliding_window_kv_pool or layer.sliding_window_size in (None, -1):
            return original(backend, q, k, v, layer, *more, **named)
        rows = backend.req_to_token_pool
        slots = backend.token_to_kv_pool.full_to_swa_index_mapping[rows.req_to_token.long()]
        backend.req_to_token_pool = SimpleNamespace(req_to_token=slots)
        try:
            return original(backend, q, k, v, layer, *more, **named)
        finally:
            backend.req_to_token_pool = rows

    attention = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend."
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", absorbed, HookType.AROUND)
    for name in ("forward_extend", "forward_decode"):
        HookRegistry.register(attention + name, windowed, HookType.AROUND)


def patch_loads(marker: Path) -> None:
    from kvtier.connectors.sglang.loads import BatchLoad

    real = BatchLoad.layer_done

    def layer_done(self: BatchLoad, layer: int) -> None:
        if layer == 1 and marker.exists():
            marker.unlink()
            raise OSError("injected by a test")
        real(self, layer)

    BatchLoad.layer_done = layer_done  # type: ignore[method-assign]


if os.environ.get("KVTIER_TEST_SDPA") == "1":
    sglang_on_cpu.replace_attention()
if os.environ.get("KVTIER_TEST_HOST") == "1":
    sglang_on_cpu.allow_host_pools()
if os.environ.get("KVTIER_TEST_FP8") == "1":
    allow_fp8()
if os.environ.get("KVTIER_TEST_POOLS") == "1":
    attend_over_pools()
if os.environ.get("KVTIER_TEST_FAIL"):
    patch_loads(Path(os.environ["KVTIER_TEST_FAIL"]))


class Driver:
    def __init__(self, arguments: dict[str, Any]) -> None:
        import sglang

        self.engine = sglang.Engine(**arguments)

    async def one(
        self, rid: str, ids: list[int], tokens: int, abort_after_s: float | None, more: dict[str, Any]
    ) -> Any:
        """Generate greedily; `ttft_s` is the time to the first streamed token."""
        start = time.perf_counter()
        first: float | None = None
        answer: dict[str, Any] = {"rid": rid, "ids": []}
        manager = self.engine.tokenizer_manager
        sampling = more.pop("sampling", {})
        if abort_after_s is not None:
            asyncio.get_running_loop().call_later(abort_after_s, manager.abort_request, rid)
        try:
            parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **sampling}
            asked = {"input_ids": ids, "rid": rid, "sampling_params": parameters, "stream": True, **more}
            if "extra_key" in more:  # which only requests over HTTP can carry
                from sglang.srt.managers.io_struct import GenerateReqInput

                stream = manager.generate_request(GenerateReqInput(**asked), None)
            else:
                stream = await self.engine.async_generate(**asked)
            async for chunk in stream:
                first = first or time.perf_counter() - start
                meta = chunk["meta_info"]
                answer |= {
                    "ids": chunk["output_ids"],
                    "cached": meta["cached_tokens"],
                    "details": meta.get("cached_tokens_details"),
                    "finish": meta["finish_reason"],
                    "logprobs": meta.get("output_token_logprobs"),
                }
        except Exception as error:  # noqa: BLE001 - the test decides what should have happened
            answer["error"] = f"{type(error).__name__}: {error}"
            answer["status"] = getattr(error, "status_code", None)
        return answer | {"ttft_s": first, "total_s": time.perf_counter() - start}

    def generate(self, requests: list[dict[str, Any]], flush_every_s: float | None = None) -> Any:
        ended = asyncio.Event()

        async def flush() -> None:
            while flush_every_s is not None and not ended.is_set():
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(ended.wait(), flush_every_s)
                await self.engine.tokenizer_manager.flush_cache()  # refused while requests run

        async def run() -> Any:
            flushing = asyncio.ensure_future(flush())
            answers = await asyncio.gather(
                *(
                    self.one(r["rid"], r["ids"], r.get("tokens", 8), r.get("abort_after_s"), r.get("more", {}))
                    for r in requests
                )
            )
            ended.set()
            await flushing  # a flush that is given up midway leaves its answer to the next one
            return answers

        return self.engine.loop.run_until_complete(run())

    def update_from_disk(self, path: str) -> Any:
        return bool(self.engine.update_weights_from_disk(path)[0])

    def update_from_tensors(self, path: str) -> Any:
        from safetensors.torch import load_file

        weights = list(load_file(f"{path}/model.safetensors").items())
        answers = [self.engine.begin_weight_update(), self.engine.update_weights_from_tensor(weights)]
        answers.append(self.engine.end_weight_update())
        return [bool(answer[0] if isinstance(answer, (tuple, list)) else answer.success) for answer in answers]

    def memory(self) -> Any:
        self.engine.release_memory_occupation()
        self.engine.resume_memory_occupation()
        return True

    def flush(self) -> Any:
        return self.engine.flush_cache().success

    def storage(self, attach: dict[str, Any] | None) -> Any:
        """What the handlers of ``DELETE`` and ``PUT /hicache/storage-backend`` do."""
        manager = self.engine.tokenizer_manager
        call = manager.detach_hicache_storage() if attach is None else manager.attach_hicache_storage(**attach)
        answer = self.engine.loop.run_until_complete(call)
        return {"success": answer.success, "message": answer.message}

    def text(self, text: str) -> Any:
        return self.engine.tokenizer_manager.tokenizer.encode(text)


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints goes to standard error
    driver = Driver(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(driver, command.pop("do"))(**command)
        print(json.dumps({"answer": answer}), file=out, flush=True)
    driver.engine.shutdown()


if __name__ == "__main__":
    main()
