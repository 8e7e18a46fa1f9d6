"""Whether a directory's device can be used: given up after failures, tried in the background, taken back by itself.

A device that is full or fails to write takes no new pages; what it holds goes on being read. One that fails to read,
or lets a transfer wait for long, is left alone altogether: its pages are misses. While either lasts a thread tries
the device in growing intervals, and ends when it works again.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

_log = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_WRITES_IN_A_ROW = 4
_READS_IN_A_ROW = 8
_RETRY_MAX_S = 5.0
_STALL_S = 10.0


class DeviceState(Enum):
    """SERVING: reads and writes. NO_WRITES: reads only. OUT: neither."""

    SERVING = "serving"
    NO_WRITES = "no_writes"
    OUT = "out"


@dataclass(frozen=True, slots=True)
class DeviceCounters:
    """Since the directory was opened. failures: failed transfers. refused_puts: pages not taken in while it took none.
    outages: how often it left SERVING."""

    read_failures: int = 0
    write_failures: int = 0
    refused_puts: int = 0
    outages: int = 0


class Health:
    """The state of one directory's device. Thread-safe.

    probe: tries the device, raising OSError while it fails; called in a thread of its own. retry_s: until the first
    try; doubles with every failure.
    """

    def __init__(self, tier: str, path: Path, probe: Callable[[], None], retry_s: float = 0.25) -> None:
        self._tier = tier
        self._path = path
        self._probe = probe
        self._retry_s = retry_s
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._state = DeviceState.SERVING
        self._in_a_row = {"read": 0, "write": 0, "log": 0}  # failures, by what failed
        self._pending: dict[int, float] = {}  # thread -> since when its transfer is under way
        self._read_failures = self._write_failures = self._refused = self._outages = 0
        self._said: set[str] = set()

    @property
    def state(self) -> DeviceState:
        return DeviceState.OUT if self._stalled() else self._state

    @property
    def readable(self) -> bool:
        return self._state is not DeviceState.OUT and not self._stalled()

    @property
    def writable(self) -> bool:
        return self._state is DeviceState.SERVING and not self._stalled()

    def counters(self) -> DeviceCounters:
        return DeviceCounters(self._read_failures, self._write_failures, self._refused, self._outages)

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Around a transfer, so that one that does not end is noticed by the others."""
        me = threading.get_ident()
        self._pending[me] = time.monotonic()
        try:
            yield
        finally:
            del self._pending[me]

    def worked(self, what: str) -> None:
        """what: "read", "write" (of pages) or "log"."""
        self._in_a_row[what] = 0

    def read_failed(self, error: OSError) -> None:
        self._say("read", error)
        with self._lock:
            self._read_failures += 1
            self._in_a_row["read"] += 1
            if self._in_a_row["read"] >= _READS_IN_A_ROW:
                self._leave(DeviceState.OUT, error)

    def write_failed(self, what: str, error: OSError) -> None:
        """what: "write" (of a page) or "log"."""
        self._say(what, error)
        with self._lock:
            self._write_failures += 1
            self._in_a_row[what] += 1
            if error.errno in _FULL or self._in_a_row[what] >= _WRITES_IN_A_ROW:
                self._leave(DeviceState.NO_WRITES, error)

    def refused(self, puts: int) -> None:
        with self._lock:
            self._refused += puts

    def close(self, timeout_s: float) -> bool:
        """End the thread that tries; False if it hangs in the device, and may still use the directory's files."""
        self._stop.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def _stalled(self) -> bool:
        if not self._pending:
            return False
        until = time.monotonic() - _STALL_S
        return any(since < until for since in list(self._pending.values()))

    def _leave(self, state: DeviceState, error: OSError) -> None:
        if self._state is DeviceState.OUT or self._state is state or self._stop.is_set():
            return
        if self._state is DeviceState.SERVING:
            self._outages += 1
        self._state = state
        does = "takes no new pages" if state is DeviceState.NO_WRITES else "is left alone, its pages are misses"
        _log.warning(
            "the %s tier's directory %s %s: %s; it is tried again", self._tier, self._path, does, error.strerror
        )
        if self._thread is None:
            self._thread = threading.Thread(target=self._try, name=f"kvtier-{self._tier}-probe", daemon=True)
            self._thread.start()

    def _try(self) -> None:
        pause_s = self._retry_s
        while not self._stop.wait(pause_s):
            pause_s = min(2 * pause_s, max(_RETRY_MAX_S, self._retry_s))
            try:
                self._probe()
            except OSError as error:
                _log.debug("the %s tier: %s still fails: %s", self._tier, self._path, error)
                continue
            with self._lock:
                self._state = DeviceState.SERVING
                self._in_a_row = dict.fromkeys(self._in_a_row, 0)
                self._thread = None
            _log.warning("the %s tier: %s is in use again", self._tier, self._path)
            return

    def _say(self, what: str, error: OSError) -> None:
        """One log line per kind of failure: the counters tell the rest."""
        kind = f"{what}: {error.strerror}"
        if kind not in self._said:
            self._said.add(kind)
            _log.warning("the %s tier in %s failed to %s (further ones are counted only)", self._tier, self._path, kind)
