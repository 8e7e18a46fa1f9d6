"""The releases of SGLang that kvtier works with: the one table.

What kvtier reaches into is private to SGLang and may change with any release, so only those that the tests ran against
are accepted: a table with one release has both its ends in `make test-sglang`.
"""

from __future__ import annotations

import importlib.metadata
from enum import Enum

from kvtier.errors import EngineError


class Part(Enum):
    """What is asked for, as one asks for it."""

    CONNECTOR = "--kv-connector kvtier"
    STAGED = "--kv-connector kvtier-hicache"
    EVICTION = "--kv-cache-compression-config"


SUPPORTED: dict[Part, tuple[str, ...]] = {
    Part.CONNECTOR: ("0.5.23",),
    Part.STAGED: ("0.5.23",),
    Part.EVICTION: ("0.5.23",),
}
"""Oldest first. 0.5.22 was tried: it builds no linker of others (`linker_factory`), and does not tell storage behind
its hierarchical cache when the host pools are there. 0.5.21 does not tell a linker when a forward has ended."""


def installed() -> str:
    """Version of the installed SGLang, or what is wrong with it."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "without package metadata"


def refusal(what: str) -> EngineError:
    """The error for an engine that does not fit, with the releases that do."""
    releases = ", ".join(f"{part.value}: {' and '.join(found)}" for part, found in SUPPORTED.items())
    return EngineError(
        f"kvtier: {what}. This version of kvtier works with these releases of SGLang: {releases}. Install one of them, "
        "or start without the option"
    )
