"""The Triton kernels compiled for GPUs that are not there: no spills, no stack frame, no fused or flushed arithmetic.

One page of every form here; every coding of every type with `make triton-check`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install 'kvtier[triton]'")

TOOL = Path(__file__).parents[2] / "tools" / "triton_resources.py"
ARCHITECTURES = (80, 89, 90, 100, 120)


def compiled(only: str, arch: str, cache: Path) -> list[dict[str, object]]:
    """In a process of its own: in this one Triton is interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, TOOL, "--json", "--only", only, "--arch", arch],
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_take_registers_only(arch: int, tmp_path: Path) -> None:
    got = compiled("^evict|code page", str(arch), tmp_path)
    assert len(got) == 11 + 12 and {row["arch"] for row in got} == {arch}
    for row in got:
        assert (row["stack_bytes"], row["local_bytes"], row["fused"], row["flushed"]) == (0, 0, 0, 0), row
        assert 0 < int(str(row["registers"])) <= 255


def test_a_kernel_that_spills_is_told(tmp_path: Path) -> None:
    """With an eighth of the registers that it needs, the same kernel is reported, and the exit status says so."""
    code = (
        "import pathlib, sys\n"
        f"sys.path.insert(0, {str(TOOL.parent)!r})\n"
        "import triton_resources as tool\n"
        "from dataclasses import replace\n"
        "kernel = next(k for k in tool.kernels() if k.name == 'encode page nvfp4_offset bf16')\n"
        "kernel = replace(kernel, options={**kernel.options, 'maxnreg': 24, 'enable_fp_fusion': True})\n"
        f"got = tool.compile_kernel(kernel, 80, pathlib.Path({str(tmp_path)!r}))\n"
        "print(got.good, got.stack_bytes + got.local_bytes > 0)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True,
        text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["False", "True"], done.stderr
