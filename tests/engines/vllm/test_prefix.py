"""vLLM through ``lmcache server`` with kvtier behind it: what one process computed, others get from kvtier."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ..lmcache.server import LMCacheServer
from ..sglang.tiny_model import VOCAB, write_model

GENERATE = Path(__file__).with_name("generate.py")
CHUNK_TOKENS = 64  # of the server that `LMCacheServer` starts
PROMPT_TOKENS, NEW_TOKENS = 600, 16
CHUNKS = PROMPT_TOKENS // CHUNK_TOKENS
START_S = 240.0  # 25 s on two idle cores


def generate(model: Path, prompt: list[int], server: LMCacheServer) -> dict[str, Any]:
    asked = {"model": str(model), "prompt": prompt, "max_tokens": NEW_TOKENS, "lmcache_port": server.rpc}
    log = model.parent / f"vllm-{time.monotonic_ns()}.log"
    command = [sys.executable, str(GENERATE), json.dumps(asked)]
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
    try:
        printed, _ = process.communicate(timeout=START_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"vLLM did not generate within {START_S:.0f} s\n{log.read_text(errors='replace')[-4000:]}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its workers outlive it, if it is killed
        process.wait()
    assert process.returncode == 0, printed[-4000:] + log.read_text(errors="replace")[-4000:]
    found: dict[str, Any] = json.loads([line for line in printed.splitlines() if line.startswith("{")][-1])
    return found


def hits(server: LMCacheServer, tier: str) -> int:
    return int(server.metrics()[f'kvtier_hits_total{{tier="{tier}"}}'])


def stored_everywhere(server: LMCacheServer) -> None:
    """Wait until the prompt's chunks are in host memory and on the disk."""
    give_up = time.monotonic() + 60.0
    while True:
        metrics = server.metrics()
        there = [metrics.get(f'kvtier_tier_resident_pages{{tier="{tier}"}}', 0) for tier in ("host", "nvme")]
        if min(there) >= CHUNKS:
            return
        assert time.monotonic() < give_up, f"of {CHUNKS} chunks, host memory and disk have {there}"
        time.sleep(0.05)


@pytest.mark.timeout(1500)
def test_processes_get_their_prefix_from_kvtier_and_generate_the_same(tmp_path: Path) -> None:
    params = {
        "attention": "vllm",
        "tiers": [
            {"type": "host", "capacity": "128MiB"},
            {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": "512MiB"},
        ],
        "kv_cache_compression_config": [{"algorithm": "quantization_for_cold_page", "quant": "none"}],
        "promote_deadline": "60s",
    }
    model = write_model(tmp_path / "model", seed=7, dim=64)  # the least that vLLM's attention on a CPU takes is 32
    prompt = random.Random(0).choices(range(3, VOCAB), k=PROMPT_TOKENS)

    def start() -> LMCacheServer:
        return LMCacheServer(tmp_path, params, "--supported-transfer-mode", "auto")

    server = start()
    try:
        cold = generate(model, prompt, server)
        stored_everywhere(server)
        assert cold["cached_tokens"] == 0 and len(set(cold["tokens"])) > 2
        before = hits(server, "host")
        server.clear_l1()
        from_host = generate(model, prompt, server)
        report("computed", cold)
        report(f"kvtier: {hits(server, 'host') - before} chunks from host memory", from_host)
        assert hits(server, "host") - before == CHUNKS
    finally:
        server.stop()
    server = start()  # nothing is in any memory now
    try:
        from_disk = generate(model, prompt, server)
        report(f"kvtier: {hits(server, 'nvme')} chunks from NVMe", from_disk)
        assert hits(server, "nvme") == CHUNKS
    finally:
        server.stop()
    for found in (from_host, from_disk):
        assert found["cached_tokens"] == CHUNKS * CHUNK_TOKENS
        assert found["tokens"] == cold["tokens"]


def report(where: str, found: dict[str, Any]) -> None:
    """Printed under ``pytest -s``; docs/results/lmcache.md holds what it was."""
    external = found["metrics"].get("vllm:external_prefix_cache_hits")
    print(f"{where}: {found['cached_tokens']} of {PROMPT_TOKENS} tokens cached ({external} of them by the connector),")
    print(f"    then {found['tokens']}")
