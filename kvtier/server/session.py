"""One client: who it is, what it has been sent, and the loop that serves it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.kernels import _native
from kvtier.server import resp
from kvtier.server.auth import User, Users
from kvtier.server.keyspace import Keyspace, Reading, Refusal, Reservation
from kvtier.server.resp import Argument, Buffer, Disconnected, Place, ProtocolError, Stream
from kvtier.server.stats import ServerStats

if TYPE_CHECKING:
    from kvtier.server.options import ServerOptions

_log = logging.getLogger(__name__)

_FLUSH_BYTES = 256 << 10
"""Replies of pipelined commands are gathered up to this; values in them stay pinned until they are sent."""
_COPIED_MAX_BYTES = 4096
"""Values up to this are copied into their reply: cheaper than keeping them pinned until it is sent."""
_PENDING_MAX_BYTES = 16 << 20
"""A client that sends on and on without reading its replies has this much kept for it; then it must read."""


class Refused:
    """A value that is thrown away while it is received, and the error reply that says why."""

    __slots__ = ("checksum", "page", "text", "view")

    def __init__(self, text: str) -> None:
        self.text = text
        self.view: memoryview | None = None
        self.page = self.checksum = b""


@dataclass(frozen=True, slots=True)
class Shared:
    """What all sessions work on. execute: does one command, and puts its reply into the session."""

    keyspace: Keyspace
    users: Users
    stats: ServerStats
    options: ServerOptions
    started: float
    execute: Callable[[Session, list[Argument]], None]


class Session:
    """Served by one thread (`serve`). `interrupt` may come from any."""

    def __init__(self, number: int, stream: Stream, peer: str, shared: Shared) -> None:
        self.id = number
        self.peer = peer
        self.shared = shared
        self.keyspace = shared.keyspace
        self.user: User | None = shared.users.first
        self.protocol = 2
        self.database = 0
        self.name = b""
        self.since = time.time()
        self.leaving = False
        """Set to end the session once the reply to the command at hand is sent."""
        self._stream = stream
        self._stream.stranger = self.user is None
        self._out: list[Buffer] = []
        self._out_bytes = 0
        self.received_bytes = 0
        """Of values that were taken and are not counted yet."""
        self._readings: list[Reading] = []
        self.places: list[Reservation | Refused] = []
        """The values of the command at hand, in order, or one that was refused and stands for all of them. A command
        takes those out that it commits or aborts itself."""
        self._busy = False

    def serve(self) -> None:
        """Read commands and answer them until the client goes. Never raises for what a client does."""
        stream, execute, place = self._stream, self.shared.execute, self._place
        try:
            while not self.leaving:
                if stream.start == stream.end or not stream.buffered:
                    if self._out:
                        self._push()
                    self._busy = bool(self._out)
                args = stream.read_command(place)
                self._busy = True
                try:
                    execute(self, args)
                finally:
                    if self.places:
                        self._give_up_places()
            self._flush()
        except ProtocolError as e:
            self.shared.stats.protocol_error()
            self.reply(resp.error(f"ERR Protocol error: {e}"))
            self._finish()
        except Disconnected as e:
            _log.debug("client %d (%s): %s", self.id, self.peer, e)
        finally:
            self._give_up_places()
            self._release()
            self._stream.close()

    def drain(self) -> None:
        """End the session as soon as it is between two commands. From any thread."""
        self.leaving = True
        if not self._busy:
            self._stream.shut_down()

    def cut(self) -> None:
        """End the session now. From any thread."""
        self.leaving = True
        self._stream.shut_down()

    def log_in(self, user: User) -> None:
        self.user = user
        self._stream.stranger = False

    # ---- replying

    def reply(self, data: bytes) -> None:
        self._out.append(data)
        self._out_bytes += len(data)
        if self._out_bytes >= _PENDING_MAX_BYTES:
            self._flush()

    def reply_value(self, reading: Reading | None) -> None:
        """A value, sent from where it lies, or null."""
        if reading is None:
            self.reply(resp.null(self.protocol))
            return
        view = reading[0]
        nbytes = len(view)
        if nbytes <= _COPIED_MAX_BYTES:
            self.reply(b"$%d\r\n%b\r\n" % (nbytes, bytes(view)))
            self.shared.stats.sent(nbytes)
            self.keyspace.release(reading)
            return
        self._out += (b"$%d\r\n" % nbytes, view, b"\r\n")
        self._out_bytes += nbytes
        self._readings.append(reading)
        self.shared.stats.sent(nbytes)
        if self._out_bytes >= _PENDING_MAX_BYTES:
            self._flush()
        elif self._out_bytes >= _FLUSH_BYTES:
            self._send_now()

    def _push(self) -> None:
        """Send replies until all are sent, or the client sends more: one that sends much before it reads must not find
        us waiting for it to read."""
        out, fd = self._out, self._stream.fd
        if len(out) == 1 and fd >= 0:  # the usual answer, a short one, mostly goes at once
            sent = _native.send_now(fd, out[0])
            if sent == len(out[0]):
                out.clear()
                self._out_bytes = 0
                if self._readings:
                    self._release()
                return
            if sent > 0:
                out[0] = memoryview(out[0])[sent:]
        while self._out:  # or it meets its error again here
            self._out = self._stream.send_some(self._out)
            if not self._out:
                self._out_bytes = 0
                if self._readings:
                    self._release()
            elif self._stream.wait():
                self._out_bytes = sum(map(len, self._out))
                return

    def _send_now(self) -> None:
        self._out = self._stream.send_some(self._out)
        self._out_bytes = sum(map(len, self._out)) if self._out else 0
        if not self._out:
            self._release()

    def _flush(self) -> None:
        """Send every reply, however long the client takes for it."""
        if self._out:
            out, self._out, self._out_bytes = self._out, [], 0
            try:
                self._stream.send(out)
            finally:
                self._release()

    def _finish(self) -> None:
        try:
            self._flush()
        except Disconnected:
            _log.debug("client %d (%s) did not stay for its error", self.id, self.peer)

    def _release(self) -> None:
        readings, self._readings = self._readings, []
        for reading in readings:
            self.keyspace.release(reading)

    # ---- receiving values

    def _place(self, args: list[Argument], nbytes: int) -> Place | None:
        """Where the next argument goes, if it is the value of a SET or MSET."""
        at = len(args)
        if at < 2 or not isinstance(args[0], bytes):
            return None
        command = args[0].upper()
        if not (command == b"SET" and at == 2) and not (command == b"MSET" and at % 2 == 0):
            return None
        key, user = args[at - 1], self.user
        if not isinstance(key, bytes) or user is None:
            return None
        self._busy = True
        if self.places and isinstance(self.places[0], Refused):  # nothing of this command will be stored
            return self.places[0]
        refusal = write_refusal(user, key) if user.prefixes or user.read_only else ""
        place: Reservation | Refused | Refusal
        place = Refusal(refusal) if refusal else self.keyspace.reserve(self.database, key, nbytes)
        if isinstance(place, Refusal):
            place = Refused(place.text)
            self._give_up_places()  # others may have their room while the rest is received
        else:
            self.received_bytes += nbytes
        self.places.append(place)
        return place

    def _give_up_places(self) -> None:
        places, self.places = self.places, []
        for place in places:
            if isinstance(place, Reservation):
                self.keyspace.abort(place)


def write_refusal(user: User, key: bytes) -> str:
    """Why `user` may not write `key`; empty where it may."""
    if user.read_only:
        return "NOPERM this user may only read"
    return key_refusal(user, [key])


def key_refusal(user: User, keys: Sequence[bytes]) -> str:
    """Why `user` may not touch `keys`; empty where it may."""
    if all(map(user.owns, keys)):
        return ""
    return "NOPERM this user has no access to one of the keys"
