"""The note in a tier's directory: what its pages are, for people; nothing depends on it."""

from __future__ import annotations

import logging
from pathlib import Path

_log = logging.getLogger(__name__)

NOTE = "namespaces.json"


def write_note(directory: Path, data: bytes) -> None:
    """Whole or not at all. A failure is logged."""
    new = directory / f"{NOTE}.new"
    try:
        new.write_bytes(data)
        new.replace(directory / NOTE)
    except OSError as error:
        _log.warning("%s cannot be written: %s; kvtier ls will know less", directory / NOTE, error)


def read_note(directory: Path) -> list[bytes]:
    """The note, if there is one that can be read."""
    try:
        return [(directory / NOTE).read_bytes()]
    except FileNotFoundError:
        return []
    except OSError as error:
        _log.warning("%s cannot be read: %s; kvtier ls will know less", directory / NOTE, error)
        return []
