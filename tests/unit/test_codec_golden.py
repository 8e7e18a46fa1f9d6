"""Golden bytes: cold pages as committed, from the reference and from the native codecs."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.codecs.registry import codec, codec_for_form
from kvtier.hot import HotLayout, HotPool
from kvtier.kernels.nvfp4 import page_reference
from kvtier.spec import BufferSpec
from kvtier.testing.codecs import reference_parts

FOLDER = Path(__file__).parents[1] / "golden"
# Read while collecting: a missing file stops the run.
GOLDEN: list[dict[str, Any]] = json.loads((FOLDER / "codec_pages.json").read_text())


def load_inputs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("codec_regenerate", FOLDER / "codec_regenerate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


INPUTS = load_inputs()


def name_of(case: dict[str, Any]) -> str:
    shape = "x".join(str(case[n]) for n in ("layers", "heads", "tokens", "dim"))
    options = "".join(str(case["options"].get(n, "")) for n in ("global_scale", "rope"))
    return f"{case['codec']}{options}-{case['dtype']}-{case.get('kind', '')}{shape}-{case['valid_tokens']}"


def assert_golden(cold: bytes, case: dict[str, Any]) -> None:
    assert len(cold) == case["cold_bytes"]
    if "hex" in case:
        assert cold.hex() == case["hex"]
    assert hashlib.sha256(cold).hexdigest() == case["sha256"]


def test_every_case_is_committed() -> None:
    assert [name_of(c) for c in GOLDEN] == [name_of(c) for c in INPUTS.CASES]
    assert sum("hex" in c for c in GOLDEN) >= 12


@pytest.mark.parametrize("case", GOLDEN, ids=name_of)
def test_reference_bytes(case: dict[str, Any]) -> None:
    assert_golden(INPUTS.cold_page(case).tobytes(), case)


def hot_of(values: npt.NDArray[Any], buffer: BufferSpec) -> npt.NDArray[Any]:
    """One page ``[1, heads, tokens, dim]``, or ``[1, heads, dim]`` of a buffer with one row per page."""
    return values[None] if buffer.role.attention else values[None, :, 0]


@pytest.mark.parametrize("case", GOLDEN, ids=name_of)
def test_codec_bytes_and_back(case: dict[str, Any]) -> None:
    spec, values = INPUTS.spec_of(case), INPUTS.values_of(case)
    writer = codec(case["codec"], **case["options"])
    layout = writer.layout(spec)
    pool = HotPool.of(spec, [hot_of(v, b) for v, b in zip(values, spec.buffers, strict=True)], HotLayout.HND)
    arena = np.full(layout.cold_page_bytes, 0xAA, np.uint8)
    zero, valid = np.zeros(1, np.int64), np.array([case["valid_tokens"]], np.int32)
    result = writer.encode(layout, pool, zero, valid, arena, zero, np.zeros(1, np.uint64))
    assert not result.refused[0]
    assert_golden(arena.tobytes(), case)

    out = [np.full_like(hot_of(v, b), 1) for v, b in zip(values, spec.buffers, strict=True)]
    reader = codec_for_form(writer.form)
    reader.decode(layout, HotPool.of(spec, out, HotLayout.HND), zero, valid, arena, zero)
    expected = page_reference.decode_page(
        arena, reference_parts(layout, values), case["valid_tokens"], case["tokens"], layout.scale_table_offset
    )
    for at, part in zip(layout.parts, expected, strict=True):
        columns = out[at.buffer].reshape(values[at.buffer].shape)[:, :, at.column : at.column + at.columns]
        assert columns.tobytes() == part.tobytes()
