"""The Triton kernels compiled for GPUs that are not there: no spills, no stack frame, no fused or flushed arithmetic.

One page of every form here; every coding of every type with `make triton-check`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

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
        timeout=280,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_pages_of_every_form_take_registers_only(arch: int, tmp_path: Path) -> None:
    got = compiled("page ", str(arch), tmp_path)
    assert len(got) == 12 and {row["arch"] for row in got} == {arch}
    for row in got:
        assert (row["stack_bytes"], row["local_bytes"], row["fused"], row["flushed"]) == (0, 0, 0, 0), row
        assert 0 < int(str(row["registers"])) <= 255
