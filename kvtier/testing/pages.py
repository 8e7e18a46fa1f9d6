"""Pages whose bytes follow from their key, so that any mix-up of pages, slots or versions shows."""

from __future__ import annotations

import hashlib

import numpy as np

from kvtier.abc.tier import PageMeta, PutItem
from kvtier.keys import checksum


def key_of(number: int) -> bytes:
    """A page key, 32 bytes, spread like real ones."""
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def data_of(key: bytes, nbytes: int) -> bytes:
    """The bytes that belong to a page of this key and length."""
    seed = int.from_bytes(hashlib.blake2b(key + nbytes.to_bytes(8, "little"), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(seed)).bytes(nbytes)


def item_of(key: bytes, nbytes: int, *, data: bytes | None = None) -> PutItem:
    """A page to put, described in a way that differs from key to key."""
    content = data_of(key, nbytes) if data is None else data
    meta = PageMeta(
        nbytes=nbytes,
        form=1 + key[0] % 3,
        valid_tokens=key[1],
        checksum=checksum(content, key),
        spec=hashlib.blake2b(key[2:3], digest_size=16).digest(),
        origin=key[: key[3] % 33],
    )
    return PutItem(key, meta, memoryview(content))


def belongs(key: bytes, data: memoryview | bytes) -> bool:
    """Whether `data` is what `data_of` gives for this key and length."""
    return bytes(data) == data_of(key, len(data))


def aligned_buffer(nbytes: int, *, shift: int = 0) -> memoryview:
    """A writable buffer of `nbytes` that starts `shift` bytes behind a multiple of 4 KiB, filled with 0xAA."""
    memory = np.full(nbytes + 2 * 4096, 0xAA, np.uint8)
    start = -memory.ctypes.data % 4096 + shift
    return memory[start : start + nbytes].data
