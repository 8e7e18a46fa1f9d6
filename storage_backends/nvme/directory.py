"""The directory of an NVMe tier: made or checked, locked against other processes, of one format.

``LOCK`` is held with flock(2) while the tier is open and names its process. ``FORMAT`` states the version and the
segment size. A directory that holds anything else and no FORMAT is left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from pathlib import Path

from kvtier.abc.tier import SLOT_ALIGN
from kvtier.errors import ConfigError, TierPathError
from kvtier.storage_backends.nvme.device import Device, write_all

_log = logging.getLogger(__name__)

FORMAT_VERSION = 1
FORMAT, _FORMAT_NEW, _LOCK = "FORMAT", "FORMAT.new", "LOCK"
PROBE = "PROBE"
_FORMAT_BYTES_MAX = 4096
_HARMLESS = {_FORMAT_NEW, _LOCK, PROBE, "lost+found"}


class TierDirectory:
    """`path` exists, is ours alone until `close`, and is of this format. TierPathError says why it cannot be.

    segment_bytes: size of the segment files; None takes the directory's own, or `default_segment_bytes` in a new one.
    if_in_use: the way out where another process has it.
    """

    def __init__(
        self,
        tier: str,
        path: Path,
        segment_bytes: int | None,
        default_segment_bytes: int,
        device: Device | None = None,
        *,
        if_in_use: str = "give every process its own directory, or stop that one",
    ) -> None:
        self._tier = tier
        self._if_in_use = if_in_use
        self._device = device or Device()
        self.path = path
        if segment_bytes is not None and (segment_bytes < SLOT_ALIGN or segment_bytes % SLOT_ALIGN):
            raise ConfigError(
                f"{tier} tier: segment_bytes = {segment_bytes} must be a positive multiple of {SLOT_ALIGN}; "
                "leave the option out for the default"
            )
        self._lock = -1
        try:
            self._make()
            self._lock = self._acquire()
            self._device.unlink(self.path / PROBE)
            self.segment_bytes = self._agree(segment_bytes, default_segment_bytes)
        except (TierPathError, ConfigError):
            self.close()
            raise
        except OSError as error:
            self.close()
            raise TierPathError(
                f"{tier} tier: path = {str(path)!r} cannot be used: {error.strerror}; name a directory that this user "
                "can write to"
            ) from error

    def close(self) -> None:
        """Unlock. Explicitly, because a forked child may still hold the same open file."""
        if self._lock >= 0:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = -1

    def _make(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise TierPathError(
                f"{self._tier} tier: path = {str(self.path)!r} is a file; name a directory, it is made if missing"
            )
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        foreign = sorted(p.name for p in self.path.iterdir() if p.name not in _HARMLESS)
        if foreign and not (self.path / FORMAT).exists():
            raise TierPathError(
                f"{self._tier} tier: path = {str(self.path)!r} holds other files ({foreign[0]!r}) and no tier; "
                "name an empty or a new directory"
            )
        if (self.path / FORMAT).exists():
            self._stated()  # before anything is changed in what may not be ours
        try:
            self.path.chmod(0o700)
        except PermissionError:
            _log.warning("%s belongs to another user: its permissions stay as they are", self.path)

    def _acquire(self) -> int:
        fd = self._device.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise TierPathError(
                f"{self._tier} tier: path = {str(self.path)!r} is in use by process {holder}; {self._if_in_use}"
            ) from None
        except BaseException:
            os.close(fd)
            raise
        with contextlib.suppress(OSError):  # for people only: a full disk must not keep a tier closed
            os.pwrite(fd, b"%-10d\n" % os.getpid(), 0)
        return fd

    def _agree(self, segment_bytes: int | None, default_segment_bytes: int) -> int:
        at = self.path / FORMAT
        if not at.exists():
            chosen = default_segment_bytes if segment_bytes is None else segment_bytes
            self._write_format(chosen)
            return chosen
        found = self._stated()
        if segment_bytes not in (None, found):
            raise ConfigError(
                f"{self._tier} tier: segment_bytes = {segment_bytes}, but path = {str(self.path)!r} was made with "
                f"{found}; leave the option out, or name another directory"
            )
        return found

    def _stated(self) -> int:
        """The segments' size that FORMAT states."""
        with (self.path / FORMAT).open("rb") as file:
            text = file.read(_FORMAT_BYTES_MAX)
        try:
            stated = json.loads(text)
            version, found = stated["kvtier_nvme_format"], stated["segment_bytes"]
        except (ValueError, KeyError, TypeError, RecursionError):
            version, found = text[:64], 0
        if version != FORMAT_VERSION or not isinstance(found, int) or found < SLOT_ALIGN or found % SLOT_ALIGN:
            raise TierPathError(
                f"{self._tier} tier: path = {str(self.path)!r} has format {version!r}, this kvtier reads "
                f"{FORMAT_VERSION}; name another directory, or delete this one (it holds cached pages only)"
            )
        return found

    def _write_format(self, segment_bytes: int) -> None:
        text = json.dumps({"kvtier_nvme_format": FORMAT_VERSION, "segment_bytes": segment_bytes}) + "\n"
        fd = self._device.open(self.path / _FORMAT_NEW, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(self._device, fd, text.encode(), 0)
            self._device.sync(fd)
        finally:
            self._device.close(fd)
        self._device.rename(self.path / _FORMAT_NEW, self.path / FORMAT)
