"""A mover over small tiers, and the geometry of its pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.build import open_codec, open_store
from kvtier.config import parse_config
from kvtier.keys import Namespace
from kvtier.mover import PageMover, policy_of
from kvtier.spec import DType, PageSpec

LAYERS, HEADS, DIM, TOKENS, PAGES = 2, 2, 64, 16, 8
SPEC = PageSpec.mha(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, page_tokens=TOKENS, dtype=DType.BF16, rotary_dim=16)
PATIENCE_S = 120.0
Bits = npt.NDArray[np.uint16]


@contextmanager
def open_mover(directory: Path, **options: Any) -> Iterator[PageMover]:
    """Of pages of `SPEC`, over 8 MiB of host memory and 16 MiB in `directory`. options: of the cold pages. At the end
    everything under way must have ended."""
    config = parse_config(
        {
            "kv_cache_compression_config": [{"algorithm": "quantization_for_cold_page", **options}],
            "promote_deadline": f"{PATIENCE_S:.0f}s",
            "tiers": [
                {"type": "host", "capacity": "8MiB"},
                {"type": "nvme", "path": str(directory), "capacity": "16MiB", "io_threads": 2},
            ],
        }
    )
    which = open_codec(config, SPEC)
    namespace = Namespace.of(SPEC, policy_of(which), model="m", weights="00", dtype="bf16")
    mover = PageMover(open_store(config), SPEC, namespace, which, workers=2)
    try:
        yield mover
    finally:
        assert mover.drain(PATIENCE_S)
        assert mover.store.flush(PATIENCE_S)
        mover.close()
        mover.store.close()
