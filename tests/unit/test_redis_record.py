"""The 96-byte header: golden bytes, and every damaged byte found."""

from __future__ import annotations

import pytest
import xxhash

from kvtier.abc.tier import PageMeta
from kvtier.errors import SpecError
from kvtier.keys import checksum, seed_of
from kvtier.storage_backends.redis.record import HEADER_BYTES, RecordError, pack_header, parse_header, record_check

KEY = bytes(range(32))
SPEC = bytes(range(100, 116))
PAGE = bytes(i * 7 % 256 for i in range(1000))
META = PageMeta(len(PAGE), 2, 48, checksum(PAGE, KEY), SPEC)

GOLDEN = (
    "4b565452010002003000000000000000e803000000000000"
    "6465666768696a6b6c6d6e6f70717273000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    "129579cf638941548cedb3e2f541b5dd0000000000000000"
)


def read(raw: bytes, payload: bytes, key: bytes = KEY, spec: bytes | None = SPEC) -> PageMeta:
    """The check of a whole record, as a reader does it."""
    header = parse_header(raw, key, spec)
    if header.record_bytes != len(raw) + len(payload):
        raise RecordError("length")
    check = record_check(header.covered, key)
    check.update(payload)
    if check.digest() != header.checksum:
        raise RecordError("checksum")
    page = payload[: header.nbytes]
    return header.meta(checksum(page, key), payload[header.nbytes :])


def test_golden_header() -> None:
    assert pack_header(KEY, META, PAGE).hex() == GOLDEN


def test_checksum_is_the_published_hash_of_the_fields_and_the_page() -> None:
    raw = pack_header(KEY, META, PAGE)
    assert raw[72:88] == xxhash.xxh3_128_digest(raw[:72] + PAGE, seed_of(KEY))
    assert raw[88:] == bytes(8)


def test_fields_come_back() -> None:
    raw = pack_header(KEY, META, PAGE)
    assert len(raw) == HEADER_BYTES
    assert read(raw, PAGE) == META
    assert read(raw, PAGE, spec=None) == META


def test_an_origin_follows_the_page_and_is_covered() -> None:
    for origin in (b"x", bytes(range(255))):
        meta = META._replace(origin=origin)
        raw = pack_header(KEY, meta, PAGE)
        assert read(raw, PAGE + origin) == meta
        with pytest.raises(RecordError, match="length"):
            read(raw, PAGE)
        with pytest.raises(RecordError, match="checksum"):
            read(raw, PAGE + origin[:-1] + b"?")


@pytest.mark.parametrize("at", range(HEADER_BYTES))
@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_in_any_byte_of_the_header_is_found(at: int, bit: int) -> None:
    raw = bytearray(pack_header(KEY, META, PAGE))
    raw[at] ^= 1 << bit
    with pytest.raises(RecordError):
        read(bytes(raw), PAGE, spec=None)


@pytest.mark.parametrize("at", [0, 1, 500, 999])
def test_a_flipped_bit_in_the_page_is_found(at: int) -> None:
    page = bytearray(PAGE)
    page[at] ^= 0x10
    with pytest.raises(RecordError, match="checksum"):
        read(pack_header(KEY, META, PAGE), bytes(page))


def test_another_key_spec_or_length_is_found() -> None:
    raw = pack_header(KEY, META, PAGE)
    with pytest.raises(RecordError, match="another key"):
        read(raw, PAGE, key=bytes(32))
    with pytest.raises(RecordError, match="another spec"):
        read(raw, PAGE, spec=bytes(16))
    with pytest.raises(RecordError, match="length"):
        read(raw, PAGE[:-1])
    with pytest.raises(RecordError, match="shorter than its header"):
        parse_header(b"", KEY)


def test_a_page_that_went_bad_gets_no_header() -> None:
    with pytest.raises(RecordError, match="does not match its checksum"):
        pack_header(KEY, META, PAGE[:-1] + b"?")


@pytest.mark.parametrize(
    "meta",
    [
        PageMeta(999, 2, 48, bytes(16), SPEC),
        PageMeta(1000, 1 << 16, 48, bytes(16), SPEC),
        PageMeta(1000, 2, -1, bytes(16), SPEC),
        PageMeta(1000, 2, 48, bytes(16), SPEC[:-1]),
        PageMeta(1000, 2, 48, bytes(16), SPEC, bytes(256)),
    ],
)
def test_what_cannot_be_described_is_refused(meta: PageMeta) -> None:
    with pytest.raises(SpecError):
        pack_header(KEY, meta, PAGE)
