"""What holds for every test: no network, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

# Whether Triton's own functions are interpreted is decided when it is first imported, so this comes before anything
# that might. For this process only: what it starts may have a GPU.
with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}), contextlib.suppress(ImportError):
    import triton.experimental.gluon
    import triton.language  # noqa: F401

# Before torch and transformers are imported by any test.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

JOIN_S = 5.0
"""How long the threads that are on their way out may take, together."""

FOREIGN_THREADS = ("tqdm", "TMonitor", "pytest_timeout", "Thread-auto")
"""Threads that libraries keep for the life of the process."""

FOREIGN_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails the session if a thread or a child process outlives its test."""
    threads_before = set(threading.enumerate())
    children_before = set(child_processes())
    yield
    left = []
    deadline = time.monotonic() + JOIN_S
    for thread in set(threading.enumerate()) - threads_before:
        if not type(thread).__name__.startswith(FOREIGN_THREADS) and not thread.name.startswith(FOREIGN_THREADS):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                left.append(f"thread {thread.name!r}")
    for pid in set(child_processes()) - children_before:
        command = command_of(pid)
        if command and not any(name in command for name in FOREIGN_PROCESSES):
            left.append(f"process {pid}: {command[:200]}")
    if left:
        pytest.fail("tests left behind: " + "; ".join(sorted(left)))


def child_processes() -> list[int]:
    """Ids of this process's living children, whichever thread started them."""
    pids = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that ended between the two looks; its children passed to another
            pids += [int(pid) for pid in (task / "children").read_text().split()]
    return pids


def command_of(pid: int) -> str:
    """The command line of a process; empty for one that has ended and waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:  # gone between the two looks
        return ""
