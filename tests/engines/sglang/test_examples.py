"""The example with SGLang, run as its reader would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "sglang_offline.py"


@pytest.mark.timeout(700)
def test_sglang_offline_reads_back_what_left_the_device(tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), str(tiny), "--cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "computed: 0 of 200 tokens; on the device: 0" in done.stdout
    assert "from kvtier: 192 of 200 tokens; on the device: 0" in done.stdout
