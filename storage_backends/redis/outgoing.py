"""Pages on their way out: each the SET command of its record, made when it is its turn to be sent."""

from __future__ import annotations

from collections.abc import Iterator

from kvtier.abc.tier import PutItem
from kvtier.storage_backends.redis.connection import Buffer, encode
from kvtier.storage_backends.redis.record import HEADER_BYTES, RecordError, pack_header

_PING = encode([b"PING"])


class SetOptions:
    """What follows the value in every SET: only where there is none, and for how long, or without an end (0)."""

    def __init__(self, ttl_ms: int) -> None:
        options = [b"NX", *([b"PX", b"%d" % ttl_ms] if ttl_ms else [])]
        self.count = len(options)
        self.tail = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(o), o) for o in options)


class Outgoing:
    """The parts of one page's SET, for as many sendings as it takes. The page is compared with its checksum when the
    first part is asked for. In the place of a bad one, then `bad`, a PING is sent: every command has a reply."""

    __slots__ = ("_item", "_name", "_options", "_parts", "bad")

    def __init__(self, name: bytes, item: PutItem, options: SetOptions) -> None:
        self._name, self._item, self._options = name, item, options
        self._parts: list[Buffer] = []
        self.bad = False

    def __iter__(self) -> Iterator[Buffer]:
        if not self._parts:
            try:
                self._parts = self._make()
            except RecordError:
                self._parts, self.bad = [_PING], True
        return iter(self._parts)

    def _make(self) -> list[Buffer]:
        meta, name = self._item.meta, self._name
        page = self._item.data[: meta.nbytes]
        header = pack_header(self._item.key, meta, page)
        length = HEADER_BYTES + len(page) + len(meta.origin)
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (3 + self._options.count, len(name), name, length)
        return [head + header, page, meta.origin + self._options.tail]
