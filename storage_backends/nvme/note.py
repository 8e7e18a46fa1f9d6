"""Notes in a tier's directory, such as what its pages are: small files beside the index, which does without them."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from kvtier.abc.tier import Note

_log = logging.getLogger(__name__)

NOTE_BYTES_MAX = 4 << 20
_WITHOUT = {
    Note.NAMESPACES: "kvtier ls will know less",
    Note.PINS: "pages that were pinned are not pinned after a restart",
}


def write_note(directory: Path, note: Note, data: bytes) -> None:
    """Whole or not at all. A failure is logged."""
    path = _path(directory, note)
    new = path.with_name(f"{path.name}.new")
    try:
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        new.replace(path)
    except OSError as error:
        _log.warning("%s cannot be written: %s; %s", path, error, _WITHOUT[note])


def read_note(directory: Path, note: Note = Note.NAMESPACES) -> list[bytes]:
    """The note, if there is one that can be read: a file of no more than `NOTE_BYTES_MAX`."""
    path = _path(directory, note)
    try:
        # What is no file, such as a pipe, must not keep a tier from being opened.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError("it is no file")
            data = file.read(NOTE_BYTES_MAX + 1)
            if len(data) > NOTE_BYTES_MAX:
                raise OSError(f"it has more than {NOTE_BYTES_MAX} bytes")
            return [data]
    except FileNotFoundError:
        return []
    except OSError as error:
        _log.warning("%s cannot be read: %s; %s", path, error, _WITHOUT[note])
        return []


def _path(directory: Path, note: Note) -> Path:
    return directory / f"{note.value}.json"
