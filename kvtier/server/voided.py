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
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path

from kvtier.errors import ConfigError

_log = logging.getLogger(__name__)

_KEY_BYTES = 32
_NAME_BYTES = 24
_CHECK_BYTES = 8
_RECORD_BYTES = _KEY_BYTES + _CHECK_BYTES
_COMPACT_BYTES = 4 << 20


class Voided:
    """The log, a copy in each of the files `paths`: one per device, so that it outlives any but the last of them, and
    their order does not matter. Files are made where there are none; those that fail are left out, with a warning, as
    long as one works. Thread-safe.

    unlogged: pages whose deletion a tier could not write down yet. errors: records that no file took when it was asked,
    so that a crash right then would have brought their values back.
    """

    def __init__(self, paths: Sequence[Path], unlogged: Callable[[], Container[bytes]] = frozenset[bytes]) -> None:
        self._lock = threading.Lock()
        self._unlogged = unlogged
        self._pending: dict[bytes, None] = {}
        self._kept_bytes = 0  # when it was compacted last
        self.errors = 0
        self._files: list[_File] = []
        opened = [_open(path) for path in paths]
        for one in opened:
            if isinstance(one, _File):
                self._files.append(one)
                self._pending.update(dict.fromkeys(one.found))
        failed = [one for one in opened if isinstance(one, OSError)]
        failed += [error for file in self._files if (error := file.rewrite(self._pending)) is not None]
        for error in failed:
            if len(failed) == len(paths):
                self.close()
                raise ConfigError(
                    f"the nvme tier's path: {error.filename!r} cannot be used: {error.strerror or error}; give the "
                    "server a directory that it may write to"
                ) from error
            _log.warning(
                "%s cannot be used: %s: what is overwritten or deleted is noted in the other directories",
                error.filename, error.strerror or error,
            )  # fmt: skip
        self._latest: dict[bytes, bytes] = {}
        for page in self._pending:
            name = page[:_NAME_BYTES]
            self._latest[name] = max(self._latest.get(name, b""), page)

    def covers(self, page: bytes) -> bool:
        """Whether `page`, found on opening, is void."""
        return page <= self._latest.get(page[:_NAME_BYTES], b"")

    @property
    def highest_number(self) -> int:
        """Of the pages found on opening; 0 where there were none. A value gets a higher one, or it would be void."""
        return max((int.from_bytes(page[_NAME_BYTES:], "big") for page in self._latest.values()), default=0)

    def opened(self) -> None:
        """`covers` is not asked any more."""
        self._latest = {}

    def add(self, pages: Sequence[bytes]) -> None:
        """These pages are void. Call it before the client hears of it."""
        data = b"".join(map(_record, pages))
        with self._lock:
            self._pending.update(dict.fromkeys(pages))
            if not sum(file.add(data) for file in self._files):  # to all of them, not only the first that takes it
                self._failed(len(pages))

    def compact(self, pending: Callable[[Sequence[bytes]], Sequence[bool]]) -> None:
        """Forget the pages that are not `pending` any more, if the log has grown long, and give files what they did not
        take. Call it now and then, from one thread."""
        with self._lock:
            pages = list(self._pending)
            files = [file for file in self._files if file.behind]
            longest = max(len(pages) * _RECORD_BYTES, *(file.nbytes for file in self._files))
        if longest >= max(_COMPACT_BYTES, 2 * self._kept_bytes):
            waiting = pending(pages)
            unlogged = self._unlogged()  # asked last: what does not wait any more is logged, or is there
            with self._lock:
                for page, waits in zip(pages, waiting, strict=True):
                    if not waits and page not in unlogged:
                        self._pending.pop(page, None)
                self._kept_bytes = len(self._pending) * _RECORD_BYTES
            files = self._files
        for file in files:
            with self._lock:
                error = file.rewrite(self._pending)
            if error is not None:
                _log.debug("%s stays as it is: %s", file.path, error)

    def close(self) -> None:
        with self._lock:
            for file in self._files:
                file.close()

    def _failed(self, records: int) -> None:
        if not self.errors:
            _log.warning(
                "%s: the disk did not take the note: a crash may bring back values that were overwritten (said once)",
                ", ".join(str(file.path) for file in self._files),
            )
        self.errors += records


class _File:
    """One copy of the log. Guarded by the log's lock. Raises OSError where it cannot be opened.

    found: the records that were in it. behind: it did not take all that it should have.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = path.read_bytes() if path.exists() else b""
        self.found = tuple(_pages(raw))
        self.nbytes = len(raw)
        self.behind = False
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def add(self, data: bytes) -> bool:
        """Append records; whether all of them were written. What was written of the others stays whole."""
        try:
            written = os.write(self._file, data)
        except OSError:
            self.behind = True
            return False
        self.nbytes += written
        if written < len(data):  # the rest would stand behind half a record
            self.behind = True
            with contextlib.suppress(OSError):  # then `_pages` stops there
                self.nbytes -= written % _RECORD_BYTES
                os.ftruncate(self._file, self.nbytes)
        return written == len(data)

    def rewrite(self, pages: Iterable[bytes]) -> OSError | None:
        """Write it anew with `pages` alone; or what that failed with, and it is as it was."""
        new = self.path.with_suffix(".new")
        data = b"".join(map(_record, pages))
        try:
            new.unlink(missing_ok=True)
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(data)
            replaced = os.open(new, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as e:
            return e
        try:
            new.replace(self.path)
        except OSError as e:
            os.close(replaced)
            return e
        os.close(self._file)
        self._file, self.nbytes, self.behind = replaced, len(data), False
        return None

    def close(self) -> None:
        os.close(self._file)


def _open(path: Path) -> _File | OSError:
    try:
        return _File(path)
    except OSError as e:
        e.filename = e.filename or str(path)
        return e


def _record(page: bytes) -> bytes:
    return page + hashlib.blake2b(page, digest_size=_CHECK_BYTES).digest()


def _pages(raw: bytes) -> Iterable[bytes]:
    for at in range(0, len(raw) - _RECORD_BYTES + 1, _RECORD_BYTES):
        page = raw[at : at + _KEY_BYTES]
        if _record(page) != raw[at : at + _RECORD_BYTES]:
            return
        yield page
