"""What holds for every test: no network, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
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

# The same examples on every machine and in every run; a slow one is not at fault. Others, to look for more:
# --hypothesis-profile=default
with contextlib.suppress(ImportError):  # an engine's environment has none
    import hypothesis

    hypothesis.settings.register_profile(
        "kvtier", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("kvtier")

# Before torch and transformers are imported by any test.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

TMPDIR_BYTES_MAX = 40
"""What leaves room for a socket in a test's own folder: its name has 107 bytes at most."""

JOIN_S = 60.0
"""How long the threads and processes that are on their way out may take, together."""

FOREIGN_THREADS = ("tqdm", "TMonitor", "pytest_timeout", "Thread-auto")
"""Threads that libraries keep for the life of the process."""

FOREIGN_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Short names for temporary folders, also where TMPDIR is a long one; and an interrupt that interrupts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell's background job; its children ignore it, too
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.option.basetemp is None and len(os.fsencode(tempfile.gettempdir())) > TMPDIR_BYTES_MAX:
        config.option.basetemp = tempfile.mkdtemp(prefix="kvtier-", dir="/tmp")
        config.add_cleanup(lambda: shutil.rmtree(config.option.basetemp, ignore_errors=True))


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
    while (running := set(ours_of(child_processes())) - children_before) and time.monotonic() < deadline:
        time.sleep(0.05)
    left += [f"process {pid}: {command_of(pid)[:200]}" for pid in running]
    if left:
        pytest.fail("tests left behind: " + "; ".join(sorted(left)))


@pytest.fixture(scope="session", autouse=True)
def stores_close_with_patience() -> Iterator[None]:
    """A store gives its tiers half a second to close, and a directory that is open then cannot be opened again: on
    a machine that stands still for so long, or whose disk does, the next test's opening would fail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvtier.store._TIER_CLOSE_S", JOIN_S)
        yield


def ours_of(pids: list[int]) -> list[int]:
    """Those that run a program, and not one that a library keeps for the life of the process."""
    commands = {pid: command_of(pid) for pid in pids}
    return [pid for pid, c in commands.items() if c and not any(name in c for name in FOREIGN_PROCESSES)]


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
