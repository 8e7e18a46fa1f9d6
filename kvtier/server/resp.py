"""The Redis protocol as a server sees it: commands read from a socket, replies written to it.

Values are received straight into memory that the caller names while the command is still being read, and sent straight
from where they lie. RESP2 and RESP3; the Redis serialization protocol specification, https://redis.io/docs/reference.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kvtier.kernels import _native
from kvtier.keys import seed_of

_BUFFER_BYTES = 16 << 10
_PARTS_MAX = 512
_ARGS_MAX = 1 << 16
_STRANGER_ARGS_MAX = 16
_STRANGER_BULK_MAX = 16 << 10
_BULK_MAX = 1 << 20
"""Arguments that are no values, such as keys: more than this is nobody's key."""
_VALUE_MAX = 1 << 40
_SKIP_BYTES = 64 << 10
_PIECE_BYTES = 256 << 10
_SEND_WAIT_S = 0.02
_AWAKE_S = 2e-6
"""So long a client on this machine is waited for in the middle of a value without going to sleep."""
_BULK_HEAD = re.compile(rb"\$(\d{1,15})\r\n")

Buffer = bytes | bytearray | memoryview


class ProtocolError(Exception):
    """What came is not a command. The connection cannot be used any further; the message is for the client."""


class Disconnected(Exception):  # noqa: N818 - not an error: clients come and go
    """The client went away, or took too long in the middle of a command or a reply."""


class Place(Protocol):
    """Where a value goes: `view` has exactly its length; None to throw the value away. `checksum` is set once it is
    there: `kvtier.keys.checksum` of it under `page`."""

    page: bytes
    view: memoryview | None
    checksum: bytes


Argument = bytes | Place
Placer = Callable[[list[Argument], int], Place | None]
"""Asked for every argument that may be a value, with those before it and its length; None: it is a plain one."""


class Stream:
    """A connected socket with its receive buffer. For one thread, but for `shut_down`.

    timeout_s: how long a peer may leave a command half sent or a reply half taken. Between commands it may be silent
    for as long as it likes, once it has said who it is.
    """

    def __init__(self, connected: socket.socket, timeout_s: float) -> None:
        self._socket = connected
        self._tls = isinstance(connected, ssl.SSLSocket)
        self.fd = -1 if self._tls else connected.fileno()
        """-1 where bytes must go through TLS."""
        self._awake_s = _AWAKE_S if connected.family == socket.AF_UNIX else 0.0
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self.start = self.end = 0
        """What was received and is not read yet lies in the buffer between these."""
        self.stranger = True
        """Not authenticated yet: only short commands are read."""
        self._timeout_s = timeout_s
        # Python's TLS sockets go on by themselves where the kernel's timeouts end a call: they have one of their own.
        connected.settimeout(timeout_s if self._tls else None)
        for option, wait_s in ((socket.SO_RCVTIMEO, timeout_s), (socket.SO_SNDTIMEO, min(_SEND_WAIT_S, timeout_s))):
            seconds, micros = divmod(int(wait_s * 1e6), 1_000_000)
            connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, micros))

    @property
    def buffered(self) -> bool:
        """Whether more of what the client sent is here already. Empty lines are nothing: nobody must wait for the
        reply to the command before them."""
        while self.start < self.end and self._buffer[self.start] in b"\r\n":
            self.start += 1
        return self.start < self.end

    def shut_down(self) -> None:
        """Wake the thread that reads: to it, the client has gone. From any thread."""
        with contextlib.suppress(OSError):  # the client was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    # ---- reading

    def read_command(self, place: Placer) -> list[Argument]:
        """The next command. Waits for it as long as it takes; raises Disconnected or ProtocolError."""
        stranger = self.stranger
        limits = _STRANGER_LIMITS if stranger else _LIMITS
        if self._tls and self.start == self.end:
            self.start, self.end = 0, self._receive(self._view, 0, patient=not stranger)
        while True:
            self.start, self.end, read, left, nbytes, failed = _native.read_command(
                self.fd, self._buffer, self.start, self.end, *limits
            )
            if not failed:
                break
            if failed != errno.EAGAIN or stranger:
                raise _lost(failed)
        args: list[Argument]
        if read is not None:  # what is here already; all of what follows would read it, too
            args = read  # type: ignore[assignment]  # a list of words is one of arguments
            if nbytes >= 0:
                args.append(self._read_body(args, nbytes, place))
                left -= 1
        else:
            line = self._read_line(idle=True)
            while not line:  # an empty line between commands is allowed
                line = self._read_line(idle=True)
            if line[:1] != b"*":
                return list(line.split())
            args, left = [], self._number(line[1:], limits[0], "multibulk length")
        while left:
            args.append(self._read_body(args, self._read_head(), place))
            left -= 1
        return args

    def _read_head(self) -> int:
        """The line that begins an argument: its length."""
        most = _STRANGER_BULK_MAX if self.stranger else _VALUE_MAX
        head = _BULK_HEAD.match(self._buffer, self.start, self.end)
        if head is not None and (length := int(head[1])) <= most:  # the usual case: the line is here already
            self.start = head.end()
            return length
        line = self._read_line()
        if line[:1] != b"$":
            raise ProtocolError(f"expected '$', got {line[:1].decode(errors='replace')!r}")
        return self._number(line[1:], most, "bulk length")

    def _read_body(self, args: list[Argument], length: int, place: Placer) -> Argument:
        """An argument of `length` bytes, and the line end behind it."""
        placed = None if self.stranger else place(args, length)
        if placed is not None:
            view = placed.view
            if view is None or self._tls:
                self._read_slowly(placed, length)
                return placed
            self.start, self.end, placed.checksum, failed = _native.read_value(
                self.fd, self._buffer, self.start, self.end, view, placed.page, self._awake_s
            )
            if failed == _native.NO_LINE_END:
                raise ProtocolError("expected the end of the bulk")
            if failed:
                raise _lost(failed)
            return placed
        if length > _BULK_MAX:
            raise ProtocolError("invalid bulk length")
        data = bytearray(length)
        self._read_into(memoryview(data))
        self._end_bulk()
        return bytes(data)

    def _read_slowly(self, place: Place, length: int) -> None:
        """A value that comes over TLS or is thrown away."""
        view, at = place.view, 0
        if view is None:
            self._skip(length)
        else:
            check = _native.Xxh3(seed_of(place.page))
            while at < length:
                piece = view[at : at + _PIECE_BYTES]
                self._read_into(piece)
                check.update(piece)
                at += len(piece)
            place.checksum = check.digest()
        self._end_bulk()

    def _read_line(self, *, idle: bool = False) -> bytes:
        while (at := self._buffer.find(b"\n", self.start, self.end)) < 0:
            if self.start:
                self._view[: self.end - self.start] = bytes(self._view[self.start : self.end])
                self.end -= self.start
                self.start = 0
            if self.end == len(self._buffer):
                raise ProtocolError("too big inline request")
            self.end += self._receive(self._view[self.end :], 0, patient=idle and not self.end and not self.stranger)
        line = bytes(self._view[self.start : at])
        self.start = at + 1
        if self.start == self.end:
            self.start = self.end = 0
        return line[:-1] if line.endswith(b"\r") else line

    def _take(self, out: memoryview) -> int:
        """Fill `out` from the buffer, as far as that goes; how far."""
        taken = min(len(out), self.end - self.start)
        if taken:
            out[:taken] = self._view[self.start : self.start + taken]
            self.start += taken
        return taken

    def _read_into(self, out: memoryview) -> None:
        taken = self._take(out)
        while taken < len(out):
            taken += self._receive(out[taken:], socket.MSG_WAITALL)

    def _skip(self, nbytes: int) -> None:
        scratch = memoryview(bytearray(min(nbytes, _SKIP_BYTES)))
        while nbytes:
            part = min(nbytes, len(scratch))
            self._read_into(scratch[:part])
            nbytes -= part

    def _end_bulk(self) -> None:
        if self.end - self.start < 2:  # what follows, if it is here already, comes along
            left = bytes(self._view[self.start : self.end])
            self.start, self.end = 0, len(left)
            self._view[: len(left)] = left
            while self.end < 2:
                self.end += self._receive(self._view[self.end :], 0)
        if not self._buffer.startswith(b"\r\n", self.start):
            raise ProtocolError("expected the end of the bulk")
        self.start += 2

    def _receive(self, out: memoryview, flags: int, *, patient: bool = False) -> int:
        while True:
            try:
                got = self._socket.recv_into(out) if self._tls else self._socket.recv_into(out, 0, flags)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as e:
                if patient:
                    continue
                raise _lost(errno.EAGAIN) from e
            except TimeoutError as e:  # with a number it is the kernel's: nobody is there any more
                if patient and e.errno is None:
                    continue
                raise _lost(e.errno or errno.EAGAIN) from e
            except OSError as e:
                raise Disconnected(str(e)) from e
            if not got:
                raise Disconnected("closed by the client")
            return got

    def _number(self, text: bytes, most: int, what: str) -> int:
        if not text.isdigit() or len(text) > 15 or int(text) > most:
            raise ProtocolError(f"invalid {what}")
        return int(text)

    # ---- writing

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send buffers as one stream, without copying them, however long the client takes. Raises Disconnected."""
        left = self.send_some(parts)
        while left:
            before = sum(map(len, left))
            until = time.monotonic() + self._timeout_s
            while left and sum(map(len, left)) == before:
                if time.monotonic() > until:
                    raise Disconnected("a reply was left half taken")
                left = self.send_some(left)

    def send_some(self, parts: Sequence[Buffer]) -> list[Buffer]:
        """Send what the client takes while it keeps taking; returns the rest. The kernel waits, so that a large value
        is one call, but not for long, so that a client that sends on instead of reading is heard. TLS sockets send
        all. Raises Disconnected."""
        try:
            if len(parts) == 1 and not self._tls:  # the usual answer: a short one
                sent = self._socket.send(parts[0])
                return [] if sent == len(parts[0]) else [memoryview(parts[0])[sent:]]
        except BlockingIOError:
            return list(parts)
        except OSError as e:
            raise Disconnected(str(e)) from e
        at = 0
        waiting = parts
        try:
            if self._tls:
                for part in parts:
                    self._send_all(memoryview(part))
                return []
            sent = self._socket.sendmsg(parts[:_PARTS_MAX])
            if sent == sum(map(len, parts)):  # as it mostly is
                return []
            waiting = [memoryview(p) for p in parts if len(p)]
            while True:
                while at < len(waiting) and sent >= len(waiting[at]):
                    sent -= len(waiting[at])
                    at += 1
                if at == len(waiting):
                    return []
                waiting[at] = waiting[at][sent:]
                sent = self._socket.sendmsg(waiting[at : at + _PARTS_MAX])
        except BlockingIOError:
            return list(waiting[at:])
        except OSError as e:
            raise Disconnected(str(e)) from e

    def wait(self) -> bool:
        """Wait until the client takes more or sends more; True if it sends. Raises Disconnected where it does neither
        for the timeout."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | select.POLLOUT)
        ready = poll.poll(self._timeout_s * 1000)
        if not ready:
            raise Disconnected("a reply was left half taken")
        return bool(ready[0][1] & ~select.POLLOUT)

    def _send_all(self, part: memoryview) -> None:
        """Over TLS: a piece at a time, each of which must be taken within the timeout."""
        for at in range(0, len(part), _PIECE_BYTES):
            self._socket.sendall(part[at : at + _PIECE_BYTES])


_LIMITS = (_ARGS_MAX, _BULK_MAX, _VALUE_MAX)
_STRANGER_LIMITS = (_STRANGER_ARGS_MAX, _STRANGER_BULK_MAX, -1)
"""Of `kernels.read_command`."""


def _lost(failed: int) -> Disconnected:
    """What an errno of the kernels, or CLOSED, says of the client."""
    if failed == _native.CLOSED:
        return Disconnected("closed by the client")
    return Disconnected("a command was left half sent" if failed == errno.EAGAIN else os.strerror(failed))


# ---- replies

OK = b"+OK\r\n"
PONG = b"+PONG\r\n"


def error(text: str) -> bytes:
    """An error reply; its first word is the code."""
    return b"-" + text.replace("\r", " ").replace("\n", " ").encode() + b"\r\n"


def integer(value: int) -> bytes:
    return b":%d\r\n" % value


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def null(protocol: int) -> bytes:
    return b"_\r\n" if protocol == 3 else b"$-1\r\n"


def array(items: Sequence[bytes]) -> bytes:
    """An array of replies that are encoded already."""
    return b"*%d\r\n" % len(items) + b"".join(items)


def mapping(pairs: Iterable[tuple[bytes, bytes]], protocol: int) -> bytes:
    """A map of encoded replies; a flat array for RESP2."""
    flat = [x for pair in pairs for x in pair]
    if protocol == 3:
        return b"%%%d\r\n" % (len(flat) // 2) + b"".join(flat)
    return array(flat)
