"""What goes wrong in the middle of a batch whose replies are asked for piece by piece: every command has its own reply,
or a name for why not, connections go back or are dropped, and the breaker counts what the server did."""

from __future__ import annotations

import threading
import time

import pytest

from kvtier.abc.tier import GetStatus
from kvtier.storage_backends.redis.breaker import BreakerState
from kvtier.storage_backends.redis.connection import Connection
from kvtier.storage_backends.redis.exchange import NoReply
from kvtier.storage_backends.redis.options import RedisOptions
from kvtier.storage_backends.redis.record import pack_header
from kvtier.storage_backends.redis.tier import RedisTier
from kvtier.testing.pages import item_of, key_of
from tests.redis_exchanges import Batch, Client, keys_of, moved
from tests.redis_pages import get
from tests.scripted_redis import PATIENCE_S, Link, ScriptedServer

pytest.importorskip("redis", reason="redis-py is not installed: pip install 'kvtier[redis]'")

LARGE = 2 << 20
"""Three of such replies are asked for at a time."""
COUNT = 12


def answer(count: int, link: Link) -> list[bytes]:
    """Answer so many commands, and go on once everything has come that is sent before the next reply is read."""
    keys = link.keys(3)
    for n in range(count):
        link.answer(keys[n])
        if n + 3 < COUNT:
            keys += link.keys(1)
    return keys


@pytest.mark.parametrize("count", [0, 1, 5, COUNT - 1])
@pytest.mark.parametrize("reused", [False, True], ids=["fresh", "reused"])
def test_a_server_closes_after_some_replies(monkeypatch: pytest.MonkeyPatch, reused: bool, count: int) -> None:
    keys, before = keys_of(COUNT + 2)[:COUNT], keys_of(COUNT + 2)[COUNT:]

    def closing(link: Link) -> None:
        if reused:
            link.answer(*link.keys(2))
        answer(count, link)

    with Client(monkeypatch, ScriptedServer(closing, Link.answer_all)) as client:
        if reused:
            assert client.run(Batch(before)) == before
        results = client.run(Batch(keys, LARGE))
        (server,) = client.servers
        if reused and not count:  # it may have been closed since its last use: another one is tried
            assert results == keys
            assert client.failures(server) == 0
            assert client.open_connections() == [1]
        else:
            assert results == keys[:count] + [NoReply.DOWN] * (COUNT - count)
            assert client.failures(server) == 1
            assert client.open_connections() == [0]
        assert client.run(Batch(keys, LARGE)) == keys
        assert client.failures(server) == 0
        assert client.node(server).connected == 2


@pytest.mark.parametrize("count", [0, 1, 5, COUNT - 1])
@pytest.mark.parametrize("half", [b"", b"$4\r\na"], ids=["between replies", "in a reply"])
def test_a_server_freezes_after_some_replies(monkeypatch: pytest.MonkeyPatch, count: int, half: bytes) -> None:
    keys = keys_of(COUNT)

    def freezing(link: Link) -> None:
        answer(count, link)
        if half:
            link.send(half)
        link.wait_for_the_end()

    def before_reading(connection: Connection, i: int) -> None:
        if i == count:  # the clock that matters starts here
            connection.set_deadline(time.monotonic() + 0.2)

    with Client(monkeypatch, ScriptedServer(freezing, Link.answer_all)) as client:
        results = client.run(Batch(keys, LARGE, before_reading))
        assert results == keys[:count] + [NoReply.DEADLINE] * (COUNT - count)
        assert client.failures(client.servers[0]) == 1
        assert client.open_connections() == [0], "what still comes there must answer nothing else"
        assert client.run(Batch(keys, LARGE)) == keys


@pytest.mark.parametrize("at", [0, 2, 5, COUNT - 1])
@pytest.mark.parametrize(
    "error", [b"ERR no", b"LOADING wait", b"MOVED", b"MOVED x y", b"MOVED 99999 a:1", b"MOVED 1 a:99999", b"ASK 1 a:-1"]
)
def test_an_error_is_the_reply_of_one_command(monkeypatch: pytest.MonkeyPatch, at: int, error: bytes) -> None:
    keys = keys_of(COUNT)

    def refusing(link: Link) -> None:
        for key in keys:
            assert link.keys(1) == [key]
            if key == keys[at]:
                link.send(b"-" + error + b"\r\n")
            else:
                link.answer(key)
        link.answer_all()

    with Client(monkeypatch, ScriptedServer(refusing)) as client:
        assert client.run(Batch(keys, LARGE)) == [*keys[:at], error, *keys[at + 1 :]]
        assert client.failures(client.servers[0]) == 0
        assert client.open_connections() == [1]
        assert client.exchange.redirects == 0
        assert client.run(Batch(keys, LARGE)) == keys


@pytest.mark.parametrize("word", [b"MOVED", b"ASK"])
def test_commands_in_the_middle_are_sent_on(monkeypatch: pytest.MonkeyPatch, word: bytes) -> None:
    """To a server that has commands of its own in the batch, through its only connection."""
    mine, others = keys_of(COUNT, 0), keys_of(COUNT, 1)
    away = {mine[i] for i in (1, 2, 7, COUNT - 1)}
    asked_for: list[bytes] = []

    def sending_on(link: Link) -> None:
        for key in mine:
            assert link.keys(1) == [key]
            if key in away:
                link.send(moved(key, second.address, word))
            else:
                link.answer(key)
        link.answer_all()

    def taking(link: Link) -> None:
        asking = 0
        while command := link.next():
            if command == [b"ASKING"]:
                link.send(b"+OK\r\n")
                asking += 1
            else:
                asked_for.append(command[1])
                assert word == b"MOVED" or (command[1] in away) == (asking == 1), "ASKING is for the next command"
                asking = 0
                link.answer(command[1])

    second = ScriptedServer(taking)
    with Client(monkeypatch, ScriptedServer(sending_on), second, connections=1) as client:
        keys = [key for pair in zip(mine, others, strict=True) for key in pair]
        assert client.run(Batch(keys, LARGE)) == keys
        assert client.exchange.redirects == len(away)
        assert [client.failures(server) for server in client.servers] == [0, 0]
        assert client.open_connections() == [1, 1]
        assert asked_for == others + [key for key in mine if key in away]
        again = Batch(sorted(away))
        if word == b"MOVED":  # once and for all
            assert client.run(again) == sorted(away) and client.exchange.redirects == len(away)


def test_a_command_that_is_asked_for_elsewhere_shares_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both servers send one on: the other one's only connection serves both kinds at once."""
    mine, others = keys_of(3, 0), keys_of(3, 1)
    servers: list[ScriptedServer] = []

    def script_of(half: int, away: dict[bytes, bytes]) -> ScriptedServer:
        def script(link: Link) -> None:
            while command := link.next():
                if command == [b"ASKING"]:
                    link.send(b"+OK\r\n")
                    link.answer(*link.keys(1))
                elif (word := away.pop(command[1], b"")) == b"TRYAGAIN":
                    link.send(b"-TRYAGAIN soon\r\n")
                elif word:
                    link.send(moved(command[1], servers[1 - half].address, word))
                else:
                    link.answer(command[1])

        return ScriptedServer(script)

    servers += [script_of(0, {mine[1]: b"ASK"}), script_of(1, {others[1]: b"TRYAGAIN"})]
    with Client(monkeypatch, *servers, connections=1) as client:
        keys = mine + others
        assert client.run(Batch(keys, LARGE), time.monotonic() + PATIENCE_S / 2) == keys
        assert client.exchange.redirects == 1
        assert client.open_connections() == [1, 1]


def test_a_command_that_is_sent_back_is_not_asked_for_elsewhere_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slot did not move in the end: the first server says ASK, the second one MOVED."""
    (key,) = keys_of(1, 0)
    servers: list[ScriptedServer] = []

    def first(link: Link) -> None:
        assert link.next() == [b"GET", key]
        link.send(moved(key, servers[1].address, b"ASK"))
        assert link.next() == [b"GET", key]
        link.answer(key)
        link.wait_for_the_end()

    def second(link: Link) -> None:
        assert link.next() == [b"ASKING"] and link.next() == [b"GET", key]
        link.send(b"+OK\r\n" + moved(key, servers[0].address))
        link.wait_for_the_end()

    servers += [ScriptedServer(first), ScriptedServer(second)]
    with Client(monkeypatch, *servers) as client:
        assert client.run(Batch([key], LARGE)) == [key]
        assert client.exchange.redirects == 2
        assert client.open_connections() == [1, 1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ValueError])
def test_connections_of_all_servers_are_dropped_where_reading_raises(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Replies are still to come there. No server has failed."""
    keys = keys_of(COUNT, 0) + keys_of(COUNT, 1)
    raised = threading.Event()

    def before_reading(_: Connection, i: int) -> None:
        if i == 3:
            raised.set()
            raise error("in the middle")

    servers = [ScriptedServer(Link.answer_all, Link.answer_all) for _ in range(2)]
    with Client(monkeypatch, *servers, connections=1) as client:
        with pytest.raises(error, match="in the middle"):
            client.run(Batch(keys, LARGE, before_reading))
        assert raised.is_set()
        assert client.open_connections() == [0, 0]
        assert [client.failures(server) for server in servers] == [0, 0]
        assert client.run(Batch(keys, LARGE)) == keys


def test_a_server_that_always_closes_is_given_up_by_the_number_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many commands a call has: each call is one failure."""
    keys = keys_of(COUNT)

    def closing(link: Link) -> None:
        answer(2, link)

    with Client(monkeypatch, ScriptedServer(closing, closing, closing)) as client:
        breaker = client.node(client.servers[0]).breaker
        for failures in (1, 2, 3):
            assert breaker.state is BreakerState.CLOSED
            assert client.run(Batch(keys, LARGE)) == keys[:2] + [NoReply.DOWN] * (COUNT - 2)
            assert client.failures(client.servers[0]) == failures
        assert breaker.state is BreakerState.OPEN and breaker.opened == 1


@pytest.mark.parametrize("inserted", [b"$-1\r\n", b"+OK\r\n", b"$3\r\nabc\r\n", b"again"])
@pytest.mark.parametrize("count", [1, 4])
def test_good_pages_are_not_deleted_where_replies_are_mixed_up(inserted: bytes, count: int) -> None:
    """A proxy sends a reply too many: from then on each is that to the command before."""
    nbytes = 5000
    items = [item_of(key_of(n), nbytes) for n in range(8)]
    values = {b"k:" + i.key.hex().encode(): pack_header(i.key, i.meta, i.data) + i.data + i.meta.origin for i in items}
    deleted: list[bytes] = []

    def reply(command: list[bytes]) -> bytes:
        value = values.get(command[1], b"")
        if command[0] == b"UNLINK":
            deleted.append(command[1])
            return b":1\r\n"
        if command[0] == b"GETRANGE":
            value = value[:96]
        return b"$%d\r\n%b\r\n" % (len(value), value)

    def mixing_up(link: Link) -> None:
        for n in range(100):
            command = link.next()
            if not command:
                return
            if n == count:
                link.send(reply([b"GET", b"k:" + items[0].key.hex().encode()]) if inserted == b"again" else inserted)
            link.send(reply(command))

    def honest(link: Link) -> None:
        while command := link.next():
            link.send(reply(command))

    server = ScriptedServer(lambda _: None, mixing_up, *[honest] * 4)  # the first one asks what server it is
    options = RedisOptions.of(server.url, mode="standalone", prefix="k:", timeout_s=PATIENCE_S)
    tier = RedisTier(options)
    first = [get(tier, range(4), nbytes), get(tier, range(4, 8), nbytes)]
    assert GetStatus.HIT in first[0]
    for _ in range(3):
        get(tier, range(8), nbytes)
    assert get(tier, range(8), nbytes) == [GetStatus.HIT] * 8
    assert set(deleted) <= {b"k:" + items[count].key.hex().encode()}, "what was inserted is in nobody's place but this"
    tier.close()
    server.close()


def test_a_server_met_while_the_tier_closes_is_closed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is still under way is sent on to a server that is not known yet."""
    keys = keys_of(1)
    other = ScriptedServer(Link.answer_all)

    def sending_on(link: Link) -> None:
        link.keys(1)
        link.send(moved(keys[0], other.address, b"ASK"))
        link.wait_for_the_end()

    with Client(monkeypatch, ScriptedServer(sending_on)) as client:

        def before_reading(connection: Connection, i: int) -> None:
            client.topology._closed = True

        assert client.run(Batch(keys, 0, before_reading)) == [NoReply.DOWN]
        assert client.topology.node_at(other.address).open_connections == 0
    other.close()
