"""The index log of an NVMe tier: what was put where and what went, each record with its own CRC (`docs/formats.md`).

Records are queued in the order in which the tier's table changed, and written by `flush`, many in one write. Nothing
is synced: what the operating system has survives the process, and after a power cut checksums decide. A log that has
grown well past its pages is rewritten beside the old one and renamed over it.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvtier.abc.tier import PageMeta
from kvtier.storage_backends.slots.table import Entry

_log = logging.getLogger(__name__)

MAGIC = b"KVTL"
PUT, DELETE = 1, 2
_HEAD = struct.Struct("<4sIBBHI32s")  # magic, crc, kind, origin bytes, form, valid tokens, key
_TAIL = struct.Struct("<16s16sQQ")  # checksum, spec, offset, nbytes
_CRC_FROM = 8
_ALIGN = 8
_COMPACT_SLACK_BYTES = 1 << 20
_WRITE_BYTES = 1 << 20


class Loaded(NamedTuple):
    """entries: pages in the order of their puts. end: where the last good record ends. damaged: stretches of bytes
    inside the log that are no good record, skipped."""

    entries: list[Entry]
    end: int
    damaged: int


def encode_put(entry: Entry) -> bytes:
    key, meta, offset = entry
    origin = meta.origin.ljust(-(-len(meta.origin) // _ALIGN) * _ALIGN, b"\0")
    head = _HEAD.pack(MAGIC, 0, PUT, len(meta.origin), meta.form, meta.valid_tokens, key)
    return _sealed(head + _TAIL.pack(meta.checksum, meta.spec, offset, meta.nbytes) + origin)


def encode_delete(key: bytes) -> bytes:
    return _sealed(_HEAD.pack(MAGIC, 0, DELETE, 0, 0, 0, key))


def decode(data: bytes) -> Loaded:
    """Replay a log. Bytes that are no good record are skipped up to the next one; a torn tail is left out."""
    live: dict[bytes, Entry] = {}
    at = end = damaged = 0
    while at < len(data):
        length = _record_bytes(data, at)
        if not length:
            following = _next_record(data, at + _ALIGN)
            if following < 0:
                break
            damaged += 1
            at = following
            continue
        _, _, kind, origin_bytes, form, valid, key = _HEAD.unpack_from(data, at)
        live.pop(key, None)  # a page put again goes to the end
        if kind == PUT:
            checksum, spec, offset, nbytes = _TAIL.unpack_from(data, at + _HEAD.size)
            origin_at = at + _HEAD.size + _TAIL.size
            origin = data[origin_at : origin_at + origin_bytes]
            live[key] = Entry(key, PageMeta(nbytes, form, valid, checksum, spec, origin), offset)
        at += length
        end = at
    return Loaded(list(live.values()), end, damaged)


class IndexLog:
    """The log file, open for appending. `queue_*` are called under the tier's lock, `flush` and `compact` never."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._new = path.with_name(path.name + ".new")
        self._new.unlink(missing_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
        loaded = decode(self._path.read_bytes())
        os.ftruncate(self._fd, loaded.end)
        self.size_bytes = loaded.end
        self._compact_at = 2 * sum(_put_bytes(len(e.meta.origin)) for e in loaded.entries) + _COMPACT_SLACK_BYTES
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

    def compact(self, snapshot: Callable[[], Sequence[Entry]]) -> None:
        """Rewrite the log as the puts of `snapshot()`, which takes the tier's lock, and what is written meanwhile.

        Blocks the calling thread, and others only for the snapshot and the switch. A failure leaves the old log."""
        with self._write_lock:
            if self._beside is not None:
                return
            entries = snapshot()
            # Records queued before the snapshot and written after it are replayed on top: they end in the same state.
            self._beside = []
        fd, done = -1, False
        try:
            fd = os.open(self._new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            size = 0
            for start in range(0, len(entries), 1024):
                if self._aborting:
                    return
                size += _write_all(fd, b"".join(map(encode_put, entries[start : start + 1024])), size)
            os.fsync(fd)
            with self._write_lock:
                size += _write_all(fd, b"".join(self._beside), size)
                self._new.rename(self._path)
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
                self._new.unlink(missing_ok=True)
            if fd >= 0:
                os.close(fd)

    def abort_compaction(self) -> None:
        self._aborting = True

    def close(self) -> None:
        """Write what is queued and close. To be called once nobody else uses the log."""
        with self._write_lock:
            try:
                self._flush()
            except OSError as error:
                _log.warning("the end of %s could not be written: %s", self._path, error)
            os.close(self._fd)

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
            _write_all(self._fd, data, self.size_bytes)
        except OSError:
            with self._queue_lock:
                self._queue = records + self._queue
            # Whole records of a part that was written must not come back after shorter ones overwrote the rest.
            os.ftruncate(self._fd, self.size_bytes)
            raise
        self.size_bytes += len(data)
        self._written = up_to
        if self._beside is not None:
            self._beside.append(data)


def _sealed(record: bytes) -> bytes:
    return record[:4] + zlib.crc32(record[_CRC_FROM:]).to_bytes(4, "little") + record[_CRC_FROM:]


def _put_bytes(origin_bytes: int) -> int:
    return _HEAD.size + _TAIL.size + -(-origin_bytes // _ALIGN) * _ALIGN


def _record_bytes(data: bytes, at: int) -> int:
    """Length of the good record at `at`, 0 where there is none."""
    if at + _HEAD.size > len(data) or data[at : at + 4] != MAGIC:
        return 0
    kind, origin_bytes = data[at + 8], data[at + 9]
    if kind == PUT:
        length = _put_bytes(origin_bytes)
    elif kind == DELETE:
        length = _HEAD.size
    else:
        return 0
    if at + length > len(data):
        return 0
    crc = int.from_bytes(data[at + 4 : at + 8], "little")
    return length if zlib.crc32(memoryview(data)[at + _CRC_FROM : at + length]) == crc else 0


def _next_record(data: bytes, start: int) -> int:
    """Where the next good record begins, -1 where there is none."""
    at = data.find(MAGIC, start)
    while at >= 0:
        if at % _ALIGN == 0 and _record_bytes(data, at):
            return at
        at = data.find(MAGIC, at + 1)
    return -1


def _write_all(fd: int, data: bytes, at: int) -> int:
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done : done + _WRITE_BYTES], at + done)
    return done
