"""Sockets that the cache server listens on, and the threads behind them: one that accepts, one per client."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.kernels import tcp
from kvtier.server import resp
from kvtier.server.options import Listen
from kvtier.server.resp import Stream
from kvtier.server.session import Session, Shared

_log = logging.getLogger(__name__)

_BACKLOG = 1024
_HANDSHAKE_S = 10.0
_PAUSE_S = 0.1


class Clients:
    """The sessions that are open, over all listeners: at most `limit`. Thread-safe."""

    def __init__(self, shared: Shared, limit: int) -> None:
        self._shared = shared
        self._limit = limit
        self._changed = threading.Condition()
        self._open: dict[Session, threading.Thread] = {}
        self._came: dict[Session, float] = {}  # those that have not said who they are, and since when they are here
        self._waiting = 0  # connections whose handshake is under way
        self._number = 0
        self._closing = False

    def take(self, connected: socket.socket, peer: str, secure: Callable[[socket.socket], socket.socket]) -> None:
        """Serve a new connection in a thread of its own, or turn it away."""
        with self._changed:
            full = len(self._open) + self._waiting >= self._limit
            closing = self._closing
            if not full and not closing:
                self._waiting += 1
                self._number += 1
                number = self._number
        if full or closing:
            self._shared.stats.rejected()
            text = "ERR max number of clients reached" if full else "ERR the server is shutting down"
            connected.settimeout(0.1)
            with contextlib.suppress(OSError):  # a client that is gone needs no answer
                connected.sendall(resp.error(text))
            connected.close()
            return
        thread = threading.Thread(
            target=self._serve, args=(connected, peer, number, secure), name=f"kvtier-client-{number}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as e:  # the system has no thread left
            _log.error("client %s turned away: %s", peer, e)
            self._shared.stats.rejected()
            connected.close()
            with self._changed:
                self._waiting -= 1

    def cut_strangers(self, after_s: float) -> int:
        """Cut off clients that have not said who they are for so long, whatever they send; how many. Call it now and
        then."""
        until = time.monotonic() - after_s
        with self._changed:
            for session in [session for session in self._came if session.user is not None]:
                del self._came[session]
            late = [session for session, came in self._came.items() if came < until]
        for session in late:
            session.cut()
        return len(late)

    def drain(self, timeout_s: float) -> int:
        """Let every client finish the command at hand, for at most `timeout_s`, then cut them off; returns how many had
        to be. No new ones are taken."""
        give_up = time.monotonic() + timeout_s
        with self._changed:
            self._closing = True
            sessions = list(self._open)
        for session in sessions:
            session.drain()
        with self._changed:
            self._changed.wait_for(lambda: not self._open, max(0.0, give_up - time.monotonic()))
            left = dict(self._open)
        for session in left:
            session.cut()
        for thread in left.values():
            thread.join(1.0)
        return len(left)

    def _serve(
        self, connected: socket.socket, peer: str, number: int, secure: Callable[[socket.socket], socket.socket]
    ) -> None:
        session: Session | None = None
        try:
            try:
                stream = Stream(secure(connected), self._shared.options.client_timeout_s)
            except (OSError, ssl.SSLError) as e:
                _log.debug("client %s: %s", peer, e)
                connected.close()
                return
            session = Session(number, stream, peer, self._shared)
            self._shared.stats.connected(+1)
            with self._changed:
                self._waiting -= 1
                self._open[session] = threading.current_thread()
                if session.user is None:
                    self._came[session] = time.monotonic()
                if self._closing:
                    session.drain()
            session.serve()
        except Exception:  # noqa: BLE001 - logged; one client's trouble is not the others'
            _log.exception("client %s: the session failed", peer)
        finally:
            with self._changed:
                if session is None:
                    self._waiting -= 1
                else:
                    self._open.pop(session, None)
                    self._came.pop(session, None)
                    self._shared.stats.connected(-1)
                self._changed.notify_all()


class Listener:
    """Accepts connections on one address from the constructor on, until `close`. `where` has the port in use."""

    def __init__(self, listen: Listen, clients: Clients, tls: ssl.SSLContext | None) -> None:
        self._clients = clients
        self._tls = tls if listen.tls else None
        self._closed = False
        self._inode = 0
        if listen.path is not None:
            self._socket = self._bind_unix(listen.path)
            self.where = listen
        else:
            self._socket = self._bind_tcp(listen)
            self.where = Listen(listen.host, int(self._socket.getsockname()[1]), tls=listen.tls)
        self._thread = threading.Thread(target=self._accept, name=f"kvtier-listen-{self.where}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and remove the socket's path, if it is still ours."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):  # not every system wakes accept this way; closing does the rest
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(1.0)
        path = self.where.path
        if path is not None:
            with contextlib.suppress(OSError):  # somebody removed it already
                if path.stat().st_ino == self._inode:
                    path.unlink()

    def _accept(self) -> None:
        told = False
        while not self._closed:
            try:
                connected, peer = self._socket.accept()
            except OSError as e:
                if e.errno not in (errno.ECONNABORTED, errno.EINTR, errno.EBADF, errno.EINVAL):
                    if not told:
                        told = True
                        hint = "; raise the limit (ulimit -n), or lower max_connections"
                        _log.warning(
                            "%s: no connection can be taken: %s%s (said once)",
                            self.where, e, hint if e.errno == errno.EMFILE else "",
                        )  # fmt: skip
                    time.sleep(_PAUSE_S)  # out of descriptors, say: others will be closed
                continue
            if connected.family != socket.AF_UNIX:
                with contextlib.suppress(OSError):  # reset already: whoever reads from it will see
                    tcp.tune(connected)
            self._clients.take(connected, f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "unix", self._secure)

    def _secure(self, connected: socket.socket) -> socket.socket:
        if self._tls is None:
            return connected
        connected.settimeout(_HANDSHAKE_S)
        return self._tls.wrap_socket(connected, server_side=True)

    def _bind_unix(self, path: Path) -> socket.socket:
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
                if _somebody_listens(path):
                    raise ConfigError(f"listen = 'unix:{path}': another process listens there; choose another path")
                path.unlink()  # left behind by a process that was killed
            elif path.exists():
                raise ConfigError(f"listen = 'unix:{path}': there is something that is no socket; choose another path")
            mask = os.umask(0o177)
            try:
                bound.bind(str(path))
            finally:
                os.umask(mask)
            bound.listen(_BACKLOG)
            self._inode = path.stat().st_ino
        except OSError as e:
            bound.close()
            if isinstance(e, ConfigError):
                raise
            raise ConfigError(
                f"listen = 'unix:{path}' cannot be listened on: {e.strerror or e}; choose a path in a directory "
                "that this user can write to"
            ) from e
        except ConfigError:
            bound.close()
            raise
        return bound

    def _bind_tcp(self, listen: Listen) -> socket.socket:
        family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((listen.host, listen.port))
            bound.listen(_BACKLOG)
        except OSError as e:
            bound.close()
            way_out = "choose another port, 0 for any free one"
            if isinstance(e, socket.gaierror) or e.errno == errno.EADDRNOTAVAIL:
                way_out = "name an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them"
            raise ConfigError(f"listen = {str(listen)!r} cannot be listened on: {e.strerror or e}; {way_out}") from e
        return bound


def _somebody_listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
