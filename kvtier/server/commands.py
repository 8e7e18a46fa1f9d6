"""The commands of the cache server. Names, arguments and replies are those of Redis; what is not here is an error."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.server import connection_commands, resp, server_commands, value_commands
from kvtier.server.auth import User
from kvtier.server.command import CommandError, Spec
from kvtier.server.resp import Argument, ProtocolError
from kvtier.server.session import Session, key_refusal

_OF_HTTP = (b"POST", b"HOST:")
"""A web page can make its reader's browser send what it likes to ports of that machine, but only behind these."""


def execute(session: Session, args: list[Argument]) -> None:
    """Do one command and put its reply, error or not, into the session. Raises ProtocolError for what a browser sends:
    nothing that follows is to be done."""
    if not args:
        return
    # Values are in their places already; commands look at the names and numbers around them.
    words: list[bytes] = args  # type: ignore[assignment]
    name = words[0].upper()
    stats = session.shared.stats
    spec = TABLE.get(name)
    stats.command(name, session.received_bytes)
    session.received_bytes = 0
    try:
        if spec is None:
            if name in _OF_HTTP:
                raise ProtocolError("this is a request of HTTP; metrics and health have a port of their own")
            shown = words[0][:64].decode(errors="replace")
            raise CommandError(f"ERR unknown command '{shown}'; this server is a cache of plain values")
        arity = spec.arity
        if len(args) != arity if arity > 0 else len(args) < -arity:
            raise CommandError(f"ERR wrong number of arguments for '{name.decode().lower()}' command")
        user = session.user
        if user is None:
            if not spec.open_to_strangers:
                stats.denied()
                raise CommandError("NOAUTH Authentication required.")
        elif user.prefixes or user.read_only:
            _check_permission(session, user, spec, words)
        spec.handler(session, words)
    except CommandError as e:
        session.reply(resp.error(str(e)))


def _check_permission(session: Session, user: User, spec: Spec, words: Sequence[bytes]) -> None:
    first, last, step = spec.keys
    refusal = "NOPERM this user may only read" if spec.writes and user.read_only else ""
    if not refusal and first:
        refusal = key_refusal(user, words[first : len(words) + last + 1 if last < 0 else last + 1 : step])
    if refusal:
        session.shared.stats.denied()
        raise CommandError(refusal)


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


TABLE: dict[bytes, Spec] = {
    b"HELLO": Spec(connection_commands.hello, -1, open_to_strangers=True),
    b"AUTH": Spec(connection_commands.auth, -2, open_to_strangers=True),
    b"QUIT": Spec(connection_commands.quit, -1, open_to_strangers=True),
    b"PING": Spec(connection_commands.ping, -1),
    b"ECHO": Spec(connection_commands.echo, 2),
    b"SELECT": Spec(connection_commands.select, 2),
    b"CLIENT": Spec(connection_commands.client, -2),
    b"INFO": Spec(server_commands.info, -1),
    b"CONFIG": Spec(server_commands.config, -2),
    b"COMMAND": Spec(_command, -1),
    b"GET": Spec(value_commands.get, 2, (1, 1, 1)),
    b"MGET": Spec(value_commands.mget, -2, (1, -1, 1)),
    b"GETRANGE": Spec(value_commands.getrange, 4, (1, 1, 1)),
    b"SET": Spec(value_commands.set_, -3, (1, 1, 1), writes=True),
    b"MSET": Spec(value_commands.mset, -3, (1, -1, 2), writes=True),
    b"DEL": Spec(value_commands.delete, -2, (1, -1, 1), writes=True),
    b"UNLINK": Spec(value_commands.delete, -2, (1, -1, 1), writes=True),
    b"EXISTS": Spec(value_commands.exists, -2, (1, -1, 1)),
    b"STRLEN": Spec(value_commands.strlen, 2, (1, 1, 1)),
    b"TTL": Spec(value_commands.ttl, 2, (1, 1, 1)),
    b"PTTL": Spec(value_commands.ttl, 2, (1, 1, 1)),
    b"EXPIRE": Spec(value_commands.expire, -3, (1, 1, 1), writes=True),
    b"PEXPIRE": Spec(value_commands.expire, -3, (1, 1, 1), writes=True),
    b"DBSIZE": Spec(value_commands.dbsize, 1),
    b"SCAN": Spec(value_commands.scan, -2),
    b"FLUSHDB": Spec(value_commands.flushdb, -1, writes=True),
}

NAMES = tuple(name.decode().lower() for name in TABLE)
