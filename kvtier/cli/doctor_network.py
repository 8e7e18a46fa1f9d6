"""``kvtier doctor``: Redis or Valkey, TLS, and what the cache server and the metrics port need."""

from __future__ import annotations

import errno
import importlib
import os
import socket
import ssl
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.abc.codec import Form
from kvtier.abc.tier import (
    FINGERPRINT_BYTES,
    KEY_BYTES,
    PROBE_PREFIX,
    GetStatus,
    PageMeta,
    PutItem,
    PutStatus,
)
from kvtier.build import redis_options
from kvtier.cli.doctor_line import Finding, State, bad, good, nothing, refused, size, warning
from kvtier.cli.options import is_there, nearest_there
from kvtier.config import Config, RedisTierConfig
from kvtier.errors import ConfigError, KVTierError
from kvtier.keys import checksum

if TYPE_CHECKING:
    from kvtier.storage_backends.redis.discovery import ServerFacts
    from kvtier.storage_backends.redis.options import Address, RedisOptions

_TRY_BYTES = 1 << 20
_SKEW_S = 5.0
_EXPIRES_DAYS = 14


def check_redis(config: RedisTierConfig) -> Iterator[Finding]:
    what = "redis"
    try:
        options = redis_options(config)
        from kvtier.storage_backends.redis import discovery, tier
    except KVTierError as error:
        yield refused(what, error)
        return
    servers: list[Address] = []
    facts: list[ServerFacts] = []
    for found in _servers(config, options):
        if isinstance(found, Finding):
            yield found
        else:
            servers.append(found[0])
            facts.append(found[1])
    if facts:
        said = sorted({f"{f.version} ({f.mode.value}), maxmemory {size(f.maxmemory_bytes)}" for f in facts})
        yield good(what, f"version {'; '.join(said)}, policy {', '.join(sorted({f.maxmemory_policy for f in facts}))}")
        limit = min((f.max_value_bytes for f in facts if f.max_value_bytes), default=512 << 20)
        for text in discovery.misfits(facts, limit, 0, facts[0].mode):
            misfit = refused(what, text)
            yield misfit if "this tier needs" in text else warning(what, misfit.text, misfit.fix)
        if config.mode in ("standalone", "cluster") and any(f.mode.value != config.mode for f in facts):
            are = ", ".join(sorted({f.mode.value for f in facts}))
            yield bad(what, f"mode = {config.mode!r}, and the servers say {are}", "leave mode out: they are asked then")
            facts = []
    yield from _transport(options)
    if facts:
        clock = _server_clock(servers[0], options, in_cluster=facts[0].mode.value == "cluster")
        if clock.state is not State.BAD:
            with_tier = tier.RedisTier(options)
            try:
                yield _round_trip(what, with_tier)
            finally:
                with_tier.close()
        yield clock


def _servers(config: RedisTierConfig, options: RedisOptions) -> Iterator[tuple[Address, ServerFacts] | Finding]:
    """Those that the url names, or the master that its sentinels tell, with what they say of themselves."""
    from kvtier.storage_backends.redis import discovery

    if config.mode != "sentinel":
        found = [(address, _facts(address, options)) for address in options.seeds]
        if config.mode != "auto" or not any(
            not isinstance(facts, Finding) and facts.mode.value == "sentinel" for _, facts in found
        ):
            yield from (facts if isinstance(facts, Finding) else (address, facts) for address, facts in found)
            return
        if not config.service:
            yield bad("redis", f"{found[0][0]} is a sentinel", "set service to the name of the master that it watches")
            return
    try:
        master = discovery.ask_sentinels(options, options.timeout_s)
    except Exception as error:  # noqa: BLE001 - whatever the client library says is what is to be told
        yield bad(
            "redis", f"no sentinel tells where {config.service} is: {error}",
            "check that the url names sentinels, that service is their name for the master, and their password",
        )  # fmt: skip
        return
    facts = _facts(master, options)
    yield facts if isinstance(facts, Finding) else (master, facts)


def _facts(address: Address, options: RedisOptions) -> ServerFacts | Finding:
    from kvtier.storage_backends.redis import discovery

    try:
        return discovery.ask_facts(address, options, options.timeout_s)
    except Exception as error:  # noqa: BLE001 - whatever the client library says is what is to be told
        return bad(f"redis {address}", f"does not answer: {error}", _reachable(address, options))


def _reachable(address: Address, options: RedisOptions) -> str:
    tls = "TLS is spoken there (rediss:// against redis://)" if options.tls is None else "it speaks TLS there"
    return f"check that the server runs at {address}, that this machine may connect, the password, and whether {tls}"


def _round_trip(what: str, tier: Any) -> Finding:
    key = PROBE_PREFIX + os.urandom(KEY_BYTES - len(PROBE_PREFIX))
    data = os.urandom(_TRY_BYTES)
    meta = PageMeta(_TRY_BYTES, Form.RAW, 0, checksum(data, key), bytes(FINGERPRINT_BYTES))
    started = time.perf_counter()
    (put,) = tier.put_many([PutItem(key, meta, memoryview(data))])
    between = time.perf_counter()
    out = bytearray(_TRY_BYTES)
    (got,) = tier.get_many_into([key], [memoryview(out)])
    ended = time.perf_counter()
    tier.delete_many([key])
    if put is not PutStatus.STORED:
        return bad(
            what, f"a put answered {put.value}", "see the log above; check the user's rights and the memory limit"
        )
    if got.status is not GetStatus.HIT or out != data:
        return bad(what, f"a page that was put came back as {got.status.value}", "see the log above")
    return good(
        what,
        f"put and got a page of {size(_TRY_BYTES)} in {1000 * (between - started):.1f} and "
        f"{1000 * (ended - between):.1f} ms",
    )


def _transport(options: RedisOptions) -> Iterator[Finding]:
    what = "redis TLS"
    if options.tls is None:
        remote = [a for a in options.seeds if a.host and not _is_local(a.host)]
        if remote:
            yield warning(
                what,
                f"pages and the password go to {remote[0]} in the clear",
                "use rediss:// with tls_ca, or a network that nobody else is on",
            )
        else:
            yield nothing(what, "not used; the server is on this machine")
        return
    for address in options.seeds:
        yield _certificate(what, address, options.tls)


def _certificate(what: str, address: Address, context: ssl.SSLContext) -> Finding:
    try:
        with (
            socket.create_connection((address.host, address.port), 5.0) as plain,
            context.wrap_socket(plain, server_hostname=address.host) as connection,
        ):
            found = connection.getpeercert() or {}
            version = connection.version()
    except OSError as error:  # ssl.SSLError among them
        return bad(what, f"{address} was not accepted: {error}", "check tls_ca, the certificate's names and dates")
    return _expiry(what, f"{address}, {version}", found)


def _expiry(what: str, who: str, certificate: Any) -> Finding:
    if "notAfter" not in certificate:
        return good(what, who)
    days = (ssl.cert_time_to_seconds(certificate["notAfter"]) - time.time()) / 86400
    if days < 0:
        return bad(what, f"{who}: the certificate has expired {-days:.0f} days ago", "renew the certificate")
    if days < _EXPIRES_DAYS:
        return warning(what, f"{who}: the certificate expires in {days:.0f} days", "renew the certificate")
    return good(what, f"{who}, certificate valid for {days:.0f} days")


def _server_clock(address: Address, options: RedisOptions, *, in_cluster: bool) -> Finding:
    """The server's clock beside ours; bad where it does not let us in as the tier would be."""
    from kvtier.storage_backends.redis.connection import Connection, DeadlineError, LoginError, LostError, encode

    what = "redis clock"
    until, database = time.monotonic() + options.timeout_s, 0 if in_cluster else options.database
    try:
        connection = Connection(address, options, until, database=database)
        try:
            connection.send([encode([b"TIME"])])
            reply = connection.read_reply()
        finally:
            connection.close()
    except LoginError as error:
        return bad("redis", f"{address}: {error}", "check the user's name, the password and the database in the url")
    except (DeadlineError, LostError) as error:
        return nothing(what, f"not told: {error}")
    if not isinstance(reply, list) or not reply or not isinstance(reply[0], bytes) or not reply[0].isdigit():
        return nothing(what, f"not told: {reply}")
    ahead_s = int(reply[0]) - time.time()
    if abs(ahead_s) > _SKEW_S:
        return warning(what, f"the server is {ahead_s:+.0f} s off this machine", "synchronize both (chrony)")
    return good(what, "agrees with this machine's")


def check_server(config: Config) -> Iterator[Finding]:
    if config.server is None:
        return
    from kvtier.server.options import ServerOptions

    what = "server"
    try:
        options = ServerOptions.of(config.server)
        options.check_block(config)
        if options.tls is not None:
            options.tls.context()
    except KVTierError as error:
        yield refused(what, error)
        return
    if options.tls is not None:
        decode = getattr(importlib.import_module("_ssl"), "_test_decode_cert", None)
        certificate = decode(str(options.tls.cert)) if decode is not None else {}
        yield _expiry("server TLS", str(options.tls.cert), certificate)
    for where in options.listen:
        if where.path is None:
            yield _address(what, str(where), where.host, where.port)
        else:
            yield _socket_path(what, str(where), where.path)


def check_http(config: Config) -> Iterator[Finding]:
    if config.http is None:
        yield nothing("metrics", "no http block: nobody sees hits, misses and errors")
        return
    from kvtier.server.http import HttpOptions

    options = HttpOptions.of(config.http)
    try:
        options.check_exposure(options.token() is not None)
    except ConfigError as error:
        yield refused("metrics", error)
        return
    where = f"{options.host}:{options.port or '(any free port)'}"
    for text in () if config.server is None or not options.port else config.server.listen:
        if text.partition(":")[2] == where:
            yield bad("metrics", f"{where}: the server is to listen there, too: {text}", "choose another port for one")
            return
    yield _address("metrics", where, options.host, options.port)


def _address(what: str, where: str, host: str, port: int) -> Finding:
    """Whether one could listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return _somebody(what, where)
        fix = "name an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them"
        if error.errno == errno.EACCES:
            fix = "choose a port from 1024 up"
        return bad(what, f"{where}: cannot be listened on: {error.strerror}", fix)
    return good(what, f"{where}: free")


def _socket_path(what: str, where: str, path: Path) -> Finding:
    """Whether a socket could be made there."""
    if is_there(path) and not path.is_socket():
        return bad(what, f"{where}: there is something that is no socket", "choose another path")
    if _answers(path):
        return _somebody(what, where)
    folder = nearest_there(path.parent)  # the server makes what is missing
    try:
        with (
            tempfile.TemporaryDirectory(prefix=".kvtier-doctor-", dir=folder) as place,
            socket.socket(socket.AF_UNIX) as tried,
        ):
            here = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
            try:  # by a name that is short enough whatever the folder is called
                tried.bind(f"/proc/self/fd/{here}/s")
            finally:
                os.close(here)
    except OSError as error:
        return bad(
            what, f"{where}: no socket can be made in {folder}: {error.strerror}",
            f"make {folder} writable for user {os.geteuid()}, or choose another path",
        )  # fmt: skip
    return good(what, f"{where}: free")


def _somebody(what: str, where: str) -> Finding:
    """A place that is taken. No failure: it may be by the very process that this configuration is of."""
    return warning(
        what, f"{where}: somebody listens there", "if it is not what this configuration started, choose another place"
    )


def _answers(path: Path) -> bool:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(0.5)
            connection.connect(str(path))
    except OSError:
        return False
    return True


def _is_local(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
