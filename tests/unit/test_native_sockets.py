"""Hashing in pieces, receiving with hashing, sending by reference: each against the plain way."""

from __future__ import annotations

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


@pytest.mark.parametrize("nbytes", [1, 5000, (1 << 20) + 77, 5 << 20])
def test_pages_sent_by_reference_arrive(pair: tuple[socket.socket, socket.socket], nbytes: int) -> None:
    ours, theirs = pair
    value = np.frombuffer(os.urandom(nbytes + 3), np.uint8)[3:]
    pipe_out, pipe_in = os.pipe()
    received = bytearray()

    def read() -> None:
        while len(received) < nbytes + 4 and (piece := theirs.recv(1 << 20)):
            received.extend(piece)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        sent, error = _native.send_pages(ours.fileno(), pipe_out, pipe_in, value, FOREVER)
        assert (sent, error) == (nbytes, 0)
        ours.sendall(b"tail")
        thread.join(30.0)
        assert bytes(received) == value.tobytes() + b"tail"
    finally:
        ours.close()
        thread.join()
        os.close(pipe_out)
        os.close(pipe_in)


def test_a_peer_that_does_not_read_ends_a_send_by_reference(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = pair
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, (0).to_bytes(8, "little") + (50_000).to_bytes(8, "little"))
    pipe_out, pipe_in = os.pipe()
    try:
        sent, error = _native.send_pages(ours.fileno(), pipe_out, pipe_in, bytearray(64 << 20), FOREVER)
        assert error == 11 and sent < 64 << 20
    finally:
        os.close(pipe_out)
        os.close(pipe_in)
