"""Commands about the connection itself: who speaks, in which protocol, on which database."""

from __future__ import annotations

import re
import time

from kvtier.server import resp
from kvtier.server.command import SYNTAX, CommandError, number
from kvtier.server.keyspace import DATABASES
from kvtier.server.session import Session

REDIS_VERSION = "7.0.0"
"""The version whose behaviour the commands follow; clients ask for it."""


def hello(session: Session, words: list[bytes]) -> None:
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
            name = _client_name(rest[1])
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


def auth(session: Session, words: list[bytes]) -> None:
    if len(words) > 3:
        raise CommandError(SYNTAX)
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


def ping(session: Session, words: list[bytes]) -> None:
    if len(words) > 2:
        raise CommandError("ERR wrong number of arguments for 'ping' command")
    session.reply(resp.bulk(words[1]) if len(words) == 2 else resp.PONG)


def echo(session: Session, words: list[bytes]) -> None:
    session.reply(resp.bulk(words[1]))


def select(session: Session, words: list[bytes]) -> None:
    database = number(words[1])
    if not 0 <= database < DATABASES:
        raise CommandError("ERR DB index is out of range")
    session.database = database
    session.reply(resp.OK)


def client(session: Session, words: list[bytes]) -> None:
    what = words[1].upper()
    if what == b"SETINFO" and len(words) == 4:
        session.reply(resp.OK)
    elif what == b"SETNAME" and len(words) == 3:
        session.name = _client_name(words[2])
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


def _client_name(word: bytes) -> bytes:
    if re.search(rb"[\s\x00-\x1f]", word):
        raise CommandError("ERR Client names cannot contain spaces, newlines or special characters.")
    return word


def quit(session: Session, words: list[bytes]) -> None:
    session.reply(resp.OK)
    session.leaving = True
