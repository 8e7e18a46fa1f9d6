"""``kvtier serve``: the cache server in a process of its own."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli import serve_options
from kvtier.errors import ConfigError


def serve(
    listen: serve_options.Listens = None,
    http: serve_options.Http = "",
    host_capacity: serve_options.HostCapacity = "",
    nvme: serve_options.Nvmes = None,
    config: Annotated[
        Path | None, typer.Option(help="A file with the blocks tiers, server and http instead.", show_default=False)
    ] = None,
    password_file: serve_options.PasswordFile = None,
    tls_cert: serve_options.TlsCert = None,
    tls_key: serve_options.TlsKey = None,
    tls_client_ca: serve_options.TlsClientCa = None,
    max_connections: serve_options.MaxConnections = None,
    max_value: serve_options.MaxValue = "",
) -> None:
    """Serve values over the Redis protocol from host memory and NVMe. Runs until SIGTERM or SIGINT.

    Clients: redis-cli, redis-py and everything else that speaks RESP. Without options for more it listens on loopback
    only; passwords come from files or from the environment variable KVTIER_SERVER_PASSWORD.
    """
    from kvtier.config import load_config
    from kvtier.server.app import CacheServer
    from kvtier.server.http import HttpOptions
    from kvtier.server.options import ServerOptions

    given = serve_options.Given(
        listen, http, host_capacity, nvme, password_file, tls_cert, tls_key, tls_client_ca, max_connections, max_value
    )
    if config is not None and given.any:
        raise ConfigError("--config already says everything: put the other options into that file")
    block = given.block() if config is None else load_config(config)
    if block.server is None:
        raise ConfigError(f"config file {str(config)!r} has no block 'server': add one with the option listen")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    sys.setswitchinterval(0.0005)  # a small GET must not wait 5 ms for each thread that is busy with a large SET
    with _signals() as told_to_stop:
        running = CacheServer(
            block, ServerOptions.of(block.server), None if block.http is None else HttpOptions.of(block.http)
        )
        try:
            for where in running.listening:
                typer.echo(f"listening on {where}")
            if running.http is not None:
                typer.echo(f"metrics and health on {running.http.url}")
            sys.stdout.flush()
            told_to_stop.recv(1)
        finally:
            running.stop()


@contextmanager
def _signals() -> Iterator[socket.socket]:
    """Where a byte arrives at SIGTERM, SIGINT and, unless it is ignored (nohup), at SIGHUP: the terminal is gone.

    Python's own handlers run in the main thread, when that wakes up; but the kernel gives a signal to any thread, one
    that is just being started say, and a main thread that waits for a lock would then sleep on. Bytes wake it."""
    receives, sends = socket.socketpair()
    with receives, sends:
        sends.setblocking(False)
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        before = signal.set_wakeup_fd(sends.fileno(), warn_on_full_buffer=False)
        handlers = [signal.signal(number, lambda *_: None) for number in numbers]
        try:
            yield receives
        finally:
            for number, handler in zip(numbers, handlers, strict=True):
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)
