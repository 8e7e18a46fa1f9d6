"""The check that nothing outlives its test must itself hold while threads come and go."""

from __future__ import annotations

import subprocess
import sys
import threading

from tests.conftest import child_processes


def test_child_processes_are_read_while_threads_end() -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            short = [threading.Thread(target=int) for _ in range(8)]
            for thread in short:
                thread.start()
            for thread in short:
                thread.join()

    churner = threading.Thread(target=churn)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    churner.start()
    try:
        for _ in range(300):
            assert child.pid in child_processes()
    finally:
        stop.set()
        churner.join()
        child.communicate(b"\n")
