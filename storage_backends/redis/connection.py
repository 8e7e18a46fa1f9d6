"""One connection to a Redis server: requests gathered from the caller's buffers, pages received straight into them.

Speaks RESP2 over a blocking socket. Deadlines are the kernel's own timeouts (SO_RCVTIMEO, SO_SNDTIMEO), so that a page
is received by few system calls. Pages are sent by reference: the kernel takes them from the caller's memory when the
server's side reads them, so they must stay as they are until the reply is here. TLS sockets of Python can neither
gather nor wait for all; there, parts go one by one.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import socket
import ssl
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kvtier.kernels import _native, tcp
from kvtier.storage_backends.redis.options import Address, RedisOptions

_CONTROL_BYTES = 4096
"""Replies are read through a buffer of this size. It is small, since what it catches of a page is copied once more."""
_SMALL_BYTES = 512
"""Up to so many bytes are read by way of that buffer."""
_PARTS_MAX = 512
"""Buffers per sendmsg; the kernel takes 1 024."""
_TEXT_MAX = 64 << 20
_VALUE_MAX = 1 << 40
_REFERENCE_MIN_BYTES = 64 << 10
"""Copying less than this is cheaper than handing over its pages."""
_JOINED_MAX_BYTES = 64 << 10
_NEVER = 1 << 62
_PIPE_BYTES = 1 << 20
_NO_REFERENCES = (errno.EFAULT, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP, errno.EMFILE, errno.ENFILE)
"""What kernels, sandboxes and memory of devices say that cannot be sent by reference."""

Buffer = bytes | bytearray | memoryview
Reply = Any
"""int, bytes, None, a list of replies, or ReplyError."""


class ReplyError(Exception):
    """An error reply: not raised but returned, since the connection stays good. `code` is its first word."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = text.partition(" ")[0]


class DeadlineError(Exception):
    """The call's deadline passed before the server answered. The connection is of no more use."""


class LostError(Exception):
    """The server cannot be reached, went away, or does not speak the protocol. The connection is of no more use."""


class LoginError(Exception):
    """The server answered, but does not let us in."""


class Connection:
    """For one thread at a time. `fresh` until its first reply: a failure of a used one may just be its old age.
    `doubtful` once a reply may have been that to another command: whoever finds out sets it."""

    def __init__(self, address: Address, options: RedisOptions, until: float, *, database: int) -> None:
        self.fresh = True
        self.doubtful = False
        self._until = until
        self._buffer = bytearray(_CONTROL_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._pipe: tuple[int, int] | None = None
        self._armed = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}
        try:
            self._socket = _connect(address, self._left())
            try:
                if options.tls is not None:
                    self._socket.settimeout(self._left())
                    self._socket = options.tls.wrap_socket(self._socket, server_hostname=address.host or None)
                self._socket.settimeout(None)
            except BaseException:
                self._socket.close()
                raise
        except TimeoutError as e:
            raise DeadlineError(f"{address}: no connection in time") from e
        except (OSError, UnicodeError) as e:  # the latter: of a host's name
            raise LostError(f"{address}: {e}") from e
        self._tls = isinstance(self._socket, ssl.SSLSocket)
        self._fd = self._socket.fileno()
        self._reference_min = _NEVER if self._tls else _REFERENCE_MIN_BYTES
        try:
            self._log_in(options, database)
        except BaseException:
            self.close()
            raise

    def set_deadline(self, until: float) -> None:
        """Everything from now on ends by `until` (`time.monotonic`), or raises DeadlineError."""
        self._until = until

    @property
    def descriptor(self) -> int:
        """For `poll`: there is something to be read where it says so, or where `has_input`."""
        return self._fd

    @property
    def has_input(self) -> bool:
        """Whether something has come that was not read yet, and that the kernel no longer has."""
        return self._start < self._end or (isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0)

    def close(self) -> None:
        self._socket.close()
        self._close_pipe()

    def shut_down(self) -> None:
        """Make a call that is blocked in another thread fail."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # it is down already
            return

    # ---- sending

    def send(self, parts: Iterable[Buffer]) -> None:
        """Send buffers as one stream, without copying them. Large ones, but for the last, must not change before the
        reply to them is read. Each is asked for once what lies before it is on its way, so that the server is at work
        while the next one is made."""
        if self._tls:
            for part in _joined_small(parts):
                self._send_all(memoryview(part))
            return
        waiting: list[Buffer] = []
        page: Buffer | None = None
        for part in parts:
            if page is not None:
                waiting = self._send_pages(waiting, page)
                page = None
            if len(part) < self._reference_min:
                waiting.append(part)
            else:
                page = part
        if page is not None:
            waiting.append(page)
        if waiting:
            self._gather(waiting)

    def _gather(self, parts: Sequence[Buffer], flags: int = 0) -> None:
        self._arm(socket.SO_SNDTIMEO)
        if len(parts) == 1 and len(parts[0]) <= _SMALL_BYTES:  # nearly always all of it, and without the detours
            try:
                sent = self._socket.send(parts[0], flags)
            except BlockingIOError:
                raise DeadlineError("the server does not take what is sent") from None
            except OSError as e:
                raise LostError(f"sending: {e}") from e
            if sent == len(parts[0]):
                return
            parts = [memoryview(parts[0])[sent:]]
        waiting = [memoryview(p) for p in parts if len(p)]
        at = 0
        while at < len(waiting):
            self._arm(socket.SO_SNDTIMEO)
            try:
                sent = self._socket.sendmsg(waiting[at : at + _PARTS_MAX], (), flags)
            except BlockingIOError:
                raise DeadlineError("the server does not take what is sent") from None
            except OSError as e:
                raise LostError(f"sending: {e}") from e
            while at < len(waiting) and sent >= len(waiting[at]):
                sent -= len(waiting[at])
                at += 1
            if sent:
                waiting[at] = waiting[at][sent:]

    def _send_pages(self, before: list[Buffer], data: Buffer) -> list[Buffer]:
        """Send what comes before `data`, and that by reference; what is left of both where that cannot be done here."""
        if sum(map(len, before)) > _JOINED_MAX_BYTES:
            self._gather(before, socket.MSG_MORE)
            before = []
        start = b"".join(before)
        self._arm(socket.SO_SNDTIMEO)
        try:
            if self._pipe is None:
                self._pipe = _pipe()
            sent, error = _native.send_pages(self._fd, *self._pipe, start, data, self._until)
        except OSError as e:
            sent, error = 0, e.errno or errno.ENOSYS
        if not error:
            return []
        self._close_pipe()
        if sent < len(start) + mmap.PAGESIZE and error in _NO_REFERENCES:
            self._reference_min = _NEVER
            return [start[sent:], memoryview(data)[max(0, sent - len(start)) :]]
        if error == errno.EAGAIN:
            raise DeadlineError("the server does not take what is sent")
        raise LostError(f"sending: {os.strerror(error)}")

    def _close_pipe(self) -> None:
        pipe, self._pipe = self._pipe, None
        for end in pipe or ():
            os.close(end)

    def _send_all(self, part: memoryview) -> None:
        while len(part):
            self._arm(socket.SO_SNDTIMEO)
            try:
                part = part[self._socket.send(part) :]
            except (BlockingIOError, TimeoutError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                raise DeadlineError("the server does not take what is sent") from None
            except OSError as e:
                raise LostError(f"sending: {e}") from e

    # ---- receiving

    def read_reply(self, depth: int = 2) -> Reply:
        """The next reply, whatever it is; depth: of lists in each other."""
        line = self._read_line()
        kind, text = line[:1], line[1:]
        if kind == b"+":
            return bytes(text)
        if kind == b"-":
            return ReplyError(text.decode(errors="replace"))
        if kind == b":":
            return self._number(text)
        if kind == b"$":
            length = self._number(text)
            if length < 0:
                return None
            if length > _TEXT_MAX:
                raise LostError(f"a reply of {length} bytes where a short one is due")
            data = bytearray(length)
            self.read_into(memoryview(data))
            self.end_bulk()
            return bytes(data)
        if kind == b"*" and depth:
            count = self._number(text)
            return None if count < 0 else [self.read_reply(depth - 1) for _ in range(count)]
        raise LostError(f"not a reply: {line[:40]!r}")

    def read_bulk_length(self) -> int | ReplyError:
        """The start of a bulk reply: its length, -1 for none. Then come `read_into` or `skip`, and `end_bulk`."""
        line = self._read_line()
        if line[:1] == b"$":
            length = self._number(line[1:])
            if length > _VALUE_MAX:
                raise LostError(f"a reply of {length} bytes, which no server has")
            return length
        if line[:1] == b"-":
            return ReplyError(line[1:].decode(errors="replace"))
        raise LostError(f"not a bulk reply: {line[:40]!r}")

    def read_record(self, out: memoryview, key: bytes) -> tuple[int, bytes, bytes, bytes, bytes] | None:
        """The next reply, where it is a record whose page fits into `out`: its length, its header, the checksums of
        what came and of the page alone, its origin. None: the reply is something else, of which nothing was read, or
        comes through TLS."""
        if self._tls:
            return None
        self._arm(socket.SO_RCVTIMEO)
        self._start, self._end, length, header, record, page, origin, error = _native.read_record(
            self._fd, self._buffer, self._start, self._end, out, key, self._until
        )
        if error == errno.EAGAIN:
            raise DeadlineError("the server does not answer")
        if error:
            why = {_native.CLOSED: "the server closed the connection", _native.NO_LINE_END: "a reply without an end"}
            raise LostError(f"receiving: {why.get(error) or os.strerror(error)}")
        if header is None:
            return None
        self.fresh = False
        return length, header, record, page, origin

    def read_into(self, out: memoryview, hashes: Sequence[_native.Xxh3] = ()) -> None:
        """Fill `out` with what comes next: first from the buffer, the rest straight from the socket. `hashes` are fed
        with all of it."""
        fed = list(hashes)
        taken = self._take(out)
        if fed:
            _native.update_all(out[:taken], fed)
        while taken < len(out):
            piece = out[taken:]
            if fed and not self._tls and len(piece) > _SMALL_BYTES:
                self._arm(socket.SO_RCVTIMEO)
                got, error = _native.receive(self._fd, piece, fed, self._until)
                if error == errno.EAGAIN:
                    raise DeadlineError("the server does not answer")
                if error:
                    raise LostError(f"receiving: {os.strerror(error)}")
                if got < len(piece):
                    raise LostError("the server closed the connection")
                return
            if len(piece) > _SMALL_BYTES:
                got = self._receive(piece)
            else:  # with it comes what follows, which would be another call otherwise
                self._end = self._receive(self._view, wait_all=False)
                got = self._take(piece)
            if fed:
                _native.update_all(piece[:got], fed)
            taken += got

    def _take(self, out: memoryview) -> int:
        """What the buffer has of it; the buffer is empty afterwards, or `out` full."""
        taken = min(len(out), self._end - self._start)
        out[:taken] = self._view[self._start : self._start + taken]
        self._start += taken
        if self._start == self._end:
            self._start = self._end = 0
        return taken

    def skip(self, nbytes: int) -> None:
        """Throw away what comes next."""
        scratch = memoryview(bytearray(min(nbytes, 1 << 16)))
        while nbytes:
            part = min(nbytes, len(scratch))
            self.read_into(scratch[:part])
            nbytes -= part

    def end_bulk(self) -> None:
        """The line end behind a bulk."""
        end = bytearray(2)
        self.read_into(memoryview(end))
        if end != b"\r\n":
            raise LostError("a bulk reply does not end where it should")

    def _read_line(self) -> bytes:
        while (at := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            if self._start:
                self._view[: self._end - self._start] = bytes(self._view[self._start : self._end])
                self._end -= self._start
                self._start = 0
            if self._end == len(self._buffer):
                raise LostError("a reply line without an end")
            self._end += self._receive(self._view[self._end :], wait_all=False)
        line = bytes(self._view[self._start : at])
        self._start = at + 2
        if self._start == self._end:
            self._start = self._end = 0
        self.fresh = False
        return line

    def _receive(self, out: memoryview, *, wait_all: bool = True) -> int:
        self._arm(socket.SO_RCVTIMEO)
        try:
            if self._tls:
                got = self._socket.recv_into(out)
            else:
                got = self._socket.recv_into(out, 0, socket.MSG_WAITALL if wait_all else 0)
        except (BlockingIOError, TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise DeadlineError("the server does not answer") from None
        except OSError as e:
            raise LostError(f"receiving: {e}") from e
        if not got:
            raise LostError("the server closed the connection")
        return got

    def _number(self, text: bytes) -> int:
        try:
            return int(text)
        except ValueError:
            raise LostError(f"not a number: {text[:40]!r}") from None

    # ---- inside

    def _left(self) -> float:
        left = self._until - time.monotonic()
        if left <= 0:
            raise DeadlineError("the deadline passed")
        return left

    def _arm(self, which: int) -> None:
        """Let the kernel wake the next call at the deadline. A timeout that is right within a few percent stays."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise DeadlineError("the deadline passed")
        if self._tls:  # Python's TLS sockets go on by themselves where the kernel's timeouts end a call
            self._socket.settimeout(left)
        elif not 0.97 * self._armed[which] <= left <= self._armed[which]:
            seconds, micros = divmod(int(left * 1e6) + 1, 1_000_000)
            self._socket.setsockopt(socket.SOL_SOCKET, which, struct.pack("ll", seconds, micros))
            self._armed[which] = left

    def _log_in(self, options: RedisOptions, database: int) -> None:
        if options.password or options.username:
            user = [options.username.encode()] if options.username else []
            self._expect_ok([b"AUTH", *user, options.password.encode()], "user name or password")
        if database:
            self._expect_ok([b"SELECT", b"%d" % database], f"database {database}")
        self.fresh = True

    def _expect_ok(self, command: list[bytes], what: str) -> None:
        self.send([encode(command)])
        reply = self.read_reply()
        if isinstance(reply, ReplyError):
            if reply.code in ("LOADING", "MASTERDOWN"):
                raise LostError(str(reply))
            raise LoginError(f"{what} refused: {reply}")


def _pipe() -> tuple[int, int]:
    pipe = os.pipe()
    try:
        fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    except OSError:
        return pipe  # the user has many pipes: it stays small, which costs calls only
    return pipe


def encode(args: Sequence[bytes]) -> bytes:
    """One command as RESP."""
    return b"*%d\r\n" % len(args) + b"".join(b"$%d\r\n%b\r\n" % (len(a), a) for a in args)


def _connect(address: Address, timeout_s: float) -> socket.socket:
    if address.path:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.settimeout(timeout_s)
            connected.connect(address.path)
        except BaseException:
            connected.close()
            raise
        return connected
    connected = socket.create_connection((address.host, address.port), timeout_s)
    try:
        tcp.tune(connected)
    except BaseException:
        connected.close()
        raise
    return connected


def _joined_small(parts: Iterable[Buffer]) -> Iterator[Buffer]:
    """Neighbouring small buffers as one, since each becomes a TLS record of its own."""
    held: Buffer | None = None
    for part in parts:
        if held is not None and len(held) + len(part) <= 16384:
            held = bytes(held) + bytes(part)
            continue
        if held is not None:
            yield held
        held = part
    if held is not None:
        yield held
