"""``kvtier config show``: what a configuration comes to, and where each value is from."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier.cli import serve_options
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.config import Config

File = Annotated[
    str | None, typer.Argument(help="A configuration file, also an engine's own; - is stdin.", show_default=False)
]


def show(
    file: File = None,
    config: Annotated[
        Path | None, typer.Option(help="The same, as other commands name it.", show_default=False)
    ] = None,
    listen: serve_options.Listens = None,
    http: serve_options.Http = "",
    host_capacity: serve_options.HostCapacity = "",
    nvme: serve_options.Nvmes = None,
    password_file: serve_options.PasswordFile = None,
    tls_cert: serve_options.TlsCert = None,
    tls_key: serve_options.TlsKey = None,
    tls_client_ca: serve_options.TlsClientCa = None,
    max_connections: serve_options.MaxConnections = None,
    max_value: serve_options.MaxValue = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the configuration that is in effect, as YAML: of a file, or of the options of kvtier serve.

    Behind each value is its origin: default, file, or option. Secrets are shown as ***, those in the environment by the
    names of their variables.
    """
    from kvtier.cli.config_sources import only_block
    from kvtier.cli.config_text import Leaf, as_yaml, leaves

    given = serve_options.Given(
        listen, http, host_capacity, nvme, password_file, tls_cert, tls_key, tls_client_ca, max_connections, max_value
    )
    path = file or (str(config) if config is not None else None)
    if path is not None and (given.any or (file and config)):
        raise ConfigError(f"config file {path!r} already says everything: give either a file, once, or options")
    if path is None and not given.any:
        raise ConfigError("there is nothing to show: give a file, or the options of kvtier serve")
    if path is None:
        block, named, origin = given.block(), None, "option"
    else:
        block, found = only_block(path)
        named, origin = set(found.options), "file"

    def of(leaf: Leaf) -> str:
        filled_in = named is not None and leaf.place[0] not in named  # by an engine's door, which has tiers of its own
        return origin if leaf.given and not filled_in else "default"

    environment = _environment(block)
    if as_json:
        rows = {leaf.option: {"value": leaf.shown, "origin": of(leaf)} for leaf in leaves(block)}
        print(json.dumps({"file": path, "options": rows, "environment": environment}))
        return
    sys.stdout.write(as_yaml(block, of))
    for variable, what in environment.items():
        typer.echo(f"# {variable} = {what['value']}, from the environment: {what['meaning']}")


def _environment(block: Config) -> dict[str, dict[str, Any]]:
    """The variables that are set and have a say, or would have one."""
    from kvtier.config import RedisTierConfig
    from kvtier.server.auth import PASSWORD_VARIABLE
    from kvtier.server.http import TOKEN_VARIABLE
    from kvtier.server.page import SECRET
    from kvtier.storage_backends.redis.options import PASSWORD_VARIABLE as REDIS
    from kvtier.storage_backends.redis.options import SENTINEL_PASSWORD_VARIABLE as SENTINEL

    redis = next((t for t in block.tiers if isinstance(t, RedisTierConfig)), None)
    used = (
        (PASSWORD_VARIABLE, "server", block.server, block.server and block.server.password_file, "password_file"),
        (TOKEN_VARIABLE, "http", block.http, block.http and block.http.token_file, "token_file"),
        (REDIS, "redis", redis, redis and redis.password_file, "password_file"),
        (SENTINEL, "redis", redis, redis and redis.sentinel_password_file, "sentinel_password_file"),
    )
    found = {}
    for variable, part, there, file, option in used:
        if os.environ.get(variable):
            meaning = f"the {part} block's secret"
            if there is None:
                meaning = f"not used, there is no {part} block"
            elif file is not None:
                meaning = f"not used, {part} has {option}"
            found[variable] = {"value": SECRET, "meaning": meaning, "used": there is not None and file is None}
    return found
