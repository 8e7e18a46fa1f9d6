"""Starts `bench_sglang_engine` and asks it; what it answers, and what the scheduler's thread spent on it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.cli import bench_sglang_engine
from kvtier.cli.metrics_text import samples
from kvtier.errors import KVTierError

_START_S = 420.0
_ANSWER_S = 120.0
_SETTLE_S = 30.0
_PAUSE_S = 0.2
_SPENT = ("queue", "schedule", "finish", bench_sglang_engine.THREAD_CPU, bench_sglang_engine.WORKERS_CPU)


@dataclass(frozen=True, slots=True)
class Served:
    """details: reused tokens by where SGLang says that they were. queue_s to finish_s: of the scheduler's thread, and
    its CPU time in them; workers_cpu_s: of kvtier's own threads, from the end of the last request to the end of this,
    so that copying out what the last one computed is in it."""

    ttft_s: float
    token: int
    details: dict[str, int]
    queue_s: float
    schedule_s: float
    finish_s: float
    thread_cpu_s: float
    workers_cpu_s: float

    @property
    def reused(self) -> int:
        return sum(self.details.values())

    @property
    def scheduler_s(self) -> float:
        return self.queue_s + self.schedule_s + self.finish_s


class EngineProcess:
    """An engine that serves `model` on the CPU, with `options` of SGLang's own. Its files lie in `folder`."""

    def __init__(self, model: Path, folder: Path, options: dict[str, Any]) -> None:
        folder.mkdir(parents=True)
        self._times = folder / "times.json"
        self._port: int | None = None
        self._spent = dict.fromkeys((*_SPENT, bench_sglang_engine.BATCHES), 0.0)
        block = options.pop("kv_connector_config", None)
        if block is not None:
            self._port = _free_port()
            path = folder / "kvtier.json"
            path.write_text(json.dumps({**block, "http": {"port": self._port}}))
            options["kv_connector_config"] = str(path)
        arguments = {
            "model_path": str(model),
            "device": "cpu",
            "attention_backend": "torch_native",
            "skip_tokenizer_init": True,
            "grammar_backend": "none",
            "disable_cuda_graph": True,
            "mem_fraction_static": 0.5,  # max_total_tokens is less
            "max_running_requests": 4,
            "log_level": "error",
            "enable_cache_report": True,
            "sleep_on_idle": True,
            **options,
        }
        environment = {
            **os.environ,
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_WAIT_POLICY": "passive",
            "PYTHONWARNINGS": "ignore",
            bench_sglang_engine.TIMES: str(self._times),
        }
        self._log = folder / "engine.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", bench_sglang_engine.__name__, json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                cwd=folder,
                start_new_session=True,
                text=True,
            )

    def started(self) -> None:
        """Wait until it serves."""
        self._read(_START_S)

    def serve(self, rid: str, ids: list[int]) -> Served:
        answer = self._do("generate", rid=rid, ids=ids)
        before, self._spent = self._spent, self._spent_after(self._spent[bench_sglang_engine.BATCHES])
        spent = self._spent
        took = {name: spent[name] - before[name] for name in spent}
        details = {k: v for k, v in answer["details"].items() if isinstance(v, int)}
        return Served(answer["ttft_s"], answer["token"], details, *(took[name] for name in _SPENT))

    def _spent_after(self, batches: float) -> dict[str, float]:
        """What the scheduler has spent by the end of a later batch than that: it answers before it has finished it."""
        give_up = time.monotonic() + _SETTLE_S
        while time.monotonic() < give_up:
            if self._times.exists():
                spent: dict[str, float] = json.loads(self._times.read_text())
                if spent[bench_sglang_engine.BATCHES] > batches:
                    return spent
            time.sleep(0.005)
        raise KVTierError(f"the scheduler did not tell its times: {self._last()}")

    def flush(self) -> None:
        """Forget the device's cache, and SGLang's host memory; refused while a request is being wound up."""
        give_up = time.monotonic() + _SETTLE_S
        while not self._do("flush"):
            if time.monotonic() > give_up:
                raise KVTierError(f"SGLang did not flush its cache: {self._last()}")
            time.sleep(0.02)

    def settle(self) -> None:
        """Wait until pages have stopped moving: users think between their turns."""
        time.sleep(_PAUSE_S)
        if self._port is None:
            return
        give_up = time.monotonic() + _SETTLE_S
        last = None
        while (now := self._moved()) != last and time.monotonic() < give_up:
            last = now
            time.sleep(_PAUSE_S)

    def hits(self) -> dict[str, int]:
        """Of kvtier, by tier."""
        return {tier: int(n) for tier, n in self._samples()["kvtier_hits_total"].items()}

    def calls_us(self) -> dict[str, float]:
        """Means of kvtier's own calls on the scheduler's thread; nothing of calls that it does not have."""
        told = self._samples()
        counts, sums = (told[f"kvtier_engine_thread_seconds_{what}"] for what in ("count", "sum"))
        return {call: 1e6 * sums[call] / counts[call] for call in ("lookup", "load", "offload") if counts.get(call)}

    def _moved(self) -> dict[str, dict[str, float]]:
        told = self._samples()
        return {name: told[name] for name in ("kvtier_offload_pages_total", "kvtier_spill_pages_total")}

    def _samples(self) -> dict[str, dict[str, float]]:
        if self._port is None:
            raise KVTierError("this engine runs without kvtier")
        return samples(self._port)

    def kill(self) -> None:
        """End every process of it at once; nothing of it is used afterwards."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _do(self, command: str, **arguments: Any) -> Any:
        stdin = self._process.stdin
        if stdin is None:
            raise KVTierError("the engine has no standard input")
        stdin.write(json.dumps({"do": command, **arguments}) + "\n")
        stdin.flush()
        return self._read(_ANSWER_S)

    def _read(self, limit_s: float) -> Any:
        out = self._process.stdout
        if out is None or not select.select([out], [], [], limit_s)[0]:
            raise KVTierError(f"SGLang did not answer within {limit_s:.0f} s: {self._last()}")
        line = out.readline()
        if not line:
            raise KVTierError(f"SGLang ended: {self._last()}")
        return json.loads(line)

    def _last(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port
