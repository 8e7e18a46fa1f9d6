"""Put KV pages of a program of your own into tiers and get them back: numpy only, no engine.

Shows the four things that a program brings: what a page is (PageSpec), where pages lie (HotPool), what makes them
interchangeable (Namespace), and a hash per page that covers everything before it.
"""

from __future__ import annotations

import tempfile

import numpy as np

from kvtier.build import open_codec, open_store
from kvtier.config import parse_config
from kvtier.hot import HotLayout, HotPool
from kvtier.keys import Namespace, page_hashes
from kvtier.mover import PageMover, policy_of
from kvtier.spec import DType, PageSpec

PAGES = 8


def main(folder: str) -> None:
    block = {"tiers": [{"type": "host", "capacity": "32MiB"}, {"type": "nvme", "path": folder, "capacity": "64MiB"}]}
    config = parse_config(block | {"kv_cache_compression_config": [{"algorithm": "quantization_for_cold_page"}]})

    spec = PageSpec.mha(layers=4, kv_heads=2, head_dim=64, page_tokens=16, dtype=DType.FP16)
    rng = np.random.default_rng(0)
    shape = (PAGES * spec.page_tokens, 2, 64)  # tokens, heads, dim: NHD, as vLLM and SGLang have it
    computed = [rng.standard_normal(shape).astype(np.float16) for _ in spec.buffers]  # K and V of each layer
    hashes = page_hashes(range(PAGES * spec.page_tokens), spec.page_tokens)  # of the prompt's token ids

    codec = open_codec(config, spec)
    namespace = Namespace.of(spec, policy_of(codec), model="my-model", weights="revision-1", dtype="fp16")
    store = open_store(config)
    mover = PageMover(store, spec, namespace, codec)
    try:
        put = mover.offload(HotPool.of(spec, computed, HotLayout.NHD), hashes, range(PAGES))  # encoded by workers
        print("put:", {outcome.value: pages for outcome, pages in put.result(60).outcomes.items()})
        store.flush(60)  # also on NVMe by now

        lookup = store.lookup("request-1", namespace.page_keys(hashes), hashes=hashes)
        ready = store.wait(lookup)  # pages that only NVMe has come up meanwhile
        restored = [np.empty_like(array) for array in computed]
        result = mover.onboard(lookup, HotPool.of(spec, restored, HotLayout.NHD), range(ready)).result(60)
        store.settle("request-1", loaded=result.ok)  # counts the pages, lets go of them

        ratio = sum(array.nbytes for array in computed) / (PAGES * mover.layout(codec).cold_page_bytes)
        wanted, got = np.stack(computed).astype(float), np.stack(restored).astype(float)
        error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
        print(f"got {ready} of {PAGES} pages, {ratio:.2f} times smaller, relative error {error:.3f}")
    finally:
        mover.close()  # before its store
        store.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
