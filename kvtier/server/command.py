"""What a command of the cache server is, and how its arguments are read."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.server.keyspace import KEY_MAX_BYTES
from kvtier.server.session import Session

SYNTAX = "ERR syntax error"
_INTEGER = "ERR value is not an integer or out of range"
_PATTERN_MAX_BYTES = 4096

Handler = Callable[[Session, list[bytes]], None]
"""Given the words of the command, its name first. Where values stand among them there are places that have them already
(`Session.places`): no bytes, and not to be looked at."""


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
    if not re.fullmatch(rb"0|-?[1-9]\d{0,17}", word):
        raise CommandError(_INTEGER)
    return int(word)


def deadline(word: bytes, unit_ms: int, command: str) -> int:
    """Unix time in ms, `word` units from now."""
    units = number(word)
    if units <= 0 or units * unit_ms > 1 << 50:
        raise CommandError(f"ERR invalid expire time in '{command}' command")
    return int(time.time() * 1000) + units * unit_ms


class Glob:
    """A pattern of Redis: ``*``, ``?``, ``[a-c]``, ``[^a]`` and a backslash before what is meant as it is. Matching
    takes time in proportion to key and pattern, whatever a client makes of them."""

    def __init__(self, pattern: bytes) -> None:
        if len(pattern) > _PATTERN_MAX_BYTES:
            raise CommandError(f"ERR the pattern has {len(pattern)} bytes, this server takes {_PATTERN_MAX_BYTES}")
        runs: list[list[bytes]] = [[]]  # of what matches one byte each; between two runs anything may stand
        at = 0
        while at < len(pattern):
            if pattern[at : at + 1] == b"*":
                runs.append([])
                at += 1
            else:
                one, at = _one_byte(pattern, at)
                runs[-1].append(one)
        self._least = sum(map(len, runs))
        self._possible = self._least <= KEY_MAX_BYTES
        if not self._possible:
            return
        self._first, *rest = [re.compile(b"".join(run), re.DOTALL) for run in runs[:1] + [r for r in runs[1:-1] if r]]
        self._middle = rest
        self._last = re.compile(b"".join(runs[-1]), re.DOTALL) if len(runs) > 1 else None
        self._last_bytes = len(runs[-1])

    def match(self, key: bytes) -> bool:
        """Whether all of `key` is what the pattern says."""
        if not self._possible or len(key) < self._least:
            return False
        found = self._first.match(key)
        if found is None or self._last is None:
            return found is not None and found.end() == len(key)
        for part in self._middle:  # the first place is as good as any: it leaves most for what follows
            found = part.search(key, found.end())
            if found is None:
                return False
        start = len(key) - self._last_bytes
        return start >= found.end() and self._last.match(key, start) is not None


def glob(pattern: bytes) -> Glob:
    return Glob(pattern)


def _one_byte(pattern: bytes, at: int) -> tuple[bytes, int]:
    """An expression for what stands at `at` in a pattern and matches one byte, and where it ends."""
    char = pattern[at : at + 1]
    if char == b"?":
        return b".", at + 1
    if char == b"[" and (end := pattern.find(b"]", at + 1)) > at:
        inner = pattern[at + 1 : end]
        negated = inner.startswith(b"^")
        members = _members(inner[negated:])
        if not members:
            return (b"." if negated else b"(?!)."), end + 1
        return b"[" + b"^" * negated + b"".join(b"\\x%02x" % byte for byte in sorted(members)) + b"]", end + 1
    if char == b"\\" and at + 1 < len(pattern):
        at += 1
    return re.escape(pattern[at : at + 1]), at + 1


def _members(inner: bytes) -> set[int]:
    """The bytes that a set such as ``a-cx`` names."""
    members: set[int] = set()
    at = 0
    while at < len(inner):
        if inner[at + 1 : at + 2] == b"-" and at + 2 < len(inner):
            low, high = sorted((inner[at], inner[at + 2]))
            members.update(range(low, high + 1))
            at += 3
        else:
            members.add(inner[at])
            at += 1
    return members
