"""PrefixCache: restores the stored prefix of a prompt into a DynamicCache, and offloads what a request computed.

Works on CPU caches with batch size 1. Threads: calls may come from any thread; `offload` returns at once and its pages
are encoded in worker threads, so the cache's tensors must not be changed in place until its ticket is done (appending
is fine: transformers makes new tensors).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from kvtier.abc.codec import Codec
from kvtier.build import open_codec, open_store
from kvtier.config import PRIORITIES, Config
from kvtier.connectors.transformers.compact_serving import CompactCache
from kvtier.connectors.transformers.geometry import page_spec_of
from kvtier.connectors.transformers.identity import check_model_name, weights_fingerprint_of
from kvtier.errors import SpecError
from kvtier.hot import HotLayout, HotPool, dtype_of
from kvtier.keys import Namespace, page_hashes
from kvtier.ledger import Ledger
from kvtier.lookup import Lookup
from kvtier.mover import PageMover, policy_of
from kvtier.server.http import HttpExporter, HttpOptions
from kvtier.server.page import StatusPage
from kvtier.server.probe import store_ready
from kvtier.spec import DType, PageSpec
from kvtier.tickets import OffloadResult, Ticket

DEFAULT_PAGE_TOKENS = 64

_TORCH_DTYPE = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16, DType.FP32: torch.float32}


@dataclass(frozen=True, slots=True)
class Restored:
    """What was brought back for one request.

    cache: holds the first `tokens` tokens of the prompt (empty where nothing was found); compute the rest into it.
    pages: pages restored, by the tier they were found in.
    """

    cache: DynamicCache
    tokens: int
    pages: dict[str, int]


class PrefixCache:
    """Binds one model to a store. See the module's docstring; made by `open`, or around a mover of your own."""

    def __init__(self, model: Any, mover: PageMover) -> None:
        """Raises SpecError where `mover` was made for another model's geometry or dtype."""
        expected = page_spec_of(model.config, page_tokens=mover.spec.page_tokens, dtype=dtype_of_model(model))
        if mover.spec != expected:
            raise SpecError(
                f"the store's pages were set up for another model ({_describe(mover.spec)}; this model has "
                f"{_describe(expected)}): open the prefix cache with this model"
            )
        self._config = model.config.get_text_config(decoder=True)
        self.mover = mover
        self.store = mover.store
        self._http: HttpExporter | None = None
        self._restores = itertools.count()

    @staticmethod
    def open(
        model: Any, config: Config, *, model_name: str, page_tokens: int = DEFAULT_PAGE_TOKENS, lora: str = ""
    ) -> PrefixCache:
        """Open the tiers of `config` for `model` (a PreTrainedModel on the CPU), and the HTTP exporter if it asks for
        one. `model_name` is the name that the model is known by, never a local path. Raises ConfigError, SpecError or
        TierPathError, with everything closed again."""
        spec = page_spec_of(model.config, page_tokens=page_tokens, dtype=dtype_of_model(model))
        codec = open_codec(config, spec)
        namespace = namespace_of(model, spec, codec, model_name=model_name, lora=lora, salt=config.salt)
        store = open_store(config)
        mover: PageMover | None = None
        try:
            mover = PageMover(
                store,
                spec,
                namespace,
                codec,
                workers=config.workers,
                offload_wait_s=config.offload_wait,
                priority=PRIORITIES[config.priority],
            )
            prefixes = PrefixCache(model, mover)
            if config.http is not None:
                nbytes = mover.layout(codec).cold_page_bytes
                prefixes._http = HttpExporter(
                    store.ledger.registry,
                    HttpOptions.of(config.http),
                    ready=lambda: store_ready(store, nbytes),
                    page=StatusPage(store.ledger.registry, config, lambda: store.observer),
                )
            return prefixes
        except BaseException:
            if mover is not None:
                mover.close()
            store.close()
            raise

    @property
    def ledger(self) -> Ledger:
        return self.store.ledger

    @property
    def http(self) -> HttpExporter | None:
        return self._http

    def restore(self, request_id: str, token_ids: Sequence[int]) -> Restored:
        """Bring back the longest stored prefix of `token_ids`, waiting for pages on their way up from lower tiers until
        the store's deadline. At least one token is always left to compute, since a model needs it to say what follows.
        Every page that was looked up is counted before this returns. Blocks; never raises for what happens to pages.
        Calls under way may share a `request_id`: each is counted by itself."""
        hashes = self._hashes(token_ids, len(token_ids) - 1)
        if not hashes:
            return Restored(DynamicCache(config=self._config), 0, {})
        # Never the caller's id alone: two requests under one would load each other's pages.
        request_id = f"{request_id}#{next(self._restores)}"
        lookup = self.store.lookup(request_id, self.mover.namespace.page_keys(hashes), hashes=hashes)
        try:
            self.store.hold(lookup)
            pages = self.store.wait(lookup)
            if not self.store.hold(lookup, pages):  # its last pages gave way to an older request a moment ago
                self.store.hold(lookup, 0)
                pages = 0
            arrays: list[torch.Tensor] = []
            while pages:
                arrays = self._empty(pages)
                if self._load(lookup, arrays, pages):
                    break
                pages = lookup.ready_pages
            by_tier = lookup.restored_from(pages)
        finally:
            self.store.settle(request_id)
        return Restored(
            self._cache_of(arrays) if pages else DynamicCache(config=self._config), self._tokens(pages), by_tier
        )

    def offload(self, token_ids: Sequence[int], cache: DynamicCache) -> Ticket[OffloadResult]:
        """Queue the full pages of `cache`, which holds exactly `token_ids`, for storage. A last partial page is not
        stored. Pages that a tier already has are not encoded again. Raises SpecError where the cache is not this
        model's, is not on the CPU, or holds another number of tokens."""
        if isinstance(cache, CompactCache):
            raise SpecError(
                "the cache goes on from a compacted prefix: its rows are not the plain KV of its tokens, and are not "
                "stored as such"
            )
        if cache.get_seq_length() != len(token_ids):
            raise SpecError(f"the cache holds {cache.get_seq_length()} tokens, {len(token_ids)} token ids were given")
        hashes = self._hashes(token_ids, len(token_ids))
        pool = HotPool.of(self.mover.spec, self._arrays_of(cache), HotLayout.SEQ)
        return self.mover.offload(pool, hashes, range(len(hashes)))

    def protect(self, token_ids: Sequence[int]) -> int:
        """Keep the full pages of `token_ids`, a system prompt say, from making room for others until `unprotect` or
        `close`; how many of them are kept. Not those that are not stored yet, nor what exceeds half of host memory."""
        return sum(self.store.protect(self.mover.namespace.page_keys(self._hashes(token_ids, len(token_ids)))))

    def unprotect(self, token_ids: Sequence[int]) -> None:
        """The pages of `token_ids` may make room again."""
        self.store.unprotect(self.mover.namespace.page_keys(self._hashes(token_ids, len(token_ids))))

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Tell how long the model took to compute so many tokens of a prompt, so that pages which would take longer to
        load are left alone (`break_even` in the configuration). Without it nothing is."""
        self.store.break_even.prefilled(tokens, seconds)

    def close(self) -> None:
        """Let queued work end for a moment, then close everything. Safe to call twice."""
        if self._http is not None:
            self._http.close()
        self.mover.close()
        self.store.close()

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hashes(self, token_ids: Sequence[int], limit: int) -> list[bytes]:
        """Chained hashes of the full pages among the first `limit` tokens."""
        return page_hashes(token_ids[: max(0, limit)], self.mover.spec.page_tokens)

    def _tokens(self, pages: int) -> int:
        return pages * self.mover.spec.page_tokens

    def _load(self, lookup: Lookup, arrays: list[torch.Tensor], pages: int) -> bool:
        """Decode the first `pages` pages into `arrays`; False if they must not be used. Pages that turned out bad are
        misses by then, so the ready prefix is shorter."""
        pool = HotPool.of(self.mover.spec, arrays, HotLayout.SEQ)
        result = self.mover.onboard(lookup, pool, range(pages)).result()
        if not result.ok and not result.failed_pages:
            # Not because of a page (closing, say): none of them was restored, and none of them is bad.
            self.store.hold(lookup, 0)
        return result.ok

    def _empty(self, pages: int) -> list[torch.Tensor]:
        """One uninitialised ``[heads, tokens, dim]`` tensor per buffer of the page."""
        spec = self.mover.spec
        return [torch.empty(b.heads, self._tokens(pages), b.dim, dtype=_TORCH_DTYPE[b.dtype]) for b in spec.buffers]

    def _cache_of(self, arrays: list[torch.Tensor]) -> DynamicCache:
        """A cache whose layers are `arrays` themselves, with the batch axis in front."""
        cache = DynamicCache(config=self._config)
        for layer, keys, values in zip(cache.layers, arrays[0::2], arrays[1::2], strict=True):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys[None], values[None]
        return cache

    def _arrays_of(self, cache: DynamicCache) -> list[torch.Tensor]:
        spec = self.mover.spec
        if len(cache.layers) != spec.num_layers:
            raise SpecError(
                f"the cache has {len(cache.layers)} layers, the pages {spec.num_layers}: it is another model's"
            )
        arrays: list[torch.Tensor] = []
        for number, layer in enumerate(cache.layers):
            for tensor, buffer in zip(
                (layer.keys, layer.values), spec.buffers[2 * number : 2 * number + 2], strict=True
            ):
                if tensor.shape[0] != 1:
                    raise SpecError(f"the cache has batch size {tensor.shape[0]}: offload one sequence at a time")
                if dtype_of(tensor) is not buffer.dtype:
                    raise SpecError(f"the cache holds {tensor.dtype}, its pages were set up for {buffer.dtype.value}")
                arrays.append(tensor[0])
        return arrays


def namespace_of(
    model: Any, spec: PageSpec, codec: Codec, *, model_name: str, lora: str = "", salt: str = "", generation: str = ""
) -> Namespace:
    """The namespace of `model`'s pages. `generation` changes whenever weights are updated in place."""
    return Namespace.of(
        spec,
        policy_of(codec),
        model=check_model_name(model_name),
        weights=weights_fingerprint_of(model),
        dtype=spec.buffers[0].dtype.value,
        lora=lora,
        salt=salt,
        generation=generation,
    )


def dtype_of_model(model: Any) -> DType:
    """Element type of the cache that `model` computes. Raises SpecError for one that has no pages."""
    dtype = dtype_of(next(model.parameters()))
    if dtype not in _TORCH_DTYPE:
        raise SpecError(f"a model that computes in {dtype.value} is not supported: load it in bf16, fp16 or fp32")
    return dtype


def _describe(spec: PageSpec) -> str:
    first = spec.buffers[0]
    return f"{spec.num_layers} layers, {first.heads} heads x {first.dim}, {first.dtype.value}"
