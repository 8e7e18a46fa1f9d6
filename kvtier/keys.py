"""Who a page belongs to (Namespace), the 32-byte key it is stored under, and the checksum bound to that key.

The encodings are specified in `docs/formats.md` and frozen by golden vectors; they change only with
`FORMAT_VERSION`. Nothing here depends on the process: no `hash()`, no seeds, no order of a dict.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.abc.tier import CHECKSUM_BYTES, FINGERPRINT_BYTES, KEY_BYTES
from kvtier.errors import ConfigError
from kvtier.kernels import _native
from kvtier.spec import PageSpec

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class CodecPolicy:
    """Family, version and options of the codec that writes pages. Any form of one policy is valid under its keys."""

    id: str
    version: int
    config: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    def encoded(self) -> str:
        return json.dumps([self.id, self.version, dict(sorted(self.config.items()))], separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that must be equal for two pages to be interchangeable.

    model: served name, never a local path. weights: hex fingerprint (`fingerprint_weights`). generation: empty, or
    16 random bytes as hex drawn at each in-place weight update. dtype: of the hot cache. spec: PageSpec fingerprint,
    hex; empty where pages of any geometry share the keys and the fingerprint in a page's record decides. shard:
    ``replicated``, or ``tp{rank}/{size}`` with the pipeline and context-parallel rank. pruning: empty for
    plain KV; evicted or compacted KV is never plain KV.
    """

    model: str
    weights: str
    dtype: str
    spec: str
    page_tokens: int
    codec: str
    shard: str = "tp0/1"
    generation: str = ""
    lora: str = ""
    salt: str = ""
    pruning: str = ""

    @staticmethod
    def of(spec: PageSpec, policy: CodecPolicy, *, model: str, weights: str, dtype: str, **identity: str) -> Namespace:
        return Namespace(
            model=model,
            weights=weights,
            dtype=dtype,
            spec=spec.fingerprint.hex(),
            page_tokens=spec.page_tokens,
            codec=policy.encoded(),
            **identity,
        )

    @property
    def digest(self) -> bytes:
        """32 bytes: BLAKE2b-256 of the injective encoding."""
        return _digest_of(self)

    def encoded(self) -> bytes:
        """Injective: per field in declaration order, its name and its value, each length-prefixed (u32)."""
        out = [b"kvtier-ns", FORMAT_VERSION.to_bytes(2, "little")]
        for f in fields(self):
            for part in (f.name, str(getattr(self, f.name))):
                raw = part.encode()
                out += [len(raw).to_bytes(4, "little"), raw]
        return b"".join(out)

    def page_keys(self, hashes: Iterable[bytes]) -> list[bytes]:
        """Keys of pages by the engine's page hashes (any bytes, each chained over its prefix): BLAKE2b-256 of the
        hash, keyed with the namespace digest."""
        messages = list(hashes)
        keys = _native.page_key_list(self.digest, messages)
        if keys is None:
            keys = [hashlib.blake2b(m, key=self.digest, digest_size=KEY_BYTES).digest() for m in messages]
        return keys

    def page_names(self, hashes: Sequence[str]) -> tuple[list[bytes], list[bytes]]:
        """Page hashes that an engine hands out in hexadecimal, as bytes, and the keys of their pages."""
        names = _native.page_names(self.digest, list(hashes))
        if names is not None:
            return names
        raw = [bytes.fromhex(page_hash) for page_hash in hashes]
        return raw, self.page_keys(raw)


def owners_of(digests: Sequence[bytes], keys: Sequence[bytes], hashes: Sequence[bytes]) -> list[int]:
    """Whose pages these are: for each the index in `digests` (of namespaces) under which its hash gives its key, or -1.
    hashes: all of one length, at least a byte."""
    owners = _native.page_owners(b"".join(digests), b"".join(keys), b"".join(hashes), len(hashes[0]) if hashes else 1)
    found: list[int] = owners.tolist()
    return found


@lru_cache(maxsize=256)
def _digest_of(namespace: Namespace) -> bytes:
    """Asked for with every batch of pages."""
    return hashlib.blake2b(namespace.encoded(), digest_size=KEY_BYTES).digest()


def seed_of(key: bytes) -> int:
    """Seed of the checksum of the page under `key`: its first 8 bytes, little-endian."""
    return int.from_bytes(key[:8], "little")


def seeds_of(keys: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """uint64 ``[len(keys)]``: as `seed_of`, of many page keys."""
    return np.frombuffer(b"".join(keys), "<u8")[:: KEY_BYTES // 8].astype(np.uint64)


def checksum(data: Any, key: bytes) -> bytes:
    """16 bytes: xxh3-128 of `data` seeded with the page key, so that right bytes under a wrong key fail too."""
    return xxhash.xxh3_128_digest(data, seed_of(key))


def page_hashes(tokens: Sequence[int], page_tokens: int, parent: bytes = b"") -> list[bytes]:
    """Chained SHA-256 per full page of `tokens`: equal hashes mean equal token prefixes. For connectors whose
    engine has no page hashes of its own. Tokens (also a numpy array or a torch tensor) are encoded as u32,
    little-endian. Raises ConfigError for what is no sequence of token ids."""
    if page_tokens < 1:
        raise ConfigError(f"page_tokens = {page_tokens}, must be at least 1")
    ids = np.asarray(tokens)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ConfigError(
            f"token ids of shape {ids.shape} and type {ids.dtype}: give one sequence of integers, without a batch axis"
        )
    if ids.size and not (int(ids.min()) >= 0 and int(ids.max()) < 1 << 32):
        raise ConfigError(f"token ids from {ids.min()} to {ids.max()}: they must be from 0 to {(1 << 32) - 1}")
    packed, stride = ids.astype("<u4").tobytes(), 4 * page_tokens
    hashes = []
    for start in range(0, len(packed) - stride + 1, stride):
        h = hashlib.sha256(parent)
        h.update(packed[start : start + stride])
        parent = h.digest()
        hashes.append(parent)
    return hashes


def fingerprint_weights(config: Mapping[str, Any], tensors: Iterable[tuple[str, Sequence[int], str, bytes]]) -> str:
    """Hex SHA-256 over a model's config and, per tensor, name, shape, dtype and its first 4 KiB.

    Two fine-tunes share headers and sizes, so bytes must take part. Tensors are taken in the order of their names.
    """
    h = hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":"), default=str).encode())
    for name, shape, dtype, head in sorted(tensors, key=lambda t: t[0]):
        described = json.dumps([name, list(shape), dtype], separators=(",", ":")).encode()
        h.update(
            len(described).to_bytes(4, "little") + described + len(head[:4096]).to_bytes(4, "little") + head[:4096]
        )
    return h.hexdigest()


__all__ = [
    "CHECKSUM_BYTES",
    "FINGERPRINT_BYTES",
    "FORMAT_VERSION",
    "KEY_BYTES",
    "CodecPolicy",
    "Namespace",
    "checksum",
    "fingerprint_weights",
    "owners_of",
    "page_hashes",
    "seed_of",
    "seeds_of",
]
