"""Use the cache server from redis-py: it is started here, keeps a value over a restart, and is ended."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import redis

SERVE = [sys.executable, "-m", "kvtier.cli", "serve", "--host-capacity", "32MiB"]


def start(folder: Path) -> tuple[subprocess.Popen[str], redis.Redis]:
    socket = folder / "cache.sock"
    command = [*SERVE, "--nvme", f"{folder}/pages:64MiB", "--listen", f"unix:{socket}"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in server.stdout or ():
        if line.startswith("listening"):  # said when clients are taken
            break
    return server, redis.Redis(unix_socket_path=str(socket))


def stop(server: subprocess.Popen[str], client: redis.Redis) -> None:
    client.close()
    server.terminate()
    server.communicate()  # what is queued for NVMe is written first


def main(folder: Path) -> None:
    server, client = start(folder)
    try:
        client.set("greeting", b"hello" * 1000)
        client.set("short-lived", b"x", ex=3600)
        print("stored", client.dbsize(), "values; one ends in", client.ttl("short-lived"), "s")
    finally:
        stop(server, client)

    server, client = start(folder)
    try:
        value = client.get("greeting")
        print("after a restart:", "nothing" if value is None else f"{len(value)} bytes")
    finally:
        stop(server, client)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
