"""Commands about values and their keys. A user sees its own keys only; that it may touch those that a command names was
found out before."""

from __future__ import annotations

import time

from kvtier.server import resp
from kvtier.server.command import SYNTAX, CommandError, deadline, glob, number
from kvtier.server.keyspace import Reservation
from kvtier.server.session import Refused, Session

_RANGE_MAX_BYTES = 1 << 20


def get(session: Session, words: list[bytes]) -> None:
    session.reply_value(session.keyspace.read(session.database, words[1]))


def mget(session: Session, words: list[bytes]) -> None:
    session.reply(b"*%d\r\n" % (len(words) - 1))
    for key in words[1:]:
        session.reply_value(session.keyspace.read(session.database, key))


def getrange(session: Session, words: list[bytes]) -> None:
    start, end = number(words[2]), number(words[3])
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


def set_(session: Session, words: list[bytes]) -> None:
    expires_ms, only_new = 0, False
    rest = words[3:] if len(words) > 3 else []
    while rest:
        option = rest[0].upper()
        if option == b"NX":
            only_new, rest = True, rest[1:]
        elif option in (b"EX", b"PX") and len(rest) >= 2 and not expires_ms:
            expires_ms, rest = deadline(rest[1], 1000 if option == b"EX" else 1, "set"), rest[2:]
        else:
            raise CommandError(SYNTAX)
    places = session.places
    place = places[0] if len(places) == 1 else None
    if isinstance(place, Reservation):
        places.clear()
    else:
        (place,) = _values(session, 1)  # says why not
    done = session.keyspace.commit(session.database, words[1], place, expires_ms=expires_ms, only_new=only_new)
    session.reply(resp.OK if done else resp.null(session.protocol))


def mset(session: Session, words: list[bytes]) -> None:
    if len(words) % 2 == 0:
        raise CommandError("ERR wrong number of arguments for 'mset' command")
    for key, place in zip(words[1::2], _values(session, len(words) // 2), strict=True):
        session.places.remove(place)
        session.keyspace.commit(session.database, key, place)
    session.reply(resp.OK)


def _values(session: Session, count: int) -> list[Reservation]:
    """The values of the command: all of them, or an error."""
    values = []
    for place in session.places:
        if isinstance(place, Refused):
            if place.text.startswith("NOPERM"):
                session.shared.stats.denied()
            raise CommandError(place.text)
        values.append(place)
    if len(values) != count:
        raise CommandError("ERR send the value as a bulk string")
    return values


def delete(session: Session, words: list[bytes]) -> None:
    session.reply(resp.integer(session.keyspace.delete(session.database, words[1:])))


def exists(session: Session, words: list[bytes]) -> None:
    session.reply(resp.integer(sum(session.keyspace.find(session.database, key) is not None for key in words[1:])))


def strlen(session: Session, words: list[bytes]) -> None:
    entry = session.keyspace.find(session.database, words[1])
    session.reply(resp.integer(0 if entry is None else entry.nbytes))


def ttl(session: Session, words: list[bytes]) -> None:
    entry = session.keyspace.find(session.database, words[1])
    if entry is None or not entry.expires_ms:
        session.reply(resp.integer(-2 if entry is None else -1))
        return
    left_ms = max(0, entry.expires_ms - int(time.time() * 1000))
    session.reply(resp.integer(left_ms if words[0].upper() == b"PTTL" else (left_ms + 500) // 1000))


def expire(session: Session, words: list[bytes]) -> None:
    if len(words) > 3:
        raise CommandError("ERR this server's EXPIRE takes no options")
    unit = 1 if words[0].upper() == b"PEXPIRE" else 1000
    if number(words[2]) <= 0:
        session.reply(resp.integer(session.keyspace.delete(session.database, [words[1]])))
        return
    done = session.keyspace.expire(session.database, words[1], deadline(words[2], unit, "expire"))
    session.reply(resp.integer(int(done)))


def dbsize(session: Session, words: list[bytes]) -> None:
    session.reply(resp.integer(size(session, session.database)))


def scan(session: Session, words: list[bytes]) -> None:
    cursor = number(words[1])
    if cursor < 0:
        raise CommandError("ERR invalid cursor")
    count, pattern, kind = 10, b"*", b"string"
    rest = words[2:]
    while len(rest) >= 2:
        option = rest[0].upper()
        if option == b"COUNT":
            count = number(rest[1])
        elif option == b"MATCH":
            pattern = rest[1]
        elif option == b"TYPE":
            kind = rest[1].lower()
        else:
            raise CommandError(SYNTAX)
        rest = rest[2:]
    if rest or count < 1:
        raise CommandError(SYNTAX)
    cursor, keys = session.keyspace.scan(session.database, cursor, count)
    matches = glob(pattern)
    mine = [k for k in keys if _owns(session, k) and kind == b"string" and matches.match(k)]
    session.reply(resp.array([resp.bulk(b"%d" % cursor), resp.array([resp.bulk(k) for k in mine])]))


def flushdb(session: Session, words: list[bytes]) -> None:
    if len(words) > 2 or (len(words) == 2 and words[1].upper() not in (b"ASYNC", b"SYNC")):
        raise CommandError(SYNTAX)
    session.keyspace.flush(session.database, lambda key: _owns(session, key))
    session.reply(resp.OK)


def _owns(session: Session, key: bytes) -> bool:
    return session.user is not None and session.user.owns(key)


def size(session: Session, database: int) -> int:
    """Keys of a database that the user can see."""
    user = session.user
    if user is None:
        return 0
    return session.keyspace.size(database, user.owns if user.prefixes else None)
