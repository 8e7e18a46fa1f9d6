"""The form of a page in Redis and on the wire: a header of 96 bytes, little-endian, then the page's bytes.

Specified in `docs/formats.md` under "Wire record" and frozen by golden vectors; it changes only with `VERSION`. The
header's checksum covers everything: the 72 bytes before it by their content, the 8 bytes behind it because they must
be zero, and the page.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import xxhash

from kvtier.abc.tier import CHECKSUM_BYTES, FINGERPRINT_BYTES, KEY_BYTES, PageMeta
from kvtier.errors import KVTierError, SpecError
from kvtier.keys import seed_of

HEADER_BYTES = 96
MAGIC = b"KVTR"
VERSION = 1

_FIELDS = struct.Struct(f"<4sHHIIQ{FINGERPRINT_BYTES}s{KEY_BYTES}s")
_RESERVED = bytes(HEADER_BYTES - _FIELDS.size - CHECKSUM_BYTES)


class RecordError(KVTierError, ValueError):
    """Bytes that are not the record they should be. The message says what is wrong with them."""


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """A header that was parsed and agrees with its key, its length and, where one is expected, its spec.

    covered: the 72 bytes that the checksum starts with. checksum: over those and the page. The origin of a page is not
    part of a record.
    """

    covered: bytes
    nbytes: int
    form: int
    valid_tokens: int
    spec: bytes
    checksum: bytes

    def meta(self, page_checksum: bytes) -> PageMeta:
        """The page's description, with the checksum of its bytes alone."""
        return PageMeta(self.nbytes, self.form, self.valid_tokens, page_checksum, self.spec)


def pack_header(key: bytes, meta: PageMeta, data: Any) -> bytes:
    """The 96 bytes that go before `data`, a buffer of ``meta.nbytes`` bytes. SpecError where a field cannot be kept."""
    if len(key) != KEY_BYTES or len(meta.spec) != FINGERPRINT_BYTES:
        raise SpecError(
            f"key and spec have {KEY_BYTES} and {FINGERPRINT_BYTES} bytes, got {len(key)} and {len(meta.spec)}"
        )
    if not (0 <= meta.form < 1 << 16 and 0 <= meta.valid_tokens < 1 << 32 and meta.nbytes >= 0):
        raise SpecError(f"nbytes, form or valid_tokens out of range: {meta}")
    if len(data) != meta.nbytes:
        raise SpecError(f"data has {len(data)} bytes, its meta says {meta.nbytes}")
    covered = _FIELDS.pack(MAGIC, VERSION, meta.form, meta.valid_tokens, 0, meta.nbytes, meta.spec, key)
    check = record_check(covered, key)
    check.update(data)
    return covered + check.digest() + _RESERVED


def record_check(covered: bytes, key: bytes) -> xxhash.xxh3_128:
    """The hash of a record whose page is still to be fed: ``update`` with the page's bytes, then ``digest``."""
    return xxhash.xxh3_128(covered, seed_of(key))


def parse_header(raw: bytes, key: bytes, record_bytes: int, spec: bytes | None = None) -> RecordHeader:
    """Check the header of the record found under `key`, `record_bytes` long in all, and, with `spec`, that its page has
    that fingerprint. The page's bytes are checked by the caller, with `record_check`. Raises RecordError."""
    if len(raw) != HEADER_BYTES:
        raise RecordError(f"a record of {record_bytes} bytes is shorter than its header")
    magic, version, form, valid_tokens, flags, nbytes, found_spec, found_key = _FIELDS.unpack_from(raw)
    if magic != MAGIC:
        raise RecordError(f"not a page record: it starts with {magic!r}")
    if version != VERSION:
        raise RecordError(f"a record of version {version}, this release reads version {VERSION}")
    if flags or raw[_FIELDS.size + CHECKSUM_BYTES :] != _RESERVED:
        raise RecordError("reserved bits of the header are set")
    if nbytes != record_bytes - HEADER_BYTES:
        raise RecordError(f"{record_bytes - HEADER_BYTES} bytes of page where the header says {nbytes}")
    if found_key != key:
        raise RecordError("the record of another key")
    if spec is not None and found_spec != spec:
        raise RecordError("the record of a page with another spec")
    checksum = raw[_FIELDS.size : _FIELDS.size + CHECKSUM_BYTES]
    return RecordHeader(raw[: _FIELDS.size], nbytes, form, valid_tokens, found_spec, checksum)
