"""The index log: golden bytes, replay, damage, and rewriting while it is written to."""

from __future__ import annotations

import os
import random
import struct
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.abc.tier import PageMeta
from kvtier.storage_backends.nvme import log
from kvtier.storage_backends.nvme.log import IndexLog
from kvtier.storage_backends.nvme.records import decode, encode_delete, encode_put, encode_puts, put_bytes
from kvtier.storage_backends.slots.columns import Entry, PageColumns
from kvtier.testing.pages import key_of

KEY = bytes(range(32))
ENTRY = Entry(KEY, PageMeta(1_327_104, 3, 32, bytes(range(100, 116)), bytes(range(200, 216)), b"engine-key"), 8192)

# Frozen: they change only with the format's version (`docs/formats.md`).
GOLDEN_PUT = (
    "4b56544c"  # magic
    "18580f07"  # crc
    "01" "0a" "0300" "20000000"  # put, origin of 10 bytes, form 3, 32 valid tokens
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    "6465666768696a6b6c6d6e6f70717273"  # checksum
    "c8c9cacbcccdcecfd0d1d2d3d4d5d6d7"  # spec
    "0020000000000000" "0040140000000000"  # offset, nbytes
    "656e67696e652d6b6579000000000000"  # origin, padded
)  # fmt: skip
GOLDEN_DELETE = (
    "4b56544c" "593438e4" "02" "00" "0000" "00000000"
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
)  # fmt: skip


def test_golden_records() -> None:
    assert encode_put(ENTRY).hex() == GOLDEN_PUT
    assert encode_delete(KEY).hex() == GOLDEN_DELETE
    loaded = decode(bytes.fromhex(GOLDEN_PUT))
    assert loaded.pages.entries() == [ENTRY] and loaded.end == 112 and loaded.damaged == 0
    assert decode(bytes.fromhex(GOLDEN_PUT + GOLDEN_DELETE)).pages.entries() == []


def entry(number: int, origin: bytes = b"") -> Entry:
    return Entry(key_of(number), PageMeta(100 + number, 2, 7, bytes(16), bytes(16), origin), 4096 * number)


@pytest.mark.parametrize("origin_bytes", [0, 1, 7, 8, 9, 255])
def test_every_origin_comes_back(origin_bytes: int) -> None:
    one = entry(1, bytes(range(origin_bytes)))
    assert len(encode_put(one)) % 8 == 0
    assert decode(encode_put(one) + encode_put(entry(2))).pages.entries() == [one, entry(2)]


def test_replay_keeps_the_last_word_and_the_order_of_puts() -> None:
    data = b"".join(
        [
            *(encode_put(entry(n)) for n in range(4)),
            encode_delete(key_of(1)),
            encode_put(entry(0)),
            encode_delete(key_of(9)),
        ]
    )
    assert decode(data).pages.entries() == [entry(2), entry(3), entry(0)]


def test_every_torn_length_gives_the_whole_records_before_it() -> None:
    records = [encode_put(entry(n, b"x" * n)) for n in range(4)]
    ends = [sum(map(len, records[: n + 1])) for n in range(4)]
    data = b"".join(records)
    for length in range(len(data)):
        loaded = decode(data[:length])
        whole = sum(end <= length for end in ends)
        assert len(loaded.pages.entries()) == whole
        assert loaded.end == (ends[whole - 1] if whole else 0)


def test_any_flipped_bit_costs_its_own_record_only() -> None:
    records = [encode_put(entry(n, b"xy" * n)) for n in range(3)]
    data = b"".join(records)
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        loaded = decode(bytes(damaged))
        assert len(loaded.pages.entries()) == 2 and set(loaded.pages.entries()) < {
            entry(n, b"xy" * n) for n in range(3)
        }


def test_a_rewritten_log_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_COMPACT_SLACK_BYTES", 0)
    index = IndexLog(tmp_path / "index.log")
    index.load()
    live: dict[bytes, Entry] = {}
    lock = threading.Lock()
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set() and number < 20_000:
            with lock:  # stands in for the tier's lock: table and queue change together
                one = entry(number % 50)
                if one.key in live:
                    del live[one.key]
                    index.queue_delete(one.key)
                else:
                    live[one.key] = one
                    index.queue_put(one)
            index.flush(index.queued)
            number += 7

    def snapshot() -> PageColumns:
        with lock:
            return PageColumns.of(live.values())

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(30):
        index.compact(snapshot)
    stop.set()
    writer.join()
    index.close()
    assert sorted(decode((tmp_path / "index.log").read_bytes()).pages.entries()) == sorted(live.values())
    assert not (tmp_path / "index.log.new").exists()


def test_a_failed_rewrite_leaves_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = IndexLog(tmp_path / "index.log")
    index.load()
    for n in range(5):
        index.queue_put(entry(n))
    index.flush(index.queued)

    def failing(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", failing)
    index.compact(lambda: PageColumns.of([entry(0)]))
    index.queue_put(entry(5))
    index.close()
    assert decode((tmp_path / "index.log").read_bytes()).pages.entries() == [entry(n) for n in range(6)]
    assert [p.name for p in tmp_path.iterdir()] == ["index.log"]


def test_what_could_not_be_written_is_written_later_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = IndexLog(tmp_path / "index.log")
    index.load()
    real: Callable[[int, memoryview, int], int] = os.pwrite

    def half(fd: int, data: memoryview, at: int) -> int:
        """Writes whole records and a part of one, then the device is full."""
        if at >= 250:
            raise OSError(28, "No space left on device")
        return real(fd, data[: 250 - at], at)

    monkeypatch.setattr(os, "pwrite", half)
    for n in range(4):
        index.queue_put(entry(n))
    with pytest.raises(OSError, match="No space"):
        index.flush(index.queued)
    assert (tmp_path / "index.log").stat().st_size == 0
    index.queue_delete(key_of(1))
    monkeypatch.undo()
    index.flush(index.queued)
    index.close()
    assert decode((tmp_path / "index.log").read_bytes()).pages.entries() == [entry(0), entry(2), entry(3)]


def decode_by_the_book(data: bytes) -> tuple[list[Entry], int, int]:
    """The format's own rules, byte by byte: what `decode` is held to."""

    def good_bytes(at: int) -> int:
        if at + 48 > len(data) or data[at : at + 4] != b"KVTL" or data[at + 8] not in (1, 2):
            return 0
        length = 48 if data[at + 8] == 2 else 96 + -(-data[at + 9] // 8) * 8
        crc = int.from_bytes(data[at + 4 : at + 8], "little")
        return length if at + length <= len(data) and zlib.crc32(data[at + 8 : at + length]) == crc else 0

    live: dict[bytes, Entry] = {}
    at = end = damaged = 0
    while at < len(data):
        length = good_bytes(at)
        if not length:
            at += 8
            continue
        damaged += at != end
        _, kind, origin_bytes, form, valid, key = struct.unpack_from("<IBBHI32s", data, at + 4)
        live.pop(key, None)
        if kind == 1:
            check, spec, offset, nbytes = struct.unpack_from("<16s16sQQ", data, at + 48)
            origin = data[at + 96 : at + 96 + origin_bytes]
            live[key] = Entry(key, PageMeta(nbytes, form, valid, check, spec, origin), offset)
        at += length
        end = at
    return list(live.values()), end, damaged


@pytest.mark.parametrize("seed", range(60))
def test_replay_is_by_the_book_whatever_happened_to_the_log(seed: int) -> None:
    rng = random.Random(seed)
    records = []
    for _ in range(rng.randrange(60)):
        number = rng.randrange(20)
        # Origins that look like records of their own.
        origin = rng.choice([b"", rng.randbytes(rng.randrange(256)), encode_delete(key_of(number)), b"KVTL" * 40])
        records.append(rng.choice([encode_put(entry(number, origin)), encode_delete(key_of(number))]))
    data = bytearray(b"".join(records))
    for _ in range(rng.choice([0, 0, 1, 2, 10])):
        at, what = rng.randrange(len(data) + 1), rng.choice(["flip", "cut", "insert", "zeros", "end"])
        if what == "flip" and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif what == "cut":
            del data[at : at + rng.choice([1, 8, 48, 100])]
        elif what == "insert":
            data[at:at] = rng.choice([b"KVTL", rng.randbytes(24), records[0] if records else b""])
        elif what == "zeros":
            data[at : at + 30] = bytes(len(data[at : at + 30]))
        else:
            del data[at:]
    loaded = decode(bytes(data))
    assert (loaded.pages.entries(), loaded.end, loaded.damaged) == decode_by_the_book(bytes(data))


def test_many_puts_at_once_are_the_same_bytes() -> None:
    entries = [entry(n, b"o" * (n % 4 * 13)) for n in range(50)]
    pages = PageColumns.of(entries)
    data = b"".join(map(encode_put, entries))
    assert encode_puts(pages, 0, 50) == data and len(data) == put_bytes(pages)
    assert encode_puts(pages, 0, 13) + encode_puts(pages, 13, 99) == data
    assert encode_puts(PageColumns.of([]), 0, 10) == b""
