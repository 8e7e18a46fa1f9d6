"""Checks of option values, with messages that name the option, the value and the way out."""

from __future__ import annotations

from kvtier.errors import ConfigError


def at_least(minimum: int, **options: int | None) -> None:
    """Raise ConfigError for the first option, by its Python name, whose value is below `minimum`."""
    for name, value in options.items():
        if value is not None and value < minimum:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: give a number from {minimum} up")
