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

from kvtier.abc.codec import FINER, Form
from kvtier.codecs.registry import codec_for_form
from kvtier.hot import HotLayout, HotPool
from kvtier.kernels.nvfp4 import page_reference
from kvtier.spec import BufferSpec
from kvtier.testing.codecs import reference_parts

FOLDER = Path(__file__).parents[1] / "golden"


def load_inputs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("codec_regenerate", FOLDER / "codec_regenerate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


INPUTS = load_inputs()
PATHS: list[Path] = sorted({INPUTS.file_of(case) for case in INPUTS.CASES})
# Read while collecting: a missing file stops the run.
GOLDEN: list[dict[str, Any]] = [case for path in PATHS for case in json.loads(path.read_text())]


def name_of(case: dict[str, Any]) -> str:
    shape = "x".join(str(case[n]) for n in ("layers", "heads", "tokens", "dim"))
    options = "".join(str(case["options"].get(n, "")) for n in ("global_scale", "rope"))
    options += "finer" if "levels" in case else ""
    return f"{case['codec']}{options}-{case['dtype']}-{case.get('kind', '')}{shape}-{case['valid_tokens']}"


def assert_golden(cold: bytes, case: dict[str, Any]) -> None:
    assert len(cold) == case["cold_bytes"]
    if "hex" in case:
        assert cold.hex() == case["hex"]
    assert hashlib.sha256(cold).hexdigest() == case["sha256"]


def test_every_case_is_committed() -> None:
    assert sorted(name_of(c) for c in GOLDEN) == sorted(name_of(c) for c in INPUTS.CASES)
    assert sum("hex" in c for c in GOLDEN) >= 12
    assert sorted(INPUTS.FOLDER.iterdir()) == PATHS, "a file that no case belongs to"


@pytest.mark.parametrize("form", list(Form))
def test_every_form_has_golden_pages_of_its_version(form: Form) -> None:
    """Fails for a form, or a version of it, that was added without its bytes."""
    if form is Form.LOSSLESS:
        assert (FOLDER / f"codec_lossless-v{codec_for_form(form).version}.json").is_file()
        return
    name = f"{form.name.lower()}-v{codec_for_form(form).version}.json"
    path = INPUTS.FOLDER / name
    assert path.is_file(), f"{path} is missing: add cases to tests/golden/codec_regenerate.py and run it"
    assert {case["form"] for case in json.loads(path.read_text())} == {form}


@pytest.mark.parametrize("case", GOLDEN, ids=name_of)
def test_reference_bytes(case: dict[str, Any]) -> None:
    assert_golden(INPUTS.cold_page(case).tobytes(), case)


def hot_of(values: npt.NDArray[Any], buffer: BufferSpec) -> npt.NDArray[Any]:
    """One page ``[1, heads, tokens, dim]``, or ``[1, heads, dim]`` of a buffer with one row per page."""
    return values[None] if buffer.role.attention else values[None, :, 0]


@pytest.mark.parametrize("case", GOLDEN, ids=name_of)
def test_codec_bytes_and_back(case: dict[str, Any]) -> None:
    spec, values = INPUTS.spec_of(case), INPUTS.values_of(case)
    writer, layout = INPUTS.codec_of(case), INPUTS.layout_of(case)
    pool = HotPool.of(spec, [hot_of(v, b) for v, b in zip(values, spec.buffers, strict=True)], HotLayout.HND)
    arena = np.full(layout.cold_page_bytes, 0xAA, np.uint8)
    zero, valid = np.zeros(1, np.int64), np.array([case["valid_tokens"]], np.int32)
    result = writer.encode(layout, pool, zero, valid, arena, zero, np.zeros(1, np.uint64))
    assert not result.refused[0]
    assert_golden(arena.tobytes(), case)

    out = [np.full_like(hot_of(v, b), 1) for v, b in zip(values, spec.buffers, strict=True)]
    # What a reader knows: the form of the record, and the levels at the page's end.
    assert case["form"] == writer.form | (FINER if layout.levels else 0)
    reader = codec_for_form(case["form"])
    read_layout = reader.finer_layout(spec, layout.levels)
    reader.decode(read_layout, HotPool.of(spec, out, HotLayout.HND), zero, valid, arena, zero)
    expected = page_reference.decode_page(
        arena, reference_parts(layout, values), case["valid_tokens"], case["tokens"], layout.scale_table_offset
    )
    for at, part in zip(layout.parts, expected, strict=True):
        columns = out[at.buffer].reshape(values[at.buffer].shape)[:, :, at.column : at.column + at.columns]
        assert columns.tobytes() == part.tobytes()
