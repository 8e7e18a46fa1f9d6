"""What a worker would find only when the model is loaded, asked before anything starts: ports that are taken, folders
that cannot be written. Nothing is opened or made; what changes in between, the worker finds."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.config import Config, HttpConfig, NvmeTierConfig
from kvtier.errors import ConfigError, TierPathError

if TYPE_CHECKING:
    from kvtier.server.http import HttpOptions


def check_machine(config: Config, given: Mapping[str, Any]) -> None:
    """`given`: SGLang's options, those that are there. Raises ConfigError or TierPathError."""
    if config.http is not None:
        _check_ports(config.http, given)
    for tier in config.tiers:
        if isinstance(tier, NvmeTierConfig):
            for path in tier.path:
                _check_folder(path)


def _check_ports(http: HttpConfig, given: Mapping[str, Any]) -> None:
    from kvtier.server.http import HttpOptions  # only for who has a port: every process of SGLang loads this module

    options = HttpOptions.of(http)
    options.check_exposure(options.token() is not None)
    ranks = _number(given, "tp_size") * _number(given, "pp_size") // _number(given, "nnodes")
    own = given.get("port")
    for rank in range(max(1, ranks) if options.port else 0):
        if own is not None and options.port_of(rank) == own:
            raise ConfigError(
                f"http port {options.port}{f' + rank {rank}' if rank else ''} is SGLang's own (--port {own}): choose "
                "another for one of the two"
            )
        _check_port(options, rank)


def _check_port(options: HttpOptions, rank: int) -> None:
    port = options.port_of(rank)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            probe.bind((options.host, port))
        except OSError as error:
            of_rank = f" (port + rank {rank})" if rank else ""
            raise ConfigError(
                f"http port {port}{of_rank} on {options.host!r} cannot be listened on: {error.strerror or error}; "
                "choose another port, or 0 for any free one"
            ) from None


def _number(given: Mapping[str, Any], option: str) -> int:
    value = given.get(option)
    return value if isinstance(value, int) and value > 0 else 1


def _check_folder(path: Path) -> None:
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    what = f"nvme tier: path = {str(path)!r}"
    if not there.is_dir():
        where = "is a file" if there == path else f"lies below {str(there)!r}, which is a file"
        raise TierPathError(f"{what} {where}; name a directory, it is made if missing")
    if not os.access(there, os.W_OK | os.X_OK):
        raise TierPathError(
            f"{what} cannot be used: this user cannot write to {str(there)!r}; name a directory that it can write to, "
            f"or as root: install -d -o {os.geteuid()} {path}"
        )
