"""The form of a page in Redis and on the wire: a header of 96 bytes, little-endian, then the payload: the page's bytes
and the engine's own key of it (the origin, at most 255 bytes, mostly none).

Specified in `docs/formats.md` under "Wire record" and frozen by golden vectors; it changes only with `VERSION`. The
header's checksum covers everything: the 72 bytes before it and the payload by their content, the 8 bytes behind it
because they must be zero.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from kvtier.abc.tier import CHECKSUM_BYTES, FINGERPRINT_BYTES, KEY_BYTES, PageMeta
from kvtier.errors import KVTierError, SpecError
from kvtier.kernels import _native
from kvtier.keys import seed_of

HEADER_BYTES = 96
MAGIC = b"KVTR"
VERSION = 1

_FIELDS = struct.Struct(f"<4sHHIIQ{FINGERPRINT_BYTES}s{KEY_BYTES}s")
_ORIGIN_MASK = 0xFF
"""The low byte of the flags is the origin's length; the others are reserved."""
_RESERVED = bytes(HEADER_BYTES - _FIELDS.size - CHECKSUM_BYTES)


class RecordError(KVTierError, ValueError):
    """Bytes that are not the record they should be. The message says what is wrong with them."""


class NewerRecordError(RecordError):
    """A record that a later release wrote. It is that one's: no use here, and not ours to remove."""


class OtherKeyError(RecordError):
    """The record of another key: a copy, or the reply to another command."""


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """A header that was parsed and agrees with its key and, where one is expected, its spec.

    covered: the 72 bytes that the checksum starts with. nbytes: of the page. checksum: over `covered` and the payload.
    """

    covered: bytes
    nbytes: int
    origin_bytes: int
    form: int
    valid_tokens: int
    spec: bytes
    checksum: bytes

    @property
    def record_bytes(self) -> int:
        return HEADER_BYTES + self.nbytes + self.origin_bytes

    def meta(self, page_checksum: bytes, origin: bytes) -> PageMeta:
        """The page's description, with the checksum of its bytes alone."""
        return PageMeta(self.nbytes, self.form, self.valid_tokens, page_checksum, self.spec, origin)


def pack_header(key: bytes, meta: PageMeta, data: Any) -> bytes:
    """The 96 bytes that go before `data`, a buffer of ``meta.nbytes`` bytes, and ``meta.origin`` behind it. SpecError
    where a field cannot be kept. RecordError where `data` does not match ``meta.checksum``: the record gets a checksum
    of its own, which must not bless bytes that went bad before."""
    if len(key) != KEY_BYTES:
        raise SpecError(f"a page key has {KEY_BYTES} bytes, got {len(key)}")
    if len(meta.spec) != FINGERPRINT_BYTES:
        raise SpecError(f"a spec fingerprint has {FINGERPRINT_BYTES} bytes, got {len(meta.spec)}")
    if not (0 <= meta.form < 1 << 16 and 0 <= meta.valid_tokens < 1 << 32 and len(meta.origin) <= _ORIGIN_MASK):
        raise SpecError(f"form, valid_tokens or origin out of range: {meta}")
    if len(data) != meta.nbytes:
        raise SpecError(f"data has {len(data)} bytes, its meta says {meta.nbytes}")
    covered = _FIELDS.pack(MAGIC, VERSION, meta.form, meta.valid_tokens, len(meta.origin), meta.nbytes, meta.spec, key)
    record, page = _native.record_checksums(covered, data, meta.origin, key)
    if page != meta.checksum:
        raise RecordError("the page does not match its checksum")
    return covered + record + _RESERVED


def record_check(covered: bytes, key: bytes) -> _native.Xxh3:
    """The hash of a record whose payload is still to be fed: ``update`` with its bytes, then ``digest``."""
    check = _native.Xxh3(seed_of(key))
    check.update(covered)
    return check


def parse_header(raw: bytes, key: bytes, spec: bytes | None = None) -> RecordHeader:
    """Check the header of the record found under `key` and, with `spec`, that its page has that fingerprint. The caller
    compares `record_bytes` with the length that it finds, and the payload with `checksum`. Raises RecordError, and
    NewerRecordError for one whose version is higher, of which nothing but magic and version is looked at."""
    if len(raw) != HEADER_BYTES:
        raise RecordError(f"a record of {len(raw)} bytes is shorter than its header")
    magic, version, form, valid_tokens, flags, nbytes, found_spec, found_key = _FIELDS.unpack_from(raw)
    if magic != MAGIC:
        raise RecordError(f"not a page record: it starts with {magic!r}")
    if version > VERSION:
        raise NewerRecordError(f"a record of version {version}, this release reads version {VERSION}")
    if version != VERSION:
        raise RecordError(f"a record of version {version}, this release reads version {VERSION}")
    if flags & ~_ORIGIN_MASK or raw[_FIELDS.size + CHECKSUM_BYTES :] != _RESERVED:
        raise RecordError("reserved bits of the header are set")
    if found_key != key:
        raise OtherKeyError("the record of another key")
    if spec is not None and found_spec != spec:
        raise RecordError("the record of a page with another spec")
    checksum = raw[_FIELDS.size : _FIELDS.size + CHECKSUM_BYTES]
    return RecordHeader(raw[: _FIELDS.size], nbytes, flags, form, valid_tokens, found_spec, checksum)
