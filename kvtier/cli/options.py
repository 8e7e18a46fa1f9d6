"""Checks of option values, with messages that name the option, the value and the way out."""

from __future__ import annotations

from kvtier.errors import ConfigError


def at_least(minimum: int, **options: int | None) -> None:
    """Raise ConfigError for the first option, by its Python name, whose value is below `minimum`."""
    for name, value in options.items():
        if value is not None and value < minimum:
            raise ConfigError(f"{_flag(name)} {value}: give a number from {minimum} up")


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
        raise ConfigError(f"{flag} {value!r} {e}; give a size such as 64MiB") from None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
