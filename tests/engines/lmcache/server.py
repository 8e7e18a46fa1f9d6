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

from kvtier.testing.redis_servers import kept_port

PATIENCE_S = 60.0
"""For what an idle machine does at once."""
LMCACHE = [sys.executable, "-m", "lmcache.cli.main"]


class LMCacheServer:
    """``lmcache server`` with one adapter; its own /metrics are kvtier's. `arguments`: further ones of the command."""

    def __init__(self, folder: Path, params: dict[str, Any], *arguments: str) -> None:
        self.rpc, self.http, self.metrics_port = kept_port(), kept_port(), kept_port()
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

    def _ready(self, limit_s: float = 240.0) -> None:
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
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}{path}", timeout=PATIENCE_S) as answer:
            return json.loads(answer.read())

    def clear_l1(self) -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{self.http}/cache/clear", method="POST", data=b"")
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            assert json.loads(answer.read())["cleared"] == {"tier": "l1"}

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=PATIENCE_S) as answer:
            lines = answer.read().decode().splitlines()
        return {m[1]: float(m[2]) for line in lines if (m := re.fullmatch(r"([^#\s]\S*(?:\{.*\})?) (\S+)", line))}

    def stored(self, pages: int, tier: str) -> None:
        """Wait until a tier of kvtier's holds so many pages: LMCache stores behind its clients' backs."""
        give_up = time.monotonic() + PATIENCE_S
        while (have := self.metrics().get(f'kvtier_tier_resident_pages{{tier="{tier}"}}', 0)) < pages:
            assert time.monotonic() < give_up, f"{have} of {pages} pages in {tier}"
            time.sleep(0.05)

    def bench(self) -> tuple[list[str], set[str]]:
        """``lmcache bench server`` over four requests of 8 chunks: its cold lookups, and checksums of what it has."""
        shape = "(2,256,16,2,64):bfloat16:4"
        command = [
            *LMCACHE, "bench", "server", "--mode", "cpu", "--transfer-mode", "lmcache_driven",
            "--rpc-url", f"tcp://127.0.0.1:{self.rpc}", "--url", f"http://127.0.0.1:{self.http}",
            "--num-tokens", "512", "--kvcache-shape-spec", shape, "--start", "0", "--end", "4",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.findall(r"/cold\] LOOKUP: (\d+/\d+) chunks hit", done.stdout)
        return found, set(re.findall(r"CHECKSUM: (\w+)", done.stdout))

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self.process.poll() is None:
            self.process.send_signal(how)
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(PATIENCE_S)
