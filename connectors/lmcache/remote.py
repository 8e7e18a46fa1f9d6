"""The in-process door of LMCache's older engine: ``remote_storage_plugins: [kvtier]``. Contract: LMCache 0.5.6,
`lmcache/v1/storage_backend/connector/base_connector.py`.

Its coroutines run on LMCache's event loop, so everything that takes time runs in threads of the loop's executor. As in
the L2 adapter, nothing is raised for what happens to chunks.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from typing import Any

from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from kvtier.connectors.lmcache.chunk_store import ChunkStore
from kvtier.connectors.lmcache.chunks import Chunk, layout_of, object_chunk, partial_layout, shapes_of
from kvtier.connectors.lmcache.host import check_calls
from kvtier.connectors.lmcache.identity import decode_text, encode_text
from kvtier.connectors.lmcache.options import AdapterOptions
from kvtier.errors import CodecError, ConfigError

_log = logging.getLogger(__name__)

_PREFIX = "remote_storage_plugin."
_LMCACHE_S_OWN = ("module_path", "class_name")


class KvtierConnectorAdapter(ConnectorAdapter):
    """What ``class_name`` names in LMCache's `extra_config`."""

    def __init__(self) -> None:
        super().__init__("plugin://kvtier")

    def create_connector(self, context: ConnectorContext) -> RemoteConnector:
        """Raises ConfigError for a mistake in the options, EngineError for an LMCache that would call us otherwise."""
        check_calls(KvtierRemoteConnector, RemoteConnector)
        return KvtierRemoteConnector(context)


class KvtierRemoteConnector(RemoteConnector):
    """Whole chunks, and the partial one at a prompt's end, of one worker."""

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context.config, context.metadata)
        metadata = context.metadata
        params = options_of(context.config.extra_config or {}, context.plugin_name or "kvtier")
        params.setdefault("attention", "mla" if metadata.use_mla else "vllm")
        options = AdapterOptions.of(params)
        self._loop, self._memory, self._metadata = context.loop, context.local_cpu_backend, metadata
        self._attention, self._rope_dim = options.attention, options.rope_dim
        sizes = tuple(int(dtype.itemsize) for dtype in self.meta_dtypes)
        groups = shapes_of(self.meta_shapes, self.meta_dtypes)
        self._whole = layout_of(groups, options.attention, options.rope_dim, sizes)
        self._chunks = ChunkStore(options, rank=metadata.local_worker_id, ranks=max(1, metadata.local_world_size))

    # -- is it there -------------------------------------------------------------------------------------------------

    async def exists(self, key: Any) -> bool:
        return bool(await self._loop.run_in_executor(None, self.exists_sync, key))

    def exists_sync(self, key: Any) -> bool:
        """Whether a tier has the chunk. Asks shared tiers over the network; does not read it."""
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: list[Any]) -> int:
        """How many of the first `keys` are there."""
        try:
            store = self._chunks.store
            wanted = self._chunks.keys_of(self._whole, [encode_text(key.to_string()) for key in keys])
            have = [a or b for a, b in zip(store.host.contains_many(wanted), store.known_below(wanted), strict=True)]
            for tier in store.lower:
                left = [i for i, known in enumerate(have) if not known] if tier.capabilities.shared else []
                for i, known in zip(left, tier.contains_many([wanted[i] for i in left]), strict=True):
                    have[i] = known
            return next((i for i, known in enumerate(have) if not known), len(have))
        except Exception as error:  # noqa: BLE001 - see the module's docstring
            self._count("contains", error)
            return 0

    # -- get and put -------------------------------------------------------------------------------------------------

    async def get(self, key: Any) -> Any:
        """The chunk in memory of LMCache's, or None."""
        found: list[Any] = await self._loop.run_in_executor(None, self._get, [key])
        return found[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: list[Any]) -> list[Any]:
        """As `get`, with one lookup for all."""
        found: list[Any] = await self._loop.run_in_executor(None, self._get, list(keys))
        return found

    def _get(self, keys: list[Any]) -> list[Any]:
        items: list[Any] = [None] * len(keys)
        try:
            found = self._chunks.find([self._whole] * len(keys), [encode_text(key.to_string()) for key in keys])
            used: set[int] = set()
            try:
                self._chunks.store.wait(found.lookup)
                if self._chunks.store.hold(found.lookup):
                    ready = found.ready
                    tokens = [meta.valid_tokens for _, meta in found.lookup.slots_of([found.pages[i] for i in ready])]
                    chunks: dict[int, Chunk] = {}
                    for i, n in zip(ready, tokens, strict=True):
                        items[i] = self._memory.allocate(self._shapes(n), self.meta_dtypes, self.meta_fmt)
                        chunk = self._chunk_of(items[i]) if items[i] is not None else None
                        if chunk is not None:
                            chunks[i] = chunk
                    pages, memory = list(chunks), list(chunks.values())
                    used = _finished(lambda done: self._chunks.onboard(found, pages, memory, done))
            finally:
                self._chunks.release(found, used)
                for i, item in enumerate(items):
                    if item is not None and i not in used:
                        item.ref_count_down()
                        items[i] = None
        except Exception as error:  # noqa: BLE001 - see the module's docstring
            self._count("get", error)
        return items

    async def put(self, key: Any, memory_obj: Any) -> None:
        """Store a chunk; returns when its memory is not read any more."""
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: list[Any], memory_objs: list[Any]) -> None:
        """As `put`, in one batch."""
        for item in memory_objs:
            item.ref_count_up()  # until it was read: whoever waits for this may be cancelled before
        await self._loop.run_in_executor(None, self._put, list(keys), list(memory_objs))

    def _put(self, keys: list[Any], items: list[Any]) -> None:
        try:
            hashes, chunks = [], []
            for key, item in zip(keys, items, strict=True):
                if (chunk := self._chunk_of(item)) is not None:
                    hashes.append(encode_text(key.to_string()))
                    chunks.append(chunk)
            _finished(lambda done: self._chunks.offload(hashes, chunks, lambda ok, fresh: done(set())))
            if len(chunks) != len(keys):
                raise CodecError(f"{len(keys) - len(chunks)} of {len(keys)} chunks have no shape that can be kept")
        except Exception as error:  # noqa: BLE001 - see the module's docstring
            self._count("put", error)
        finally:
            for item in items:
                item.ref_count_down()

    def _shapes(self, tokens: int) -> Any:
        """Of a chunk of so many tokens. Where nothing tells a page's tokens, it is a whole one."""
        whole = tokens == self._whole.spec.page_tokens
        return self.meta_shapes if whole else self._metadata.get_shapes(tokens)

    def _chunk_of(self, item: Any) -> Chunk | None:
        chunk = object_chunk(item, self._attention, self._rope_dim)
        if chunk is None:
            return None
        layout = partial_layout(self._whole, chunk.layout)
        if layout is None:
            return None
        return Chunk(layout, chunk.address, chunk.owner, chunk.layout.spec.page_tokens)

    # -- house-keeping -----------------------------------------------------------------------------------------------

    def remove_sync(self, key: Any) -> bool:
        """Remove a chunk from every tier; whether it was there."""
        there = self.exists_sync(key)
        self._chunks.delete([encode_text(key.to_string())])
        return there

    async def list(self) -> list[str]:
        """Keys of the chunks in the tiers of this node; of long ones nothing can be told."""
        return [text for _, known in self._chunks.known() if (text := decode_text(known.origin)) is not None]

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._chunks.close)

    def _count(self, where: str, error: BaseException) -> None:
        self._chunks.ledger.error("engine")
        _log.error("kvtier: %s failed, LMCache goes on without it", where, exc_info=error)


def _finished(start: Any) -> set[int]:
    """What `start(done)` gives to `done`, once it has."""
    event, result = threading.Event(), set[int]()

    def done(pages: set[int]) -> None:
        result.update(pages)
        event.set()

    start(done)
    event.wait()
    return result


def options_of(extra: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Options of the plugin `name` in LMCache's `extra_config`."""
    prefix = f"{_PREFIX}{name}."
    params = {option.removeprefix(prefix): value for option, value in extra.items() if option.startswith(prefix)}
    for option in params:
        if "." in option:
            raise ConfigError(f"extra_config: {prefix}{option}: write the options of a block as a mapping")
    return {option: value for option, value in params.items() if option not in _LMCACHE_S_OWN}
