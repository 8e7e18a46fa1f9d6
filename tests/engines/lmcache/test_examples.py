"""The example with LMCache, run as its reader would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "lmcache_server.py"


@pytest.mark.timeout(300)
def test_lmcache_server_is_started_with_the_adapter_and_ended(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "L2 adapter in use: True" in done.stdout
