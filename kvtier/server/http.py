"""A small HTTP exporter, the same for every connector and for the cache server.

``/metrics``  Prometheus text, or OpenMetrics where the Accept header asks for it
``/livez``    200 while the process answers at all
``/readyz``   200 if a real put and get just worked, else 503 with the reason
``/``         the status page, and its data below ``/api`` (`kvtier.server.page`)

It listens on the loopback address unless remote access is allowed explicitly, and then everything but the two statuses
needs the token: as a bearer token, or as the password of any user, which is how a browser asks for it. Without a token
it answers under its own names only: somebody else's page, whose name was made to point here (DNS rebinding), must not
read ours in a visitor's browser. Orchestrators probe without credentials and by their own addresses: the two statuses
are always answered; why it is not ready is told to those alone who may read the rest.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import errno
import gzip
import hmac
import io
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from kvtier.config import HttpConfig
from kvtier.errors import ConfigError
from kvtier.server.page import NAMESPACES, SECURITY_HEADERS, StatusPage
from kvtier.server.readiness import Readiness, ReadyCheck

TOKEN_VARIABLE = "KVTIER_HTTP_TOKEN"
MAX_CONNECTIONS = 16
REQUEST_TIMEOUT_S = 5.0
RECEIVE_DEADLINE_S = 15.0
"""A request that has not come whole by then is given up: byte by byte it would hold one of the connections for good."""
CLOSE_TIMEOUT_S = 2.0
_GZIP_FROM_BYTES = 8192
_MANAGE_BYTES_MAX = 4096
_PATHS = b"/metrics, /livez, /readyz\n"
_FOREIGN_NAME = b"use 127.0.0.1 or localhost, or put the name into the option http.names, or set a token\n"


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Where to listen. With several ranks on one node, rank r listens on ``port + r``; port 0 takes any free one.

    host: an address or name. allow_remote: must be set for anything but a loopback address, and then a token must
    be in `token_file` or in the environment variable KVTIER_HTTP_TOKEN (never an argument: those show in `ps`).
    names: by which it may be asked for without a token, beside loopback addresses, localhost and `host`.
    """

    host: str = "127.0.0.1"
    port: int = 0
    allow_remote: bool = False
    token_file: Path | None = None
    names: tuple[str, ...] = ()

    @staticmethod
    def of(config: HttpConfig) -> HttpOptions:
        """The options that the configuration block holds."""
        return HttpOptions(config.host, config.port, config.allow_remote, config.token_file, config.names)

    def port_of(self, rank: int) -> int:
        if rank < 0:
            raise ConfigError(f"rank {rank}: must not be negative")
        port = self.port + rank if self.port else 0
        if not 0 <= port <= 65535:
            raise ConfigError(f"http port {self.port} + rank {rank} = {port}: choose a port from 0 to {65535 - rank}")
        return port

    def check_exposure(self, has_token: bool) -> None:
        """Raise ConfigError where other machines could read what is not meant for them."""
        if _is_loopback(self.host):
            return
        if not self.allow_remote:
            raise ConfigError(
                f"http host {self.host!r} is reachable from other machines: use 127.0.0.1, or set allow_remote: true "
                "and give a token"
            )
        if not has_token:
            raise ConfigError(
                f"http host {self.host!r} needs a token: set token_file, or the environment variable {TOKEN_VARIABLE}"
            )

    def token(self) -> bytes | None:
        """The bearer token, or None. Raises ConfigError where the file cannot be used."""
        if self.token_file is None:
            return os.environ.get(TOKEN_VARIABLE, "").strip().encode() or None
        try:
            value = self.token_file.read_bytes().strip()
        except OSError as e:
            raise ConfigError(
                f"http token_file {str(self.token_file)!r} cannot be read: {e.strerror or e}; name a file that this "
                "user can read"
            ) from e
        if not value:
            raise ConfigError(f"http token_file {str(self.token_file)!r} is empty: put the token into it")
        return value


@dataclass(frozen=True, slots=True)
class Post:
    """What answers a POST: body and headers in, status and text out; in the threads of the server."""

    handle: Callable[[bytes, Message], tuple[HTTPStatus, bytes]]
    body_bytes_max: int


class HttpExporter:
    """Serves `registry`, the health of this process and its status page until `close`. Starts listening in the
    constructor; `port` is the port in use. All methods may be called from any thread. Raises ConfigError where the
    options cannot work or the port is taken.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        options: HttpOptions,
        *,
        rank: int = 0,
        ready: ReadyCheck | None = None,
        page: StatusPage | None = None,
        posts: Mapping[str, Post] | None = None,
    ) -> None:
        token = options.token()
        options.check_exposure(token is not None)
        port = options.port_of(rank)
        names = frozenset(name.lower() for name in ("localhost", options.host, *options.names))
        managed = {} if page is None else {NAMESPACES: Post(page.manage, _MANAGE_BYTES_MAX)}
        state = _State(registry, token, names, Readiness(ready), page, {**managed, **(posts or {})})
        try:
            self._server = _Server((options.host, port), state)
        except OSError as e:
            raise ConfigError(_bind_message(options.host, port, rank, e)) from e
        self.host = options.host
        self.port = int(self._server.server_address[1])
        self._closed = threading.Lock()
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="kvtier-http", daemon=True)
        self._thread.start()
        self.page = page
        if page is not None:
            page.start()

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def close(self) -> None:
        """Stop listening, cut open connections and join the threads, within 2 s. Safe to call twice."""
        if not self._closed.acquire(blocking=False):
            return
        end = time.monotonic() + CLOSE_TIMEOUT_S
        self._server.shutdown()
        self._thread.join(max(0.0, end - time.monotonic()))
        self._server.server_close()
        self._server.cut_connections(end)
        if self.page is not None:
            self.page.close()

    def __enter__(self) -> HttpExporter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _State:
    registry: CollectorRegistry
    token: bytes | None
    names: frozenset[str]
    readiness: Readiness
    page: StatusPage | None
    posts: Mapping[str, Post]


class _Server(HTTPServer):
    """One thread per connection, at most MAX_CONNECTIONS; further ones are answered 503 at once."""

    allow_reuse_address = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, address: tuple[str, int], state: _State) -> None:
        self.address_family = _family(address[0])
        self.state = state
        self._lock = threading.Lock()
        self._open: dict[threading.Thread, socket.socket] = {}
        self._receiving: dict[threading.Thread, float] = {}
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # Not HTTPServer's: that one asks the resolver for our own name, which can take seconds.
        super(HTTPServer, self).server_bind()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = threading.Thread(
            target=self._serve, args=(request, client_address), name="kvtier-http-connection", daemon=True
        )
        with self._lock:
            full = len(self._open) >= MAX_CONNECTIONS
            if not full:
                self._open[thread] = request
        if full:
            request.settimeout(0.1)
            with contextlib.suppress(OSError):  # a client that is gone needs no answer
                request.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self.shutdown_request(request)
            return
        thread.start()

    def _serve(self, request: Any, client_address: Any) -> None:
        try:
            with contextlib.suppress(OSError):  # the client went away, or close() cut the connection
                self.finish_request(request, client_address)
        finally:
            self.shutdown_request(request)
            with self._lock:
                self._open.pop(threading.current_thread(), None)
                self._receiving.pop(threading.current_thread(), None)

    def receiving(self) -> None:
        """The first of a request has come to this thread."""
        with self._lock:
            self._receiving[threading.current_thread()] = time.monotonic()

    def received(self) -> None:
        """This thread has its request."""
        with self._lock:
            self._receiving.pop(threading.current_thread(), None)

    def service_actions(self) -> None:
        """Called about ten times a second."""
        begun_before = time.monotonic() - RECEIVE_DEADLINE_S
        with self._lock:
            late = [self._open[t] for t, begun in self._receiving.items() if begun < begun_before and t in self._open]
        for connection in late:
            with contextlib.suppress(OSError):  # its own thread may have closed it meanwhile
                connection.shutdown(socket.SHUT_RDWR)

    def cut_connections(self, end: float) -> None:
        """Shut every open connection down and join its thread until `end` (monotonic seconds)."""
        with self._lock:
            connections = dict(self._open)
        for connection in connections.values():
            with contextlib.suppress(OSError):  # its own thread may have closed it meanwhile
                connection.shutdown(socket.SHUT_RDWR)
        for thread in connections:
            thread.join(max(0.0, end - time.monotonic()))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "kvtier"
    sys_version = ""
    timeout = REQUEST_TIMEOUT_S  # a silent client frees its thread
    server: _Server
    rfile: io.BufferedReader

    def handle_one_request(self) -> None:
        try:
            self.rfile.peek(1)  # an idle connection has its own time
        except TimeoutError:
            self.close_connection = True
            return
        self.server.receiving()
        try:
            super().handle_one_request()
        finally:
            self.server.received()

    def do_GET(self) -> None:
        self.server.received()
        # Requests carry no body here; one that does is not read, so its connection cannot be used again.
        if self.headers.get("Content-Length", "0").strip() != "0" or self.headers.get("Transfer-Encoding"):
            self.close_connection = True
            self._answer(HTTPStatus(413))
            return
        path = self.path.split("?", 1)[0]
        if path == "/livez":
            self._answer(HTTPStatus.OK, b"ok\n")
        elif path == "/readyz":
            self._ready()
        elif path == "/metrics":
            self._metrics()
        else:
            self._page()

    def do_POST(self) -> None:
        """A body of JSON, of a bounded and stated length. The media type is asked for because no page of a browser can
        send it elsewhere unasked."""
        post = self.server.state.posts.get(self.path.split("?", 1)[0])
        length = self.headers.get("Content-Length", "")
        self.close_connection = True  # unless the body is read
        if post is None:
            self._answer(HTTPStatus.NOT_FOUND)
        elif not self._authorized():
            self._answer(HTTPStatus.UNAUTHORIZED, b"a bearer token is needed\n", {"WWW-Authenticate": "Bearer"})
        elif not self._by_own_name():
            self._answer(HTTPStatus.FORBIDDEN, _FOREIGN_NAME)
        elif self.headers.get_content_type() != "application/json":
            self._answer(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, b"send application/json\n")
        elif not (length.isascii() and length.isdigit()) or self.headers.get("Transfer-Encoding"):
            self._answer(HTTPStatus.LENGTH_REQUIRED)
        elif len(length) > 9 or int(length) > post.body_bytes_max:
            self._answer(HTTPStatus(413), f"at most {post.body_bytes_max} bytes\n".encode())
        else:
            body = self.rfile.read(int(length))
            self.server.received()
            if len(body) < int(length):
                return
            self.close_connection = False
            try:
                status, answer = post.handle(body, self.headers)
            except Exception as e:  # noqa: BLE001 - the caller's to see, as in _metrics
                status, answer = HTTPStatus.INTERNAL_SERVER_ERROR, f"failed: {type(e).__name__}: {e}\n".encode()
            self._answer(status, answer)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _ready(self) -> None:
        reason = self.server.state.readiness.reason()
        if reason is None:
            self._answer(HTTPStatus.OK, b"ok\n")
        else:
            shown = reason if self._authorized() and self._by_own_name() else "not ready"
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, shown.encode(errors="replace") + b"\n")

    def _page(self) -> None:
        page = self.server.state.page
        if page is None:
            self._answer(HTTPStatus.NOT_FOUND, b"known paths: " + _PATHS)
            return
        if not self._authorized():
            # A browser then asks for a user, which may be anything, and a password, which is the token.
            text = b"a token is needed: as bearer token, or as password\n"
            self._answer(HTTPStatus.UNAUTHORIZED, text, {"WWW-Authenticate": 'Basic realm="kvtier"'})
            return
        if not self._by_own_name():
            self._answer(HTTPStatus.FORBIDDEN, _FOREIGN_NAME)
            return
        try:
            answer = page.answer(self.path)
        except Exception as e:  # noqa: BLE001 - a collector's fault is the reader's to see, as in _metrics
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"the page failed: {type(e).__name__}: {e}\n".encode())
            return
        if answer is None:
            self._answer(
                HTTPStatus.NOT_FOUND,
                b"known paths: /, /api/status, /api/explain, /api/namespaces, /metrics, /livez, /readyz\n",
            )
            return
        headers = {"Content-Type": answer.content_type, **SECURITY_HEADERS}
        body = answer.body
        if len(body) > _GZIP_FROM_BYTES and "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body, compresslevel=1)
            headers["Content-Encoding"] = "gzip"
        self._answer(answer.status, body, headers)

    def _metrics(self) -> None:
        if not self._authorized():
            self._answer(HTTPStatus.UNAUTHORIZED, b"a bearer token is needed\n", {"WWW-Authenticate": "Bearer"})
            return
        if not self._by_own_name():
            self._answer(HTTPStatus.FORBIDDEN, _FOREIGN_NAME)
            return
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        try:
            body = encode(self.server.state.registry)
        except Exception as e:  # noqa: BLE001 - a collector's fault is the scraper's to see, not a traceback on stderr
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"a collector failed: {type(e).__name__}: {e}\n".encode())
            return
        self._answer(HTTPStatus.OK, body, {"Content-Type": content_type})

    def _authorized(self) -> bool:
        token = self.server.state.token
        if token is None:
            return True
        scheme, _, text = self.headers.get("Authorization", "").partition(" ")
        given = text.strip().encode(errors="replace")
        if scheme.lower() == "basic":
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(given, token)

    def _by_own_name(self) -> bool:
        """Whether the request names this process as only this machine would; with a token, any name will do: a browser
        gives it to nobody else's page."""
        state = self.server.state
        return state.token is not None or _is_own_name(self.headers.get("Host"), state.names)

    def _answer(self, status: HTTPStatus, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "text/plain; charset=utf-8", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """No access log: an engine's stderr is not ours to fill."""


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_own_name(host_header: str | None, names: frozenset[str]) -> bool:
    """Whether a Host header is a loopback address or one of `names`. No browser leaves it out."""
    if host_header is None:
        return True
    try:
        name = urlsplit(f"//{host_header}").hostname or ""
    except ValueError:  # brackets that are no address
        return False
    return name in names or (name != "" and _is_loopback(name))


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _bind_message(host: str, port: int, rank: int, error: OSError) -> str:
    at = f"http port {port}" + (f" (port + rank {rank})" if rank and port else "") + f" on {host!r}"
    if error.errno == errno.EADDRINUSE:
        return f"{at} is taken by another process: choose another port, or 0 for any free one"
    if error.errno == errno.EACCES:
        return f"{at} is not allowed for this user: choose a port from 1024 up"
    return f"{at} cannot be listened on: {error.strerror or error}"
