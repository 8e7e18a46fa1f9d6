"""Starts `engine_driver` and talks to it; the whole process group can be killed as a crash would."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Any

DRIVER = Path(__file__).with_name("engine_driver.py")
START_S = 400.0  # 30 s on two idle cores
PATIENCE_S = 60.0
"""For what an idle machine does at once."""


class EngineProcess:
    """An engine with the connector, serving `model` on the CPU. `block`: kvtier's configuration; an http port is added.
    Without a block the engine runs without the connector. `methods`: for its live cache, in a file of their own.

    Whoever compares tokens gives ``dtype="float32"``: a prefix that is restored is summed in another order than one
    that is computed, and in 16 bits the machine decides which of two tokens, nearly as likely, comes next."""

    def __init__(
        self,
        model: Path,
        block: dict[str, Any] | None,
        folder: Path,
        *,
        methods: list[dict[str, Any]] | None = None,
        ranks: int = 2,
        **arguments: Any,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port, self._kept_ports = _keep_ports(ranks)
        self.fail_next_load = folder / "fail-next-load"
        options: dict[str, Any] = {
            "model_path": str(model),
            "device": "cpu",
            "attention_backend": "torch_native",
            "skip_tokenizer_init": True,
            "grammar_backend": "none",
            "disable_cuda_graph": True,
            "mem_fraction_static": 0.5,  # of what is free, which others may be taking; the pool is max_total_tokens
            "max_total_tokens": 8192,
            "max_running_requests": 8,
            "log_level": "warning",
            "enable_cache_report": True,
        }
        if block is not None:
            path = folder / "kvtier.json"
            path.write_text(json.dumps({**block, "http": {"port": self.port}}))
            options |= {"kv_connector": "kvtier", "kv_connector_config": str(path)}
        if methods is not None:
            path = folder / "methods.json"
            path.write_text(json.dumps({"kv_cache_compression_config": methods, "http": {"port": self.port}}))
            options["kv_cache_compression_config"] = str(path)
        environment = {
            **os.environ,
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_WAIT_POLICY": "passive",
            "KVTIER_TEST_SDPA": "1",
            "KVTIER_TEST_HOST": "1" if "hicache_io_backend" in arguments else "",
            "KVTIER_TEST_FAIL": str(self.fail_next_load),
        }
        self.log = folder / f"engine-{time.monotonic_ns()}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(DRIVER), json.dumps(options | arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
                text=True,
            )
        begin = time.monotonic()
        try:
            self._read(START_S)
        except BaseException:
            self.kill()
            raise
        self.started_s = time.monotonic() - begin

    def generate(
        self, *requests: dict[str, Any], limit_s: float = 300.0, flush_every_s: float | None = None
    ) -> list[dict[str, Any]]:
        """Each request: rid, ids, and optionally tokens, abort_after_s, more (arguments of `generate`, and `sampling`,
        further sampling parameters)."""
        answers: list[dict[str, Any]] = self._do(
            "generate", limit_s, requests=list(requests), flush_every_s=flush_every_s
        )
        return answers

    def one(self, rid: str, ids: list[int], **options: Any) -> dict[str, Any]:
        return self.generate({"rid": rid, "ids": ids, **options})[0]

    def flush(self) -> bool:
        """Forget the device cache; retried while the engine is still finishing requests."""
        give_up = time.monotonic() + PATIENCE_S
        while not (done := bool(self._do("flush"))) and time.monotonic() < give_up:
            time.sleep(0.1)
        return done

    def storage(self, attach: dict[str, Any] | None) -> dict[str, Any]:
        """Detach storage, or attach it: success and message. Retried while the engine is winding requests up."""
        give_up = time.monotonic() + PATIENCE_S
        while True:
            answer: dict[str, Any] = self._do("storage", attach=attach)
            if answer["success"] or "not idle" not in answer["message"] or time.monotonic() > give_up:
                return answer
            time.sleep(0.1)

    def do(self, command: str, **arguments: Any) -> Any:
        """Another method of the driver."""
        return self._do(command, **arguments)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._do("text", text=text)
        return ids

    def metrics(self, rank: int = 0) -> dict[str, float]:
        """Samples of a rank's /metrics by name and labels."""
        lines = self.get("/metrics", rank).decode().splitlines()
        return {m[1]: float(m[2]) for line in lines if (m := re.fullmatch(r"([^#\s]\S*(?:\{.*\})?) (\S+)", line))}

    def get(self, path: str, rank: int = 0) -> bytes:
        """What a rank's port answers."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port + rank}{path}", timeout=PATIENCE_S) as answer:
            body: bytes = answer.read()
            return body

    def ready(self) -> bool:
        """Whether the engine's tiers work; asked again where they took too long."""
        give_up = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.get("/readyz")
                return True
            except urllib.error.HTTPError:
                if time.monotonic() > give_up:
                    return False
            time.sleep(0.5)

    def left_behind(self, limit_s: float = PATIENCE_S) -> list[str]:
        """Processes of the engine's group that are still there after `limit_s`, by name."""
        give_up = time.monotonic() + limit_s
        while (running := _running_in(self._process.pid)) and time.monotonic() < give_up:
            time.sleep(0.1)
        return running

    def stored(self, pages: int, tier: str = "nvme", limit_s: float = PATIENCE_S, rank: int = 0) -> None:
        """Wait until a tier holds at least `pages`."""
        give_up = time.monotonic() + limit_s
        while (have := self.metrics(rank)[f'kvtier_tier_resident_pages{{tier="{tier}"}}']) < pages:
            assert time.monotonic() < give_up, f"{have} of {pages} pages in {tier}"
            time.sleep(0.05)

    def kill(self) -> None:
        """kill -9 on every process of the engine at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._reap()
        assert self.left_behind() == []  # the next engine finds no directory locked

    def stop(self) -> None:
        """End as an engine ends that is asked to; fails if it does not."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        code = self._process.wait(2 * PATIENCE_S)
        assert code == 0, self.log.read_text(errors="replace")[-4000:]

    def _reap(self) -> None:
        self._process.wait(PATIENCE_S)
        for kept in self._kept_ports:
            kept.close()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _do(self, command: str, limit_s: float = 300.0, **arguments: Any) -> Any:
        stdin: IO[str] | None = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps({"do": command, **arguments}) + "\n")
        stdin.flush()
        return self._read(limit_s)["answer"]

    def _read(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], limit_s)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            what = "ended" if ready else f"did not answer within {limit_s} s"
            tail = self.log.read_text(errors="replace")[-4000:]
            raise AssertionError(f"the engine {what}; its log ends with:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def prompt(n: int, length: int = 200) -> list[int]:
    """Token ids that only prompt `n` begins with."""
    return [(n * 37 + i * (n + 3)) % 500 + 5 for i in range(length)]


def cores_of(ranks: int) -> str:
    """For SGLANG_CPU_OMP_THREADS_BIND: one core for each rank, of those that there are."""
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(str(cores[n % len(cores)]) for n in range(ranks))


def _running_in(group: int) -> list[str]:
    """Processes of a group by name, without those that have ended and wait for somebody to ask."""
    names = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            described, _, rest = path.read_text().rpartition(")")
            state, _parent, of = rest.split()[:3]
            if int(of) == group and state != "Z":
                names.append(described + ")")
    return names


def _keep_ports(count: int) -> tuple[int, list[socket.socket]]:
    """The first of `count` adjacent ports, one for each rank, and sockets that are bound to them and never listen: the
    kernel gives such ports to nobody who asks for any, and the engine's server, with SO_REUSEADDR, may listen there."""
    for _ in range(100):
        with contextlib.ExitStack() as held:
            kept: list[socket.socket] = []
            try:
                for n in range(count):
                    kept.append(held.enter_context(socket.socket()))
                    kept[n].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    kept[n].bind(("127.0.0.1", kept[0].getsockname()[1] + n if n else 0))
            except (OSError, OverflowError):
                continue
            held.pop_all()
            return kept[0].getsockname()[1], kept
    raise AssertionError(f"no {count} adjacent ports are free")
