"""Hashing in pieces, receiving with hashing, sending by reference: each against the plain way."""

from __future__ import annotations

import errno
import os
import random
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash

from kvtier.kernels import _native

FOREVER = float("inf")


@pytest.fixture(params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    if request.param == "unix":
        ours, theirs = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            ours = socket.create_connection(server.getsockname())
            theirs, _ = server.accept()
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("seed", [0, 0x9E3779B97F4A7C15])
def test_pieces_hash_like_the_whole(isa: str, seed: int) -> None:
    data = np.random.default_rng(3).bytes(70_000)
    draw = random.Random(5)
    lengths = [*range(300), 511, 512, 513, *range(1020, 1030), *range(2047, 2051), 4096, 65_536, 70_000]
    usual = _native.isa()
    _native.use_isa(isa)
    try:
        for length in lengths:
            expected = xxhash.xxh3_128_digest(data[:length], seed)
            assert _native.xxh3_128(data[:length], seed) == expected
            for most in (1, 63, 64, 65, 200, 300, 5000):
                if length > 3000 and most < 63:
                    continue
                hash_, at = _native.Xxh3(seed), 0
                while at < length:
                    piece = min(draw.randint(0, most), length - at)
                    hash_.update(data[at : at + piece])
                    at += piece
                assert hash_.digest() == expected == hash_.digest(), (length, most)
    finally:
        _native.use_isa(usual)


def test_several_hashes_of_one_buffer() -> None:
    data = os.urandom(1_000_001)
    hashes = [_native.Xxh3(seed) for seed in range(3)]
    hashes[2].update(b"before")
    _native.update_all(data, hashes)
    _native.update_all(b"", hashes)
    expected = [xxhash.xxh3_128_digest(b"before" * (seed == 2) + data, seed) for seed in range(3)]
    assert [h.digest() for h in hashes] == expected


@pytest.mark.parametrize("nbytes", [0, 1, 100_000, 3 << 20])
def test_what_is_received_is_hashed(pair: tuple[socket.socket, socket.socket], nbytes: int) -> None:
    ours, theirs = pair
    value = os.urandom(nbytes)
    thread = threading.Thread(target=theirs.sendall, args=(value + b"rest",))
    thread.start()
    out = bytearray(nbytes)
    one, two = _native.Xxh3(1), _native.Xxh3(2)
    two.update(b"before")
    assert _native.receive(ours.fileno(), out, [one, two], FOREVER) == (nbytes, 0)
    assert out == value and one.digest() == xxhash.xxh3_128_digest(value, 1)
    assert two.digest() == xxhash.xxh3_128_digest(b"before" + value, 2)
    assert ours.recv(4, socket.MSG_WAITALL) == b"rest"
    thread.join()


def test_the_end_of_the_stream_and_errors_are_told(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.sendall(b"abc")
    theirs.shutdown(socket.SHUT_WR)
    assert _native.receive(ours.fileno(), bytearray(10), [], FOREVER) == (3, 0)
    got, error = _native.receive(-1, bytearray(10), [], FOREVER)
    assert got == 0 and os.strerror(error)
    with pytest.raises(BufferError):
        _native.receive(ours.fileno(), b"cannot be written", [], FOREVER)


BUFFER_BYTES = 1 << 12


@pytest.mark.parametrize("nbytes", [0, 1, 16, 5000, (256 << 10) - 1, 256 << 10, (256 << 10) + 1, (1 << 20) + 3])
@pytest.mark.parametrize("here", [0, 1, 700, BUFFER_BYTES])
@pytest.mark.parametrize(("behind", "awake_s"), [(b"", 1e-5), (b"next", 0.0), (bytes(9000), 2e-6)])
def test_a_value_is_read_from_the_buffer_and_the_socket(
    pair: tuple[socket.socket, socket.socket], nbytes: int, here: int, behind: bytes, awake_s: float
) -> None:
    """As far as it is in the buffer from there, whatever of the line end that leaves for the socket."""
    ours, theirs = pair
    value, key = os.urandom(nbytes), os.urandom(32)
    sent = value + b"\r\n" + behind
    here = min(here, len(sent))
    start = BUFFER_BYTES - here  # at the very end of it
    buffer, out = bytearray(start) + sent[:here], bytearray(nbytes)
    thread = threading.Thread(target=theirs.sendall, args=(sent[here:],))
    thread.start()
    start, end, digest, error = _native.read_value(
        ours.fileno(), buffer, start, BUFFER_BYTES, memoryview(out), key, awake_s
    )
    assert not error and out == value
    assert digest == xxhash.xxh3_128_digest(value, int.from_bytes(key[:8], "little"))
    rest = bytes(buffer[start:end])
    assert len(buffer) == BUFFER_BYTES and behind.startswith(rest)
    left = len(behind) - len(rest)
    assert left == 0 or ours.recv(left, socket.MSG_WAITALL) == behind[len(rest) :]
    thread.join()


def test_a_value_that_does_not_come_is_told(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, (0).to_bytes(8, "little") + (50_000).to_bytes(8, "little"))
    buffer, out = bytearray(100), memoryview(bytearray(10))

    def read(end: int) -> int:
        return _native.read_value(ours.fileno(), buffer, 0, end, out, bytes(32), 0.0)[3]

    buffer[:12] = b"0123456789ab"
    assert read(12) == _native.NO_LINE_END
    assert read(4) == errno.EAGAIN
    theirs.sendall(b"456789\r")
    assert read(4) == errno.EAGAIN, "half a line end"
    theirs.close()
    assert read(4) == read(11) == _native.CLOSED
    assert _native.read_command(ours.fileno(), buffer, 7, 7, 9, 9, 9) == (0, 0, None, 0, -1, _native.CLOSED)
    for start, end in ((5, 4), (0, 101)):
        with pytest.raises(ValueError, match="in the buffer"):
            _native.read_value(ours.fileno(), buffer, start, end, out, bytes(32), 0.0)
        with pytest.raises(ValueError, match="in the buffer"):
            _native.read_command(ours.fileno(), buffer, start, end, 9, 9, 9)
    with pytest.raises(ValueError, match="8 bytes"):
        _native.read_value(ours.fileno(), buffer, 0, 0, out, b"short", 0.0)


@pytest.mark.parametrize(
    ("sent", "found"),
    [
        (b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$5\r\nab", ([b"SET", b"k"], 1, 5, b"ab")),
        (b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$5\r", ([b"SET", b"k"], 1, -1, b"$5\r")),
        (b"*3\r\n$3\r\nset\r\n$1\r\nk\r\n$501\r\n", ([b"set", b"k"], 1, -1, b"$501\r\n")),
        (b"*5\r\n$4\r\nMSET\r\n$1\r\nk\r\n$2\r\n", ([b"MSET", b"k"], 3, 2, b"")),
        (b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n*1", ([b"GET", b"k"], 0, -1, b"*1")),
        (b"*2\r\n$3\r\nGET\r\n$101\r\n", ([b"GET"], 1, -1, b"$101\r\n")),
        (b"*101\r\n", (None, 0, -1, b"*101\r\n")),
        (b"PING\r\n", (None, 0, -1, b"PING\r\n")),
    ],
)
def test_the_start_of_a_command(
    pair: tuple[socket.socket, socket.socket], sent: bytes, found: tuple[list[bytes] | None, int, int, bytes]
) -> None:
    ours, theirs = pair
    theirs.sendall(sent)
    buffer = bytearray(100)
    start, end, words, left, nbytes, error = _native.read_command(ours.fileno(), buffer, 3, 3, 100, 100, 500)
    assert (words, left, nbytes, bytes(buffer[start:end]), error) == (*found, 0)
    again = bytearray(b"..." + sent)
    assert _native.read_command(-1, again, 3, len(again), 100, 100, 500)[2:] == (words, left, nbytes, 0)


def test_a_deadline_holds_though_bytes_keep_trickling(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, (0).to_bytes(8, "little") + (50_000).to_bytes(8, "little"))
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.01):
            theirs.send(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        before = time.monotonic()
        got, error = _native.receive(ours.fileno(), bytearray(1 << 20), [], before + 0.3)
        assert error == 11 and got < 1 << 20
        assert time.monotonic() - before < 10.0
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("nbytes", [0, 1, 5000, (1 << 20) + 77, 5 << 20])
@pytest.mark.parametrize("before", [b"", b"a command's start", bytes(300_000)], ids=len)
@pytest.mark.parametrize("aligned", [False, True])
def test_pages_sent_by_reference_arrive(
    pair: tuple[socket.socket, socket.socket], nbytes: int, before: bytes, aligned: bool
) -> None:
    ours, theirs = pair
    room = np.frombuffer(os.urandom(nbytes + 8192), np.uint8)
    value = room[-room.ctypes.data % 4096 + (0 if aligned else 3) :][:nbytes]
    pipe_out, pipe_in = os.pipe()
    received = bytearray()

    def read() -> None:
        while len(received) < len(before) + nbytes + 4 and (piece := theirs.recv(1 << 20)):
            received.extend(piece)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        sent, error = _native.send_pages(ours.fileno(), pipe_out, pipe_in, before, value, FOREVER)
        assert (sent, error) == (len(before) + nbytes, 0)
        ours.sendall(b"tail")
        thread.join(30.0)
        assert bytes(received) == before + value.tobytes() + b"tail"
    finally:
        ours.close()
        thread.join()
        os.close(pipe_out)
        os.close(pipe_in)


def test_what_is_sent_now_does_not_wait(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    assert _native.send_now(ours.fileno(), b"+OK\r\n") == 5
    assert theirs.recv(5, socket.MSG_WAITALL) == b"+OK\r\n"
    sent, data = 0, memoryview(bytes(1 << 20))
    while (n := _native.send_now(ours.fileno(), data)) > 0:
        sent += n
        assert sent < 1 << 30, "nobody reads it"
    assert n == -errno.EAGAIN and sent
    assert _native.send_now(-1, b"x") == -errno.EBADF


def test_a_peer_that_does_not_read_ends_a_send_by_reference(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = pair
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, (0).to_bytes(8, "little") + (50_000).to_bytes(8, "little"))
    pipe_out, pipe_in = os.pipe()
    try:
        sent, error = _native.send_pages(ours.fileno(), pipe_out, pipe_in, b"start", bytearray(64 << 20), FOREVER)
        assert error == 11 and sent < 64 << 20
    finally:
        os.close(pipe_out)
        os.close(pipe_in)
