"""Cache servers of this project, in this process and as one of their own, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from kvtier.config import parse_config
from kvtier.server.app import CacheServer
from kvtier.server.http import HttpOptions
from kvtier.server.options import ServerOptions

MIB = 1 << 20
PATIENCE_S = 60.0
"""How long is waited for what must happen: long, since it says nothing about speed."""
STARTED: list[CacheServer] = []


def start(folder: Path, *, host: str = "32MiB", nvme: str = "", http: bool = False, **server: Any) -> CacheServer:
    tiers: list[dict[str, Any]] = [{"type": "host", "capacity": host}]
    if nvme:
        tiers.append({"type": "nvme", "path": str(folder / "nvme"), "capacity": nvme})
    listen = server.pop("listen", [f"unix:{folder}/k.sock", "tcp:127.0.0.1:0"])
    options = {"listen": listen, "drain": "60s", **server}
    block = parse_config({"tiers": tiers, "promote_deadline": "120s", "server": options})
    assert block.server is not None
    started = CacheServer(block, ServerOptions.of(block.server), HttpOptions(port=0) if http else None)
    STARTED.append(started)
    return started


def client_of(server: CacheServer, **options: Any) -> Any:
    import redis

    options.setdefault("retry", redis.retry.Retry(redis.backoff.NoBackoff(), 0))
    where = server.listening[0]
    if where.path is not None:
        return redis.Redis(unix_socket_path=str(where.path), **options)
    return redis.Redis(port=where.port, **options)


def run_serve(folder: Path, *arguments: str) -> tuple[subprocess.Popen[bytes], list[str]]:
    command = [sys.executable, "-m", "kvtier.cli", "serve", *arguments]
    with (folder / "err").open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
    lines = []
    assert process.stdout is not None
    while (line := process.stdout.readline().decode().strip()).startswith("listening"):
        lines.append(line)
        if len(lines) == sum(a == "--listen" for a in arguments):
            break
    if not lines:
        process.kill()
        raise AssertionError((folder / "err").read_text())
    return process, lines


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def http_status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=600) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as e:
        e.close()
        return e.code
