"""LMCache's ObjectKey as bytes: the page hash under kvtier's namespace, and the origin from which a key is listed."""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache
from typing import Any

from kvtier.connectors.lmcache.chunks import ChunkLayout
from kvtier.keys import CodecPolicy, Namespace

_HEAD = struct.Struct("<BQIHHH")  # 1, rank, object group; lengths of chunk hash, model name, salt
_LISTED, _DIGEST, _TEXT = 1, 2, 3
_LONGEST = 255  # what a tier keeps of an origin


def namespace_of(layout: ChunkLayout, policy: CodecPolicy, *, weights: str, salt: str) -> Namespace:
    """Of chunks of one layout. LMCache's key says the rest: model, rank, object group, tenant. Chunks of which LMCache
    tells no shape share their keys whatever their size, because a lookup does not know it."""
    spec = layout.spec
    return Namespace(
        model="lmcache",
        weights=weights,
        dtype=spec.buffers[0].dtype.value if layout.known else "",
        spec=spec.fingerprint.hex() if layout.known else "",
        page_tokens=spec.page_tokens,
        codec=policy.encoded(),
        shard="",
        salt=salt,
    )


def encode_key(key: Any) -> bytes:
    """Injective, at most 255 bytes. Where the parts are longer, a digest of them, from which the key cannot be told."""
    chunk_hash: bytes = key.chunk_hash
    head, tail = _around(len(chunk_hash), key.model_name, key.kv_rank, key.object_group_id, key.cache_salt)
    whole = head + chunk_hash + tail
    if len(whole) <= _LONGEST:
        return whole
    return bytes([_DIGEST]) + hashlib.blake2b(whole, digest_size=32).digest()


@lru_cache(maxsize=256)
def _around(hash_bytes: int, model_name: str, kv_rank: int, object_group: int, cache_salt: str) -> tuple[bytes, bytes]:
    """What is encoded before and behind a chunk's hash: the same for all chunks of a model and a tenant."""
    model, salt = model_name.encode(), cache_salt.encode()
    rank = kv_rank & (1 << 64) - 1
    return _HEAD.pack(_LISTED, rank, object_group, hash_bytes, len(model), len(salt)), model + salt


def decode_key(origin: bytes) -> tuple[bytes, str, int, int, str] | None:
    """chunk_hash, model_name, kv_rank, object_group_id, cache_salt; None for what `encode_key` made no whole key of."""
    if len(origin) < _HEAD.size or origin[0] != _LISTED:
        return None
    _, rank, group, hash_bytes, model_bytes, salt_bytes = _HEAD.unpack_from(origin)
    if len(origin) != _HEAD.size + hash_bytes + model_bytes + salt_bytes:
        return None
    rest = origin[_HEAD.size :]
    model = rest[hash_bytes : hash_bytes + model_bytes]
    return rest[:hash_bytes], model.decode(), rank, group, rest[hash_bytes + model_bytes :].decode()


def salt_of(origin: bytes) -> str | None:
    """cache_salt; None for what `encode_key` made no whole key of."""
    if len(origin) < _HEAD.size or origin[0] != _LISTED:
        return None
    salt_bytes = int.from_bytes(origin[_HEAD.size - 2 : _HEAD.size], "little")
    return origin[len(origin) - salt_bytes :].decode() if salt_bytes else ""


def encode_text(key: str) -> bytes:
    """As `encode_key`, of a key that LMCache's older engine gives as text."""
    whole = bytes([_TEXT]) + key.encode()
    return whole if len(whole) <= _LONGEST else bytes([_DIGEST]) + hashlib.blake2b(whole, digest_size=32).digest()


def decode_text(origin: bytes) -> str | None:
    """The key; None for what `encode_text` made no whole key of."""
    return origin[1:].decode() if origin[:1] == bytes([_TEXT]) else None
