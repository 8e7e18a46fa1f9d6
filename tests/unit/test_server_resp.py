"""The server's side of the protocol: commands in pieces, values into their places, nonsense refused."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.config import parse_config
from kvtier.errors import ConfigError
from kvtier.kernels import _native
from kvtier.keys import checksum
from kvtier.server import resp
from kvtier.server.auth import User, Users, digest
from kvtier.server.command import CommandError, Glob
from kvtier.server.options import Listen, ServerOptions
from kvtier.server.resp import Argument, Disconnected, Place, ProtocolError, Stream


class Hole:
    """A place of the given length; of none, where the value is to be thrown away."""

    def __init__(self, nbytes: int, *, keep: bool = True) -> None:
        self.view: memoryview | None = memoryview(bytearray(nbytes)) if keep else None
        self.page = b"a page's key"
        self.checksum = b""


def no_place(args: list[Argument], nbytes: int) -> Place | None:
    return None


@pytest.fixture
def pair() -> Iterator[tuple[Stream, socket.socket]]:
    ours, theirs = socket.socketpair()
    stream = Stream(ours, 0.3)
    stream.stranger = False
    yield stream, theirs
    stream.close()
    theirs.close()


def test_a_command_may_come_byte_by_byte(pair: tuple[Stream, socket.socket]) -> None:
    stream, client = pair

    def drip() -> None:
        for byte in b"*2\r\n$4\r\nECHO\r\n$3\r\na\r\n\r\n":
            client.sendall(bytes([byte]))

    thread = threading.Thread(target=drip)
    thread.start()
    assert stream.read_command(no_place) == [b"ECHO", b"a\r\n"]
    thread.join()


def test_many_commands_may_come_at_once(pair: tuple[Stream, socket.socket]) -> None:
    stream, client = pair
    client.sendall(b"*1\r\n$4\r\nPING\r\n" * 3 + b"GET  a\r\n\r\nPING\n")
    read = [stream.read_command(no_place) for _ in range(5)]
    assert read == [[b"PING"]] * 3 + [[b"GET", b"a"], [b"PING"]]
    assert not stream.buffered


def test_empty_lines_behind_a_command_hold_nothing_up(pair: tuple[Stream, socket.socket]) -> None:
    stream, client = pair
    client.sendall(b"PING\r\n\r\n\n")
    assert stream.read_command(no_place) == [b"PING"]
    assert not stream.buffered, "a session would wait for more before it answers"
    client.sendall(b"\r\n*1\r\n$4\r\nPING\r\n")
    assert stream.read_command(no_place) == [b"PING"]


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("nbytes", [0, 1, 100, 16 << 10, (16 << 10) + 1, 3 << 20])
def test_values_go_to_their_place_and_what_follows_is_read(
    pair: tuple[Stream, socket.socket], nbytes: int, keep: bool
) -> None:
    stream, client = pair
    value = (bytes(range(256)) * (nbytes // 256 + 1))[:nbytes]
    holes: list[Hole] = []

    def place(args: list[Argument], length: int) -> Place | None:
        if len(args) != 2:
            return None
        holes.append(Hole(length, keep=keep))
        return holes[-1]

    sent = b"*5\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n%b\r\n$2\r\nEX\r\n$2\r\n10\r\n*1\r\n$4\r\nPING\r\n" % (nbytes, value)
    thread = threading.Thread(target=client.sendall, args=(sent,))
    thread.start()
    assert stream.read_command(place) == [b"SET", b"k", holes[0], b"EX", b"10"]
    assert not keep or bytes(holes[0].view or b"") == value
    assert holes[0].checksum == (checksum(value, holes[0].page) if keep else b"")
    assert stream.read_command(place) == [b"PING"]
    thread.join()


WORDS = st.one_of(
    st.sampled_from([b"SET", b"set", b"MSET", b"GET", b"", b"\r\n", b"$1\r\n", b"*"]),
    st.binary(max_size=40),
    st.integers(0, 5000).map(bytes),
)
COMMANDS = st.lists(st.lists(WORDS, max_size=7), min_size=1, max_size=5)


def encoded(commands: list[list[bytes]]) -> bytes:
    return b"".join(b"*%d\r\n" % len(c) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in c) for c in commands)


def read_all(sent: bytes, pieces: list[int], *, fast: bool) -> list[Any]:
    """What a stream makes of `sent`, cut into pieces of these lengths (the last one again and again); ends in why it
    ended."""
    ours, theirs = socket.socketpair()
    stream = Stream(ours, 20.0)
    stream.stranger = False
    read_command = _native.read_command
    found: list[Any] = []

    def place(args: list[Argument], length: int) -> Place | None:
        name = args[0].upper() if args and isinstance(args[0], bytes) else b""
        at = len(args)
        return Hole(length) if (name == b"SET" and at == 2) or (name == b"MSET" and at and at % 2 == 0) else None

    def drip() -> None:
        at, turn = 0, 0
        with theirs, contextlib.suppress(OSError):  # the stream may give up in the middle
            while at < len(sent):
                n = pieces[min(turn, len(pieces) - 1)]
                theirs.sendall(sent[at : at + n])
                at, turn = at + n, turn + 1

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        if not fast:  # all in Python, as over TLS, and no word read ahead
            stream._tls, stream.fd = True, -1
            _native.read_command = lambda fd, buffer, start, end, *_: (start, end, None, 0, -1, 0)
        while True:
            args = stream.read_command(place)
            found.append([a if isinstance(a, bytes) else (bytes(a.view or b""), a.checksum) for a in args])
    except (ProtocolError, Disconnected) as e:
        found.append(type(e))
    finally:
        _native.read_command = read_command
        stream.close()
        thread.join()
    return found


@settings(max_examples=60, deadline=None)
@given(commands=COMMANDS, pieces=st.lists(st.integers(1, 3000), min_size=1, max_size=6))
def test_words_are_read_alike_with_and_without_the_native_reader(
    commands: list[list[bytes]], pieces: list[int]
) -> None:
    sent = encoded(commands)
    fast, plain = (read_all(sent, pieces, fast=fast) for fast in (True, False))
    assert fast == plain
    assert len(fast) == len(commands) + 1 and fast[-1] is Disconnected
    for found, command in zip(fast, commands, strict=False):
        assert [f if isinstance(f, bytes) else f[0] for f in found] == command


@settings(max_examples=60, deadline=None)
@given(commands=COMMANDS, at=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_nonsense_is_read_alike_with_and_without_the_native_reader(
    commands: list[list[bytes]], at: int, byte: int
) -> None:
    sent = bytearray(encoded(commands))
    sent[at % len(sent)] = byte
    fast, plain = (read_all(bytes(sent), [len(sent)], fast=fast) for fast in (True, False))
    assert fast == plain


@pytest.mark.parametrize(
    "sent",
    [
        b"*x\r\n", b"*-5\r\n", b"*100000000\r\n", b"*1\r\n:5\r\n", b"*1\r\n$-1\r\n", b"*1\r\n$abc\r\n",
        b"*1\r\n$99999999\r\n", b"*1\r\n$2\r\nabc\r\n", b"x" * 20000,
    ],
)  # fmt: skip
def test_nonsense_is_refused(pair: tuple[Stream, socket.socket], sent: bytes) -> None:
    stream, client = pair
    client.sendall(sent)
    with pytest.raises(ProtocolError):
        stream.read_command(no_place)


def test_strangers_can_send_little(pair: tuple[Stream, socket.socket]) -> None:
    stream, client = pair
    stream.stranger = True
    client.sendall(b"*3\r\n$4\r\nAUTH\r\n$1\r\nu\r\n$1\r\np\r\n*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1000000\r\n")
    assert stream.read_command(no_place) == [b"AUTH", b"u", b"p"]
    with pytest.raises(ProtocolError):
        stream.read_command(no_place)


def test_a_silent_stranger_is_not_waited_for_and_a_silent_friend_is(pair: tuple[Stream, socket.socket]) -> None:
    stream, client = pair
    timer = threading.Timer(0.6, client.sendall, (b"PING\r\n",))
    timer.start()
    assert stream.read_command(no_place) == [b"PING"]
    timer.join()
    stream.stranger = True
    with pytest.raises(Disconnected):
        stream.read_command(no_place)


def test_a_command_left_half_sent_ends_the_connection(pair: tuple[Stream, socket.socket]) -> None:
    stream, client = pair
    client.sendall(b"*2\r\n$3\r\nGET\r\n")
    with pytest.raises(Disconnected, match="half sent"):
        stream.read_command(no_place)


def test_a_reply_not_taken_ends_the_connection(pair: tuple[Stream, socket.socket]) -> None:
    stream, _client = pair
    with pytest.raises(Disconnected, match="half taken"):
        stream.send([bytes(8 << 20)])


def test_replies() -> None:
    assert resp.error("ERR a\r\nb") == b"-ERR a  b\r\n"
    assert resp.mapping([(resp.bulk(b"a"), resp.integer(1))], 2) == b"*2\r\n$1\r\na\r\n:1\r\n"
    assert resp.mapping([(resp.bulk(b"a"), resp.integer(1))], 3) == b"%1\r\n$1\r\na\r\n:1\r\n"
    assert (resp.null(2), resp.null(3)) == (b"$-1\r\n", b"_\r\n")


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (b"*", [b"", b"a\nb"], []),
        (b"a?c", [b"abc"], [b"ac", b"abbc"]),
        (b"a[b-d]", [b"ab", b"ad"], [b"ae"]),
        (b"a[^b]", [b"ac"], [b"ab"]),
        (b"a\\*", [b"a*"], [b"ab"]),
        (b"a.c", [b"a.c"], [b"abc"]),
        (b"", [b""], [b"a"]),
        (b"a*", [b"a", b"ab", b"a\n"], [b"", b"ba"]),
        (b"*a", [b"a", b"ba"], [b"ab", b""]),
        (b"a*a", [b"aa", b"aba"], [b"a", b"ab"]),
        (b"a**b*?", [b"abc", b"axbb"], [b"ab", b"acb"]),
        (b"*ab*ab*", [b"abab", b"xabyabz"], [b"ab", b"aab"]),
        (b"[d-b]", [b"c"], [b"a", b"-"]),
        (b"[a&&b||c~~d--e]", [b"a", b"&", b"|", b"~", b"-"], [b"f", b"g"]),
        (b"[^]", [b"a"], [b"", b"ab"]),
        (b"[]", [], [b"", b"a", b"]"]),
        (b"[a", [b"[a"], [b"a"]),
        (b"a\\", [b"a\\"], [b"a"]),
        (b"[\x00-\xff]", [b"\xfe", b"\n"], [b""]),
    ],
)
def test_patterns_are_those_of_redis(pattern: bytes, yes: list[bytes], no: list[bytes]) -> None:
    assert [k for k in yes + no if Glob(pattern).match(k)] == yes


@given(pattern=st.text("ab*?", max_size=8), key=st.text("ab", max_size=8))
@settings(deadline=None)
def test_patterns_match_what_an_obvious_matcher_matches(pattern: str, key: str) -> None:
    def obvious(p: str, k: str) -> bool:
        if not p:
            return not k
        if p[0] == "*":
            return obvious(p[1:], k) or (bool(k) and obvious(p, k[1:]))
        return bool(k) and p[0] in ("?", k[0]) and obvious(p[1:], k[1:])

    assert Glob(pattern.encode()).match(key.encode()) == obvious(pattern, key)


def test_a_pattern_that_nothing_matches_keeps_nobody_waiting() -> None:
    """One that tries every way to place its stars would take longer than the sun has."""
    key = b"a" * 240
    for pattern in (b"a*" * 100 + b"b", b"*a" * 120 + b"b", b"?*" * 200 + b"b"):
        assert not Glob(pattern).match(key)
    assert Glob(b"a*" * 119 + b"a").match(key)
    assert not Glob(b"x" * 4096).match(key)
    with pytest.raises(CommandError, match="4097 bytes"):
        Glob(b"*" * 4097)


def test_users() -> None:
    assert Users().open_to_all and Users().first is not None
    users = Users([User("a", digest("x"), (b"a:",), quota_bytes=10), User("b", digest("y"))], "z")
    assert users.first is None
    named = users.authenticate("a", b"x")
    assert named is not None and named.owns(b"a:1") and not named.owns(b"b:1")
    assert users.authenticate("default", b"z") is not None
    for name, password in (("a", b"y"), ("nobody", b"x"), ("default", b""), ("nobody", b"")):
        assert users.authenticate(name, password) is None
    assert (users.owner(b"a:1"), users.owner(b"b:1"), users.quota("a")) == ("a", "", 10)
    assert "secret" not in repr(User("u", digest("x")))
    with pytest.raises(ConfigError, match="twice"):
        Users([User("a", None), User("a", None)])


@pytest.mark.parametrize(
    ("text", "local"),
    [
        ("unix:/run/x.sock", True), ("tcp:127.0.0.1:0", True), ("tcp:localhost:1", True), ("tcp:[::1]:1", True),
        ("tcp:0.0.0.0:1", False), ("tls:10.0.0.1:1", False), ("tcp:some.host:1", False), ("tcp:[::]:1", False),
    ],
)  # fmt: skip
def test_where_to_listen(text: str, local: bool) -> None:
    listen = Listen.parse(text)
    assert listen.local == local
    assert Listen.parse(str(listen)) == listen
    if not local and not listen.tls:
        with pytest.raises(ConfigError, match="reachable from other machines"):
            ServerOptions([listen]).check()
        ServerOptions([listen], Users(password="x")).check()


@pytest.mark.parametrize(
    "text", ["", "tcp", "tcp:", "udp:1.2.3.4:5", "tcp:1.2.3.4:x", "tcp:h:99999", "unix:" + "x" * 200]
)
def test_where_not_to_listen(text: str) -> None:
    with pytest.raises(ConfigError, match="listen"):
        Listen.parse(text)


def test_an_empty_prefix_is_refused(tmp_path: Path) -> None:
    """Every key begins with nothing: the user would see them all."""
    (tmp_path / "secret").write_text("x")
    user = {"name": "a", "password_file": str(tmp_path / "secret"), "prefixes": ["a:", ""]}
    block = parse_config(
        {"tiers": [{"type": "host", "capacity": "1MiB"}], "server": {"listen": ["unix:x.sock"], "users": [user]}}
    )
    assert block.server is not None
    with pytest.raises(ConfigError, match="leave prefixes out"):
        ServerOptions.of(block.server)


def test_what_must_not_be() -> None:
    with pytest.raises(ConfigError, match="at least one place"):
        ServerOptions([]).check()
    with pytest.raises(ConfigError, match="needs a certificate"):
        ServerOptions([Listen.parse("tls:127.0.0.1:0")]).check()
    with pytest.raises(ConfigError, match="is there twice"):
        ServerOptions([Listen.parse("tcp:127.0.0.1:1"), Listen.parse("tls:127.0.0.1:1")]).check()
    ServerOptions([Listen.parse("tcp:127.0.0.1:0"), Listen.parse("tcp:127.0.0.1:0")]).check()


@pytest.mark.parametrize(
    ("listen", "url", "itself"),
    [
        ("unix:/run/kvtier/k.sock", "unix:///run/kvtier/../kvtier/k.sock", True),
        ("unix:/run/kvtier/k.sock", "unix:///run/kvtier/other.sock", False),
        ("unix:/run/kvtier/k.sock", "redis://127.0.0.1:6380", False),
        ("tcp:127.0.0.1:6380", "redis://localhost:6380/0", True),
        ("tcp:127.0.0.1:6380", "redis://localhost:6379/0", False),
        ("tcp:127.0.0.1:6380", "redis://cache-1:6380/0", False),
        ("tls:0.0.0.0:6380", "rediss://cache-1:6380,127.0.0.1:6380", True),
        ("tls:[::]:6380", f"rediss://{socket.gethostname()}:6380", True),
        ("tls:192.0.2.7:6380", "rediss://user@192.0.2.7:6380/3", True),
        ("tls:192.0.2.7:6380", "redis://127.0.0.1:6380", False),
    ],
)
def test_a_tier_that_is_the_server_itself_is_refused(listen: str, url: str, itself: bool) -> None:
    tiers = [{"type": "host", "capacity": "1MiB"}, {"type": "redis", "url": url}]
    options = ServerOptions([Listen.parse(listen)])
    config = parse_config({"tiers": tiers, "server": {}})
    if not itself:
        options.check_block(config)
        return
    with pytest.raises(ConfigError, match="where this server listens itself"):
        options.check_block(config)
