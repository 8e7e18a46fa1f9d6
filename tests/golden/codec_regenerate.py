"""Writes the files in pages/ anew, one per form and version: `python tests/golden/codec_regenerate.py`. Never run by a
test.

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

from kvtier.abc.codec import FINER, Codec
from kvtier.codecs.checkpoint_scales import CheckpointScales
from kvtier.codecs.registry import codec
from kvtier.kernels.nvfp4 import page_reference, reference
from kvtier.spec import ColdLayout, DType, PageSpec, Role
from kvtier.testing.codecs import reference_parts

FOLDER = Path(__file__).with_name("pages")
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


_FORMS: list[tuple[str, dict[str, Any]]] = [
    ("nvfp4", {"rope": "2fp4"}),
    ("nvfp4", {"rope": "fp8"}),
    ("nvfp4", {"rope": "keep"}),
    ("nvfp4", {"rope": "keep", "global_scale": "identity"}),
    ("nvfp4", {"rope": "2fp4", "global_scale": "identity"}),
    ("nvfp4", {"rope": "fp8", "global_scale": "identity"}),
    ("nvfp4_offset", {}),
    ("nvfp4_token", {}),
    ("k8v4", {}),
    ("2fp4", {}),
]
# K with a constant in some channels, as the forms for K are for, and FP8 with a scale.
CASES += [
    {
        "heads": 2,
        "tokens": 32,
        "dim": 48,
        "layers": 1,
        "dtype": dtype,
        "codec": name,
        "options": options,
        "valid_tokens": valid,
        "rotary_dim": 16 if "rope" in options else 0,
        "fp8_scale": 0.75 if dtype == "fp8_e4m3" else 1.0,
        "offset": 40.0,
    }
    for dtype in ("bf16", "fp16", "fp32", "fp8_e4m3")
    for name, options in [("nvfp4", {"global_scale": "page"}), *_FORMS]
    for valid in (32, 21)
]
# MLA with a sparse-attention index key; its rotary key is the latter part of a row.
CASES += [
    {
        "kind": "mla",
        "tokens": 4,
        "dim": 64,
        "layers": 2,
        "dtype": dtype,
        "codec": "nvfp4",
        "options": options,
        "valid_tokens": 3,
        "rotary_dim": 32,
        "fp8_scale": 1.0,
        "index_page_bytes": 7,
        "heads": 1,
    }
    for dtype in ("bf16", "fp8_e4m3")
    for options in ({"global_scale": "identity"}, {"rope": "2fp4"}, {"rope": "fp8"}, {"rope": "keep"})
]


# Scales of a checkpoint, and pages with buffers stored finer than the form says.
CASES += [
    {
        "heads": 2,
        "tokens": 16,
        "dim": 32,
        "layers": 1,
        "dtype": dtype,
        "codec": "nvfp4",
        "options": {"global_scale": "checkpoint", **rope},
        "scales": {"k": [0.0123], "v": [0.0007]},
        "valid_tokens": 13,
        "rotary_dim": 16,
    }
    for dtype in ("bf16", "fp16", "fp32", "fp8_e4m3")
    for rope in ({}, {"rope": "2fp4"}, {"rope": "fp8"}, {"rope": "keep"})
]
CASES += [
    {
        "heads": 1,
        "tokens": 16,
        "dim": 32,
        "layers": 2,
        "dtype": dtype,
        "codec": name,
        "options": options,
        "valid_tokens": 11,
        "levels": [0, 1, 2, 0],
    }
    for dtype in ("bf16", "fp8_e4m3")
    for name, options in (
        ("nvfp4", {"global_scale": "page"}),
        ("nvfp4", {"global_scale": "identity"}),
        ("nvfp4_offset", {}),
        ("nvfp4_token", {}),
        ("k8v4", {}),
        ("2fp4", {}),
    )
]


def codec_of(case: dict[str, Any]) -> Codec:
    scales = case.get("scales")
    if scales is None:
        return codec(case["codec"], **case["options"])
    # As they come from a checkpoint: the global scale is the inverse, in float32.
    by_role = [{n: float(np.float32(1) / np.float32(s)) for n, s in enumerate(scales[role])} for role in ("k", "v")]
    return codec(case["codec"], **case["options"], scales=CheckpointScales(*by_role))


def layout_of(case: dict[str, Any]) -> ColdLayout:
    return codec_of(case).finer_layout(spec_of(case), tuple(case.get("levels", ())))


def form_of(case: dict[str, Any]) -> int:
    """As it is in the page's record."""
    return codec_of(case).form | (FINER if "levels" in case else 0)


def file_of(case: dict[str, Any]) -> Path:
    which = codec_of(case)
    finer = "-finer" if "levels" in case else ""
    return FOLDER / f"{which.form.name.lower()}{finer}-v{which.version}.json"


def spec_of(case: dict[str, Any]) -> PageSpec:
    if case.get("kind") == "mla":
        return PageSpec.mla(
            layers=case["layers"],
            page_tokens=case["tokens"],
            dtype=DType(case["dtype"]),
            latent_dim=case["dim"] - case["rotary_dim"],
            rope_dim=case["rotary_dim"],
            index_layers=range(1),
            index_page_bytes=case["index_page_bytes"],
        )
    return PageSpec.mha(
        layers=case["layers"],
        kv_heads=case["heads"],
        head_dim=case["dim"],
        page_tokens=case["tokens"],
        dtype=DType(case["dtype"]),
        rotary_dim=case.get("rotary_dim", 0),
        fp8_scale=case.get("fp8_scale", 1.0),
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
        if b.role is Role.K:
            x += case.get("offset", 0.0) * (n % np.uint64(b.dim) % np.uint64(11) == 3)
        shape = (b.heads, b.tokens, b.dim)
        if b.dtype is DType.UINT8:
            out.append((n % np.uint64(251)).astype(np.uint8).reshape(shape))
        elif b.dtype is DType.FP8_E4M3:
            out.append(reference.e4m3_codes((x / b.fp8_scale).astype(np.float32)).reshape(shape))
        else:
            out.append(reference.from_float32(x.astype(np.float32), case["dtype"]).reshape(shape))
    return out


def cold_page(case: dict[str, Any]) -> npt.NDArray[np.uint8]:
    layout = layout_of(case)
    parts = reference_parts(layout, values_of(case))
    cold, refused = page_reference.encode_page(
        parts, case["valid_tokens"], case["tokens"], layout.cold_page_bytes, layout.scale_table_offset
    )
    if refused:
        raise ValueError(f"{case}: a golden page must not be refused")
    if layout.levels:
        cold[layout.levels_offset : layout.levels_offset + len(layout.levels)] = layout.levels
    return cold


def golden(case: dict[str, Any]) -> dict[str, Any]:
    """The page in hex if it is small, its SHA-256 in any case."""
    cold = cold_page(case).tobytes()
    whole = {"hex": cold.hex()} if len(cold) <= 256 else {}
    known = {"form": form_of(case), "cold_bytes": len(cold), "sha256": hashlib.sha256(cold).hexdigest()}
    return {**case, **known, **whole}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path in sorted({file_of(case) for case in CASES}):
        mine = [golden(case) for case in CASES if file_of(case) == path]
        path.write_text(json.dumps(mine, indent=1) + "\n")
