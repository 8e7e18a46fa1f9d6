"""A budget of memory that the processes of a node share: its sum is never exceeded, whoever starts, ends or is killed.

The budget is a file, cut into equal grants, each a byte that a process locks for as long as it has the memory. The
locks belong to the open file, so the kernel gives them back with the process, however it ends; nothing has to be
cleaned up, and no process asks another. A process that was forked from the holder, and has not called exec, keeps them.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import struct
import time
from pathlib import Path

from kvtier.abc.tier import SLOT_ALIGN
from kvtier.errors import ConfigError

_log = logging.getLogger(__name__)

_HEADER = struct.Struct("<16sQ")
_MAGIC = b"kvtier budget 1\n"
_GRANTS = 1024
_FIRST_GRANT = 4096
"""Offset of the byte that stands for the first grant; the byte at 0 is locked while the header is read or written."""
_HEADER_WAIT_S = 2.0


class NodeBudget:
    """`granted_bytes` of the budget at `path`, of `capacity_bytes` in all, from now until `close` or the process's end.

    wanted_bytes: rounded down to whole grants, at least one; where less is left, what is left is taken, with a warning.
    Raises ConfigError where nothing is left, or where other processes use the file with another capacity."""

    def __init__(self, path: str | os.PathLike[str], capacity_bytes: int, wanted_bytes: int) -> None:
        self.path = Path(path)
        grant_bytes = max(SLOT_ALIGN, capacity_bytes // _GRANTS // SLOT_ALIGN * SLOT_ALIGN)
        grants = capacity_bytes // grant_bytes
        if not grants:
            raise ConfigError(f"budget: capacity = {capacity_bytes} bytes is less than {SLOT_ALIGN}; set it higher")
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(
                f"budget: path = {str(path)!r} cannot be used: {error.strerror}; name a file that every process of "
                "this user can write, such as /dev/shm/kvtier-budget"
            ) from error
        try:
            self._agree(capacity_bytes)
            wanted = max(1, wanted_bytes // grant_bytes)
            taken = 0
            for grant in range(grants):
                if taken == wanted:
                    break
                taken += self._lock(fcntl.F_WRLCK, _FIRST_GRANT + grant, 1)
            self._lock(fcntl.F_UNLCK, 0, 1)
            if not taken:
                raise ConfigError(
                    f"budget: nothing is left of the {capacity_bytes} bytes of {str(path)!r}: other processes have "
                    "them; end one, lower their capacity, or raise the budget's capacity for all of them"
                )
        except BaseException:
            self.close()
            raise
        self.granted_bytes = taken * grant_bytes
        if taken < wanted:
            _log.warning(
                "budget: %d bytes of %s were left, %d were wanted: the host tier is that much smaller",
                self.granted_bytes,
                path,
                wanted_bytes,
            )

    def close(self) -> None:
        """Give the grants back. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _agree(self, capacity_bytes: int) -> None:
        """Every process must cut the file into the same grants. Leaves the header locked."""
        give_up = time.monotonic() + _HEADER_WAIT_S
        while not self._lock(fcntl.F_WRLCK, 0, 1):
            if time.monotonic() > give_up:
                raise ConfigError(f"budget: path = {str(self.path)!r} is locked by a process that stopped; end it")
            time.sleep(0.01)
        header = _HEADER.pack(_MAGIC, capacity_bytes)
        found = os.pread(self._fd, _HEADER.size, 0)
        if found != header:
            if found and (len(found) != _HEADER.size or not found.startswith(_MAGIC)):
                raise ConfigError(f"budget: path = {str(self.path)!r} is a file of something else; name another one")
            # Nobody who holds a grant: then it may be cut anew.
            if not self._lock(fcntl.F_WRLCK, _FIRST_GRANT, 0):
                raise ConfigError(
                    f"budget: capacity = {capacity_bytes}, but processes that run have "
                    f"{_HEADER.unpack(found)[1]} for {str(self.path)!r}; give all of them the same"
                )
            os.pwrite(self._fd, header, 0)
            self._lock(fcntl.F_UNLCK, _FIRST_GRANT, 0)

    def _lock(self, kind: int, start: int, length: int) -> bool:
        """Lock or unlock a range, `length` 0 for all behind `start`; False where another process has a part of it."""
        request = struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0)
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, request)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True
