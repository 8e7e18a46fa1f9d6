"""Commands about the server: what it is, how it is set, what it did."""

from __future__ import annotations

import fnmatch
import os
import resource
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvtier import __version__
from kvtier.server import resp
from kvtier.server.command import CommandError
from kvtier.server.connection_commands import REDIS_VERSION
from kvtier.server.keyspace import DATABASES
from kvtier.server.session import Session
from kvtier.server.value_commands import size


def info(session: Session, words: list[bytes]) -> None:
    wanted = {w.lower().decode(errors="replace") for w in words[1:]} - {"default", "all", "everything"}
    session.reply(resp.bulk(_info_text(session, wanted).encode()))


def _info_text(session: Session, wanted: set[str]) -> str:
    shared = session.shared
    totals = shared.stats.totals()
    usage = shared.keyspace.store.host.usage()
    sections: dict[str, dict[str, Any]] = {
        "server": {
            "redis_version": REDIS_VERSION,
            "redis_mode": "standalone",
            "kvtier_version": __version__,
            "process_id": os.getpid(),
            "uptime_in_seconds": int(time.time() - shared.started),
        },
        "clients": {
            "connected_clients": shared.stats.connections,
            "maxclients": shared.options.max_connections,
            "blocked_clients": 0,  # no command here waits for another client; redis-cli --stat prints it
        },
        "memory": {
            "used_memory": usage.used_bytes,
            "used_memory_rss": _rss_bytes(),
            "maxmemory": usage.capacity_bytes,
            "maxmemory_policy": "allkeys-lru",
        },
        "stats": {
            "total_connections_received": totals["connections"],
            "total_commands_processed": totals["commands"],
            "rejected_connections": totals["rejected"],
            "expired_keys": shared.keyspace.expired,
            "evicted_keys": usage.evicted_pages,
        },
        "replication": {"role": "master", "connected_slaves": 0},
        "cpu": _cpu(),
        "cluster": {"cluster_enabled": 0},
        "keyspace": {
            f"db{n}": f"keys={keys},expires={expiring},avg_ttl=0"
            for n, (keys, expiring) in sorted(_keys(session).items())
            if keys
        },
    }
    lines = []
    for title, fields in sections.items():
        if not wanted or title in wanted:
            lines += [f"# {title.capitalize()}", *(f"{k}:{v}" for k, v in fields.items()), ""]
    return "\r\n".join(lines)


def _keys(session: Session) -> Mapping[int, tuple[int, int]]:
    """How many keys the user sees, and how many of them expire, by database: those of a user with prefixes are counted,
    once for all databases."""
    user, keyspace = session.user, session.keyspace
    if user is None or not user.prefixes:
        return {n: (size(session, n), keyspace.expiring(n)) for n in range(DATABASES)}
    mine = [entry for entry in keyspace.entries() if user.owns(entry.key)]
    expiring = Counter(entry.database for entry in mine if entry.expires_ms)
    return {n: (keys, expiring[n]) for n, keys in Counter(entry.database for entry in mine).items()}


def _cpu() -> dict[str, str]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"used_cpu_sys": f"{used.ru_stime:.6f}", "used_cpu_user": f"{used.ru_utime:.6f}"}


def _rss_bytes() -> int:
    with open("/proc/self/statm") as f:  # noqa: PTH123
        return int(f.read().split()[1]) * resource.getpagesize()


def config(session: Session, words: list[bytes]) -> None:
    if words[1].upper() != b"GET" or len(words) < 3:
        raise CommandError("ERR only CONFIG GET is known; options are set when the server is started")
    options = session.shared.options
    usage = session.shared.keyspace.store.host.usage()
    known = {
        "maxmemory": str(usage.capacity_bytes),
        "maxmemory-policy": "allkeys-lru",
        "maxclients": str(options.max_connections),
        "proto-max-bulk-len": str(options.max_value_bytes),
        "databases": str(DATABASES),
        "save": "",
        "appendonly": "no",
        "timeout": "0",
    }
    patterns = [w.decode(errors="replace").lower() for w in words[2:]]
    found = [(k, v) for k, v in known.items() if any(fnmatch.fnmatchcase(k, p) for p in patterns)]
    session.reply(resp.mapping([(resp.bulk(k.encode()), resp.bulk(v.encode())) for k, v in found], session.protocol))
