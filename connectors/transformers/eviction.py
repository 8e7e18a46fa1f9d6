"""EvictingGeneration: compression methods on a live DynamicCache, between the steps of a generation.

One object serves one batch of sequences of equal length at a time, on the thread that runs the model. Positions stay
logical, the cache's length is physical.

    with EvictingGeneration(model, methods) as generation:      # methods: kv_cache_compression_config, parsed
        tokens = generation.generate(prompt_ids, max_new_tokens=8192)
        print(generation.compression.managers[0].metrics.evicted_tokens("triattention"))
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvtier.abc.compression import (
    AttentionKind,
    CacheGeometry,
    KeepSet,
    LiveCache,
    LiveRequest,
    Platform,
)
from kvtier.compression import CompressionPipeline, build_compression
from kvtier.compression.triattention.rotary import Rotary, rotary_of
from kvtier.config import ColdPageConfig, TriAttentionConfig
from kvtier.errors import ConfigError, SpecError
from kvtier.kernels.rowpack import fast as rowpack
from kvtier.kernels.rowpack.sequences import PagedSequence

_GROWTH_ROWS = 256
"""Rows that a cache layer grows by at least: appending then rarely copies."""


class RowLayer(DynamicLayer):
    """A DynamicLayer over buffers with room: appending writes in place, and packed rows leave their room behind.

    It stands in for layers with a sliding window as well, which then keep all rows and are masked by row number:
    right as long as the latest window's rows stay together at the end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``[batch, heads, new, dim]``; the answer is everything, as views of the buffers."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows = self.get_seq_length()
        needed = rows + key_states.shape[-2]
        if self._buffers is None or self._buffers[0].shape[-2] < needed:
            room = max(needed + _GROWTH_ROWS, needed * 5 // 4)
            self._buffers = (_grown(key_states, self.keys, rows, room), _grown(value_states, self.values, rows, room))
        keys, values = self._buffers
        keys[:, :, rows:needed] = key_states
        values[:, :, rows:needed] = value_states
        self.shrink(needed)
        return self.keys, self.values

    def shrink(self, rows: int) -> None:
        """Let the first `rows` rows of the buffers be the content."""
        if self._buffers is not None:
            self.keys, self.values = self._buffers[0][:, :, :rows], self._buffers[1][:, :, :rows]

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[batch, heads, room, dim]``. Raises SpecError before the first update."""
        if self._buffers is None:
            raise SpecError("the cache is empty: run the prompt first")
        return self._buffers


def _grown(like: torch.Tensor, old: torch.Tensor, rows: int, room: int) -> torch.Tensor:
    batch, heads, _, dim = like.shape
    buffer = torch.empty(batch, heads, room, dim, dtype=like.dtype, device=like.device)
    if rows:
        buffer[:, :, :rows] = old
    return buffer


class BatchCache(LiveCache):
    """A batch of sequences of one length in a DynamicCache of RowLayers: sequence b is row b of the batch axis, a
    page of its own for the row packing."""

    def __init__(self, config: Any, requests: Sequence[LiveRequest]) -> None:
        self.dynamic = DynamicCache(config=config)
        self.dynamic.layers = [RowLayer() for _ in self.dynamic.layers] or [
            RowLayer() for _ in range(config.num_hidden_layers)
        ]
        self.requests = list(requests)
        self._row_of = {request.request_id: n for n, request in enumerate(requests)}

    @property
    def layers(self) -> list[RowLayer]:
        return list(self.dynamic.layers)

    def keys(self, request: LiveRequest, layer: int, first_row: int = 0) -> torch.Tensor:
        keys: torch.Tensor = self.layers[layer].keys
        return keys[self._row_of[request.request_id], :, first_row : request.length]

    def compact(self, requests: Sequence[LiveRequest], keep: Sequence[KeepSet]) -> None:
        """Raises SpecError where not every sequence of the batch is packed to the same length: they share one
        tensor."""
        rows = {k.kept_rows + r.draft_tokens for k, r in zip(keep, requests, strict=True)}
        if len(requests) != len(self.requests) or len(rows) != 1:
            raise SpecError(
                f"a method packs {len(requests)} of {len(self.requests)} sequences, to {sorted(rows)} rows: in one "
                "batch all must keep the same number; generate them one by one"
            )
        (packed,) = rows
        sequences = [
            PagedSequence(
                pages=torch.tensor([self._row_of[request.request_id]]),
                rows=request.length + request.draft_tokens,
                first_row=kept.first_row,
                kept=torch.as_tensor(kept.ordinals),
                tail_rows=request.draft_tokens,
            )
            for request, kept in zip(requests, keep, strict=True)
        ]
        rowpack.pack([[t.transpose(1, 2) for t in layer.buffers()] for layer in self.layers], sequences)
        for layer in self.layers:
            layer.shrink(packed)
        for request, kept in zip(requests, keep, strict=True):
            request.length = kept.kept_rows

    def rows_bytes(self) -> int:
        """Bytes of the rows in use, keys and values of all layers and sequences."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in (layer.keys, layer.values))


class EvictingGeneration:
    """Runs a model with compression methods between its steps. Use `generate` for transformers' own generation, or
    `prefill` and `step` for a loop of your own. `finish` (or leaving the `with` block) ends the sequences."""

    def __init__(
        self,
        model: Any,
        methods: Sequence[ColdPageConfig | TriAttentionConfig] | CompressionPipeline,
        *,
        context_tokens: int | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """methods: parsed configuration, or a pipeline made for `platform_of(model)`. context_tokens: the longest
        sequence that will be generated, where it is less than the model's own limit. Raises ConfigError for methods
        that cannot work with this model."""
        self._model = model
        self._config = model.config.get_text_config(decoder=True)
        self._cache_argument = cache_argument(model)
        if isinstance(methods, CompressionPipeline):
            self.compression = methods
        else:
            self.compression = build_compression(
                methods,
                platform_of(model, context_tokens=context_tokens),
                rotary=rotary_reader(model.config),
                registry=registry,
            )
        self.cache: BatchCache | None = None
        self._begun = 0

    @property
    def requests(self) -> list[LiveRequest]:
        return self.cache.requests if self.cache is not None else []

    def begin(self, batch: int, prompt_tokens: int) -> BatchCache:
        """Start `batch` sequences with prompts of `prompt_tokens` tokens, ending those before."""
        self.finish()
        self._begun += 1
        requests = [LiveRequest(f"{self._begun}.{n}", prompt_tokens) for n in range(batch)]
        self.cache = BatchCache(self._config, requests)
        self.compression.call("on_request_init", requests)
        return self.cache

    def prefill(self, input_ids: torch.Tensor, *, chunk_tokens: int | None = None, **kwargs: Any) -> torch.Tensor:
        """Run prompts ``[batch, tokens]`` into a new cache; logits ``[batch, tokens of the last chunk,
        vocabulary]``."""
        self.begin(*input_ids.shape)
        for chunk in torch.split(input_ids, chunk_tokens or input_ids.shape[1], dim=1):
            output = self._forward(chunk, **kwargs)
        return output.logits  # type: ignore[no-any-return]  # transformers is not followed

    def step(self, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Feed the next tokens ``[batch, n]`` (n > 1: confirmed together); logits ``[batch, n, vocabulary]``."""
        return self._forward(input_ids, **kwargs).logits  # type: ignore[no-any-return]

    def generate(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        """``model.generate`` with the methods active, its options and its answer. Prompts have one length, no
        padding. The cache stays readable until the next call. Raises ConfigError for beams and assisted generation,
        and where the attention mask hides tokens."""
        self._check_options(kwargs)
        mask = kwargs.pop("attention_mask", None)
        if mask is not None and not bool(torch.as_tensor(mask).all()):
            raise ConfigError("attention_mask hides tokens: with eviction, prompts of a batch must have one length")
        sequences = int(kwargs.get("num_return_sequences") or 1)
        cache = self.begin(input_ids.shape[0] * sequences, input_ids.shape[1])
        before = self._model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        after = self._model.register_forward_hook(self._after_forward)
        try:
            ones = torch.ones_like(input_ids)
            return self._model.generate(
                input_ids, attention_mask=ones, **{self._cache_argument: cache.dynamic}, **kwargs
            )
        finally:
            before.remove()
            after.remove()

    def publishable(self, row: int = 0) -> DynamicCache:
        """A copy of the rows of sequence `row` that are the plain KV of its tokens, for a prefix cache: all of them,
        or with evictions those of the prompt. Its length says how many tokens it holds."""
        cache = self._live()
        tokens = self.compression.publishable_tokens(cache.requests[row])
        copy = DynamicCache(config=self._config)
        for number, layer in enumerate(cache.layers):
            keys, values = (t[row : row + 1, :, :tokens].clone() for t in (layer.keys, layer.values))
            copy.update(keys, values, number)
        return copy

    def finish(self) -> None:
        """End the sequences and forget their cache."""
        if self.cache is not None:
            self.compression.call("on_request_finish", self.cache.requests)
        self.cache = None

    def __enter__(self) -> EvictingGeneration:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def _check_options(self, options: dict[str, Any]) -> None:
        config = options.get("generation_config") or self._model.generation_config
        beams = options.get("num_beams", getattr(config, "num_beams", None)) or 1
        if beams > 1:
            raise ConfigError(f"num_beams = {beams}: sequences with evictions cannot be searched by beams; use 1")
        for option in ("assistant_model", "prompt_lookup_num_tokens", "inputs_embeds", self._cache_argument):
            if options.get(option) is not None:
                raise ConfigError(f"option {option!r}: not supported together with eviction; leave it out")

    def _live(self) -> BatchCache:
        if self.cache is None:
            raise SpecError("no sequences are running: call prefill or generate first")
        return self.cache

    def _forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        cache = self._live()
        positions = self._step_begin(input_ids.shape[1], input_ids.device)
        with torch.no_grad():
            output = self._model(
                input_ids,
                position_ids=positions.expand(input_ids.shape[0], -1),
                use_cache=True,
                **{self._cache_argument: cache.dynamic},
                **kwargs,
            )
        self._step_end(input_ids.shape[1], output)
        return output

    def _before_forward(self, _: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """generate counts logical tokens; the model must see logical positions and no mask of logical length."""
        input_ids = kwargs["input_ids"]
        kwargs = dict(kwargs, attention_mask=None)
        kwargs["position_ids"] = self._step_begin(input_ids.shape[1], input_ids.device).expand(input_ids.shape[0], -1)
        return args, kwargs

    def _after_forward(self, _: Any, args: Any, output: Any) -> None:
        self._step_end(self._live().dynamic.get_seq_length() - self._live().requests[0].length, output)

    def _step_begin(self, tokens: int, device: torch.device) -> torch.Tensor:
        """Logical positions ``[1, tokens]`` of the tokens that come next."""
        cache = self._live()
        first = cache.requests[0]
        if first.length >= first.prompt_tokens:
            self.compression.call("on_generation_step_begin", cache.requests, cache)
        start = first.length + (first.evicted_tokens if first.length >= first.prompt_tokens else 0)
        return torch.arange(start, start + tokens, device=device)[None]

    def _step_end(self, tokens: int, output: Any) -> None:
        """The model has written `tokens` rows per sequence: bring the requests up to date, then call the methods."""
        cache = self._live()
        in_prompt = cache.requests[0].length < cache.requests[0].prompt_tokens
        for request in cache.requests:
            request.length += tokens
            if not in_prompt:
                request.generated_tokens += tokens
        attentions = getattr(output, "attentions", None)
        if not in_prompt:
            self.compression.call("on_generation_step_end", cache.requests, cache, attentions=attentions)
            return
        self.compression.call("on_prefill_chunk_end", cache.requests, cache, attentions=attentions)
        if cache.requests[0].length == cache.requests[0].prompt_tokens:
            self.compression.call("on_context_step_end", cache.requests, cache, attentions=attentions)


def cache_argument(model: Any) -> str:
    """The name under which this version of transformers takes a cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def rotary_reader(config: Any) -> Callable[[int, str], Rotary]:
    """(layer, rope style) -> the rotary embedding of a model with this configuration."""
    return lambda layer, style: rotary_of(config, ROPE_INIT_FUNCTIONS, layer, style=style)


def platform_of(model: Any, *, context_tokens: int | None = None) -> Platform:
    """What transformers and `model` offer to compression methods."""
    config = model.config.get_text_config(decoder=True)
    layers = DynamicCache(config=config).layers
    sliding = [type(layer) is DynamicSlidingWindowLayer for layer in layers]
    # A chunked layer looks alike, but its chunks begin at logical positions, which packed rows no longer have.
    chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    heads = int(config.num_attention_heads)
    return Platform(
        engine="transformers",
        geometry=CacheGeometry(
            layers=len(layers) or int(config.num_hidden_layers),
            query_heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            windows=tuple(config.sliding_window if slides else None for slides in sliding),
        ),
        attention=AttentionKind.MLA if getattr(config, "kv_lora_rank", None) is not None else AttentionKind.MHA,
        sliding_pools=chunked,
        recurrent=any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers),
        context_tokens=context_tokens or getattr(config, "max_position_embeddings", None),
    )
