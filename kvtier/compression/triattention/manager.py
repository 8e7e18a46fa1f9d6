"""TriAttention as a compression method: between decode steps, keep the generated tokens that future queries will
want."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvtier.abc.compression import (
    AttentionKind,
    CompressionManager,
    KeepSet,
    LiveCache,
    LiveRequest,
    Platform,
    Speculation,
)
from kvtier.compression.metrics import EvictionMetrics
from kvtier.compression.rounds import RoundSchedule
from kvtier.compression.triattention.calibration import OPTION, Calibration
from kvtier.compression.triattention.rotary import Rotary
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from kvtier.kernels.triattention.fast import LayerTable


class TriAttention(CompressionManager):
    """Every `beta` generated tokens, the `budget` best of a sequence's generated rows stay; its prompt is never
    touched.

    Layers with a sliding window keep their latest `budget` rows, which contain the window: they need no score. Keys
    keep their rotation, positions stay logical. One object serves one model on one rank."""

    algorithm = "triattention"

    def __init__(
        self,
        calibration: Calibration,
        rotary: Callable[[int], Rotary],
        *,
        budget: int = 2048,
        beta: int = 128,
        eviction_mode: str = "union",
        normalize_scores: bool = True,
        metrics: EvictionMetrics | None = None,
        reduce_max: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """rotary: layer -> its rotary embedding. reduce_max: element-wise maximum over the ranks of a tensor-parallel
        group, so that all ranks keep the same rows in mode `union`; the other modes are local to a rank's heads."""
        self._calibration = calibration
        self._rotary = rotary
        self._schedule = RoundSchedule(budget, beta)
        self._mode = eviction_mode
        self._normalized = normalize_scores or eviction_mode == "union"
        self._reduce_max = reduce_max
        self.metrics = metrics if metrics is not None else EvictionMetrics([self.algorithm])
        self._platform: Platform | None = None
        self._tables: dict[tuple[int, torch.device], LayerTable] = {}

    @property
    def budget(self) -> int:
        return self._schedule.budget

    def check(self, platform: Platform) -> None:
        geometry = platform.geometry
        name = f"algorithm 'triattention' in {platform.engine}"
        if platform.attention is not AttentionKind.MHA:
            raise ConfigError(
                f"{name}: attention {platform.attention.value!r} is not supported, only keys per KV head; "
                "remove it from kv_cache_compression_config"
            )
        for option, wrong, way_out in (
            ("recurrent layers", platform.recurrent, "use it with a model whose layers all keep every row"),
            ("sliding-window pools", platform.sliding_pools, "keep all rows of those layers, if the engine can"),
            ("disaggregated decode", platform.disaggregated_decode, "serve prefill and decode together"),
            (f"beam width {platform.beam_width}", platform.beam_width > 1, "use beam width 1"),
            (
                "a prefix cache that publishes generated tokens",
                not platform.prefix_reuse_limited,
                "switch the prefix cache off",
            ),
        ):
            if wrong:
                raise ConfigError(f"{name}: {option}: not supported; {way_out}")
        if platform.speculation is Speculation.ON and self._mode != "union":
            raise ConfigError(
                f"option 'eviction_mode' = {self._mode!r}: speculative decoding needs 'union', because the draft's "
                "cache is packed with the same set"
            )
        windows = [w for w in geometry.windows if w is not None]
        if len(windows) == geometry.layers:
            raise ConfigError(f"{name}: every layer has a sliding window, so there is nothing to score; remove it")
        if windows and self.budget < max(windows):
            raise ConfigError(
                f"option 'budget' = {self.budget}: the model has a sliding window of {max(windows)}; give at least that"
            )
        self._check_calibration(platform)
        self._platform = platform
        self._tables.clear()

    def _check_calibration(self, platform: Platform) -> None:
        geometry = platform.geometry
        self._calibration.check(geometry)
        last = geometry.first_query_head + geometry.query_heads
        sampled = self._calibration.sampled[:, geometry.first_query_head : last]
        per_kv_head = sampled.reshape(geometry.layers, geometry.kv_heads, -1)
        for layer in range(geometry.layers):
            if geometry.window(layer) is not None:
                continue
            rotary = self._rotary(layer)
            self._calibration.check_rotary(rotary, layer)
            limit = rotary.valid_tokens
            if limit is not None and (platform.context_tokens is None or platform.context_tokens > limit):
                raise ConfigError(
                    f"the model's rotary frequencies change beyond {limit} tokens, so cached keys cannot "
                    f"be scored there: limit the context length (now {platform.context_tokens}) to {limit}"
                )
            if self._mode != "union" and not per_kv_head[layer].any(axis=-1).all():
                raise ConfigError(
                    f"option {OPTION!r}: layer {layer} has a KV head without statistics, which 'eviction_mode' = "
                    f"{self._mode!r} needs; use 'union' or calibrate all heads"
                )
        scored = [layer for layer in range(geometry.layers) if geometry.window(layer) is None]
        if not sampled[scored].any():
            raise ConfigError(f"option {OPTION!r}: the file has statistics of none of this rank's heads")

    def on_request_init(self, requests: Sequence[LiveRequest], **kwargs: Any) -> None:
        self._schedule.start(requests)

    def on_request_finish(self, requests: Sequence[LiveRequest], **kwargs: Any) -> None:
        self._schedule.finish(requests)

    def on_generation_step_end(self, requests: Sequence[LiveRequest], cache: LiveCache, **kwargs: Any) -> None:
        due = self._schedule.due(requests)
        if not due:
            return
        start = time.perf_counter()
        before = [request.length for request in due]
        cache.compact(due, [self.keep_set(request, cache) for request in due])
        after = [request.length for request in due]
        evicted = [b - a for b, a in zip(before, after, strict=True)]
        self.metrics.round(self.algorithm, evicted, after, time.perf_counter() - start)

    def keep_set(self, request: LiveRequest, cache: LiveCache) -> KeepSet:
        """The rows of `request` that stay. Reads the cache, changes nothing."""
        import torch

        from kvtier.kernels.triattention import fast

        platform = self._checked()
        geometry = platform.geometry
        first = request.prompt_tokens
        reduction = fast.Reduction(self._mode, geometry.kv_heads, normalized=self._normalized)
        scored = []
        for layer in range(geometry.layers):
            if geometry.window(layer) is not None:
                continue
            keys = cache.keys(request, layer, first)
            table = self._table(layer, keys.device)
            scores = fast.score(keys, table, fast.mean_phase(table.omega, request.logical_tokens))
            rows = self._sampled_rows(layer, scores)
            if rows is not None:
                reduction.add(rows)
                scored.append(layer)
        reduced = reduction.result()
        if self._mode == "union" and self._reduce_max is not None:
            reduced = self._reduce_max(reduced)
        chosen = fast.select(reduced, self.budget)
        if len(scored) == geometry.layers or not geometry.windows or all(w is None for w in geometry.windows):
            return KeepSet(first, chosen)
        # Window layers keep their latest rows, as many as the others keep.
        evictable = request.length - first
        latest = torch.arange(evictable - chosen.shape[-1], evictable, device=chosen.device).expand(
            1, chosen.shape[1], -1
        )
        per_layer = chosen.expand(len(scored), -1, -1) if chosen.shape[0] == 1 else chosen
        order = iter(per_layer)
        ordinals = [latest[0] if geometry.window(n) is not None else next(order) for n in range(geometry.layers)]
        return KeepSet(first, torch.stack(ordinals))

    def _sampled_rows(self, layer: int, scores: torch.Tensor) -> torch.Tensor | None:
        """Scores of the heads that the calibration has; the others must not decide. None where it has none."""
        import torch

        geometry = self._checked().geometry
        first = geometry.first_query_head
        sampled = self._calibration.sampled[layer, first : first + geometry.query_heads]
        if sampled.all():
            return scores
        scored = [layer for layer in range(geometry.layers) if geometry.window(layer) is None]
        if not sampled[scored].any():
            return None
        kept = torch.from_numpy(sampled.nonzero()[0]).to(scores.device)
        if self._mode == "union":
            return scores[kept]
        # A query head without statistics repeats the first of its KV head that has some: the maximum does not change.
        grouped = sampled.reshape(geometry.kv_heads, -1)
        heads = range(grouped.shape[1])
        source = [
            kv * grouped.shape[1] + (q if grouped[kv, q] else int(grouped[kv].argmax()))
            for kv in range(geometry.kv_heads)
            for q in heads
        ]
        return scores[torch.tensor(source, device=scores.device)]

    def _table(self, layer: int, device: torch.device) -> LayerTable:
        table = self._tables.get((layer, device))
        if table is None:
            from kvtier.kernels.triattention import fast

            geometry = self._checked().geometry
            heads = slice(geometry.first_query_head, geometry.first_query_head + geometry.query_heads)
            rotary = self._rotary(layer)
            table = fast.layer_table(
                self._calibration.q_mean[layer, heads],
                self._calibration.q_abs[layer, heads],
                rotary.omega,
                rotary.gain,
                rotary.real,
                rotary.imag,
                geometry.kv_heads,
                device,
            )
            self._tables[layer, device] = table
        return table

    def _checked(self) -> Platform:
        if self._platform is None:
            raise ConfigError("TriAttention needs a platform: put it into a CompressionPipeline first")
        return self._platform
