"""Writes codec_lossless-v1.json anew: `python tests/golden/lossless_regenerate.py`. Never run by a test.

What it holds must decode for ever; that an encoder makes other bytes of the same page is no fault.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.codecs.registry import codec
from kvtier.hot import HotLayout, HotPool
from kvtier.spec import BufferSpec, DType, PageSpec, Role

PATH = Path(__file__).with_name("codec_lossless-v1.json")
SPEC = PageSpec.mha(layers=1, kv_heads=2, head_dim=24, page_tokens=4, dtype=DType.BF16).with_buffers(
    [BufferSpec(Role.STATE, 0, 1, 1, 99, DType.UINT8), BufferSpec(Role.V, 0, 1, 4, 8, DType.FP32)]
)
VALID_TOKENS = 3


def arrays() -> list[npt.NDArray[Any]]:
    """One page in HND, from integers that need no random generator."""
    k = ((np.arange(192) * 2654435761 % 2**32) / 2**31 - 1).astype(np.float32)
    bits = (k.view(np.uint32) >> 16).astype(np.uint16).reshape(1, 2, 4, 24)
    state = (np.arange(99) * 7 % 11).astype(np.uint8).reshape(1, 1, 99)
    return [bits, bits[..., ::-1].copy(), state, k[:32].reshape(1, 1, 4, 8).copy()]


def main() -> None:
    which = codec("lossless")
    layout, zero = which.layout(SPEC), np.zeros(1, np.int64)
    arena = np.zeros(layout.cold_page_bytes, np.uint8)
    pool = HotPool.of(SPEC, arrays(), HotLayout.HND)
    valid = np.array([VALID_TOKENS], np.int32)
    result = which.encode(layout, pool, zero, valid, arena, zero, np.zeros(1, np.uint64))
    assert result.nbytes is not None
    PATH.write_text(json.dumps({"hex": arena[: result.nbytes[0]].tobytes().hex()}) + "\n")


if __name__ == "__main__":
    main()
