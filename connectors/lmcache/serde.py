"""The serde ``kvtier_nvfp4``: chunks as records for LMCache's own adapters, such as `fs` and `resp`.

A record is kvtier's wire record: a header with key, geometry and checksum, then the cold page. Its size follows from
the layout alone, as LMCache requires: it allocates before it asks, and a blob of another length fails its whole batch.
Contract: LMCache 0.5.6, `lmcache/v1/distributed/serde/base.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from lmcache.v1.distributed.serde import AsyncSerdeProcessor, Deserializer, Serializer, register_serde_factory

from kvtier.abc.codec import Codec
from kvtier.abc.tier import PageMeta
from kvtier.build import open_codec
from kvtier.codecs.registry import codec, codec_for_form
from kvtier.config import Config
from kvtier.connectors.lmcache.chunks import SAMPLE, Chunk, ChunkLayout, object_chunk, object_layout
from kvtier.connectors.lmcache.identity import encode_key, namespace_of
from kvtier.connectors.lmcache.options import AdapterOptions
from kvtier.errors import CodecError, ConfigError
from kvtier.keys import seed_of
from kvtier.mover import policy_of
from kvtier.storage_backends.redis.record import HEADER_BYTES, RecordError, pack_header, parse_header, record_check

NAME = "kvtier_nvfp4"
_ONE = np.zeros(1, np.int64)
_TAKEN = ("attention", "rope_dim", "weights", "salt", "kv_cache_compression_config", "config", "max_workers")
_OF_THE_ADAPTER = {"instance", *Config.model_fields}.difference(_TAKEN)


class _Pages:
    """What both directions share: the codec and the key of a chunk."""

    def __init__(self, options: AdapterOptions) -> None:
        self._options = options

    def codec(self, layout: ChunkLayout) -> Codec:
        if not any(b.compressible for b in layout.spec.buffers):
            return codec("raw")
        chosen = open_codec(self._options.config, layout.spec)
        if chosen.varies:
            raise ConfigError(
                f"quant: the serde {NAME} needs pages of a size that is known before, and those of {chosen.id!r} vary; "
                "use another quant, or the adapter kvtier.connectors.lmcache instead of a serde"
            )
        return chosen

    def layout(self, described: Any) -> ChunkLayout:
        return object_layout(described, self._options.attention, self._options.rope_dim)

    def chunk(self, item: Any) -> Chunk:
        chunk = object_chunk(item, self._options.attention, self._options.rope_dim)
        if chunk is None:
            raise CodecError("the chunk was freed before it could be read")
        return chunk

    def page_key(self, layout: ChunkLayout, key: Any) -> bytes:
        namespace = namespace_of(
            layout, policy_of(self.codec(layout)), weights=self._options.weights, salt=self._options.config.salt
        )
        (page_key,) = namespace.page_keys([encode_key(key)])
        return page_key


class ColdSerializer(Serializer):
    """Chunk -> record."""

    def __init__(self, options: AdapterOptions) -> None:
        self._pages = _Pages(options)

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        """Exactly the size of the record."""
        layout = self._pages.layout(layout_desc)
        return HEADER_BYTES + self._pages.codec(layout).layout(layout.spec).cold_page_bytes

    def serialize(self, src: Any, dst: Any, key: Any) -> int:
        """CodecError for a chunk that cannot be encoded (not a number, infinity): LMCache then does not store its
        batch."""
        chunk = self._pages.chunk(src)
        spec, used = chunk.layout.spec, self._pages.codec(chunk.layout)
        cold = used.layout(spec)
        pool, ids = chunk.layout.pool([chunk])
        page_key = self._pages.page_key(chunk.layout, key)
        record = _memory(dst, HEADER_BYTES + cold.cold_page_bytes)
        page = record[HEADER_BYTES:]
        valid = np.array([spec.page_tokens], np.int32)
        result = used.encode(cold, pool, ids, valid, page, _ONE, np.array([seed_of(page_key)], np.uint64))
        if result.refused[0]:
            raise CodecError(f"the chunk cannot be stored as {used.id}: it holds values that are not finite")
        meta = PageMeta(
            cold.cold_page_bytes, used.form, spec.page_tokens, result.checksums[0].tobytes(), spec.fingerprint
        )
        record[:HEADER_BYTES] = np.frombuffer(pack_header(page_key, meta, page.data), np.uint8)
        return HEADER_BYTES + cold.cold_page_bytes


class ColdDeserializer(Deserializer):
    """Record -> chunk. RecordError for one that is not what was stored under the key: nothing is decoded from it."""

    def __init__(self, options: AdapterOptions) -> None:
        self._pages = _Pages(options)

    def deserialize(self, src: Any, dst: Any, key: Any) -> None:
        chunk = self._pages.chunk(dst)
        spec = chunk.layout.spec
        page_key = self._pages.page_key(chunk.layout, key)
        record = _memory(src, HEADER_BYTES)
        header = parse_header(record[:HEADER_BYTES].tobytes(), page_key, spec.fingerprint)
        used = codec_for_form(header.form)
        cold = used.layout(spec)
        if header.nbytes != cold.cold_page_bytes:
            raise RecordError(f"a record of {header.nbytes} bytes, pages of this form have {cold.cold_page_bytes}")
        page = _memory(src, HEADER_BYTES + header.nbytes)[HEADER_BYTES:]
        check = record_check(header.covered, page_key)
        check.update(page.data)
        if check.digest() != header.checksum:
            raise RecordError("the record's bytes do not match its checksum")
        pool, ids = chunk.layout.pool([chunk])
        valid = np.array([header.valid_tokens], np.int32)
        used.decode(cold, pool, ids, valid, page, _ONE, range(len(spec.buffers)))


def _memory(item: Any, nbytes: int) -> npt.NDArray[np.uint8]:
    """The first bytes of a buffer of LMCache's, as they lie in memory."""
    raw = item.raw_tensor
    if raw is None:
        raise CodecError("the buffer was freed before it could be used")
    import torch

    flat: npt.NDArray[np.uint8] = raw.reshape(-1).view(torch.uint8).numpy()
    if len(flat) < nbytes:
        raise RecordError(f"a buffer of {len(flat)} bytes is shorter than a record of {nbytes}")
    return flat[:nbytes]


def make_serde(params: Mapping[str, Any]) -> Any:
    """From the adapter's ``"serde"`` block: `max_workers`, and the adapter's own parameters without tiers.
    Raises ConfigError."""
    rest = {name: value for name, value in params.items() if name not in ("type", "max_workers")}
    for name in sorted(rest.keys() & _OF_THE_ADAPTER):
        raise ConfigError(
            f"{name} = {rest[name]!r}: the serde {NAME} takes {', '.join(_TAKEN)}; give it to the adapter "
            "kvtier.connectors.lmcache, or leave it out"
        )
    options = AdapterOptions.of(rest)
    workers = params.get("max_workers", 1)
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise ConfigError(f"max_workers = {workers!r}: give a number of threads, at least 1")
    _Pages(options).codec(SAMPLE)  # what is wrong with it is told now, not with every chunk
    return AsyncSerdeProcessor(ColdSerializer(options), ColdDeserializer(options), max_workers=workers)


def register() -> None:
    """Make the serde known to LMCache; more than once is harmless."""
    from lmcache.v1.distributed.serde import get_registered_serde_types

    if NAME not in get_registered_serde_types():
        register_serde_factory(NAME, make_serde)
