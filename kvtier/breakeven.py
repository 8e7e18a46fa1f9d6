"""The break-even rule: pages whose load would take longer than computing them again are left where they are.

Both sides are measured while serving: what a page costs that comes up from a tier, queueing included, and what its
tokens cost to prefill. Medians of the latest samples stand for each; the rule says nothing until both have enough.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from statistics import median

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_SAMPLES = 33
_ENOUGH = 9
_PREFILL_TOKENS_MIN = 128
"""Shorter prefills say what a prefill costs besides its tokens, which a load does not save."""
_PROBE_EVERY = 32
"""Of the requests that would be declined, one in so many loads all the same: a tier that got faster must be seen."""


class _Median:
    """Of the latest samples; None until there are enough."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self.value: float | None = None

    def add(self, sample: float) -> None:
        self._samples.append(sample)
        if len(self._samples) >= _ENOUGH:
            self.value = median(self._samples)


class BreakEven(Collector):
    """All methods may be called from any thread. tiers: the lower ones. `prefill_s_per_token` is used instead of a
    measurement where given. With `enabled` False nothing is ever declined."""

    def __init__(self, tiers: Iterable[str], *, enabled: bool = True, prefill_s_per_token: float | None = None) -> None:
        self.enabled = enabled
        self._lock = threading.Lock()
        self._loads = {tier: _Median() for tier in tiers}
        self._decode = _Median()
        self._prefill = _Median()
        self._prefill_s_per_token = prefill_s_per_token
        self._page_tokens = 0
        self._turns = dict.fromkeys(self._loads, 0)

    def page_holds(self, tokens: int) -> None:
        """Pages of this store hold so many tokens."""
        self._page_tokens = tokens

    def prefilled(self, tokens: int, seconds: float) -> None:
        """The engine computed so many tokens of prompts in that time, and nothing else. Short ones are left out."""
        if tokens >= _PREFILL_TOKENS_MIN and seconds > 0:
            with self._lock:
                self._prefill.add(seconds / tokens)

    def promoted(self, tier: str, pages: int, seconds: float) -> None:
        """So many pages of one request came up from `tier` in that time, from its first lookup."""
        if pages > 0:
            with self._lock:
                self._loads[tier].add(seconds / pages)

    def decoded(self, pages: int, seconds: float) -> None:
        """So many pages were brought from host memory into the engine's cache in that time."""
        if pages > 0:
            with self._lock:
                self._decode.add(seconds / pages)

    @property
    def prefill_s_per_token(self) -> float | None:
        """What a token costs to compute; None until that is known."""
        return self._prefill_s_per_token if self._prefill_s_per_token is not None else self._prefill.value

    def load_s_per_page(self, tier: str) -> float | None:
        """What a page of `tier`, or of the host tier, costs to load; None until that is known."""
        load, decode = self._loads.get(tier), self._decode.value
        if load is None:
            return decode
        return None if load.value is None else load.value + (decode or 0.0)

    def collect(self) -> Iterator[Metric]:
        """For Prometheus: what is compared."""
        prefill = "What a prompt's token costs to compute"
        yield GaugeMetricFamily("kvtier_prefill_seconds_per_token", prefill, value=self.prefill_s_per_token or 0.0)
        loads = GaugeMetricFamily(
            "kvtier_load_seconds_per_page", "What a page of a tier costs to load", labels=["tier"]
        )
        for tier in ("host", *self._loads):
            loads.add_metric([tier], self.load_s_per_page(tier) or 0.0)
        yield loads

    def declines(self, tier: str) -> bool:
        """Whether pages of `tier` (or of the host tier, by any other name) should be computed rather than loaded. Asked
        once per request."""
        if not self.enabled:
            return False
        token_s, page_s = self.prefill_s_per_token, self.load_s_per_page(tier)
        if token_s is None or page_s is None or not self._page_tokens or page_s <= token_s * self._page_tokens:
            return False
        with self._lock:
            turn = self._turns[tier] = self._turns.get(tier, 0) + 1
        return turn % _PROBE_EVERY != 0
