"""Stopping a child process in its tracks, and knowing that it stands still."""

from __future__ import annotations

import os
import signal


def freeze(pid: int) -> None:
    """Stop the child process `pid`, and return once none of its threads runs any more.

    A signal is only asked for when `os.kill` returns: a server may still read a request and answer it afterwards.

    Raises:
        ChildProcessError: `pid` is not a child of this process.
        ProcessLookupError: it has ended.
    """
    os.kill(pid, signal.SIGSTOP)
    ended = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    if ended is None or ended.si_code != os.CLD_STOPPED:
        raise ProcessLookupError(f"process {pid} ended instead of being stopped")


def thaw(pid: int) -> None:
    """Let a frozen process go on."""
    os.kill(pid, signal.SIGCONT)
