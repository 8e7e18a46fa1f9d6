"""What a command of the cache server is, and how its arguments are read."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.server.session import Session

SYNTAX = "ERR syntax error"
_INTEGER = "ERR value is not an integer or out of range"

Handler = Callable[[Session, list[bytes]], None]
"""Given the words of the command, its name first; values are in their places already (`Session.values`), and empty
among the words."""


@dataclass(frozen=True, slots=True)
class Spec:
    """arity as Redis counts it: with the name, negative for "at least". keys: first, last and step of the arguments
    that are keys, 0 for none."""

    handler: Handler
    arity: int
    keys: tuple[int, int, int] = (0, 0, 0)
    writes: bool = False
    open_to_strangers: bool = False


class CommandError(Exception):
    """A command that cannot be done. The message is the error reply."""


def number(word: bytes) -> int:
    if not re.fullmatch(rb"-?\d{1,18}", word):
        raise CommandError(_INTEGER)
    return int(word)


def deadline(word: bytes, unit_ms: int, command: str) -> int:
    """Unix time in ms, `word` units from now."""
    units = number(word)
    if units <= 0 or units * unit_ms > 1 << 50:
        raise CommandError(f"ERR invalid expire time in '{command}' command")
    return int(time.time() * 1000) + units * unit_ms


def glob(pattern: bytes) -> re.Pattern[bytes]:
    """Redis' patterns: ``*``, ``?``, ``[a-c]``, ``[^a]`` and a backslash before what is meant as it is."""
    out, at = b"", 0
    while at < len(pattern):
        char = pattern[at : at + 1]
        if char == b"*":
            out += b".*"
        elif char == b"?":
            out += b"."
        elif char == b"[" and (end := pattern.find(b"]", at + 1)) > at:
            inner = pattern[at + 1 : end]
            negated = inner.startswith(b"^")
            members = re.sub(rb"([\\\[\]^])", rb"\\\1", inner[negated:])
            out += b"[" + b"^" * negated + members + b"]" if members else b"(?!)"
            at = end
        elif char == b"\\" and at + 1 < len(pattern):
            at += 1
            out += re.escape(pattern[at : at + 1])
        else:
            out += re.escape(char)
        at += 1
    try:
        return re.compile(out + rb"\Z", re.DOTALL)
    except re.error:
        raise CommandError(SYNTAX) from None
