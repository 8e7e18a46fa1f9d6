"""``kvtier serve``: the cache server in a process of its own."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.config import Config
    from kvtier.server.http import HttpOptions

Listens = Annotated[
    list[str] | None, typer.Option(help="unix:PATH, tcp:HOST:PORT or tls:HOST:PORT. Repeatable.", show_default=False)
]
Nvmes = Annotated[
    list[str] | None,
    typer.Option(
        help="DIR:SIZE, such as /var/lib/kvtier:200GiB. Repeatable: one per device, of one size.", show_default=False
    ),
]


def serve(
    listen: Listens = None,
    http: Annotated[str, typer.Option(help="HOST:PORT of /metrics, /livez and /readyz.", show_default=False)] = "",
    host_capacity: Annotated[str, typer.Option(help="Memory for values, such as 4GiB.", show_default=False)] = "",
    nvme: Nvmes = None,
    config: Annotated[
        Path | None, typer.Option(help="A file with the blocks tiers, server and http instead.", show_default=False)
    ] = None,
    password_file: Annotated[Path | None, typer.Option(help="Holds the password that clients need.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file, for tls: listeners.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file, for tls: listeners.")] = None,
    tls_client_ca: Annotated[Path | None, typer.Option(help="Clients must show a certificate of this CA.")] = None,
    max_connections: Annotated[int | None, typer.Option(help="Clients at a time.", show_default="256")] = None,
    max_value: Annotated[str, typer.Option(help="Largest value.", show_default="512MiB")] = "",
) -> None:
    """Serve values over the Redis protocol from host memory and NVMe. Runs until SIGTERM or SIGINT.

    Clients: redis-cli, redis-py and everything else that speaks RESP. Without options for more it listens on loopback
    only; passwords come from files or from the environment variable KVTIER_SERVER_PASSWORD.
    """
    from kvtier.config import load_config, parse_config
    from kvtier.server.app import CacheServer
    from kvtier.server.options import ServerOptions

    given: dict[str, Any] = {
        "listen": listen, "password_file": password_file, "tls_cert": tls_cert, "tls_key": tls_key,
        "tls_client_ca": tls_client_ca, "max_connections": max_connections, "max_value": max_value,
    }  # fmt: skip
    server = {name: value for name, value in given.items() if value}
    if config is not None:
        if server or host_capacity or nvme or http:
            raise ConfigError("--config already says everything: put the other options into that file")
        block = load_config(config)
    else:
        if not host_capacity:
            raise ConfigError("--host-capacity is missing: say how much memory values may take, such as 4GiB")
        tiers: list[dict[str, Any]] = [{"type": "host", "capacity": host_capacity}]
        if nvme:
            tiers.append(_nvme(nvme))
        block = parse_config({"tiers": tiers, "server": server or {"listen": ["tcp:127.0.0.1:6380"]}})
    if block.server is None:
        raise ConfigError(f"config file {str(config)!r} has no block 'server': add one with the option listen")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    sys.setswitchinterval(0.0005)  # a small GET must not wait 5 ms for each thread that is busy with a large SET
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    running = CacheServer(block, ServerOptions.of(block.server), _http(http, block))
    try:
        for where in running.listening:
            typer.echo(f"listening on {where}")
        if running.http is not None:
            typer.echo(f"metrics and health on {running.http.url}")
        sys.stdout.flush()
        stop.wait()
    finally:
        running.stop()


def _nvme(given: list[str]) -> dict[str, Any]:
    """The tier that ``--nvme DIR:SIZE`` names, given once or several times."""
    from kvtier.config import parse_bytes

    paths, sizes = [], set()
    for text in given:
        path, _, size = text.rpartition(":")
        if not path:
            raise ConfigError(f"--nvme {text} must be DIR:SIZE, such as /var/lib/kvtier:200GiB")
        paths.append(path)
        try:
            sizes.add(parse_bytes(size))
        except ValueError as error:
            raise ConfigError(f"--nvme {text}: the size {error}") from None
    if len(sizes) > 1:
        raise ConfigError(f"--nvme {' --nvme '.join(given)}: directories hold equal shares; give all the same size")
    return {"type": "nvme", "path": paths, "capacity": sizes.pop() * len(paths)}


def _http(text: str, block: Config) -> HttpOptions | None:
    from kvtier.server.http import HttpOptions

    if block.http is not None:
        return HttpOptions.of(block.http)
    if not text:
        return None
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--http {text} must be HOST:PORT, such as 127.0.0.1:9404")
    # Naming another address is the permission; the exporter still asks for a token in the environment.
    return HttpOptions(host.strip("[]"), int(port), allow_remote=True)
