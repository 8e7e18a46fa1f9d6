"""What a server is asked for ahead: of large replies a window, of small ones all; from several servers side by side."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.storage_backends.redis import exchange as exchange_module
from kvtier.storage_backends.redis.connection import Connection, DeadlineError
from kvtier.storage_backends.redis.exchange import NoReply
from kvtier.storage_backends.redis.node import Node
from tests.redis_exchanges import Batch, Client, keys_of
from tests.scripted_redis import PATIENCE_S, Link, ScriptedServer

pytest.importorskip("redis", reason="redis-py is not installed: pip install 'kvtier[redis]'")
KIB = 1 << 10


@pytest.mark.parametrize(
    ("reply_bytes", "window"), [(0, 24), (64 * KIB, 16), (288 * KIB, 3), (1152 * KIB, 3), (64 << 20, 3)]
)
def test_large_replies_are_asked_for_as_they_are_wanted(
    monkeypatch: pytest.MonkeyPatch, reply_bytes: int, window: int
) -> None:
    keys = keys_of(24)

    def script(link: Link) -> None:
        first = link.keys(window)
        assert first == keys[:window] and not link.more, "more was asked for than the window takes"
        link.answer(*first)
        link.answer_all()

    with Client(monkeypatch, ScriptedServer(script)) as client:
        batch = Batch(keys, reply_bytes)
        assert client.run(batch) == keys == batch.asked == batch.answered
        assert batch.windows[0] == window
        for answered, ahead in enumerate(batch.windows):
            left = len(keys) - answered
            assert ahead >= min(left, exchange_module._AHEAD_MIN), "the server waits for commands"
            assert ahead <= max(exchange_module._AHEAD_MIN, window)
            assert ahead == left or ahead * reply_bytes >= exchange_module._AHEAD_BYTES // 2 or reply_bytes == 0
        assert client.open_connections() == [1]


def test_large_and_small_replies_in_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small ones behind a large one wait with it, and are asked for together once it is their turn."""
    keys = keys_of(40)
    with Client(monkeypatch, ScriptedServer(Link.answer_all)) as client:
        batch = Batch(keys)
        batch.commands = [
            exchange_module.Command(c.name, c.parts, 2 << 20 if i < 6 else 0) for i, c in enumerate(batch.commands)
        ]
        assert client.run(batch) == keys == batch.asked
        assert batch.windows == [3] * 6 + list(range(34, 0, -1))


def test_two_servers_are_served_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each server sends its next reply only after the other one was asked for more, which is when its last was read."""
    shares = [keys_of(8, half) for half in range(2)]
    asked_for = [threading.Semaphore(0), threading.Semaphore(0)]

    def script_of(half: int) -> ScriptedServer:
        def script(link: Link) -> None:
            keys = link.keys(3)
            for n in range(8):
                link.answer(keys[n])
                if n + 3 < 8:
                    keys += link.keys(1)
                asked_for[half].release()
                assert asked_for[1 - half].acquire(timeout=PATIENCE_S), "the other server is not asked for more"
            assert keys == shares[half]
            link.wait_for_the_end()

        return ScriptedServer(script)

    with Client(monkeypatch, script_of(0), script_of(1)) as client:
        keys = [key for pair in zip(*shares, strict=True) for key in pair]
        assert client.run(Batch(keys, 2 << 20)) == keys
        assert client.open_connections() == [1, 1]


@pytest.mark.parametrize("reply_bytes", [0, 2 << 20])
def test_a_server_that_says_nothing_keeps_nobody_from_the_replies_of_the_other(
    monkeypatch: pytest.MonkeyPatch, reply_bytes: int
) -> None:
    mine, others = keys_of(6, 0), keys_of(6, 1)
    others_read = threading.Event()

    def silent(link: Link) -> None:
        first = link.keys(3)
        assert others_read.wait(PATIENCE_S / 2), "the other server's replies are not read"
        link.answer(*first)
        link.answer_all()

    with Client(monkeypatch, ScriptedServer(silent), ScriptedServer(Link.answer_all)) as client:
        keys = mine + others

        def before_reading(_: Connection, i: int) -> None:
            if keys[i] == others[-1]:
                others_read.set()

        assert client.run(Batch(keys, reply_bytes, before_reading)) == keys


def test_a_server_is_not_blamed_for_the_time_that_another_one_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """One hangs in the middle of a reply until the deadline, which the other one's replies cannot make any more."""
    base, offsets = 1000.0, [0.0]
    clock = SimpleNamespace(monotonic=lambda: base + offsets[0])
    mine, others = keys_of(2, 0), keys_of(2, 1)
    hung = threading.Event()

    def late(link: Link) -> None:
        keys = link.keys(2)
        link.answer(keys[0])
        assert hung.wait(PATIENCE_S), "the reply of the other server is not waited for"
        link.answer(keys[1])
        link.wait_for_the_end()

    with Client(monkeypatch, ScriptedServer(Link.answer_all), ScriptedServer(late)) as client:
        client.topology.refresh(PATIENCE_S)
        monkeypatch.setattr(exchange_module, "time", clock)
        monkeypatch.setattr(client.topology, "refresh_if_due", lambda until: None)
        take = Node.take
        monkeypatch.setattr(Node, "take", lambda node, until: take(node, until + 1e9))
        keys = mine + others

        def before_reading(_: Connection, i: int) -> None:
            if keys[i] == mine[0]:
                offsets[0] += 10.0
                hung.set()
            if hung.is_set():
                raise DeadlineError("the deadline passed")

        results = client.run(Batch(keys, 0, before_reading), base + 10.0)
        assert results[:2] == [NoReply.DEADLINE] * 2 and results[3] is NoReply.DEADLINE
        assert results[2] in (others[0], NoReply.DEADLINE)
        assert [client.failures(server) for server in client.servers] == [1, 0]
        assert client.open_connections() == [0, 0]


def test_a_server_is_not_blamed_for_the_time_that_sending_to_another_one_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """One takes nothing of what it is sent until the deadline; the other one is sent nothing any more."""
    base, offsets = 1000.0, [0.0]

    class Late:
        def __init__(self, takes_s: float) -> None:
            self._takes_s = takes_s

        def __iter__(self) -> Iterator[bytes]:
            offsets[0] += self._takes_s
            raise DeadlineError("the server does not take what is sent")

    servers = sorted((ScriptedServer(Link.wait_for_the_end) for _ in range(2)), key=lambda server: str(server.address))
    with Client(monkeypatch, *servers) as client:
        client.topology.refresh(PATIENCE_S)
        monkeypatch.setattr(exchange_module, "time", SimpleNamespace(monotonic=lambda: base + offsets[0]))
        monkeypatch.setattr(client.topology, "refresh_if_due", lambda until: None)
        take = Node.take
        monkeypatch.setattr(Node, "take", lambda node, until: take(node, until + 1e9))
        batch = Batch(keys_of(1, 0) + keys_of(1, 1))
        batch.commands = [
            exchange_module.Command(c.name, Late(s)) for c, s in zip(batch.commands, (10.0, 0.0), strict=True)
        ]
        assert client.run(batch, base + 10.0) == [NoReply.DEADLINE] * 2
        assert [client.failures(server) for server in servers] == [1, 0]
        assert client.open_connections() == [0, 0]


def test_connections_are_taken_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that took them in the order of their keys would wait for each other until the deadline."""
    servers = [ScriptedServer(Link.answer_all) for _ in range(2)]
    with Client(monkeypatch, *servers, connections=1) as client:
        keys = keys_of(1, 0) + keys_of(1, 1)
        taken: list[str] = []
        take = Node.take

        def taking(node: Node, until: float) -> Connection:
            taken.append(str(node.address))
            return take(node, until)

        monkeypatch.setattr(Node, "take", taking)
        for batch in (keys, keys[::-1]):
            assert client.run(Batch(batch)) == batch
        assert taken == sorted(str(server.address) for server in servers) * 2


def test_small_replies_that_came_together_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """From two servers, without a look at the other one in between: what is in the buffer costs no call."""
    shares = [keys_of(50, half) for half in range(2)]
    looks = count()
    ready = exchange_module._ready

    def looking(*arguments: object) -> object:
        next(looks)
        return ready(*arguments)  # type: ignore[arg-type]

    def script(link: Link) -> None:
        link.answer(*link.keys(50))
        link.answer_all()

    monkeypatch.setattr(exchange_module, "_ready", looking)
    with Client(monkeypatch, ScriptedServer(script), ScriptedServer(script)) as client:
        keys = shares[0] + shares[1]
        assert client.run(Batch(keys)) == keys
        assert next(looks) < 20


def test_replies_that_a_tls_record_brought_with_others_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are in neither the socket nor our buffer, but with what decrypts them."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl: apt-get install openssl")
    command = "req -x509 -newkey rsa:2048 -nodes -days 2 -keyout key.pem -out cert.pem -subj /CN=test"
    subprocess.run(["openssl", *command.split()], cwd=tmp_path, check=True, capture_output=True)
    theirs, ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    theirs.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    ours.check_hostname, ours.verify_mode = False, ssl.CERT_NONE
    # With replies of 32 bytes our buffer is at its end where a reply ends.
    shares = [keys_of(400, half, 25) for half in range(2)]

    def script(link: Link) -> None:
        link.answer(*link.keys(400))
        link.wait_for_the_end()

    servers = [ScriptedServer(script, tls=theirs) for _ in range(2)]
    with Client(monkeypatch, *servers, tls=ours) as client:
        keys = shares[0] + shares[1]
        assert client.run(Batch(keys)) == keys
        assert client.open_connections() == [1, 1]
