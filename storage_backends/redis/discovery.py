"""What redis-py is used for: finding the servers behind a URL, and asking them how they are configured.

Page traffic never comes here. Every call is bounded by a timeout and raises DiscoveryError.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvtier.errors import KVTierError, missing_extra
from kvtier.storage_backends.redis.options import Address, RedisMode, RedisOptions

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry
except ImportError as e:
    raise missing_extra("redis", "redis") from e


SLOTS = 16384
_OLDEST_VERSION = 6
_LARGEST_USUAL_BYTES = 16 << 20
"""Pages of common models are smaller than this; the limit is checked against it where no page size is known."""
_SHARE_MIN_S = 0.1
NO_TIME = "no time left to look for servers"


class DiscoveryError(KVTierError, OSError):
    """No server answered as it should. The message says what each of them said."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says about itself; `maxmemory_bytes` 0: no limit; `max_value_bytes` 0: it did not say."""

    version: str
    mode: RedisMode
    role: str
    maxmemory_bytes: int
    maxmemory_policy: str
    max_value_bytes: int


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Slots ``[first, last]`` of a cluster and the master that serves them."""

    first: int
    last: int
    address: Address


def ask_facts(address: Address, options: RedisOptions, timeout_s: float) -> ServerFacts:
    """INFO, and CONFIG where that is allowed."""
    with _client(address, options, timeout_s) as client:
        info: dict[str, Any] = client.info()
        try:
            limit = int(client.config_get("proto-max-bulk-len").get("proto-max-bulk-len") or 0)
        except redis.ResponseError:  # managed servers and narrow users refuse CONFIG
            limit = 0
        return ServerFacts(
            version=str(info.get("valkey_version") or info.get("redis_version", "")),
            mode=RedisMode(info.get("redis_mode") or info.get("server_mode") or "standalone"),  # the latter: Valkey
            role=str(info.get("role", "")),
            maxmemory_bytes=int(info.get("maxmemory", 0)),
            maxmemory_policy=str(info.get("maxmemory_policy", "")),
            max_value_bytes=limit,
        )


def ask_slots(address: Address, options: RedisOptions, timeout_s: float) -> list[SlotRange]:
    """CLUSTER SLOTS as `address` sees it."""
    ranges = []
    with _client(address, options, timeout_s) as client:
        # redis-py gives a mapping of (first, last) to a description; older releases rows as the server sent them.
        for first, last, master in _slot_rows(_execute(client, "CLUSTER SLOTS")):
            host = master[0].decode() if isinstance(master[0], bytes) else str(master[0] or "")
            if not 0 <= int(first) <= int(last) < SLOTS:
                raise ValueError(f"slots {first} to {last}")
            ranges.append(SlotRange(int(first), int(last), Address.of(host or address.host, int(master[1]))))
    if not ranges:
        raise DiscoveryError(f"{address} knows of no cluster slots")
    return ranges


def ask_sentinels(options: RedisOptions, timeout_s: float) -> Address:
    """The master of ``options.service``, from the first sentinel that knows it."""
    said = []
    for seed, share_s in shares(options.seeds, timeout_s):
        try:
            with _client(seed, options, share_s, sentinel=True) as client:
                master = _execute(client, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", options.service)
                if master:
                    host, port = (x.decode() if isinstance(x, bytes) else str(x) for x in master)
                    return Address.of(host, int(port))
        except DiscoveryError as e:
            said.append(str(e))
            continue
        said.append(f"{seed}: no master named {options.service!r}")
    raise DiscoveryError("; ".join(said) or NO_TIME)


def shares(addresses: Sequence[Address], timeout_s: float) -> Iterator[tuple[Address, float]]:
    """Servers to be asked one after the other, and how long each may take: one that hangs leaves the others their time,
    and all together take no longer than `timeout_s`."""
    until = time.monotonic() + timeout_s
    for at, address in enumerate(addresses):
        left_s = until - time.monotonic()
        if left_s <= 0:
            return
        yield address, min(left_s, max(_SHARE_MIN_S, left_s / (len(addresses) - at)))


def misfits(facts: Sequence[ServerFacts], limit_bytes: int, record_bytes: int, mode: RedisMode) -> Iterator[str]:
    """What about the servers' settings is going to hurt, with the way out."""
    policies = {f.maxmemory_policy for f in facts}
    if "noeviction" in policies:
        yield (
            "maxmemory-policy is noeviction: once the server is full no page can be stored; "
            "set maxmemory-policy allkeys-lru"
        )
    if any(not f.maxmemory_bytes for f in facts):
        yield "the server has no maxmemory: it grows until the machine is out of memory; set maxmemory"
    if any(p.startswith("volatile-") for p in policies):
        yield "maxmemory-policy evicts only keys with a ttl; set maxmemory-policy allkeys-lru, or a ttl for this tier"
    wanted = record_bytes or _LARGEST_USUAL_BYTES
    if limit_bytes < wanted:
        yield (
            f"proto-max-bulk-len takes values up to {limit_bytes} bytes, pages may have "
            f"{wanted}: set it higher on the server"
        )
    old = sorted(
        {
            f.version
            for f in facts
            if f.version.split(".")[0].isdigit() and int(f.version.split(".")[0]) < _OLDEST_VERSION
        }
    )
    if old:
        yield f"the server is version {', '.join(old)}; this tier needs Redis 6 or later, or Valkey"
    if mode is not RedisMode.CLUSTER and any(f.role in ("slave", "replica") for f in facts):
        yield "the server is a read-only replica: give the URL of its master, or of its sentinels with mode: sentinel"


def _slot_rows(rows: Any) -> Iterator[tuple[Any, Any, Any]]:
    if isinstance(rows, dict):
        for (first, last), nodes in rows.items():
            yield first, last, nodes["primary"]
    else:
        for row in rows:
            yield row[0], row[1], row[2]


def _execute(client: Any, *command: str) -> Any:
    return client.execute_command(*command)


@contextmanager
def _client(
    address: Address, options: RedisOptions, timeout_s: float, *, sentinel: bool = False
) -> Iterator[redis.Redis]:
    arguments: dict[str, Any] = {
        "username": options.username or None,
        "password": options.password or None,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    if sentinel:
        arguments |= {"username": None, "password": options.sentinel_password or None}
    if address.path:
        arguments["unix_socket_path"] = address.path
    else:
        arguments |= {"host": address.host, "port": address.port}
    if options.tls is not None:
        files = options.tls_files
        arguments |= {
            "ssl": True,
            "ssl_ca_certs": None if files.ca is None else str(files.ca),
            "ssl_certfile": None if files.cert is None else str(files.cert),
            "ssl_keyfile": None if files.key is None else str(files.key),
            "ssl_check_hostname": files.check_hostname,
        }
    client = redis.Redis(**arguments)
    try:
        yield client
    except (redis.RedisError, OSError, UnicodeError) as e:
        raise DiscoveryError(f"{address}: {e}") from e
    except Exception as e:  # whatever redis-py, or we, make of such replies
        raise DiscoveryError(f"{address}: not what a Redis server answers: {e}") from e
    finally:
        client.close()
