"""Pages on their way in: each the reply to the GET of its record, read into the caller's buffer and found right."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.abc.tier import GetResult, GetStatus
from kvtier.storage_backends.redis.connection import Connection, ReplyError
from kvtier.storage_backends.redis.record import (
    HEADER_BYTES,
    NewerRecordError,
    OtherKeyError,
    RecordError,
    parse_header,
    record_check,
)


class Incoming:
    """spec: fingerprint that every page must have, where it is known. met_newer: hears of records of a later release;
    say_once: of a topic, and what people should know of it."""

    def __init__(
        self,
        spec: bytes | None,
        met_newer: Callable[[NewerRecordError], None],
        say_once: Callable[[str, str], None],
    ) -> None:
        self._spec = spec
        self._met_newer = met_newer
        self._say_once = say_once

    def read(self, connection: Connection, key: bytes, out: memoryview) -> tuple[int, GetResult | ReplyError]:
        """The next reply: bytes of the value, 0 where there is none, and what it is."""
        record = connection.read_record(out, key)
        if record is not None:
            return record[0], self._judge(connection, *record[1:], key)
        length = connection.read_bulk_length()
        if isinstance(length, ReplyError):
            return 0, length
        if length < 0:
            return 0, GetResult(GetStatus.ABSENT)
        result = self._read_whole(connection, length, key, out)
        connection.end_bulk()
        return length, result

    def _read_whole(self, connection: Connection, length: int, key: bytes, out: memoryview) -> GetResult:
        """Read a value of `length` bytes completely: its page into `out`, where it is right."""
        if length < HEADER_BYTES:
            connection.skip(length)
            return GetResult(GetStatus.CORRUPT)
        raw = bytearray(HEADER_BYTES)
        connection.read_into(memoryview(raw))
        left = length - HEADER_BYTES
        try:
            header = parse_header(bytes(raw), key, self._spec)
            if header.record_bytes != length:
                raise RecordError(f"{length} bytes where the header says {header.record_bytes}")
        except RecordError as e:
            connection.skip(left)
            return self._refuse(connection, e)
        if len(out) < header.nbytes:
            # Replaced by a longer page since the caller asked for its length.
            connection.skip(left)
            return GetResult(GetStatus.FAILED)
        record, page = record_check(header.covered, key), record_check(b"", key)
        connection.read_into(out[: header.nbytes], [record, page])
        origin = bytearray(header.origin_bytes)
        connection.read_into(memoryview(origin))
        record.update(origin)
        return self._judge(connection, bytes(raw), record.digest(), page.digest(), bytes(origin), key)

    def _judge(
        self, connection: Connection, raw: bytes, checksum: bytes, page_checksum: bytes, origin: bytes, key: bytes
    ) -> GetResult:
        """Of a record that was read completely, its page where the caller wants it."""
        try:
            header = parse_header(raw, key, self._spec)
        except RecordError as e:
            return self._refuse(connection, e)
        if checksum != header.checksum:
            return GetResult(GetStatus.CORRUPT)
        return GetResult(GetStatus.HIT, header.meta(page_checksum, origin))

    def _refuse(self, connection: Connection, why: RecordError) -> GetResult:
        if isinstance(why, NewerRecordError):
            self._met_newer(why)
            return GetResult(GetStatus.ABSENT)
        connection.doubtful |= isinstance(why, OtherKeyError)
        self._say_once(str(why), f"a stored page is bad: {why}")
        return GetResult(GetStatus.CORRUPT)
