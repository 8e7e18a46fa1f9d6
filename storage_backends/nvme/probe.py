"""Whether a device that failed takes bytes again: a file of its own is written, synced, read and removed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from kvtier.storage_backends.nvme.device import Device
from kvtier.storage_backends.nvme.directory import PROBE

PROBE_BYTES = 64 << 10


def try_writing(device: Device, directory: Path, buffer: memoryview) -> None:
    """Raises OSError where the device fails or is full. buffer: PROBE_BYTES to use, writable."""
    buffer[:] = bytes(PROBE_BYTES)
    path = directory / PROBE
    fd = device.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        if device.write(fd, buffer, 0) < PROBE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        device.sync(fd)
        device.read(fd, buffer, 0)
    finally:
        device.close(fd)
        device.unlink(path)
