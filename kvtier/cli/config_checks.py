"""What the types of a configuration block cannot say: combinations that a process refuses at its start, and plausible
mistakes that it would start with. Asks no network, opens no tier; looks at files' modes, memory and disks only."""

from __future__ import annotations

import functools
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from kvtier.cli.config_sources import SERDE, Block
from kvtier.cli.config_text import leaves, size_text
from kvtier.cli.doctor_line import size
from kvtier.cli.doctor_machine import memory_bytes
from kvtier.cli.options import nearest_there
from kvtier.config import Config, HostTierConfig, HttpConfig, NvmeTierConfig, RedisTierConfig, ServerConfig
from kvtier.config_mistakes import written
from kvtier.errors import ConfigError

Place = tuple[str | int, ...]
Grade = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Remark:
    """place: of the option, in its block. fix: the way out."""

    grade: Grade
    place: Place
    value: Any
    text: str
    fix: str

    @property
    def option(self) -> str:
        return written(self.place)


def remarks(config: BaseModel, block: Block, path: Path | None) -> Iterator[Remark]:
    """Everything there is to remark on a block that was validated, which was found in the file `path`."""
    yield from _without_unit(config, block)
    if path is not None:
        yield from _readable_salt(config, path)
    http = getattr(config, "http", None)
    if isinstance(http, HttpConfig):
        yield from _http(http)
    if not isinstance(config, Config):
        return
    if block.what == SERDE:
        yield from _serde(config)
    for n, tier in enumerate(config.tiers):
        place: Place = ("tiers", n)
        if isinstance(tier, HostTierConfig):
            yield from _memory(tier, place)
        elif isinstance(tier, NvmeTierConfig):
            yield from _disk(tier, config.tiers[0], place)
        else:
            yield from _redis(tier, place)
    if config.server is not None:
        yield from _server(config, config.server)
        for option in ("record", "salt"):
            if getattr(config, option):
                text = "is of engines; kvtier serve, for which there is a block server, does not use it"
                yield _warn(
                    (option,), "***" if option == "salt" else str(config.record), text, "put it into their file"
                )
    cores = os.cpu_count() or 1
    if config.workers > 2 * cores and "workers" in config.model_fields_set:
        yield _warn(("workers",), config.workers, f"this machine has {cores} cores", f"set workers to at most {cores}")


def _warn(place: Place, value: Any, text: str, fix: str) -> Remark:
    return Remark("warning", place, value, text, fix)


def _error(place: Place, value: Any, error: ConfigError) -> Remark:
    """One of our own messages, whose way out stands in the text."""
    return Remark("error", place, value, str(error), "")


def _serde(config: Config) -> Iterator[Remark]:
    """LMCache allocates a record before it is made, so its size must follow from the geometry alone."""
    for n, method in enumerate(config.kv_cache_compression_config):
        if method is config.cold_page and config.cold_page.quant == "lossless":
            place: Place = ("kv_cache_compression_config", n, "quant")
            error = ConfigError(
                f"option {written(place)!r} = 'lossless': its pages vary in size, which LMCache's serdes cannot have; "
                "use another quant, or the adapter kvtier.connectors.lmcache instead of a serde"
            )
            yield _error(place, "lossless", error)


def _without_unit(config: BaseModel, block: Block) -> Iterator[Remark]:
    for leaf in leaves(config):
        if not leaf.given or not isinstance(leaf.shown, str) or leaf.shown == leaf.value:
            continue
        value = _as_written(block.options, leaf.place)
        bare = isinstance(value, int) or (isinstance(value, str) and re.fullmatch(r"\s*[\d.]+\s*", value))
        if bare and leaf.shown.endswith("B"):  # a size; times without a unit are seconds, as anywhere
            text = f"has no unit, so it is {leaf.value} bytes ({size(leaf.value)})"
            yield _warn(leaf.place, value, text, f"write a unit: {value}GiB, or {size_text(leaf.value)} if it is meant")


def _as_written(options: Any, place: Place) -> Any:
    """What a block says at `place`; None where it says nothing, since the engine's door fills it in."""
    try:
        return functools.reduce(lambda inner, part: inner[part], place, options)
    except (KeyError, IndexError, TypeError):
        return None


def _readable_salt(config: BaseModel, path: Path) -> Iterator[Remark]:
    if getattr(config, "salt", "") and (mode := _mode(path)) & (stat.S_IRGRP | stat.S_IROTH):
        who = "everybody" if mode & stat.S_IROTH else "the file's group"
        yield _warn(
            ("salt",), "***", f"{who} on this machine may read {path}, and the salt is a secret", f"chmod 600 {path}"
        )


def _secret_file(place: Place, path: Path | None) -> Iterator[Remark]:
    if path is None:
        return
    try:
        if not path.expanduser().read_bytes().strip():
            yield Remark("error", place, str(path), f"{path} is empty", "put the secret into it")
    except OSError as error:
        text = f"cannot be read here: {error.strerror}"
        yield _warn(place, str(path), text, f"make {path} there before the start, readable for the process' user")
        return
    if (mode := _mode(path.expanduser())) & stat.S_IROTH:
        yield _warn(
            place, str(path), f"everybody on this machine may read it (mode {mode & 0o777:04o})", f"chmod 600 {path}"
        )


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except OSError:  # told elsewhere, or standard input
        return 0


def _memory(tier: HostTierConfig, place: Place) -> Iterator[Remark]:
    total, _ = memory_bytes()
    here = (*place, "capacity")
    if total and tier.capacity > total:
        text = f"is more than the memory of this machine or container, {size(total)}"
        yield _warn(
            here, size_text(tier.capacity), text, f"set it to about {size(total // 2)} at most, or run it elsewhere"
        )
    elif total and tier.capacity > 0.9 * total:
        text = f"leaves less than a tenth of the {size(total)} here to the process and the rest"
        yield _warn(here, size_text(tier.capacity), text, f"set it to about {size(total // 2)}")
    if tier.budget is not None and tier.budget.capacity < tier.capacity:
        text = f"is less than this process' own capacity, {size_text(tier.capacity)}, which it will never get"
        yield _warn((*place, "budget", "capacity"), size_text(tier.budget.capacity), text, "raise it to the sum of all")


def _disk(tier: NvmeTierConfig, host: Any, place: Place) -> Iterator[Remark]:
    here = (*place, "capacity")
    for path in map(Path.expanduser, tier.path):
        if str(path).startswith(("/tmp/", "/var/tmp/")) or str(path) in ("/tmp", "/var/tmp"):
            yield _warn(
                (*place, "path"), str(path), "is cleared by many systems, with the pages in it", "name another folder"
            )
        if not path.is_absolute():
            text = "is relative: where it lies depends on where the process is started"
            yield _warn((*place, "path"), str(path), text, "give an absolute path")
            continue
        existing = nearest_there(path)
        found = os.statvfs(existing)
        there = found.f_blocks * found.f_frsize
        if tier.capacity // len(tier.path) > there:
            text = f"is more, per directory, than the file system of {existing} has: {size(there)}"
            yield _warn(here, size_text(tier.capacity), text, "lower it, or mount the disk before the start")
    if tier.write == "through" and tier.capacity <= host.capacity:
        text = f"is not more than host memory's {size_text(host.capacity)}: written through, it holds the same pages"
        yield _warn(
            here, size_text(tier.capacity), text, "raise it, or set write: back, so that the tiers hold different pages"
        )


def _redis(tier: RedisTierConfig, place: Place) -> Iterator[Remark]:
    from kvtier.storage_backends.redis.options import RedisOptions, TlsOptions, mask_url

    tls_given = TlsOptions(tier.tls_ca, tier.tls_cert, tier.tls_key, tier.tls_check_hostname)
    secure = tier.url.startswith("rediss://")
    try:
        options = RedisOptions.of(
            # Checked as text alone: certificates and secrets are of the machine where it runs.
            tier.url.replace("rediss://", "redis://", 1), mode=tier.mode, service=tier.service, username=tier.username,
            tls=None if secure else tls_given, prefix=tier.prefix, ttl_s=tier.ttl, timeout_s=tier.timeout,
            connections=tier.connections,
        )  # fmt: skip
    except ConfigError as error:
        yield _error((*place, "url"), mask_url(tier.url), error)
        return
    if (tier.tls_cert is None) != (tier.tls_key is None):
        apart = ConfigError("redis tier: tls_cert and tls_key belong together; give both or neither")
        yield _error((*place, "tls_cert"), str(tier.tls_cert or tier.tls_key), apart)
    for name in ("password_file", "sentinel_password_file", "tls_key"):
        yield from _secret_file((*place, name), getattr(tier, name))
    remote = [a for a in options.seeds if a.host and not _local(a.host)]
    if remote and not secure:
        text = f"pages, and the password if there is one, go to {remote[0]} in the clear"
        yield _warn((*place, "url"), tier.url, text, "use rediss://, or a network that nobody else is on")
    if remote and not (tier.password_file or os.environ.get("KVTIER_REDIS_PASSWORD") or tier.tls_cert):
        text = "no password is set: whoever reaches that server can read and plant pages"
        yield _warn((*place, "url"), tier.url, text, "set password_file, or KVTIER_REDIS_PASSWORD")
    if not tier.tls_check_hostname:
        yield _warn((*place, "tls_check_hostname"), False, "any certificate of that CA will do", "set it to true")
    if "prefix" in tier.model_fields_set and not re.search(r"\d", tier.prefix):
        text = "names no version: releases with different records meet there, and miss each other's pages"
        yield _warn((*place, "prefix"), tier.prefix, text, "put the record's version into it, such as mine:1:")


def _local(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _http(http: HttpConfig) -> Iterator[Remark]:
    from kvtier.server.http import HttpOptions

    try:
        HttpOptions.of(http).check_exposure(bool(http.token_file or os.environ.get("KVTIER_HTTP_TOKEN")))
    except ConfigError as error:
        yield _error(("http", "host"), http.host, error)
    yield from _secret_file(("http", "token_file"), http.token_file)


def _server(config: Config, server: ServerConfig) -> Iterator[Remark]:
    from kvtier.server.auth import PASSWORD_VARIABLE, User, Users
    from kvtier.server.options import Listen, ServerOptions, ServerTls

    def stand_in(given: object) -> str:
        return "given" if given else ""

    try:
        users = Users(
            [User(u.name, b"") for u in server.users],
            stand_in(server.password_file or os.environ.get(PASSWORD_VARIABLE)),
        )
        if (server.tls_cert is None) != (server.tls_key is None):
            raise ConfigError("server: tls_cert and tls_key belong together; give both or neither")
        tls = ServerTls(server.tls_cert, server.tls_key) if server.tls_cert and server.tls_key else None
        listens = tuple(Listen.parse(text) for text in server.listen)
        options = ServerOptions(listens, users, tls, server.max_connections)
        options.check()
        options.check_block(config)
    except ConfigError as error:
        yield _error(("server", "listen"), list(server.listen), error)
        return
    yield from _secret_file(("server", "password_file"), server.password_file)
    yield from _secret_file(("server", "tls_key"), server.tls_key)
    for n, user in enumerate(server.users):
        yield from _secret_file(("server", "users", n, "password_file"), user.password_file)
    for n, listen in enumerate(listens):
        if not listen.local and not listen.tls:
            text = "passwords and values go over the network in the clear"
            yield _warn(("server", "listen", n), str(listen), text, f"use tls:{listen.host}:{listen.port}")
    host = config.tiers[0]
    if "max_value" in server.model_fields_set and isinstance(host, HostTierConfig) and server.max_value > host.capacity:
        text = f"is more than the host tier's {size_text(host.capacity)}: such a value is refused all the same"
        yield _warn(
            ("server", "max_value"), size_text(server.max_value), text, "lower it, or raise the host tier's capacity"
        )
