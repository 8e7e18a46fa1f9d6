"""Native hashes, bit for bit against their packages: XXH3-128 and keyed BLAKE2b-256."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import pytest
import xxhash

from kvtier.kernels import _native

SEEDS = (0, 1, 0x123456789ABCDEF0, 2**63, 2**64 - 1)


DATA = np.random.default_rng(4).integers(0, 256, 3_000_001, dtype=np.uint8).tobytes()


@pytest.mark.parametrize("seed", SEEDS)
def test_xxh3_of_every_length(isa: str, seed: int) -> None:
    for length in range(2049):
        data = DATA[length : 2 * length]
        assert _native.xxh3_128(data, seed) == xxhash.xxh3_128_digest(data, seed), length


@pytest.mark.parametrize("length", [4096, 65_535, 65_536, 65_537, 1_327_184, len(DATA)])
def test_xxh3_of_long_inputs(isa: str, length: int) -> None:
    for seed in SEEDS:
        assert _native.xxh3_128(DATA[:length], seed) == xxhash.xxh3_128_digest(DATA[:length], seed)


def test_xxh3_takes_any_buffer() -> None:
    expected = xxhash.xxh3_128_digest(b"abc")
    for buffer in (b"abc", bytearray(b"abc"), memoryview(b"abc"), np.frombuffer(b"abc", np.uint8)):
        assert _native.xxh3_128(buffer) == expected
    with pytest.raises(TypeError):
        _native.xxh3_128("abc")


@pytest.mark.parametrize("sizes", [1000, np.array([1000, 0, 17, 999], np.int64)], ids=["one size", "each its own"])
def test_checksum_and_verify_pages(isa: str, sizes: int | np.ndarray) -> None:
    arena = np.frombuffer(DATA[:4096], np.uint8).copy()
    offsets, seeds = np.array([3096, 0, 1001, 2050], np.int64), np.array([5, 6, 7, 2**64 - 1], np.uint64)
    checksums = np.zeros((4, 16), np.uint8)
    _native.checksum_pages(arena, offsets, sizes, seeds, checksums)
    for i, (at, size) in enumerate(zip(offsets, np.broadcast_to(sizes, 4), strict=True)):
        assert checksums[i].tobytes() == xxhash.xxh3_128_digest(arena[at : at + size].tobytes(), int(seeds[i]))
    assert _native.verify_pages(arena, offsets, sizes, seeds, checksums).tolist() == [1, 1, 1, 1]
    arena[1005] ^= 4
    assert _native.verify_pages(arena, offsets, sizes, seeds, checksums).tolist()[2] == 0
    assert _native.verify_pages(arena, offsets, sizes, seeds[::-1].copy(), checksums).sum() == 0


@pytest.mark.parametrize(("offset", "size"), [(-1, 10), (4090, 10), (0, 4097), (0, -1), (2**62, 2**62)])
def test_pages_outside_the_arena_are_refused(offset: int, size: int) -> None:
    arena, checksums = np.zeros(4096, np.uint8), np.zeros((1, 16), np.uint8)
    with pytest.raises(ValueError, match="outside an arena of 4096"):
        _native.verify_pages(arena, np.array([offset]), size, np.zeros(1, np.uint64), checksums)


@pytest.mark.parametrize("size", [1, 16, 31, 32, 64, 127, 128, 129, 255, 256, 257, 1000])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_page_keys_are_keyed_blake2b(size: int, count: int) -> None:
    key = DATA[:32]
    hashes = [DATA[i * size : (i + 1) * size] for i in range(count)]
    expected = b"".join(hashlib.blake2b(h, key=key, digest_size=32).digest() for h in hashes)
    assert _native.page_keys(key, b"".join(hashes), size) == expected


@pytest.mark.parametrize("size", [1, 32, 127, 128, 129, 1000])
@pytest.mark.parametrize("count", [0, 1, 7, 1500])
def test_lists_of_hashes_give_the_same_keys(size: int, count: int) -> None:
    key, data = DATA[:32], random.Random(size).randbytes(size * count)
    hashes = [data[i * size : (i + 1) * size] for i in range(count)]
    expected = [hashlib.blake2b(h, key=key, digest_size=32).digest() for h in hashes]
    assert _native.page_key_list(key, hashes) == expected
    assert _native.page_names(key, [h.hex() for h in hashes]) == (hashes, expected)
    assert _native.page_names(key, [h.hex().upper() for h in hashes]) == (hashes, expected)


@pytest.mark.parametrize("hashes", [[b"ab", b"a"], [b"a", b"ab"], [b""], [b"ab", b""], [b"ab", "ab"], [None]])
def test_hashes_of_several_lengths_are_not_for_the_native_code(hashes: list[Any]) -> None:
    assert _native.page_key_list(bytes(32), hashes) is None


@pytest.mark.parametrize(
    "hashes",
    [
        ["ab", "a"],
        ["a"],
        [""],
        ["ab", ""],
        ["ab", "abcd"],
        ["ag"],
        ["/0"],
        ["a b "],
        ["ä"],
        ["\ud800a"],
        [b"ab"],
        [None],
    ],
)
def test_what_is_not_hexadecimal_is_not_for_the_native_code(hashes: list[Any]) -> None:
    assert _native.page_names(bytes(32), hashes) is None


def test_a_namespace_digest_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="31 bytes, must be 32"):
        _native.page_key_list(bytes(31), [b"ab"])
    with pytest.raises(ValueError, match="31 bytes, must be 32"):
        _native.page_names(bytes(31), ["ab"])


@pytest.mark.parametrize(("key", "packed", "size"), [(31, 64, 32), (32, 63, 32), (32, 64, 0), (32, 64, -1)])
def test_page_keys_that_do_not_fit_are_refused(key: int, packed: int, size: int) -> None:
    with pytest.raises(ValueError, match="bytes"):
        _native.page_keys(b"k" * key, b"h" * packed, size)
