from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.testing.processes import freeze, thaw


def states(pid: int) -> set[str]:
    """The state letter of each thread of `pid`."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks}


BUSY = """
import sys, threading
for _ in range(4):
    threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
print("runs", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="thread states are read from /proc")
def test_no_thread_runs_once_frozen() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"runs\n"
            for _ in range(20):
                freeze(process.pid)
                assert states(process.pid) == {"T"}
                thaw(process.pid)
                assert "T" not in states(process.pid)
            assert process.poll() is None, "looking at a stop does not take its exit status"
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL


def test_a_process_that_has_ended_is_said_to_have_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    with pytest.raises(ProcessLookupError):
        freeze(process.pid)
