"""The index log of an NVMe tier: what was put where and what went, each record with its own CRC (`docs/formats.md`).

Records are queued in the order in which the tier's table changed, and written by `flush`, many in one write. Nothing
is synced: what the operating system has survives the process, and after a power cut checksums decide. A log that has
grown well past its pages is rewritten beside the old one and renamed over it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from kvtier.storage_backends.nvme.device import Device, write_all
from kvtier.storage_backends.nvme.records import (
    Loaded,
    decode,
    deleted_key,
    encode_delete,
    encode_put,
    encode_puts,
    put_bytes,
)
from kvtier.storage_backends.slots.columns import Entry, PageColumns

_log = logging.getLogger(__name__)

_COMPACT_SLACK_BYTES = 1 << 20
_REWRITE_PAGES = 1024
_READ_BYTES = 64 << 20


class IndexLog:
    """The log file, open for appending. `queue_*` are called under the tier's lock, `flush` and `compact` never."""

    def __init__(self, path: Path, device: Device | None = None) -> None:
        self._path = path
        self._device = device or Device()
        self._new = path.with_name(path.name + ".new")
        self._device.unlink(self._new)
        self._fd = self._device.open(path, os.O_RDWR | os.O_CREAT)
        self._queue_lock = threading.Lock()
        self._queue: list[bytes] = []
        self._queued = 0
        self._write_lock = threading.Lock()
        self._written = 0
        self._beside: list[bytes] | None = None  # what was written since a compaction took its snapshot
        self.size_bytes = 0
        self._compact_at = _COMPACT_SLACK_BYTES
        self._aborting = False

    def load(self) -> Loaded:
        """Replay the file and cut its torn tail off. Once, before anything else."""
        loaded = decode(self._read())
        self._device.truncate(self._fd, loaded.end)
        self.size_bytes = loaded.end
        self._compact_at = 2 * put_bytes(loaded.pages) + _COMPACT_SLACK_BYTES
        if loaded.damaged:
            _log.warning("%d damaged stretches of %s were skipped; their pages are misses", loaded.damaged, self._path)
        return loaded

    def queue_put(self, entry: Entry) -> None:
        self._append(encode_put(entry))

    def queue_delete(self, key: bytes) -> None:
        self._append(encode_delete(key))

    @property
    def queued(self) -> int:
        """How many records were queued so far: what to `flush` up to."""
        return self._queued

    @property
    def complete(self) -> bool:
        """Whether everything queued is with the operating system."""
        return self._written >= self._queued

    def unwritten_deletes(self) -> set[bytes]:
        """Pages whose deletion is queued and not written. Waits for a write under way."""
        with self._write_lock, self._queue_lock:
            queue = list(self._queue)
        return {key for record in queue if (key := deleted_key(record)) is not None}

    def flush(self, up_to: int) -> None:
        """Return once the first `up_to` records are with the operating system. OSError where they cannot be written;
        they then stay queued, in order."""
        if self._written >= up_to:
            return
        with self._write_lock:
            if self._written < up_to:
                self._flush()

    @property
    def wants_compaction(self) -> bool:
        return self.size_bytes > self._compact_at and self._beside is None

    def compact(self, snapshot: Callable[[], PageColumns]) -> None:
        """Rewrite the log as the puts of `snapshot()`, which takes the tier's lock, and what is written meanwhile.

        Blocks the calling thread, and others only for the snapshot and the switch. A failure leaves the old log."""
        with self._write_lock:
            if self._beside is not None:
                return
            pages = snapshot()
            # Records queued before the snapshot and written after it are replayed on top: they end in the same state.
            self._beside = []
        fd, done = -1, False
        try:
            fd = self._device.open(self._new, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            size = 0
            for start in range(0, len(pages), _REWRITE_PAGES):
                if self._aborting:
                    return
                size += write_all(self._device, fd, encode_puts(pages, start, start + _REWRITE_PAGES), size)
            self._device.sync(fd)
            with self._write_lock:
                size += write_all(self._device, fd, b"".join(self._beside), size)
                self._device.rename(self._new, self._path)
                self._fd, fd = fd, self._fd
                self.size_bytes = size
                self._compact_at = 2 * size + _COMPACT_SLACK_BYTES
                done = True
        except OSError as error:
            _log.warning("%s could not be compacted: %s", self._path, error)
        finally:
            with self._write_lock:
                self._beside = None
                if not done:
                    self._compact_at = 2 * self.size_bytes
            if not done:
                with contextlib.suppress(OSError):  # it is removed when the tier is opened next
                    self._device.unlink(self._new)
            if fd >= 0:
                self._device.close(fd)

    def abort_compaction(self) -> None:
        self._aborting = True

    def close(self) -> None:
        """Write what is queued and close. To be called once nobody else uses the log."""
        with self._write_lock:
            try:
                self._flush()
            except OSError as error:
                _log.warning("the end of %s could not be written: %s", self._path, error)
            self._device.close(self._fd)

    def _read(self) -> bytearray:
        data = bytearray(os.fstat(self._fd).st_size)
        view, done = memoryview(data), 0
        while done < len(data):
            n = self._device.read(self._fd, view[done : done + _READ_BYTES], done)
            if n == 0:
                break
            done += n
        del view
        del data[done:]
        return data

    def _append(self, record: bytes) -> None:
        with self._queue_lock:
            self._queue.append(record)
            self._queued += 1

    def _flush(self) -> None:
        with self._queue_lock:
            records, self._queue = self._queue, []
            up_to = self._queued
        data = b"".join(records)
        try:
            write_all(self._device, self._fd, data, self.size_bytes)
        except OSError:
            with self._queue_lock:
                self._queue = records + self._queue
            # Whole records of a part that was written must not come back after shorter ones overwrote the rest.
            self._device.truncate(self._fd, self.size_bytes)
            raise
        self.size_bytes += len(data)
        self._written = up_to
        if self._beside is not None:
            self._beside.append(data)
