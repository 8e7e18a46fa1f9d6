"""A device whose calls fail on demand, for tests of the NVMe tier and for ``kvtier torture``."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from kvtier.storage_backends.nvme.device import Device

CALLS = ("open", "read", "write", "append", "preallocate", "truncate", "sync", "rename", "unlink")
HOLD_MAX_S = 300.0


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to `calls` (of CALLS) on files below `under`.

    code: the errno they fail with; 0: they do not fail. short: transfers move at most this many bytes. hold: transfers
    wait until it is set. lose: writes are answered as done and are not. direct: only files opened with O_DIRECT.
    """

    calls: tuple[str, ...]
    under: Path = Path("/")
    code: int = 0
    short: int | None = None
    hold: threading.Event | None = None
    lose: bool = False
    direct: bool = False


class FaultyDevice(Device):
    """The real calls, but for the faults that are `set`. Thread-safe."""

    def __init__(self) -> None:
        self._faults: tuple[Fault, ...] = ()
        self._files: dict[int, tuple[Path, bool]] = {}
        self._lock = threading.Lock()
        self.struck = 0
        """How many calls a fault changed."""

    def set(self, *faults: Fault) -> None:
        """From now on these, and no others."""
        self._faults = faults

    def open(self, path: Path, flags: int) -> int:
        self._strike("open", path, bool(flags & os.O_DIRECT))
        fd = super().open(path, flags)
        self._files[fd] = (path, bool(flags & os.O_DIRECT))
        return fd

    def read(self, fd: int, into: memoryview, at: int) -> int:
        return super().read(fd, self._transfer("read", fd, into), at)

    def write(self, fd: int, data: memoryview, at: int) -> int:
        part = self._transfer("write", fd, data)
        return len(part) if self._loses("write", fd) else super().write(fd, part, at)

    def append(self, fd: int, data: memoryview, at: int) -> int:
        part = self._transfer("append", fd, data)
        return len(part) if self._loses("append", fd) else super().append(fd, part, at)

    def preallocate(self, fd: int, size: int) -> None:
        self._strike("preallocate", *self._files[fd])
        super().preallocate(fd, size)

    def truncate(self, fd: int, size: int) -> None:
        self._strike("truncate", *self._files[fd])
        super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        self._strike("sync", *self._files[fd])
        super().sync(fd)

    def rename(self, source: Path, target: Path) -> None:
        self._strike("rename", target, False)
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._strike("unlink", path, False)
        super().unlink(path)

    def _met(self, call: str, path: Path, direct: bool) -> list[Fault]:
        return [
            f
            for f in self._faults
            if call in f.calls and (direct or not f.direct) and (path == f.under or f.under in path.parents)
        ]

    def _strike(self, call: str, path: Path, direct: bool) -> list[Fault]:
        """The faults that meet this call; raises for one that lets it fail."""
        met = self._met(call, path, direct)
        for fault in met:
            with self._lock:
                self.struck += 1
            if fault.hold is not None:
                fault.hold.wait(HOLD_MAX_S)
            if fault.code:
                raise OSError(fault.code, os.strerror(fault.code))
        return met

    def _transfer(self, call: str, fd: int, data: memoryview) -> memoryview:
        for fault in self._strike(call, *self._files[fd]):
            if fault.short is not None:
                data = data[: fault.short]
        return data

    def _loses(self, call: str, fd: int) -> bool:
        return any(fault.lose for fault in self._met(call, *self._files[fd]))


def failing(code: int, *calls: str, under: Path = Path("/")) -> Fault:
    """`calls`, or every call, fail with `code`."""
    return Fault(calls or CALLS, under, code)


NO_SPACE = Fault(("write", "append", "preallocate"), code=errno.ENOSPC)
"""A disk that is full."""
