"""A record that is read and checked in one native call, against the same done step by step."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.abc.tier import PageMeta
from kvtier.kernels import _native
from kvtier.keys import checksum
from kvtier.storage_backends.redis.record import HEADER_BYTES, pack_header, parse_header, record_check

KEY = bytes(range(32))
SPEC = b"s" * 16
BUFFER_BYTES = 4096
FAR = 60.0


def record(page: bytes, origin: bytes = b"") -> bytes:
    meta = PageMeta(len(page), 1, 16, checksum(page, KEY), SPEC, origin)
    return pack_header(KEY, meta, page) + page + origin


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


class Read(NamedTuple):
    """rest: what was read and not taken."""

    rest: bytes
    length: int
    header: bytes | None
    record: bytes
    page: bytes
    origin: bytes
    error: int


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def read(ours: socket.socket, out: memoryview, held: bytes = b"", *, start: int = 0, seconds: float = FAR) -> Read:
    buffer = bytearray(BUFFER_BYTES)
    buffer[start : start + len(held)] = held
    until = time.monotonic() + seconds
    got = _native.read_record(ours.fileno(), buffer, start, start + len(held), out, KEY, until)
    return Read(bytes(buffer[got[0] : got[1]]), *got[2:])


@settings(max_examples=60, deadline=None)
@given(
    nbytes=st.one_of(st.integers(0, 300), st.integers(3_500, 4_500), st.sampled_from([70_000, 300_000, 600_000])),
    origin=st.binary(max_size=255),
    held=st.integers(0, 2_000),
    start=st.integers(0, 2_000),
    behind=st.sampled_from([b"", b"$-1\r\n", b"+OK\r\n" * 50]),
    cuts=st.lists(st.integers(0, 600_000), max_size=6),
)
def test_a_record_is_read_as_step_by_step(
    nbytes: int, origin: bytes, held: int, start: int, behind: bytes, cuts: list[int]
) -> None:
    page = bytes(i * 7 % 251 for i in range(1024)) * (nbytes // 1024 + 1)
    page = page[:nbytes]
    value = record(page, origin)
    stream = bulk(value)
    here, rest = (stream + behind)[:held], (stream + behind)[held:]
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def send() -> None:
            at = 0
            for cut in [*sorted(cuts), len(rest)]:
                theirs.sendall(rest[at:cut])
                at = max(at, cut)

        sender = threading.Thread(target=send)
        sender.start()
        out = bytearray(nbytes + 8)
        got = read(ours, memoryview(out), here, start=start)
        theirs_rest = b""
        while len(got.rest) + len(theirs_rest) < len(behind):
            theirs_rest += ours.recv(4096)
        sender.join(FAR)
        assert not sender.is_alive()
    assert (got.error, got.length) == (0, len(value))
    assert got.header is not None and got.header == value[:HEADER_BYTES] and got.origin == origin
    assert out == page + bytes(8)
    assert got.rest + theirs_rest == behind
    header = parse_header(got.header, KEY, SPEC)
    check = record_check(header.covered, KEY)
    check.update(page)
    check.update(origin)
    assert got.record == check.digest() == header.checksum
    assert got.page == checksum(page, KEY)
    assert _native.record_checksums(header.covered, page, origin, KEY) == (got.record, got.page)


@pytest.mark.parametrize(
    "reply",
    [
        b"$-1\r\n",
        b"-ERR no\r\n",
        b"+OK\r\n",
        b"$5\r\nhello\r\n",
        b"$\r\n",
        b"$99999999999999999999\r\n",
        bulk(bytes(200)),
        bulk(record(b"p" * 64)[:-1]),
        bulk(record(b"p" * 64) + b"x"),
        bulk(record(b"p" * 65)),
        b"x" * 600,
    ],
)
def test_another_reply_is_left_where_it_is(pair: tuple[socket.socket, socket.socket], reply: bytes) -> None:
    """Also a record that is longer or shorter than its header says, and one whose page does not fit."""
    ours, theirs = pair
    theirs.sendall(reply)
    out = bytearray(64)
    got = read(ours, memoryview(out))
    assert got.header is None and got.error == 0
    assert reply.startswith(got.rest) and len(got.rest) >= min(len(reply), 5)
    assert out == bytes(64)


@pytest.mark.parametrize("flipped", [0, 8, 16 + 4, 80, HEADER_BYTES, HEADER_BYTES + 99_999, HEADER_BYTES + 100_001])
def test_a_flipped_bit_changes_a_checksum_or_the_header(
    pair: tuple[socket.socket, socket.socket], flipped: int
) -> None:
    ours, theirs = pair
    good = record(b"p" * 100_000, b"origin")
    value = bytearray(good)
    value[flipped] ^= 1
    sender = threading.Thread(target=theirs.sendall, args=(bulk(bytes(value)),))
    sender.start()
    got = read(ours, memoryview(bytearray(100_000)))
    theirs.close()
    ours.close()
    sender.join(FAR)
    assert got.header is None or got.header != good[:HEADER_BYTES] or got.record != good[72:88]


def test_why_a_record_is_not_all_there(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    value = record(b"p" * 1000)
    out = memoryview(bytearray(1000))
    assert read(ours, out, bulk(value)[:-500], seconds=-1.0).error == errno.EAGAIN
    theirs.sendall(b"x" * 500)
    assert read(ours, out, bulk(value)[:-500]).error == _native.NO_LINE_END
    theirs.close()
    assert read(ours, out, bulk(value)[:-500]).error == _native.CLOSED
    assert read(ours, out).error == _native.CLOSED
    with pytest.raises(ValueError, match="key"):
        _native.read_record(ours.fileno(), bytearray(4096), 0, 0, out, b"short", 0.0)
    with pytest.raises(ValueError, match="buffer"):
        _native.read_record(ours.fileno(), bytearray(4096), 5, 4, out, KEY, 0.0)
