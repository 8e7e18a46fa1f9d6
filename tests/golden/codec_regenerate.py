"""Writes codec_pages.json anew: `python tests/golden/codec_regenerate.py`. Never run by a test.

The bytes are part of the format: they may change only together with its version. The pages are made by the numpy
reference, from integers that need no random generator.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.codecs.registry import codec
from kvtier.kernels.nvfp4 import reference
from kvtier.spec import DType, PageSpec

PATH = Path(__file__).with_name("codec_pages.json")
CASES: list[dict[str, Any]] = [
    {
        "heads": heads,
        "tokens": tokens,
        "dim": dim,
        "layers": layers,
        "dtype": dtype,
        "codec": name,
        "options": options,
        "valid_tokens": valid,
    }
    for heads, tokens, dim, layers, valid in (
        (1, 5, 32, 1, 5),
        (1, 5, 32, 1, 3),
        (4, 5, 128, 1, 5),
        (1, 64, 16, 1, 64),
        (2, 4, 48, 3, 4),
    )
    for dtype in ("bf16", "fp16", "fp32")
    for name, options in (("raw", {}), ("nvfp4", {"global_scale": "page"}), ("nvfp4", {"global_scale": "identity"}))
]


def spec_of(case: dict[str, Any]) -> PageSpec:
    return PageSpec.mha(
        layers=case["layers"],
        kv_heads=case["heads"],
        head_dim=case["dim"],
        page_tokens=case["tokens"],
        dtype=DType(case["dtype"]),
    )


def values_of(case: dict[str, Any]) -> list[npt.NDArray[Any]]:
    """Per buffer ``[heads, tokens, dim]``: a multiplicative sequence, with magnitudes over eight powers of two."""
    out = []
    for i, b in enumerate(spec_of(case).buffers):
        n = np.arange(b.values, dtype=np.uint64)
        mixed = (n + np.uint64(977 * i + 1)) * np.uint64(2654435761) % np.uint64(2**32)
        x = (mixed.astype(np.float64) / 2**31 - 1) * np.exp2(
            (n // np.uint64(16) % np.uint64(8)).astype(np.float64) - 5 + i
        )
        out.append(reference.from_float32(x.astype(np.float32), case["dtype"]).reshape(b.heads, b.tokens, b.dim))
    return out


def cold_page(case: dict[str, Any]) -> npt.NDArray[np.uint8]:
    layout = codec(case["codec"], **case["options"]).layout(spec_of(case))
    buffers = [
        reference.Buffer(x, case["dtype"], at.data_offset, at.scale_offset)
        for x, at in zip(values_of(case), layout.buffers, strict=True)
    ]
    cold, refused = reference.encode_page(
        buffers, case["valid_tokens"], case["tokens"], layout.cold_page_bytes, layout.scale_table_offset
    )
    if refused:
        raise ValueError(f"{case}: a golden page must not be refused")
    return cold


def golden(case: dict[str, Any]) -> dict[str, Any]:
    """The page in hex if it is small, its SHA-256 in any case."""
    cold = cold_page(case).tobytes()
    whole = {"hex": cold.hex()} if len(cold) <= 256 else {}
    return {**case, "cold_bytes": len(cold), "sha256": hashlib.sha256(cold).hexdigest(), **whole}


if __name__ == "__main__":
    PATH.write_text(json.dumps([golden(case) for case in CASES], indent=1) + "\n")
