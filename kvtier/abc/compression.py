"""The contract of a compression method: hooks at the stages of a live cache, and what an engine adapter gives them.

A method decides which rows stay (the keep policy); it never moves bytes and owns no pages. The adapter moves them (the
compaction), and never chooses. Array types are the adapter's: numpy or torch, on the cache's device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar


class Stage(str, Enum):
    """The five stages of a cache's life at which methods act."""

    PREFILL_CHUNK = "after each prefill chunk"
    PREFILL = "after prefill"
    DECODE = "between decode steps"
    TOOL_CALL = "around a tool call"
    REQUEST_END = "after the request"


class Speculation(str, Enum):
    """Whether several tokens may be confirmed in one step, with a draft's rows behind them."""

    OFF = "off"
    ON = "on"


class AttentionKind(str, Enum):
    """What a row of the cache is."""

    MHA = "mha"
    """Keys and values per KV head, keys rotated: MHA, MQA and GQA."""
    MLA = "mla"
    """One latent row per token."""


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """Shape of the live cache that a method sees, on this rank.

    first_query_head: where this rank's heads lie among the model's. windows: per layer, the sliding window in tokens of
    a layer whose rows are all kept and only masked, or None; empty means none anywhere."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    first_query_head: int = 0
    windows: tuple[int | None, ...] = ()

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None


@dataclass(frozen=True, slots=True)
class Platform:
    """What an adapter says of its engine, so that a method can refuse it before anything runs.

    engine: its name, for messages. sliding_pools, recurrent: some layers keep only their window, or a state.
    prefix_reuse_limited: the adapter can keep a request's rows beyond `publishable_tokens` out of the prefix cache;
    True as well where there is no prefix cache. context_tokens: the longest sequence that the engine serves."""

    engine: str
    geometry: CacheGeometry
    attention: AttentionKind = AttentionKind.MHA
    sliding_pools: bool = False
    recurrent: bool = False
    beam_width: int = 1
    disaggregated_decode: bool = False
    speculation: Speculation = Speculation.OFF
    prefix_reuse_limited: bool = True
    context_tokens: int | None = None


@dataclass(slots=True)
class LiveRequest:
    """One sequence, as its adapter keeps it up to date. Methods read it and never write.

    generated_tokens: tokens behind the prompt whose KV has been written, evicted ones included; after sampling n tokens
    that is n - 1. length: physical rows in the cache, without the draft's. draft_tokens: rows behind them that are not
    confirmed yet; they move with the kept rows.
    """

    request_id: str
    prompt_tokens: int
    generated_tokens: int = 0
    length: int = 0
    draft_tokens: int = 0

    @property
    def logical_tokens(self) -> int:
        """Tokens the model has seen, which is the position of the next one."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def evicted_tokens(self) -> int:
        """The one integer that the runtime carries: positions are logical, ``length + evicted_tokens``. Valid once the
        prompt is in the cache."""
        return self.logical_tokens - self.length


@dataclass(frozen=True, slots=True)
class KeepSet:
    """Rows of one sequence that stay: those before `first_row`, then ``first_row + ordinals``.

    ordinals: int64 ``[layers or 1, kv_heads or 1, kept]``, strictly ascending along the last axis; 1 stands for all.
    """

    first_row: int
    ordinals: Any

    @property
    def kept_rows(self) -> int:
        return self.first_row + int(self.ordinals.shape[-1])


class LiveCache(ABC):
    """An adapter's view of its cache, for the requests it passes to a hook. Called on the thread of the hook."""

    @abstractmethod
    def keys(self, request: LiveRequest, layer: int, first_row: int = 0) -> Any:
        """``[kv_heads, length - first_row, head_dim]``, the request's physical rows from `first_row` on as stored
        (rotated), draft rows left out. May be a view: valid until the hook returns or `compact` is called. Device work
        that writes them has been ordered before."""

    @abstractmethod
    def compact(self, requests: Sequence[LiveRequest], keep: Sequence[KeepSet]) -> None:
        """Pack the kept rows of each request in place, draft rows behind them byte for byte, update its `length`, and
        give back what became free, not before the device work is done. A draft model's cache is packed with the same
        sets."""


class CompressionManager:
    """One method. Override the hooks that it needs: an adapter does not even call the others.

    Hooks are batched and run on the engine's scheduling thread, after the adapter has brought requests and cache up to
    date; an exception reaches the adapter. Further arguments may come as `kwargs`: ignore those you do not know.
    """

    algorithm: ClassVar[str]
    """Its name in `kv_cache_compression_config`, and the label of its metrics."""

    def check(self, platform: Platform) -> None:
        """Raise ConfigError, naming the option, for what this method cannot do on `platform`. Called once, first."""

    def publishable_tokens(self, request: LiveRequest) -> int:
        """How many of the request's leading rows are the plain KV of its tokens, so that others may reuse them. The
        answer here is right for methods that evict behind the prompt; one that changes prompt rows must say less."""
        return request.prompt_tokens if request.evicted_tokens > 0 else request.logical_tokens

    def on_request_init(self, requests: Sequence[LiveRequest], **kwargs: Any) -> None:
        """Requests begin, or begin again after their cache was dropped (`generated_tokens` then says what will be
        recomputed)."""

    def on_prefill_chunk_end(self, requests: Sequence[LiveRequest], cache: LiveCache, **kwargs: Any) -> None:
        """A chunk of these requests' prompts was written, the last one included."""

    def on_context_step_end(self, requests: Sequence[LiveRequest], cache: LiveCache, **kwargs: Any) -> None:
        """The last chunk of these requests' prompts was just written."""

    def on_generation_step_begin(self, requests: Sequence[LiveRequest], cache: LiveCache, **kwargs: Any) -> None:
        """A decode step of these requests is about to run."""

    def on_generation_step_end(self, requests: Sequence[LiveRequest], cache: LiveCache, **kwargs: Any) -> None:
        """A decode step has written its rows and the next one has not read them: once per iteration."""

    def on_tool_call_begin(self, requests: Sequence[LiveRequest], cache: LiveCache, **kwargs: Any) -> None:
        """These requests wait for a tool, and nobody reads their cache meanwhile."""

    def on_tool_call_end(self, requests: Sequence[LiveRequest], cache: LiveCache, **kwargs: Any) -> None:
        """The tool has answered."""

    def on_request_finish(self, requests: Sequence[LiveRequest], **kwargs: Any) -> None:
        """Requests ended or were aborted; their cache may be gone."""


HOOKS: dict[str, Stage | None] = {
    "on_request_init": None,
    "on_prefill_chunk_end": Stage.PREFILL_CHUNK,
    "on_context_step_end": Stage.PREFILL,
    "on_generation_step_begin": Stage.DECODE,
    "on_generation_step_end": Stage.DECODE,
    "on_tool_call_begin": Stage.TOOL_CALL,
    "on_tool_call_end": Stage.TOOL_CALL,
    "on_request_finish": Stage.REQUEST_END,
}
"""Every hook, and the stage it belongs to."""
