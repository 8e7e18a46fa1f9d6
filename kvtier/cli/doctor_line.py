"""What ``kvtier doctor`` has to say about one thing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum


class State(Enum):
    """GOOD. WARNING: works, not as well as it could or not for long. BAD: does not work. NONE: nothing to check."""

    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Finding:
    """what: the thing. text: what was found. fix: what to do, for a WARNING or BAD."""

    what: str
    state: State
    text: str
    fix: str = ""

    def as_json(self) -> dict[str, str]:
        return {**asdict(self), "state": self.state.value}


def good(what: str, text: str) -> Finding:
    return Finding(what, State.GOOD, text)


def warning(what: str, text: str, fix: str) -> Finding:
    return Finding(what, State.WARNING, text, fix)


def bad(what: str, text: str, fix: str) -> Finding:
    return Finding(what, State.BAD, text, fix)


def nothing(what: str, text: str) -> Finding:
    return Finding(what, State.NONE, text)


def refused(what: str, message: object) -> Finding:
    """One of our own errors: its text ends with the way out."""
    text = str(message)
    for separator in ("; ", ": "):
        found, there, fix = text.rpartition(separator)
        if there:
            return bad(what, found, fix)
    return bad(what, text, "see the text")


def size(nbytes: float) -> str:
    """Bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
