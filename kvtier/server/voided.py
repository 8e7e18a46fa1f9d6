"""Values that clients overwrote or deleted, remembered until they are gone from the disk, too.

The store writes behind its callers: when a process is killed, the value that came last may not be on the disk yet, and
the one before it not be deleted there. This log is written before the client gets its answer, so that such a value is
not found again. Handed to the kernel, not forced to the device: it outlives the process, not a loss of power.

A record has 40 bytes: the page's key (`kvtier.server.keyspace`) and BLAKE2b-64 of it. All pages with the same first 24
bytes and a number (the last 8, big-endian) up to its own are void. The first record that does not fit its hash ends
the log.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kvtier.errors import ConfigError

_log = logging.getLogger(__name__)

_KEY_BYTES = 32
_NAME_BYTES = 24
_CHECK_BYTES = 8
_RECORD_BYTES = _KEY_BYTES + _CHECK_BYTES
_COMPACT_BYTES = 4 << 20


class Voided:
    """The log in the file `path`, which is made where there is none. Thread-safe.

    errors: records that could not be written, so that a crash may bring their values back.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._pending: dict[bytes, None] = {}
        self._bytes = 0
        self.errors = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            raw = path.read_bytes() if path.exists() else b""
            self._pending = dict.fromkeys(_pages(raw))
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._rewrite()
        except OSError as e:
            raise ConfigError(
                f"the nvme tier's path: {str(path)!r} cannot be used: {e.strerror or e}; give the server a directory "
                "that it may write to"
            ) from e
        self._latest: dict[bytes, bytes] = {}
        for page in self._pending:
            name = page[:_NAME_BYTES]
            self._latest[name] = max(self._latest.get(name, b""), page)

    def covers(self, page: bytes) -> bool:
        """Whether `page`, found on opening, is void."""
        return page <= self._latest.get(page[:_NAME_BYTES], b"")

    def opened(self) -> None:
        """`covers` is not asked any more."""
        self._latest = {}

    def add(self, pages: Sequence[bytes]) -> None:
        """These pages are void. Call it before the client hears of it."""
        data = b"".join(map(_record, pages))
        with self._lock:
            self._pending.update(dict.fromkeys(pages))
            try:
                written = os.write(self._file, data)
            except OSError as e:
                self._failed(len(pages), e)
                return
            self._bytes += written
            if written < len(data):  # the rest would stand behind half a record
                self._failed(len(pages), None)
                with contextlib.suppress(OSError):  # then `_pages` stops there
                    self._bytes -= written % _RECORD_BYTES
                    os.ftruncate(self._file, self._bytes)

    def compact(self, pending: Callable[[Sequence[bytes]], Sequence[bool]]) -> None:
        """Forget the pages that are not `pending` any more, if the log has grown long. Call it now and then."""
        if self._bytes < _COMPACT_BYTES:
            return
        with self._lock:
            pages = list(self._pending)
            self._pending = {page: None for page, wait in zip(pages, pending(pages), strict=True) if wait}
            try:
                self._rewrite()
            except OSError as e:
                self._failed(0, e)

    def close(self) -> None:
        with self._lock:
            os.close(self._file)

    def _rewrite(self) -> None:
        new = self._path.with_suffix(".new")
        data = b"".join(map(_record, self._pending))
        new.write_bytes(data)
        replaced = os.open(new, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            new.replace(self._path)
        except BaseException:
            os.close(replaced)
            raise
        os.close(self._file)
        self._file, self._bytes = replaced, len(data)

    def _failed(self, records: int, error: OSError | None) -> None:
        if not self.errors:
            _log.warning(
                "%s: %s: a crash may bring back values that were overwritten (said once)",
                self._path, error.strerror if error is not None else "no room",
            )  # fmt: skip
        self.errors += max(1, records)


def _record(page: bytes) -> bytes:
    return page + hashlib.blake2b(page, digest_size=_CHECK_BYTES).digest()


def _pages(raw: bytes) -> Iterable[bytes]:
    for at in range(0, len(raw) - _RECORD_BYTES + 1, _RECORD_BYTES):
        page = raw[at : at + _KEY_BYTES]
        if _record(page) != raw[at : at + _RECORD_BYTES]:
            return
        yield page
