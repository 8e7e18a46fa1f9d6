"""The records of an NVMe tier's index log as bytes (`docs/formats.md`), one by one and a million at a time."""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.storage_backends.slots.columns import PAGE, Entry, PageColumns

MAGIC = b"KVTL"
PUT, DELETE = 1, 2
_HEAD = struct.Struct("<4sIBBHI32s")  # magic, crc, kind, origin bytes, form, valid tokens, key
_TAIL = struct.Struct("<16s16sQQ")  # checksum, spec, offset, nbytes
_CRC_FROM = 8
_ALIGN = 8
_MAGIC_WORD = int.from_bytes(MAGIC, "little")
_RECORD = np.dtype(
    [
        ("magic", "S4"),
        ("crc", "<u4"),
        ("kind", "u1"),
        ("origin_bytes", "u1"),
        ("form", "<u2"),
        ("valid_tokens", "<u4"),
        ("key", "V32"),
        ("checksum", "V16"),
        ("spec", "V16"),
        ("offset", "<u8"),
        ("nbytes", "<u8"),
    ]
)
"""A put up to its origin."""


class Loaded(NamedTuple):
    """pages: in the order of their puts. end: where the last good record ends. damaged: stretches of bytes inside the
    log that are no good record, skipped."""

    pages: PageColumns
    end: int
    damaged: int


def encode_put(entry: Entry) -> bytes:
    key, meta, offset = entry
    head = _HEAD.pack(MAGIC, 0, PUT, len(meta.origin), meta.form, meta.valid_tokens, key)
    return _sealed(head + _TAIL.pack(meta.checksum, meta.spec, offset, meta.nbytes) + _padded(meta.origin))


def encode_delete(key: bytes) -> bytes:
    return _sealed(_HEAD.pack(MAGIC, 0, DELETE, 0, 0, 0, key))


def deleted_key(record: bytes) -> bytes | None:
    """The page of an `encode_delete`; None of other records."""
    _, _, kind, _, _, _, key = _HEAD.unpack_from(record)
    return bytes(key) if kind == DELETE else None


def put_bytes(pages: PageColumns) -> int:
    """Length of `encode_puts`."""
    return _RECORD.itemsize * len(pages) + sum(len(_padded(origin)) for origin in pages.origins.values())


def encode_puts(pages: PageColumns, start: int, stop: int) -> bytes:
    """What `encode_put` gives for the pages from `start` to `stop`, joined."""
    chosen = pages.pages[start:stop]
    records = np.zeros(len(chosen), _RECORD)
    records["magic"], records["kind"] = MAGIC, PUT
    for name in PAGE.names or ():
        records[name] = chosen[name]
    get = pages.origins.get
    parts = []
    plain = memoryview(records.view(np.uint8)) if len(records) else memoryview(b"")
    for i in range(len(chosen)):
        record = plain[i * _RECORD.itemsize : (i + 1) * _RECORD.itemsize]
        origin = get(start + i)
        if origin is None:
            parts.append(_sealed(record))
        else:
            parts.append(_sealed(b"".join((record[:9], bytes([len(origin)]), record[10:], _padded(origin)))))
    return b"".join(parts)


def decode(data: bytes | bytearray) -> Loaded:
    """Replay a log. Bytes that are no good record are skipped up to the next one; a torn tail is left out."""
    starts, stops, puts, checks = _candidates(data)
    live: dict[bytes, int] = {}
    end = damaged = 0
    view, crc32 = memoryview(data), zlib.crc32
    for i, (at, stop, put, crc) in enumerate(
        zip(starts.tolist(), stops.tolist(), puts.tolist(), checks.tolist(), strict=True)
    ):
        if at < end or crc32(view[at + _CRC_FROM : stop]) != crc:
            continue  # inside a good record; or none
        damaged += at != end
        end = stop
        key = bytes(view[at + 16 : at + 48])
        live.pop(key, None)  # a page put again goes to the end
        if put:
            live[key] = i
    chosen = starts[np.fromiter(live.values(), np.int64, len(live))]
    return Loaded(_gather(data, chosen), end, damaged)


def _candidates(
    data: bytes | bytearray,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_], npt.NDArray[np.uint32]]:
    """Where records may lie, going by magic, kind and length: start, end, whether it is a put, and its CRC."""
    raw = np.frombuffer(data, np.uint8)
    words = np.frombuffer(data, "<u4", len(data) // 4)
    starts = np.flatnonzero(words[:: _ALIGN // 4] == _MAGIC_WORD).astype(np.int64) * _ALIGN
    starts = starts[starts + _HEAD.size <= len(data)]
    kinds = raw[starts + 8]
    origins = -(-raw[starts + 9].astype(np.int64) // _ALIGN) * _ALIGN
    stops = starts + np.where(kinds == PUT, _RECORD.itemsize + origins, _HEAD.size)
    fit = ((kinds == PUT) | (kinds == DELETE)) & (stops <= len(data))
    starts = starts[fit]
    return starts, stops[fit], kinds[fit] == PUT, words[starts // 4 + 1]


def _gather(data: bytes | bytearray, starts: npt.NDArray[np.int64]) -> PageColumns:
    """The pages of the puts that begin at `starts`."""
    pages = np.empty(len(starts), PAGE)
    if not len(starts):
        return PageColumns(pages, {})
    raw = np.frombuffer(data, np.uint8)
    records = np.lib.stride_tricks.sliding_window_view(raw, _RECORD.itemsize)[starts].reshape(-1).view(_RECORD)
    for name in PAGE.names or ():
        pages[name] = records[name]
    lengths = records["origin_bytes"]
    positions = np.flatnonzero(lengths)
    begins = starts[positions] + _RECORD.itemsize
    ends = begins + lengths[positions]
    origins = {
        i: bytes(data[begin:end])
        for i, begin, end in zip(positions.tolist(), begins.tolist(), ends.tolist(), strict=True)
    }
    return PageColumns(pages, origins)


def _sealed(record: bytes | memoryview) -> bytes:
    body = record[_CRC_FROM:]
    return b"".join((MAGIC, zlib.crc32(body).to_bytes(4, "little"), body))


def _padded(origin: bytes) -> bytes:
    return origin.ljust(-(-len(origin) // _ALIGN) * _ALIGN, b"\0")
