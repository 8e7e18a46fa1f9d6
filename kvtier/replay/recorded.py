"""Recorded lookups: which pages requests asked for, as numbers that say nothing about their text.

A file of JSON lines. The first line describes the file::

    {"format": "kvtier-lookups", "version": 1, "page_tokens": 64}

Each further line is one request: `t` seconds since the recorder was opened, `s` number of its session, `in` and `out`
tokens, `keys` the hashes of its pages, 16 hexadecimal digits each, joined. Page keys are chained over their prefix, so
a request that begins like an earlier one names only the last page they share, in `after`, and lists the pages behind.

A hash is BLAKE2b-64 of the page key, keyed with 32 random bytes that are drawn per file and never stored: equal pages
of one file are equal numbers, and nobody who guesses a prompt can confirm the guess.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from kvtier.errors import ConfigError, TierPathError
from kvtier.replay.trace import Request, Trace

_log = logging.getLogger(__name__)

FORMAT = "kvtier-lookups"
VERSION = 1
_HASH_BYTES = 8
_DIGITS = 2 * _HASH_BYTES
_MAX_BYTES = 4 << 30


class LookupRecorder:
    """Appends one line per request to a new file of mode 0600. Any thread may call it; a call costs microseconds and
    never raises for the disk's sake: after an error, or at `max_bytes`, recording ends, and `stopped` says why.

    remember_pages: how many pages are kept in memory to shorten lines; when there are more, later lines are longer.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        page_tokens: int,
        max_bytes: int = _MAX_BYTES,
        remember_pages: int = 1 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = Path(path)
        self.stopped = ""
        """Why recording ended early; empty while it goes on."""
        self.recorded_requests = 0
        self._max_bytes = max_bytes
        self._remember_pages = remember_pages
        self._clock = clock
        self._start = clock()
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._sessions: dict[str, int] = {}
        self._session_numbers = count()
        self._hash = hashlib.blake2b(key=secrets.token_bytes(32), digest_size=_HASH_BYTES)
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise TierPathError(
                f"record = {str(self.path)!r} cannot be created: {error.strerror}; name a new file in a writable folder"
            ) from None
        self._file = os.fdopen(fd, "wb")
        self._written_bytes = self._file.write(
            _line({"format": FORMAT, "version": VERSION, "page_tokens": page_tokens})
        )

    def record(
        self, page_keys: Sequence[bytes], *, input_tokens: int, output_tokens: int = 0, session: str | None = None
    ) -> None:
        """Append a request: the 32-byte keys of its pages in prefix order, a last page that is not full included where
        the engine stores one. Requests of one `session` follow each other; without one, each stands alone."""
        with self._lock:
            if self.stopped:
                return
            # A copy of the keyed state per page: the key schedule is run once.
            hashes = []
            for key in page_keys:
                keyed = self._hash.copy()
                keyed.update(key)
                hashes.append(keyed.digest())
            shared = next((i for i, h in enumerate(hashes) if h not in self._known), len(hashes))
            entry: dict[str, Any] = {
                "t": round(self._clock() - self._start, 6),
                "s": self._session(session),
                "in": input_tokens,
                "out": output_tokens,
            }
            if shared:
                entry["after"] = hashes[shared - 1].hex()
            entry["keys"] = b"".join(hashes[shared:]).hex()
            self._append(_line(entry))
            for h in hashes:
                self._known[h] = None
                self._known.move_to_end(h)
            while len(self._known) > self._remember_pages:
                self._known.popitem(last=False)

    def _session(self, name: str | None) -> int:
        if name is None:
            return next(self._session_numbers)
        number = self._sessions.get(name)
        if number is None:
            number = self._sessions[name] = next(self._session_numbers)
        return number

    def _append(self, line: bytes) -> None:
        if self._written_bytes + len(line) > self._max_bytes:
            self._stop(f"it reached {self._max_bytes} bytes")
            return
        try:
            self._file.write(line)
        except OSError as error:
            self._stop(str(error))
            return
        self._written_bytes += len(line)
        self.recorded_requests += 1

    def _stop(self, why: str) -> None:
        self.stopped = why
        _log.warning("recording lookups to %s ended after %d requests: %s", self.path, self.recorded_requests, why)

    def close(self) -> None:
        """Write what is buffered and close the file. Safe to call twice."""
        with self._lock:
            try:
                self._file.close()
            except OSError as error:
                self._stop(str(error))
                # The first close failed to flush; the descriptor itself is given back by the second.
                with contextlib.suppress(OSError):
                    self._file.close()
            self.stopped = self.stopped or "it was closed"

    def __enter__(self) -> LookupRecorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _line(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def read_recorded(path: Path) -> Trace:
    """Read what `LookupRecorder` wrote. A last line without an end, left by a killed process, is ignored."""
    requests: list[Request] = []
    ids: dict[str, int] = {}
    parents: list[int] = []
    with path.open("rb") as file:
        page_tokens = _page_tokens(path, file.readline())
        for number, line in enumerate(file, 2):
            if not line.endswith(b"\n"):
                _log.warning("%s: line %d is incomplete and was left out", path, number)
                break
            try:
                entry = json.loads(line)
                parent = ids[entry["after"]] if "after" in entry else -1
                digits = str(entry["keys"])
                if len(digits) % _DIGITS:
                    raise ValueError(f"keys of {len(digits)} digits")
                own: list[int] = []
                for at in range(0, len(digits), _DIGITS):
                    block = ids.setdefault(digits[at : at + _DIGITS], len(ids))
                    if block == len(parents):
                        parents.append(own[-1] if own else parent)
                    own.append(block)
                chain = []
                while parent >= 0:
                    chain.append(parent)
                    parent = parents[parent]
                requests.append(
                    Request(
                        float(entry["t"]), int(entry["in"]), int(entry["out"]), [*chain[::-1], *own], int(entry["s"])
                    )
                )
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"trace {str(path)!r}, line {number}: not a recorded lookup ({error!r})") from None
    return Trace.of(requests, page_tokens)


def _page_tokens(path: Path, line: bytes) -> int:
    try:
        header = json.loads(line)
        kind, version, page_tokens = header["format"], header["version"], header["page_tokens"]
    except (ValueError, KeyError, TypeError):
        kind, version, page_tokens = "", 0, 0
    if kind != FORMAT or not isinstance(page_tokens, int):
        raise ConfigError(f"trace {str(path)!r} does not begin like recorded lookups of kvtier; give its --format")
    if version != VERSION:
        raise ConfigError(f"trace {str(path)!r} has version {version} of recorded lookups; this kvtier reads {VERSION}")
    return page_tokens
