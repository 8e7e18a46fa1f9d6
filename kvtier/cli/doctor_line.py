"""What ``kvtier doctor`` has to say about one thing."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from enum import Enum

_WAY_OUT = re.compile(
    r"[;:] (?=(?:add|apt-get|choose|did you mean|end|give|install|leave|list|lower|make|name|pip|put|raise|remove|run"
    r"|set|stop|use)\b)"
)
_ANOTHER_MISTAKE = re.compile(r"; (?:unknown )?option '")


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
    """One of our own errors: its text ends with the way out. Several mistakes in one text keep theirs."""
    text = str(message)
    split = _WAY_OUT.search(text)
    if split is None or _ANOTHER_MISTAKE.search(text):
        return bad(what, text, "see the text")
    return bad(what, text[: split.start()], text[split.end() :])


def size(nbytes: float) -> str:
    """Bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
