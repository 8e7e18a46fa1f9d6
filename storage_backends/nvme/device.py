"""Every system call that an NVMe tier makes on its files: where tests and ``kvtier torture`` let them fail."""

from __future__ import annotations

import os
from pathlib import Path


class Device:
    """The real calls. Each raises OSError as the system call does. Thread-safe."""

    def open(self, path: Path, flags: int) -> int:
        """A new file is readable by its owner alone."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def read(self, fd: int, into: memoryview, at: int) -> int:
        """Part of a page, or of the log; may be short."""
        return os.preadv(fd, [into], at)

    def write(self, fd: int, data: memoryview, at: int) -> int:
        """Part of a page; may be short."""
        return os.pwritev(fd, [data], at)

    def append(self, fd: int, data: memoryview, at: int) -> int:
        """Part of the log; may be short."""
        return os.pwrite(fd, data, at)

    def preallocate(self, fd: int, size: int) -> None:
        os.posix_fallocate(fd, 0, size)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)


def write_all(device: Device, fd: int, data: bytes, at: int, step_bytes: int = 1 << 20) -> int:
    """Append all of `data` at `at`; returns its length."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += device.append(fd, view[done : done + step_bytes], at + done)
    return done
