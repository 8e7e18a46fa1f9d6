"""The commands of the cache server. Names, arguments and replies are those of Redis; what is not here is an error."""

from __future__ import annotations

import fnmatch
import os
import re
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier import __version__
from kvtier.server import resp
from kvtier.server.keyspace import DATABASES, Reservation
from kvtier.server.resp import Argument
from kvtier.server.session import Refused, Session, key_refusal

REDIS_VERSION = "7.0.0"
"""The version whose behaviour the commands follow; clients ask for it."""

_INTEGER = "ERR value is not an integer or out of range"
_SYNTAX = "ERR syntax error"
_RANGE_MAX_BYTES = 1 << 20

Handler = Callable[[Session, list[bytes]], None]


@dataclass(frozen=True, slots=True)
class Spec:
    """arity as Redis counts it: with the name, negative for "at least". keys: first, last and step of the arguments
    that are keys, 0 for none."""

    handler: Handler
    arity: int
    keys: tuple[int, int, int] = (0, 0, 0)
    writes: bool = False
    open_to_strangers: bool = False


class CommandError(Exception):
    """A command that cannot be done. The message is the error reply."""


def execute(session: Session, args: list[Argument]) -> None:
    """Do one command and put its reply, error or not, into the session."""
    if not args:
        return
    # Values are in their places already; commands see the names and numbers around them.
    words = [a if isinstance(a, bytes) else b"" for a in args]
    name = words[0].upper()
    stats = session.shared.stats
    spec = TABLE.get(name)
    stats.command(name.decode(errors="replace").lower())
    try:
        if spec is None:
            shown = words[0][:64].decode(errors="replace")
            raise CommandError(f"ERR unknown command '{shown}'; this server is a cache of plain values")
        if len(args) < abs(spec.arity) or (spec.arity > 0 and len(args) != spec.arity):
            raise CommandError(f"ERR wrong number of arguments for '{name.decode().lower()}' command")
        if session.user is None and not spec.open_to_strangers:
            stats.denied()
            raise CommandError("NOAUTH Authentication required.")
        _check_permission(session, spec, words)
        if name in (b"SET", b"MSET"):
            (_set if name == b"SET" else _mset)(session, args, words)
        else:
            spec.handler(session, words)
    except CommandError as e:
        session.reply(resp.error(str(e)))


def _check_permission(session: Session, spec: Spec, words: Sequence[bytes]) -> None:
    first, last, step = spec.keys
    user = session.user
    if user is None:
        return
    refusal = "NOPERM this user may only read" if spec.writes and user.read_only else ""
    if not refusal and first:
        refusal = key_refusal(user, words[first : len(words) + last + 1 if last < 0 else last + 1 : step])
    if refusal:
        session.shared.stats.denied()
        raise CommandError(refusal)


# ---- connection


def _hello(session: Session, words: list[bytes]) -> None:
    rest = words[1:]
    protocol = session.protocol
    if rest:
        if rest[0] not in (b"2", b"3"):
            raise CommandError("NOPROTO unsupported protocol version")
        protocol = int(rest[0])
        rest = rest[1:]
    name = session.name
    while rest:
        option = rest[0].upper()
        if option == b"AUTH" and len(rest) >= 3:
            _log_in(session, rest[1], rest[2])
            rest = rest[3:]
        elif option == b"SETNAME" and len(rest) >= 2:
            name = rest[1]
            rest = rest[2:]
        else:
            raise CommandError(f"ERR Syntax error in HELLO option '{rest[0].decode(errors='replace')}'")
    if session.user is None:
        raise CommandError(
            "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH "
            "<user> <pass> option can be used to authenticate the client and select the RESP protocol version at the "
            "same time"
        )
    session.protocol, session.name = protocol, name
    pairs = [
        (b"server", resp.bulk(b"redis")),
        (b"version", resp.bulk(REDIS_VERSION.encode())),
        (b"proto", resp.integer(protocol)),
        (b"id", resp.integer(session.id)),
        (b"mode", resp.bulk(b"standalone")),
        (b"role", resp.bulk(b"master")),
        (b"modules", resp.array([])),
    ]
    session.reply(resp.mapping([(resp.bulk(k), v) for k, v in pairs], protocol))


def _auth(session: Session, words: list[bytes]) -> None:
    if len(words) > 3:
        raise CommandError(_SYNTAX)
    if session.shared.users.open_to_all:
        raise CommandError(
            "ERR AUTH <password> called without any password configured for the default user. Are you sure your "
            "configuration is correct?"
        )
    _log_in(session, words[1] if len(words) == 3 else b"default", words[-1])
    session.reply(resp.OK)


def _log_in(session: Session, name: bytes, password: bytes) -> None:
    users = session.shared.users
    if users.open_to_all and name == b"default":
        return
    user = users.authenticate(name.decode(errors="replace"), password)
    if user is None:
        session.shared.stats.denied()
        time.sleep(0.01)  # guessing takes time; other clients have threads of their own
        raise CommandError("WRONGPASS invalid username-password pair or user is disabled.")
    session.log_in(user)


def _ping(session: Session, words: list[bytes]) -> None:
    if len(words) > 2:
        raise CommandError("ERR wrong number of arguments for 'ping' command")
    session.reply(resp.bulk(words[1]) if len(words) == 2 else resp.PONG)


def _echo(session: Session, words: list[bytes]) -> None:
    session.reply(resp.bulk(words[1]))


def _select(session: Session, words: list[bytes]) -> None:
    database = _number(words[1])
    if not 0 <= database < DATABASES:
        raise CommandError("ERR DB index is out of range")
    session.database = database
    session.reply(resp.OK)


def _client(session: Session, words: list[bytes]) -> None:
    what = words[1].upper()
    if what == b"SETINFO" and len(words) == 4:
        session.reply(resp.OK)
    elif what == b"SETNAME" and len(words) == 3:
        if re.search(rb"[\s\x00-\x1f]", words[2]):
            raise CommandError("ERR Client names cannot contain spaces, newlines or special characters.")
        session.name = words[2]
        session.reply(resp.OK)
    elif what == b"GETNAME" and len(words) == 2:
        session.reply(resp.bulk(session.name) if session.name else resp.null(session.protocol))
    elif what == b"ID" and len(words) == 2:
        session.reply(resp.integer(session.id))
    elif what in (b"INFO", b"LIST") and len(words) == 2:
        user = session.user.name if session.user is not None else ""
        line = f"id={session.id} addr={session.peer} name={session.name.decode(errors='replace')} "
        line += f"age={int(time.time() - session.since)} db={session.database} user={user} resp={session.protocol}\n"
        session.reply(resp.bulk(line.encode()))
    else:
        shown = words[1][:64].decode(errors="replace")
        raise CommandError(f"ERR unknown subcommand or wrong number of arguments for '{shown}'. Try CLIENT ID.")


def _quit(session: Session, words: list[bytes]) -> None:
    session.reply(resp.OK)
    session.leaving = True


# ---- values


def _get(session: Session, words: list[bytes]) -> None:
    session.reply_value(session.keyspace.read(session.database, words[1]))


def _mget(session: Session, words: list[bytes]) -> None:
    session.reply(b"*%d\r\n" % (len(words) - 1))
    for key in words[1:]:
        session.reply_value(session.keyspace.read(session.database, key))


def _getrange(session: Session, words: list[bytes]) -> None:
    start, end = _number(words[2]), _number(words[3])
    reading = session.keyspace.read(session.database, words[1])
    if reading is None:
        session.reply(resp.bulk(b""))
        return
    try:
        length = len(reading.view)
        start = max(0, start + length if start < 0 else start)
        end = min(length - 1, end + length if end < 0 else end)
        if end - start >= _RANGE_MAX_BYTES:
            raise CommandError(f"ERR a range of more than {_RANGE_MAX_BYTES} bytes; use GET")
        session.reply(resp.bulk(bytes(reading.view[start : end + 1]) if start <= end else b""))
    finally:
        session.keyspace.release(reading)


def _set(session: Session, args: list[Argument], words: list[bytes]) -> None:
    expires_ms, only_new = 0, False
    rest = words[3:]
    while rest:
        option = rest[0].upper()
        if option == b"NX":
            only_new, rest = True, rest[1:]
        elif option in (b"EX", b"PX") and len(rest) >= 2 and not expires_ms:
            expires_ms, rest = _deadline(rest[1], 1000 if option == b"EX" else 1, "set"), rest[2:]
        else:
            raise CommandError(_SYNTAX)
    place = _placed(session, args[2])
    session.take(place)
    done = session.keyspace.commit(session.database, words[1], place, expires_ms=expires_ms, only_new=only_new)
    session.reply(resp.OK if done else resp.null(session.protocol))


def _mset(session: Session, args: list[Argument], words: list[bytes]) -> None:
    if len(args) % 2 == 0:
        raise CommandError("ERR wrong number of arguments for 'mset' command")
    places = [_placed(session, args[i]) for i in range(2, len(args), 2)]
    for key, place in zip(words[1::2], places, strict=True):
        session.take(place)
        session.keyspace.commit(session.database, key, place)
    session.reply(resp.OK)


def _placed(session: Session, value: Argument) -> Reservation:
    if isinstance(value, Refused):
        if value.text.startswith("NOPERM"):
            session.shared.stats.denied()
        raise CommandError(value.text)
    if not isinstance(value, Reservation):
        raise CommandError("ERR send the value as a bulk string")
    return value


def _del(session: Session, words: list[bytes]) -> None:
    session.reply(resp.integer(session.keyspace.delete(session.database, words[1:])))


def _exists(session: Session, words: list[bytes]) -> None:
    session.reply(resp.integer(sum(session.keyspace.find(session.database, key) is not None for key in words[1:])))


def _strlen(session: Session, words: list[bytes]) -> None:
    entry = session.keyspace.find(session.database, words[1])
    session.reply(resp.integer(0 if entry is None else entry.nbytes))


def _ttl(session: Session, words: list[bytes]) -> None:
    entry = session.keyspace.find(session.database, words[1])
    if entry is None or not entry.expires_ms:
        session.reply(resp.integer(-2 if entry is None else -1))
        return
    left_ms = max(0, entry.expires_ms - int(time.time() * 1000))
    session.reply(resp.integer(left_ms if words[0].upper() == b"PTTL" else (left_ms + 500) // 1000))


def _expire(session: Session, words: list[bytes]) -> None:
    if len(words) > 3:
        raise CommandError("ERR this server's EXPIRE takes no options")
    unit = 1 if words[0].upper() == b"PEXPIRE" else 1000
    if _number(words[2]) <= 0:
        session.reply(resp.integer(session.keyspace.delete(session.database, [words[1]])))
        return
    done = session.keyspace.expire(session.database, words[1], _deadline(words[2], unit, "expire"))
    session.reply(resp.integer(int(done)))


# ---- keys


def _dbsize(session: Session, words: list[bytes]) -> None:
    session.reply(resp.integer(_size(session, session.database)))


def _scan(session: Session, words: list[bytes]) -> None:
    cursor = _number(words[1])
    if cursor < 0:
        raise CommandError("ERR invalid cursor")
    count, pattern, kind = 10, b"*", b"string"
    rest = words[2:]
    while len(rest) >= 2:
        option = rest[0].upper()
        if option == b"COUNT":
            count = _number(rest[1])
        elif option == b"MATCH":
            pattern = rest[1]
        elif option == b"TYPE":
            kind = rest[1].lower()
        else:
            raise CommandError(_SYNTAX)
        rest = rest[2:]
    if rest or count < 1:
        raise CommandError(_SYNTAX)
    cursor, keys = session.keyspace.scan(session.database, cursor, count)
    matches = _glob(pattern)
    mine = [k for k in keys if _owns(session, k) and kind == b"string" and matches.match(k)]
    session.reply(resp.array([resp.bulk(b"%d" % cursor), resp.array([resp.bulk(k) for k in mine])]))


def _flushdb(session: Session, words: list[bytes]) -> None:
    if len(words) > 2 or (len(words) == 2 and words[1].upper() not in (b"ASYNC", b"SYNC")):
        raise CommandError(_SYNTAX)
    session.keyspace.flush(session.database, lambda key: _owns(session, key))
    session.reply(resp.OK)


# ---- the server itself


def _info(session: Session, words: list[bytes]) -> None:
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
            f"db{n}": f"keys={size},expires=0,avg_ttl=0" for n in range(DATABASES) if (size := _size(session, n))
        },
    }
    lines = []
    for title, fields in sections.items():
        if not wanted or title in wanted:
            lines += [f"# {title.capitalize()}", *(f"{k}:{v}" for k, v in fields.items()), ""]
    return "\r\n".join(lines)


def _cpu() -> dict[str, str]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"used_cpu_sys": f"{used.ru_stime:.6f}", "used_cpu_user": f"{used.ru_utime:.6f}"}


def _rss_bytes() -> int:
    with open("/proc/self/statm") as f:  # noqa: PTH123
        return int(f.read().split()[1]) * resource.getpagesize()


def _config(session: Session, words: list[bytes]) -> None:
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


def _command(session: Session, words: list[bytes]) -> None:
    what = words[1].upper() if len(words) > 1 else b""
    if what == b"COUNT":
        session.reply(resp.integer(len(TABLE)))
    elif what == b"DOCS":
        session.reply(resp.mapping([], session.protocol))
    elif what in (b"", b"INFO"):
        names = [w.upper() for w in words[2:]] if len(words) > 2 else list(TABLE)
        session.reply(resp.array([_describe(n) if n in TABLE else resp.null(2) for n in names]))
    else:
        raise CommandError("ERR unknown subcommand; known: COUNT, DOCS, INFO")


def _describe(name: bytes) -> bytes:
    spec = TABLE[name]
    flag = b"+write\r\n" if spec.writes else b"+readonly\r\n"
    described = [resp.bulk(name.lower()), resp.integer(spec.arity), resp.array([flag])]
    described += [resp.integer(n) for n in spec.keys]
    # Categories, tips, key specifications and subcommands: none of them is told.
    return resp.array([*described, *[resp.array([])] * 4])


# ---- helpers


def _owns(session: Session, key: bytes) -> bool:
    return session.user is not None and session.user.owns(key)


def _size(session: Session, database: int) -> int:
    """Keys of a database that the user can see."""
    user = session.user
    if user is None:
        return 0
    return session.keyspace.size(database, user.owns if user.prefixes else None)


def _number(word: bytes) -> int:
    if not re.fullmatch(rb"-?\d{1,18}", word):
        raise CommandError(_INTEGER)
    return int(word)


def _deadline(word: bytes, unit_ms: int, command: str) -> int:
    """Unix time in ms, `word` units from now."""
    number = _number(word)
    if number <= 0 or number * unit_ms > 1 << 50:
        raise CommandError(f"ERR invalid expire time in '{command}' command")
    return int(time.time() * 1000) + number * unit_ms


def _glob(pattern: bytes) -> re.Pattern[bytes]:
    """Redis' patterns: ``*``, ``?``, ``[a-c]``, ``[^a]`` and a backslash before what is meant as it is."""
    out, at = b"", 0
    while at < len(pattern):
        char = pattern[at : at + 1]
        if char == b"*":
            out += b".*"
        elif char == b"?":
            out += b"."
        elif char == b"[" and (end := pattern.find(b"]", at + 1)) > at:
            inner = pattern[at + 1 : end]
            negated = inner.startswith(b"^")
            members = re.sub(rb"([\\\[\]^])", rb"\\\1", inner[negated:])
            out += b"[" + b"^" * negated + members + b"]" if members else b"(?!)"
            at = end
        elif char == b"\\" and at + 1 < len(pattern):
            at += 1
            out += re.escape(pattern[at : at + 1])
        else:
            out += re.escape(char)
        at += 1
    try:
        return re.compile(out + rb"\Z", re.DOTALL)
    except re.error:
        raise CommandError(_SYNTAX) from None


def _in_place(session: Session, words: list[bytes]) -> None:
    raise CommandError("ERR send the value as a bulk string")


TABLE: dict[bytes, Spec] = {
    b"HELLO": Spec(_hello, -1, open_to_strangers=True),
    b"AUTH": Spec(_auth, -2, open_to_strangers=True),
    b"QUIT": Spec(_quit, -1, open_to_strangers=True),
    b"PING": Spec(_ping, -1),
    b"ECHO": Spec(_echo, 2),
    b"SELECT": Spec(_select, 2),
    b"CLIENT": Spec(_client, -2),
    b"INFO": Spec(_info, -1),
    b"CONFIG": Spec(_config, -2),
    b"COMMAND": Spec(_command, -1),
    b"GET": Spec(_get, 2, (1, 1, 1)),
    b"MGET": Spec(_mget, -2, (1, -1, 1)),
    b"GETRANGE": Spec(_getrange, 4, (1, 1, 1)),
    b"SET": Spec(_in_place, -3, (1, 1, 1), writes=True),
    b"MSET": Spec(_in_place, -3, (1, -1, 2), writes=True),
    b"DEL": Spec(_del, -2, (1, -1, 1), writes=True),
    b"UNLINK": Spec(_del, -2, (1, -1, 1), writes=True),
    b"EXISTS": Spec(_exists, -2, (1, -1, 1)),
    b"STRLEN": Spec(_strlen, 2, (1, 1, 1)),
    b"TTL": Spec(_ttl, 2, (1, 1, 1)),
    b"PTTL": Spec(_ttl, 2, (1, 1, 1)),
    b"EXPIRE": Spec(_expire, -3, (1, 1, 1), writes=True),
    b"PEXPIRE": Spec(_expire, -3, (1, 1, 1), writes=True),
    b"DBSIZE": Spec(_dbsize, 1),
    b"SCAN": Spec(_scan, -2),
    b"FLUSHDB": Spec(_flushdb, -1, writes=True),
}

NAMES = tuple(name.decode().lower() for name in TABLE)
