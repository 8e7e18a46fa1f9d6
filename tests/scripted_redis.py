"""A server that does with each connection what a test says: what arrives is commands, what it answers is bytes."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from kvtier.storage_backends.redis.options import Address

PATIENCE_S = 60.0
"""How long is waited for what must happen: long, since it says nothing about speed."""


class Link:
    """One connection, at the server's end. A command that does not come within PATIENCE_S is a TimeoutError."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.settimeout(PATIENCE_S)
        self._buffer = b""

    def next(self) -> list[bytes]:
        """The next command; an empty list once the client has closed."""
        line = self._until(b"\r\n")
        if not line:
            return []
        words = []
        for _ in range(int(line[1:])):
            nbytes = int(self._until(b"\r\n")[1:])
            words.append(self._take(nbytes + 2)[:-2])
        return words

    def keys(self, count: int) -> list[bytes]:
        """Of the next `count` commands, what they are about."""
        return [self.next()[1] for _ in range(count)]

    @property
    def more(self) -> bool:
        """Whether something has arrived beyond the commands that were taken."""
        if self._buffer:
            return True
        self._socket.setblocking(False)
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return False
        finally:
            self._socket.settimeout(PATIENCE_S)

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def answer(self, *keys: bytes) -> None:
        """To every GET its own reply: the key's name."""
        self.send(b"".join(b"$%d\r\n%b\r\n" % (len(key), key) for key in keys))

    def answer_all(self) -> None:
        """Until the client closes."""
        while command := self.next():
            self.answer(command[1])

    def wait_for_the_end(self) -> None:
        while self.next():
            continue

    def _until(self, end: bytes) -> bytes:
        while end not in self._buffer:
            try:
                piece = self._socket.recv(1 << 16)
            except ConnectionError:  # closed with replies that it did not read
                return b""
            if not piece:
                return b""
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(end)
        return line

    def _take(self, nbytes: int) -> bytes:
        while len(self._buffer) < nbytes:
            piece = self._socket.recv(1 << 16)
            if not piece:
                raise ConnectionError("the client went away in the middle of a command")
            self._buffer += piece
        data, self._buffer = self._buffer[:nbytes], self._buffer[nbytes:]
        return data


Script = Callable[[Link], None]


class ScriptedServer:
    """Runs the n-th script with the n-th connection, which is closed when that returns. What a script raises, `close`
    raises, but for a client that went away. A connection for which there is no script is closed at once."""

    def __init__(self, *scripts: Script, tls: ssl.SSLContext | None = None) -> None:
        self._scripts: Sequence[Script] = scripts
        self._tls = tls
        self._errors: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    @property
    def url(self) -> str:
        return f"redis://{self.address}"

    def close(self) -> None:
        """Once the client has closed its connections."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join(PATIENCE_S)
        self._listener.close()
        for thread in self._threads:
            thread.join(2 * PATIENCE_S)
        assert not any(thread.is_alive() for thread in self._threads), "a script hangs"
        if self._errors:
            raise self._errors[0]

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                return
            at = len(self._threads)
            script = self._scripts[at] if at < len(self._scripts) else _hang_up
            self._threads.append(threading.Thread(target=self._run, args=(script, connected), daemon=True))
            self._threads[-1].start()

    def _run(self, script: Script, connected: socket.socket) -> None:
        with ExitStack() as stack:
            stack.enter_context(connected)
            try:
                if self._tls is not None:
                    connected = stack.enter_context(self._tls.wrap_socket(connected, server_side=True))
                script(Link(connected))
            except ConnectionError:
                return
            except BaseException as error:  # noqa: BLE001 - the test hears of it in `close`
                self._errors.append(error)


def _hang_up(_: Link) -> None:
    return
