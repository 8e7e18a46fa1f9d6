"""Checks of option values, with messages that name the option, the value and the way out; of paths, too."""

from __future__ import annotations

import os
from pathlib import Path

from kvtier.errors import ConfigError, TierPathError


def at_least(minimum: int, **options: int | None) -> None:
    """Raise ConfigError for the first option, by its Python name, whose value is below `minimum`."""
    for name, value in options.items():
        if value is not None and value < minimum:
            raise ConfigError(f"{_flag(name)} {value}: give a number from {minimum} up")


THREADS_MAX = 1024
"""Libraries end the process where a thread cannot be started."""


def at_most(maximum: int, **options: int | None) -> None:
    """Raise ConfigError for the first option, by its Python name, whose value is above `maximum`."""
    for name, value in options.items():
        if value is not None and value > maximum:
            raise ConfigError(f"{_flag(name)} {value}: give a number up to {maximum}")


def check_sizes(**options: str | None) -> None:
    """Raise ConfigError for the first option, by its Python name, that is no size in bytes."""
    for name, value in options.items():
        if value is not None:
            _check_size(_flag(name), value)


def _check_size(flag: str, value: str) -> None:
    from kvtier.config import parse_bytes

    try:
        parse_bytes(value)
    except ValueError as e:
        raise ConfigError(f"{flag} {value!r} {e}") from None


def check_writable(option: str, folder: Path) -> None:
    """Make `folder` if it is not there. Raise TierPathError, which names `option`, where it cannot be written: before
    minutes of work, not after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError as e:
        raise TierPathError(f"{option} {str(folder)!r} cannot be used ({e.strerror}): give a writable folder") from e
    if not writable:
        raise TierPathError(f"{option} {str(folder)!r} cannot be written: give a writable folder")


def is_there(path: Path) -> bool:
    """Whether `path` is there, as far as this user may look: `Path.exists` raises where it may not."""
    try:
        path.stat()
    except OSError:
        return False
    return True


def nearest_there(path: Path) -> Path:
    """`path`, or its nearest ancestor that is there and may be looked at."""
    while not is_there(path) and path != path.parent:
        path = path.parent
    return path


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
