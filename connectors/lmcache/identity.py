"""LMCache's ObjectKey as bytes: the page hash under kvtier's namespace, and the origin from which a key is listed."""

from __future__ import annotations

import hashlib
import struct
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
    parts = (key.chunk_hash, key.model_name.encode(), key.cache_salt.encode())
    head = _HEAD.pack(_LISTED, key.kv_rank & (1 << 64) - 1, key.object_group_id, *map(len, parts))
    whole = head + b"".join(parts)
    if len(whole) <= _LONGEST:
        return whole
    return bytes([_DIGEST]) + hashlib.blake2b(whole, digest_size=32).digest()


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


def encode_text(key: str) -> bytes:
    """As `encode_key`, of a key that LMCache's older engine gives as text."""
    whole = bytes([_TEXT]) + key.encode()
    return whole if len(whole) <= _LONGEST else bytes([_DIGEST]) + hashlib.blake2b(whole, digest_size=32).digest()


def decode_text(origin: bytes) -> str | None:
    """The key; None for what `encode_text` made no whole key of."""
    return origin[1:].decode() if origin[:1] == bytes([_TEXT]) else None
