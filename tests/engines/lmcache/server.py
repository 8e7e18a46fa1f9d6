"""``lmcache server`` with kvtier behind it, as a process, and what it can be asked."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from kvtier.testing.redis_servers import free_port

LMCACHE = [sys.executable, "-m", "lmcache.cli.main"]


class LMCacheServer:
    """``lmcache server`` with one adapter; its own /metrics are kvtier's. `arguments`: further ones of the command."""

    def __init__(self, folder: Path, params: dict[str, Any], *arguments: str) -> None:
        self.rpc, self.http, self.metrics_port = free_port(), free_port(), free_port()
        spec = {
            "type": "plugin",
            "module_path": "kvtier.connectors.lmcache",
            "class_name": "KvtierL2Adapter",
            "adapter_params": {**params, "http": {"port": self.metrics_port}},
        }
        command = [
            *LMCACHE, "server", "--host", "127.0.0.1", "--port", str(self.rpc), "--http-host", "127.0.0.1",
            "--http-port", str(self.http), "--chunk-size", "64", "--l1-size-gb", "0.25", "--no-l1-use-lazy",
            "--eviction-policy", "LRU", "--l2-adapter", json.dumps(spec), *arguments,
        ]  # fmt: skip
        self.log = folder / f"lmcache-{self.rpc}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self._ready()

    def _ready(self, limit_s: float = 120.0) -> None:
        give_up = time.monotonic() + limit_s
        while True:
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-3000:]
            try:
                self.get("/healthcheck")
                return
            except OSError:
                assert time.monotonic() < give_up, "the server did not start"
                time.sleep(0.2)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}{path}", timeout=10) as answer:
            return json.loads(answer.read())

    def clear_l1(self) -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{self.http}/cache/clear", method="POST", data=b"")
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert json.loads(answer.read())["cleared"] == {"tier": "l1"}

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return {m[1]: float(m[2]) for line in lines if (m := re.fullmatch(r"([^#\s]\S*(?:\{.*\})?) (\S+)", line))}

    def bench(self) -> tuple[list[str], set[str]]:
        """``lmcache bench server`` over four requests of 8 chunks: its cold lookups, and checksums of what it has."""
        shape = "(2,256,16,2,64):bfloat16:4"
        command = [
            *LMCACHE, "bench", "server", "--mode", "cpu", "--transfer-mode", "lmcache_driven",
            "--rpc-url", f"tcp://127.0.0.1:{self.rpc}", "--url", f"http://127.0.0.1:{self.http}",
            "--num-tokens", "512", "--kvcache-shape-spec", shape, "--start", "0", "--end", "4",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.findall(r"/cold\] LOOKUP: (\d+/\d+) chunks hit", done.stdout)
        return found, set(re.findall(r"CHECKSUM: (\w+)", done.stdout))

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self.process.poll() is None:
            self.process.send_signal(how)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
