"""The K and V that everything is measured on: ``[2, layers, tokens, heads, dim]``, the bits of BF16 values as uint16.

    python -m tests.benchmarks.compare.kv FILE TOKENS

computes those of the demo's model for a stretch of the shipped agent sessions. `random_kv` has the same shape in no
time, for a run that only tries whether everything works."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

KV = npt.NDArray[np.uint16]

LAYERS, HEADS, DIM = 30, 3, 64
"""Of SmolLM2-135M."""


def random_kv(tokens: int, layers: int = 2) -> KV:
    draw = np.random.default_rng(0).standard_normal((2, layers, tokens, HEADS, DIM), dtype=np.float32)
    return bf16(draw)


def bf16(x: npt.NDArray[np.float32]) -> KV:
    """Bits of the values, cut off; a model's own are BF16 already when they get here."""
    bits: KV = (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return bits


def float32(bits: KV) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def model_kv(tokens: int) -> KV:
    import torch

    from kvtier.cli.eval_cold_page import ColdPageEval

    bench = ColdPageEval.load()
    with torch.inference_mode():
        layers = bench.cache_of(bench.windows(1, tokens))
    sides = [
        torch.stack([layer[side][0].to(torch.bfloat16).transpose(0, 1).contiguous() for layer in layers])
        for side in (0, 1)
    ]
    bits: KV = torch.stack(sides).view(torch.int16).numpy().view(np.uint16)
    return bits


def main() -> None:
    path, tokens = Path(sys.argv[1]), int(sys.argv[2])
    new = path.with_suffix(".new.npy")  # so that an interrupted run leaves nothing that looks whole
    np.save(new, model_kv(tokens))
    new.replace(path)


if __name__ == "__main__":
    main()
