"""Sockets that pages go through: what is set at either end, and what is left as it is."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.kernels import tcp
from kvtier.storage_backends.redis.connection import Connection, LostError
from kvtier.storage_backends.redis.options import Address, RedisOptions

AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("", 0)) as listener:
        yield listener


def connected(server: socket.socket, host: str, control: str = "", own: str = "") -> socket.socket:
    """A connection to `server` by one of this machine's addresses, from the address `own`."""
    client = socket.socket()
    try:
        if control:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
        if own:
            client.bind((own, 0))
        client.connect((host, server.getsockname()[1]))
    except OSError as e:
        client.close()
        if control and e.errno in (errno.ENOENT, errno.EPERM):
            there = AVAILABLE.read_text().strip() if AVAILABLE.exists() else "unknown"
            pytest.skip(f"this kernel does not let us use {control}; it offers {there}")
        raise
    return client


def control_of(connection: socket.socket) -> str:
    return tcp._congestion_control(connection).decode()


def assert_tuned(connection: socket.socket) -> None:
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@pytest.mark.parametrize(("control", "then"), [("bbr", "reno"), ("cubic", "cubic"), ("reno", "reno")])
def test_nothing_is_paced_towards_this_machine(server: socket.socket, control: str, then: str) -> None:
    with connected(server, "127.0.0.1", control) as client, server.accept()[0] as accepted:
        assert not client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert not client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        tcp.tune(client)
        assert_tuned(client)
        assert control_of(client) == then
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
        tcp.tune(accepted)
        assert_tuned(accepted)
        assert control_of(accepted) == then


def test_another_machine_is_left_to_its_congestion_control(server: socket.socket) -> None:
    """Whose address is not our own, as far as a test has such a one."""
    with connected(server, "127.0.0.2", "bbr", own="127.0.0.1") as client, server.accept()[0] as accepted:
        assert client.getpeername()[0] != client.getsockname()[0]
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        for end in (client, accepted):
            tcp.tune(end)
            assert_tuned(end)
            assert control_of(end) == "bbr"


class Refusing(socket.socket):
    """Lets nobody see or choose how congestion is controlled, as sandboxes do."""

    refuses_to_say = False

    def getsockopt(self, level: int, option: int, *more: int) -> object:  # type: ignore[override]
        if (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION):
            if self.refuses_to_say:
                raise OSError(errno.ENOPROTOOPT, "no such option")
            return b"bbr" + bytes(13)
        return super().getsockopt(level, option, *more)

    def setsockopt(self, level: int, option: int, *value: object) -> None:
        if (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION):
            raise PermissionError(errno.EPERM, "not allowed")
        super().setsockopt(level, option, *value)  # type: ignore[call-overload]


@pytest.mark.parametrize("refuses_to_say", [False, True])
def test_what_is_not_allowed_is_left_as_it_is(server: socket.socket, refuses_to_say: bool) -> None:
    with Refusing() as client:
        client.refuses_to_say = refuses_to_say
        client.connect(("127.0.0.1", server.getsockname()[1]))
        tcp.tune(client)
        assert_tuned(client)


def test_a_connection_that_is_gone_is_told() -> None:
    with socket.socket() as nobody:
        with pytest.raises(OSError) as told:
            tcp.tune(nobody)
        assert told.value.errno == errno.ENOTCONN


def test_the_redis_tier_tunes_its_connections(server: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is reset before that is lost, and closed."""
    address = Address("127.0.0.1", server.getsockname()[1])
    options = RedisOptions.of(f"redis://{address}")
    tuned: list[socket.socket] = []
    monkeypatch.setattr(tcp, "tune", tuned.append)
    connection = Connection(address, options, time.monotonic() + 60.0, database=0)
    assert [end.getpeername() for end in tuned] == [(address.host, address.port)]
    connection.close()

    def gone(connected: socket.socket) -> None:
        tuned.append(connected)
        raise OSError(errno.ENOTCONN, "not connected")

    monkeypatch.setattr(tcp, "tune", gone)
    with pytest.raises(LostError, match="not connected"):
        Connection(address, options, time.monotonic() + 60.0, database=0)
    assert tuned[-1].fileno() == -1
