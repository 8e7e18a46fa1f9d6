"""Instruction sets can be forced and give the same bytes; batches of any size; the C++ checks under sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtier.codecs.registry import codec
from kvtier.hot import HotLayout, HotPool
from kvtier.kernels import _native
from kvtier.kernels.nvfp4 import page_reference, reference
from kvtier.spec import DType, PageSpec
from kvtier.testing.codecs import reference_parts

FORMS = ("nvfp4", "nvfp4_offset", "nvfp4_token", "k8v4", "2fp4", "raw")
CHECKS = Path(__file__).parents[1] / "native" / "run.sh"


FORCED = """
import sys
import numpy as np
from kvtier.codecs.registry import codec
from kvtier.hot import HotLayout, HotPool
from kvtier.kernels import _native
from kvtier.spec import DType, PageSpec

assert _native.isa() == sys.argv[1], _native.isa()
spec = PageSpec.mha(layers=2, kv_heads=2, head_dim=80, page_tokens=32, dtype=DType.FP16)
rng = np.random.default_rng(6)
arrays = [(rng.standard_normal((3, 2, 32, 80)) + 9).astype(np.float16).view(np.uint16) for _ in spec.buffers]
back = [np.zeros_like(a) for a in arrays]
ids, valid = np.arange(3), np.array([32, 17, 32], np.int32)
for form in sys.argv[2:]:
    which = codec(form)
    layout = which.layout(spec)
    arena, at = np.zeros(3 * layout.cold_page_bytes, np.uint8), ids * layout.cold_page_bytes
    pool = HotPool.of(spec, arrays, HotLayout.HND)
    result = which.encode(layout, pool, ids, valid, arena, at, np.zeros(3, np.uint64))
    which.decode(layout, HotPool.of(spec, back, HotLayout.HND), ids, valid, arena, at)
    print(form, result.checksums.tobytes().hex(), _native.xxh3_128(np.stack(back)).hex())
"""


def forced(isa: str) -> str:
    """What a process says that was told to use that instruction set."""
    done = subprocess.run(
        [sys.executable, "-c", FORCED, isa, *FORMS],
        env={**os.environ, "KVTIER_ISA": isa},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_environment_forces_each_instruction_set_and_all_give_the_same_bytes() -> None:
    said = {isa: forced(isa) for isa in _native.isas()}
    assert len(said["scalar"].splitlines()) == len(FORMS)
    for isa, lines in said.items():
        assert lines == said["scalar"], isa


def test_an_unknown_instruction_set_in_the_environment_is_told_at_import() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from kvtier.kernels import _native"],
        env={**os.environ, "KVTIER_ISA": "mmx"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode != 0
    assert "KVTIER_ISA = 'mmx' is not available here; use one of: " in done.stderr


@pytest.mark.parametrize("pages", [0, 1, 257, 4096])
@pytest.mark.parametrize("form", FORMS)
def test_batches_of_any_size(isa: str, form: str, pages: int) -> None:
    """Each page of a batch is what it is alone: a few of them against the reference, and every one decoded."""
    spec = PageSpec.mha(layers=1, kv_heads=1, head_dim=16, page_tokens=16, dtype=DType.BF16)
    which, rng = codec(form), np.random.default_rng(pages)
    layout = which.layout(spec)
    kinds = 16  # of pages, which recur
    values = [reference.from_float32(rng.standard_normal((kinds, 1, 16, 16)).astype(np.float32), "bf16") for _ in "kv"]
    # Pages of the pool and slots of the arena in an order of their own; one page more than is used.
    arrays = [np.concatenate([v[np.arange(pages) % kinds], v[:1]]) for v in values]
    slots = rng.permutation(pages)
    ids, valid = np.arange(pages), (np.arange(pages) % kinds + 1).astype(np.int32)
    arena, at = np.full(pages * layout.cold_page_bytes, 0xC3, np.uint8), slots * layout.cold_page_bytes
    pool = HotPool.of(spec, arrays, HotLayout.HND)
    result = which.encode(layout, pool, ids, valid, arena, at, ids.astype(np.uint64))
    assert result.checksums.shape == (pages, 16)
    assert not result.refused.any()
    back = [np.full_like(a, 0x7FC1) for a in arrays]
    which.decode(layout, HotPool.of(spec, back, HotLayout.HND), ids, valid, arena, at)
    for array in back:
        assert (array[pages] == 0x7FC1).all()
    cold = arena.reshape(pages, layout.cold_page_bytes)[slots]
    for kind in range(min(kinds, pages)):
        parts = reference_parts(layout, [v[kind] for v in values])
        sizes = (16, layout.cold_page_bytes, layout.scale_table_offset)
        expected, _ = page_reference.encode_page(parts, kind + 1, *sizes)
        decoded = page_reference.decode_page(expected, parts, kind + 1, 16, layout.scale_table_offset)
        assert (cold[kind::kinds] == expected).all()
        for array, part in zip(back, decoded, strict=True):
            assert (array[kind:pages:kinds] == part).all()
    for i in {0, pages // 2, pages - 1} & set(range(pages)):
        assert result.checksums[i].tobytes() == _native.xxh3_128(cold[i].copy(), i)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: apt-get install g++")
@pytest.mark.timeout(1200)  # half a minute of compiling, on a machine that may have other work
def test_the_kernels_under_sanitizers(tmp_path: Path) -> None:
    done = subprocess.run(["bash", CHECKS, tmp_path, "native"], capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "agree; digest" in done.stdout
