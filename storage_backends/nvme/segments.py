"""The segment files of an NVMe tier: one address space over preallocated files, read and written with O_DIRECT.

File i covers the addresses from ``i * segment_bytes``; the last one ends with the capacity. Where O_DIRECT is
refused, at opening or at the first transfer (tmpfs, some network file systems), the page cache is used instead.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier.abc.tier import SLOT_ALIGN
from kvtier.errors import ConfigError, TierPathError
from kvtier.storage_backends.nvme.device import Device
from kvtier.storage_backends.slots.extents import Region

_log = logging.getLogger(__name__)

_FLAGS = os.O_RDWR | os.O_CREAT
_FILES_MAX = 1 << 15
_FILES_OF_OTHERS = 64
_NAME = re.compile(r"segment-(\d{6})")


class SegmentFiles:
    """`found_bytes[i]` is the size of file i before this was opened, `direct` whether O_DIRECT is in use."""

    def __init__(
        self, tier: str, directory: Path, capacity_bytes: int, segment_bytes: int, device: Device | None = None
    ) -> None:
        self.segment_bytes = segment_bytes
        self._device = device or Device()
        self._directory = directory
        _check_files(tier, directory, capacity_bytes, segment_bytes)
        self._sizes = [
            min(segment_bytes, capacity_bytes - at) // SLOT_ALIGN * SLOT_ALIGN
            for at in range(0, capacity_bytes, segment_bytes)
        ]
        try:
            self._found = {int(m[1]): p for p in directory.iterdir() if (m := _NAME.fullmatch(p.name))}
            self.found_bytes = {i: p.stat().st_size for i, p in self._found.items()}
        except OSError as error:
            raise TierPathError(
                f"{tier} tier: path = {str(directory)!r} cannot be used: {error.filename}: {error.strerror}; see to "
                "the device, or delete the directory (it holds cached pages only)"
            ) from error
        self._switching = threading.Lock()
        self._retired: list[int] = []
        self._fds: list[int] = []
        self.direct = True
        made = []
        try:
            for i, size in enumerate(self._sizes):
                self._fds.append(self._open(i))
                if i not in self._found:
                    made.append(i)
                self._preallocate(self._fds[i], size)
        except OSError as error:
            self.close()
            for i in made:
                self._device.unlink(self._path(i))
            raise TierPathError(
                f"{tier} tier: capacity = {capacity_bytes} bytes cannot be had in {str(directory)!r}: "
                f"{error.strerror}; lower the capacity or free some space"
            ) from error

    @property
    def regions(self) -> list[Region]:
        return [Region(i * self.segment_bytes, size) for i, size in enumerate(self._sizes)]

    def trim(self) -> None:
        """Cut files down to the capacity. To be called once nothing is kept behind it."""
        for i, path in self._found.items():
            if i >= len(self._sizes):
                self._device.unlink(path)
            elif self.found_bytes[i] > self._sizes[i]:
                self._device.truncate(self._fds[i], self._sizes[i])

    def inside(
        self, offsets: npt.NDArray[np.int64], slot_bytes: npt.NDArray[np.int64], *, found: bool
    ) -> npt.NDArray[np.bool_]:
        """Whether each slot lies wholly in one file, as the files are now or as they were `found`."""
        if found:
            sizes = {i: min(size, self.segment_bytes) for i, size in self.found_bytes.items()}
        else:
            sizes = dict(enumerate(self._sizes))
        limits = np.zeros(max(sizes, default=0) + 2, np.int64)
        for i, size in sizes.items():
            limits[i] = size
        files, at = np.divmod(offsets, self.segment_bytes)
        fits = at + slot_bytes <= limits[np.clip(files, 0, len(limits) - 1)]
        inside: npt.NDArray[np.bool_] = fits & (offsets % SLOT_ALIGN == 0) & (offsets >= 0)
        return inside

    def read(self, offset: int, into: memoryview) -> int:
        """Fill `into` from `offset`; returns how many bytes there were. OSError where the device fails."""
        i, at = divmod(offset, self.segment_bytes)
        done = 0
        while done < len(into):
            n = self._transfer(self._device.read, i, into[done:] if done else into, at + done)
            if n == 0:
                break
            done += n
        return done

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of `data` at `offset`. OSError where the device fails or is full."""
        i, at = divmod(offset, self.segment_bytes)
        done = 0
        while done < len(data):
            n = self._transfer(self._device.write, i, data[done:] if done else data, at + done)
            if n == 0:
                raise OSError(errno.EIO, "nothing was written")
            done += n

    def close(self) -> None:
        for fd in [*self._fds, *self._retired]:
            self._device.close(fd)
        self._fds, self._retired = [], []

    def _transfer(self, call: Callable[[int, memoryview, int], int], i: int, buffer: memoryview, at: int) -> int:
        direct = self.direct
        try:
            return call(self._fds[i], buffer, at)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
        self._use_page_cache()
        return call(self._fds[i], buffer, at)

    def _use_page_cache(self) -> None:
        with self._switching:
            if not self.direct:
                return
            _log.info("O_DIRECT is refused in %s: using the page cache", self._directory)
            # Other threads may be using the old descriptors: they are closed at the end. The new ones are in place
            # before anybody is told that buffers need not be aligned.
            self._retired += self._fds
            self._fds = [self._device.open(self._path(i), _FLAGS) for i in range(len(self._sizes))]
            self.direct = False

    def _open(self, i: int) -> int:
        if self.direct:
            try:
                return self._device.open(self._path(i), _FLAGS | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            _log.info("O_DIRECT is refused in %s: using the page cache", self._directory)
            self.direct = False
        return self._device.open(self._path(i), _FLAGS)

    def _preallocate(self, fd: int, size: int) -> None:
        try:
            self._device.preallocate(fd, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            # A file system that cannot reserve: running out of space then shows at a write, as a failed put.
            if os.fstat(fd).st_size < size:
                self._device.truncate(fd, size)

    def _path(self, i: int) -> Path:
        return self._directory / f"segment-{i:06d}"


def _check_files(tier: str, directory: Path, capacity_bytes: int, segment_bytes: int) -> None:
    """Raise ConfigError where the capacity takes more files than may be open: a directory keeps the segment size that
    it was made with, however much its capacity grows."""
    files = -(-capacity_bytes // segment_bytes)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _FILES_MAX if limit == resource.RLIM_INFINITY else min(_FILES_MAX, limit - _FILES_OF_OTHERS)
    if files > allowed:
        raise ConfigError(
            f"{tier} tier: capacity = {capacity_bytes} bytes in {str(directory)!r}, which was made with files of "
            f"{segment_bytes}, takes {files} open files, {allowed} can be had; lower the capacity, raise the limit "
            "(ulimit -n), or name a new directory, whose files will be larger"
        )
