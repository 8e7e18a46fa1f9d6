"""How the cache server is set up: where it listens, whom it serves, and what it refuses to do."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import ssl
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.config import PRIORITIES, Config, RedisTierConfig, ServerConfig
from kvtier.errors import ConfigError
from kvtier.server.auth import PASSWORD_VARIABLE, User, Users, digest, read_password

if TYPE_CHECKING:
    from kvtier.storage_backends.redis.options import Address

_PORT = 6380


@dataclass(frozen=True, slots=True)
class Listen:
    """``unix:PATH``, ``tcp:HOST:PORT`` or ``tls:HOST:PORT``; port 0 takes any free one."""

    host: str = ""
    port: int = 0
    path: Path | None = None
    tls: bool = False

    @staticmethod
    def parse(text: str) -> Listen:
        kind, _, rest = text.partition(":")
        if kind == "unix" and rest:
            if len(rest.encode()) > 100:
                raise ConfigError(
                    f"listen = {text!r}: the path of a unix socket has at most 100 bytes; use a shorter one"
                )
            return Listen(path=Path(rest).expanduser())
        match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]+)(?::(\d{1,5}))?", rest)
        if kind not in ("tcp", "tls") or match is None or int(match[2] or 0) > 65535:
            raise ConfigError(
                f"listen = {text!r} must be unix:PATH, tcp:HOST:PORT or tls:HOST:PORT, such as tcp:127.0.0.1:{_PORT}"
            )
        return Listen(match[1].strip("[]"), _PORT if match[2] is None else int(match[2]), tls=kind == "tls")

    @property
    def local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def is_at(self, address: Address) -> bool:
        """Whether whoever connects to `address` from this machine comes here, as far as names and numbers tell."""
        if self.path is not None:
            return bool(address.path) and os.path.realpath(address.path) == os.path.realpath(self.path)
        if address.path or address.port != self.port:
            return False
        everywhere = self.host in ("0.0.0.0", "::")
        near = Listen(address.host).local or (everywhere and address.host == socket.gethostname())
        return address.host == self.host or (near and (everywhere or self.local))

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.tls else 'tcp'}:{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ServerTls:
    """Paths of PEM files. client_ca: whose certificates clients must show; by default they need none."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # A passphrase is given, and wrong: OpenSSL would ask the terminal for one, and wait.
            context.load_cert_chain(self.cert, self.key, password="")
        except (OSError, ssl.SSLError) as e:
            raise ConfigError(
                f"tls_cert = {str(self.cert)!r} with tls_key = {str(self.key)!r} cannot be used: {e}; give PEM "
                "files, the certificate with its chain and the key that belongs to it, without a passphrase"
            ) from e
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except (OSError, ssl.SSLError) as e:
                raise ConfigError(
                    f"tls_client_ca = {str(self.client_ca)!r} cannot be used: {e}; give a PEM file with certificates"
                ) from e
            context.verify_mode = ssl.CERT_REQUIRED
        return context


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """max_value_bytes: larger values are refused. client_timeout_s: how long a client may leave a command half sent or
    a reply half taken. drain_s: how long clients may finish when the server is told to stop."""

    listen: Sequence[Listen]
    users: Users = field(default_factory=Users)
    tls: ServerTls | None = None
    max_connections: int = 256
    max_value_bytes: int = 512 << 20
    client_timeout_s: float = 30.0
    drain_s: float = 10.0

    @staticmethod
    def of(config: ServerConfig) -> ServerOptions:
        """Read the secrets that the block names, and check the whole."""
        users = [
            User(
                name=u.name,
                secret=digest(read_password(f"server users: password_file of {u.name!r}", u.password_file)),
                prefixes=tuple(p.encode() for p in u.prefixes),
                read_only=u.read_only,
                quota_bytes=u.quota or 0,
                priority=PRIORITIES[u.priority],
            )
            for u in config.users
        ]
        password = read_password("server password_file", config.password_file, PASSWORD_VARIABLE)
        if (config.tls_cert is None) != (config.tls_key is None):
            raise ConfigError("server: tls_cert and tls_key belong together; give both or neither")
        if config.tls_client_ca is not None and config.tls_cert is None:
            raise ConfigError(
                f"server: tls_client_ca = {str(config.tls_client_ca)!r} asks nobody for a certificate without "
                "tls_cert, tls_key and a listener tls:HOST:PORT; add them, or leave it out"
            )
        for user in config.users:
            if "" in user.prefixes:
                raise ConfigError(
                    f"server users: prefixes of {user.name!r} has an empty one, which every key begins with; leave "
                    "prefixes out if it is to see all keys"
                )
        tls = None
        if config.tls_cert is not None and config.tls_key is not None:
            ca = None if config.tls_client_ca is None else config.tls_client_ca.expanduser()
            tls = ServerTls(config.tls_cert.expanduser(), config.tls_key.expanduser(), ca)
        options = ServerOptions(
            listen=tuple(Listen.parse(text) for text in config.listen),
            users=Users(users, password),
            tls=tls,
            max_connections=config.max_connections,
            max_value_bytes=config.max_value,
            client_timeout_s=config.client_timeout,
            drain_s=config.drain,
        )
        options.check()
        return options

    def check(self) -> None:
        """Raise ConfigError for what must not be."""
        if not self.listen:
            raise ConfigError("listen: give at least one place to listen, such as unix:/run/kvtier/cache.sock")
        # tcp: and tls: are two ways to one port. Port 0 is another one each time.
        places = Counter(w.path or (w.host, w.port) for w in self.listen if w.path is not None or w.port)
        for where in self.listen:
            if places[where.path or (where.host, where.port)] > 1:
                raise ConfigError(f"listen = {str(where)!r} is there twice; leave one out")
        for where in self.listen:
            if not where.local and self.users.open_to_all:
                raise ConfigError(
                    f"listen = {str(where)!r} is reachable from other machines, and nobody needs a password: set "
                    f"password_file, the environment variable {PASSWORD_VARIABLE}, or users; or listen on 127.0.0.1"
                )
            if where.tls and self.tls is None:
                raise ConfigError(f"listen = {str(where)!r} needs a certificate: set tls_cert and tls_key")
        if self.max_connections < 1:
            raise ConfigError(f"max_connections = {self.max_connections} must be at least 1")

    def check_block(self, config: Config) -> None:
        """Raise ConfigError for what must not stand beside a cache server, in one block."""
        from kvtier.storage_backends.redis.options import RedisOptions

        if config.kv_events is not None:
            raise ConfigError(
                "kv_events: a cache server knows no tokens and no engine's hashes; leave it out here, and give it to "
                "the engine's own kvtier"
            )
        for tier in config.tiers:
            if not isinstance(tier, RedisTierConfig):
                continue
            # As text alone: no certificate is needed to see where it leads.
            url = tier.url.replace("rediss://", "redis://", 1)
            try:
                seeds = RedisOptions.of(url, mode=tier.mode, service=tier.service).seeds
            except ConfigError:  # whoever opens the tier is told
                continue
            for where in self.listen:
                if any(map(where.is_at, seeds)):  # each value would come in again as another one, without end
                    raise ConfigError(
                        f"redis tier: url = {tier.url!r} is where this server listens itself, {where}; leave the tier "
                        "out here: it belongs into the engines' file"
                    )
