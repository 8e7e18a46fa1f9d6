"""The note in a tier's directory: what its pages are, for people; nothing depends on it."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

_log = logging.getLogger(__name__)

NOTE = "namespaces.json"
NOTE_BYTES_MAX = 4 << 20


def write_note(directory: Path, data: bytes) -> None:
    """Whole or not at all. A failure is logged."""
    new = directory / f"{NOTE}.new"
    try:
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        new.replace(directory / NOTE)
    except OSError as error:
        _log.warning("%s cannot be written: %s; kvtier ls will know less", directory / NOTE, error)


def read_note(directory: Path) -> list[bytes]:
    """The note, if there is one that can be read: a file of no more than `NOTE_BYTES_MAX`."""
    try:
        # What is no file, such as a pipe, must not keep a tier from being opened.
        with os.fdopen(os.open(directory / NOTE, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError("it is no file")
            data = file.read(NOTE_BYTES_MAX + 1)
            if len(data) > NOTE_BYTES_MAX:
                raise OSError(f"it has more than {NOTE_BYTES_MAX} bytes")
            return [data]
    except FileNotFoundError:
        return []
    except OSError as error:
        _log.warning("%s cannot be read: %s; kvtier ls will know less", directory / NOTE, error)
        return []
