"""Other processes: stopping a child in its tracks, and knowing that it stands still; the CPU time of one."""

from __future__ import annotations

import os
import signal
import time

_CPUCLOCK_SCHED = 2


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


def cpu_of(pid: int) -> float:
    """CPU seconds of a process, of all the threads that it has and had: its own clock, as `clock_getcpuclockid` names
    it."""
    return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)
