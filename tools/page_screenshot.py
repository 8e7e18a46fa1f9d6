"""Take the documentation's picture of the status page: a real store, whose requests are those of a public trace with
small generated pages, looked at with a headless Chromium.

    python tools/page_screenshot.py docs/results/status-page.png [SECONDS]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from hashlib import blake2b
from pathlib import Path

import numpy as np

from kvtier.build import open_codec, open_store
from kvtier.config import parse_config
from kvtier.hot import HotLayout, HotPool
from kvtier.keys import Namespace
from kvtier.mover import PageMover, policy_of
from kvtier.replay.formats import read_trace
from kvtier.server.http import HttpExporter, HttpOptions
from kvtier.server.page import StatusPage
from kvtier.spec import DType, PageSpec

SPEC = PageSpec.mha(layers=8, kv_heads=2, head_dim=64, page_tokens=32, dtype=DType.BF16)
POOL_PAGES = 256
SIZE = (1280, 2360)


def main(picture: Path, seconds: float) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        sys.exit("no chromium here: apt-get install chromium")
    with tempfile.TemporaryDirectory(prefix="kvtier-page-") as folder:
        config = parse_config(
            {
                "kv_cache_compression_config": [
                    {"algorithm": "quantization_for_cold_page", "quality_sample": 0.02},
                ],
                "tiers": [
                    {"type": "host", "capacity": "128MiB"},
                    {"type": "nvme", "path": str(Path(folder) / "nvme"), "capacity": "512MiB"},
                ],
                "salt": "of-one-tenant",
                "prefill_s_per_token": 0.0002,
            }
        )
        codec = open_codec(config, SPEC)
        namespace = Namespace.of(SPEC, policy_of(codec), model="trace", weights="00", dtype="bf16")
        store = open_store(config)
        mover = PageMover(store, SPEC, namespace, codec)
        page = StatusPage(store.ledger.registry, config, lambda: store.observer)
        with HttpExporter(store.ledger.registry, HttpOptions(port=0), page=page) as http:
            serve(mover, seconds)
            width, height = SIZE
            options = ["--headless=new", "--disable-gpu", f"--user-data-dir={folder}/browser", "--hide-scrollbars"]
            options += ["--no-sandbox"] if os.geteuid() == 0 else []
            options += [f"--window-size={width},{height}", "--virtual-time-budget=3000", f"--screenshot={picture}"]
            subprocess.run([browser, *options, http.url], check=True, timeout=120, stderr=subprocess.DEVNULL)
        mover.close()
        store.close()


def serve(mover: PageMover, seconds: float) -> None:
    """Serve requests of the trace one after the other: restore what is there, offload the rest."""
    trace = read_trace("mooncake-conversation")
    noise = np.random.default_rng(0).standard_normal((POOL_PAGES * SPEC.page_tokens, 2, 64)).astype(np.float32)
    rows = (noise.view(np.uint32) >> 16).astype(np.uint16)
    pool = HotPool.of(SPEC, [rows.copy() for _ in SPEC.buffers], HotLayout.NHD)
    restored = HotPool.of(SPEC, [rows.copy() for _ in SPEC.buffers], HotLayout.NHD)
    end = time.monotonic() + seconds
    for number in range(trace.requests):
        if time.monotonic() > end:
            return
        blocks = dict.fromkeys(trace.blocks_of(number).tolist())
        hashes = [blake2b(block.to_bytes(8, "little"), digest_size=32).digest() for block in blocks][:POOL_PAGES]
        name = f"request-{number}"
        lookup = mover.store.lookup(name, mover.namespace.page_keys(hashes), hashes=hashes)
        ready = mover.store.wait(lookup)
        if ready and mover.store.hold(lookup, ready):
            mover.onboard(lookup, restored, range(ready)).result(60.0)
        mover.store.settle(name)
        mover.offload(pool, hashes, range(len(hashes))).result(60.0)
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), float(sys.argv[2]) if len(sys.argv) > 2 else 180.0)
