"""Where a Redis tier connects to, and as whom: the URL taken apart and checked, secrets read, TLS set up."""

from __future__ import annotations

import os
import re
import ssl
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from kvtier.errors import ConfigError

PASSWORD_VARIABLE = "KVTIER_REDIS_PASSWORD"
SENTINEL_PASSWORD_VARIABLE = "KVTIER_REDIS_SENTINEL_PASSWORD"
DEFAULT_PREFIX = "kvtier:1:"
"""The 1 is the version of the record: a release that writes another one uses other names."""
_PORT = 6379
_SCHEMES = ("redis", "rediss", "unix")


class RedisMode(str, Enum):
    """How the servers behind the URL belong together. AUTO: they are asked."""

    AUTO = "auto"
    STANDALONE = "standalone"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP host and port, or the path of a unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    @staticmethod
    def of(host: str, port: int) -> Address:
        """As a server names another one. ValueError where that cannot be."""
        if not 0 < port < 1 << 16:
            raise ValueError(f"no server is at port {port}")
        return Address(host, port)

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """Paths of PEM files. ca: who signed the server's certificate, by default the system's authorities. cert and key:
    the client's own, where the server asks for one."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    check_hostname: bool = True

    def context(self) -> ssl.SSLContext:
        """A client's context. ConfigError where a file cannot be used."""
        if (self.cert is None) != (self.key is None):
            raise ConfigError("redis tier: tls_cert and tls_key belong together; give both or neither")
        try:
            context = ssl.create_default_context(cafile=None if self.ca is None else str(self.ca))
        except (OSError, ssl.SSLError) as e:
            raise ConfigError(f"redis tier: tls_ca = {str(self.ca)!r} cannot be used: {e}; give a PEM file") from e
        context.check_hostname = self.check_hostname
        if self.cert is not None and self.key is not None:
            try:
                context.load_cert_chain(self.cert, self.key)
            except (OSError, ssl.SSLError) as e:
                raise ConfigError(
                    f"redis tier: tls_cert = {str(self.cert)!r} with tls_key = {str(self.key)!r} cannot be used: {e}"
                ) from e
        return context


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """Everything a connection needs. Made by `RedisOptions.of`; the password is not part of its text.

    timeout_s: of one batch, connecting included, where the caller gives no deadline. connections: per server.
    """

    seeds: tuple[Address, ...]
    database: int
    username: str
    password: str = field(repr=False)
    mode: RedisMode
    service: str
    sentinel_password: str = field(repr=False)
    tls: ssl.SSLContext | None = field(repr=False)
    tls_files: TlsOptions
    prefix: bytes
    ttl_ms: int
    timeout_s: float
    connections: int

    @staticmethod
    def of(
        url: str,
        *,
        mode: str = "auto",
        service: str = "",
        username: str = "",
        password_file: Path | None = None,
        sentinel_password_file: Path | None = None,
        tls: TlsOptions | None = None,
        prefix: str = DEFAULT_PREFIX,
        ttl_s: float | None = None,
        timeout_s: float = 1.0,
        connections: int = 8,
    ) -> RedisOptions:
        """Check the options of the configuration block. Raises ConfigError, whose text never holds a password."""
        shown = mask_url(url)
        if shown != url:
            raise ConfigError(
                f"redis tier: url = {shown!r} holds a password: put it into a file named by password_file, or into the "
                f"environment variable {PASSWORD_VARIABLE}, and leave only the user name in the URL"
            )
        scheme, _, rest = url.partition("://")
        if scheme not in _SCHEMES or not rest:
            raise ConfigError(
                f"redis tier: url = {url!r} must look like redis://host:6379/0, rediss://host:6379/0 (TLS) or "
                "unix:///path/to/socket?db=0"
            )
        user_in_url = unquote(urlsplit(url).username or "")
        if scheme == "unix":
            seeds, database = _unix_target(url)
        else:
            seeds, database = _tcp_target(url, rest)
        known = [m.value for m in RedisMode]
        if mode not in known:
            raise ConfigError(f"redis tier: mode = {mode!r} is unknown; choose one of {', '.join(known)}")
        if mode == RedisMode.SENTINEL.value and not service:
            raise ConfigError(
                "redis tier: mode = 'sentinel' needs service, the name of the master that sentinels watch"
            )
        if mode == RedisMode.CLUSTER.value and database:
            raise ConfigError(f"redis tier: url = {url!r}: a cluster has database 0 only; leave /{database} out")
        if tls is not None and tls != TlsOptions() and scheme != "rediss":
            raise ConfigError(f"redis tier: url = {url!r} does not use TLS, but tls options are set; use rediss://")
        if connections < 1:
            raise ConfigError(f"redis tier: connections = {connections} must be at least 1; 8 is the default")
        if not timeout_s > 0:
            raise ConfigError(f"redis tier: timeout = {timeout_s} must be larger than 0, such as 1s")
        if ttl_s is not None and ttl_s < 0.001:
            raise ConfigError(f"redis tier: ttl = {ttl_s} must be at least 1ms, or left out for pages that stay")
        if not prefix.isprintable() or " " in prefix:
            raise ConfigError(f"redis tier: prefix = {prefix!r} must be printable and without spaces")
        files = tls or TlsOptions()
        return RedisOptions(
            seeds=seeds,
            database=database,
            username=username or user_in_url,
            password=read_secret("password_file", password_file, PASSWORD_VARIABLE),
            mode=RedisMode(mode),
            service=service,
            sentinel_password=read_secret("sentinel_password_file", sentinel_password_file, SENTINEL_PASSWORD_VARIABLE),
            tls=files.context() if scheme == "rediss" else None,
            tls_files=files,
            prefix=prefix.encode(),
            ttl_ms=0 if ttl_s is None else int(ttl_s * 1000),
            timeout_s=timeout_s,
            connections=connections,
        )


def read_secret(option: str, path: Path | None, variable: str) -> str:
    """The secret in `path`, or else in the environment variable; empty where there is none."""
    if path is None:
        return os.environ.get(variable, "")
    try:
        secret = path.expanduser().read_text().strip("\r\n")
    except (OSError, UnicodeDecodeError) as e:
        reason = getattr(e, "strerror", None) or e
        raise ConfigError(
            f"redis tier: {option} = {str(path)!r} cannot be read: {reason}; name a file that this user can read"
        ) from e
    if not secret:
        raise ConfigError(f"redis tier: {option} = {str(path)!r} is empty: put the password into it")
    return secret


def mask_url(url: str) -> str:
    """`url` with any password in it as ``***``."""
    masked = re.sub(r"(://[^:@/?#]*):.*@", r"\1:***@", url)
    return re.sub(r"([?&]password=)[^&#]*", r"\1***", masked)


def _unix_target(url: str) -> tuple[tuple[Address, ...], int]:
    parts = urlsplit(url)
    query = parse_qs(parts.query)
    unknown = sorted(set(query) - {"db"})
    if unknown:
        raise ConfigError(f"redis tier: url = {url!r}: unknown parameter {unknown[0]!r}; only db is known")
    if not parts.path.startswith("/"):
        raise ConfigError(f"redis tier: url = {url!r}: give the socket's absolute path, as unix:///run/redis.sock")
    return (Address(path=unquote(parts.path)),), _database(url, query.get("db", ["0"])[0])


def _tcp_target(url: str, rest: str) -> tuple[tuple[Address, ...], int]:
    hosts, _, database = rest.rpartition("@")[2].partition("/")
    seeds = []
    for host in hosts.split(","):
        match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]?#]+)(?::(\d{1,5}))?", host)
        port = int(match[2] or _PORT) if match else 0
        if match is None or not 1 <= port <= 65535:
            raise ConfigError(f"redis tier: url = {url!r}: {host!r} must be host:port; separate several by commas")
        seeds.append(Address(match[1].strip("[]"), port))
    return tuple(seeds), _database(url, database or "0")


def _database(url: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,4}", text):
        raise ConfigError(
            f"redis tier: url = {url!r}: the database {text!r} must be a number, as in redis://host:6379/0"
        )
    return int(text)
