"""`lmcache server` with kvtier as its L2 storage: started here, asked for its adapters, and ended.

vLLM connects to such a server with LMCache's own `--kv-transfer-config`; docs/lmcache.md has the line.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request

ADAPTER = {
    "type": "plugin",
    "module_path": "kvtier.connectors.lmcache",
    "class_name": "KvtierL2Adapter",
    "adapter_params": {  # kvtier's block, and how the engine lays out attention, or nothing is quantized
        "attention": "vllm",
        "tiers": [{"type": "host", "capacity": "256MiB"}],
    },
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def main() -> None:
    rpc, http = free_port(), free_port()
    command = [sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", str(rpc)]
    command += ["--http-host", "127.0.0.1", "--http-port", str(http)]
    command += ["--l1-size-gb", "0.25", "--eviction-policy", "LRU", "--l2-adapter", json.dumps(ADAPTER)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{http}/status", timeout=10) as answer:
                    print("L2 adapter in use:", "KvtierL2Adapter" in answer.read().decode())
                break
            except OSError:
                if server.poll() is not None:
                    raise SystemExit("lmcache server ended; its messages are above") from None
                time.sleep(0.2)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
