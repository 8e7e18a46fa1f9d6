"""Whether the installed LMCache calls what we give it as it is written here."""

from __future__ import annotations

import importlib.metadata
import inspect

from kvtier.errors import EngineError

TESTED = ("0.5.6",)
"""Releases that the tests ran against. Another one is served as long as its calls are the same."""


def check_calls(ours: type, theirs: type) -> None:
    """Compare our class with the one of LMCache's that it implements, by the names of methods and parameters. Raises
    EngineError with the releases that are known to fit."""
    for name, method in inspect.getmembers(theirs, inspect.isfunction):
        if name == "__init__":
            continue
        implemented = getattr(ours, name)
        if getattr(implemented, "__isabstractmethod__", False):
            raise _refusal(f"{theirs.__name__}.{name} is asked for, and is not known here")
        if tuple(inspect.signature(method).parameters) != tuple(inspect.signature(implemented).parameters):
            raise _refusal(f"{theirs.__name__}.{name} is called as {name}{inspect.signature(method)}")


def _refusal(what: str) -> EngineError:
    try:
        version = importlib.metadata.version("lmcache")
    except importlib.metadata.PackageNotFoundError:
        version = "without package metadata"
    return EngineError(
        f"kvtier: LMCache {version}: {what}. This version of kvtier works with LMCache {' and '.join(TESTED)}: install "
        "that, or start without kvtier's adapter, serde or plugin"
    )
