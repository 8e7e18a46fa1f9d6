"""OpenTelemetry spans, with the extra ``otel``: one for each request that was looked up, one for each offload.

Spans go to the tracer provider of the process: an engine that traces has set one, and ``opentelemetry-instrument`` sets
one for those that do not.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kvtier.errors import MissingExtraError

try:
    from opentelemetry import trace
    from opentelemetry.trace import SpanKind
except ImportError as error:
    raise MissingExtraError("opentelemetry: true needs the extra 'otel': pip install 'kvtier[otel]'") from error

from kvtier import __version__


class Spans:
    """Times are seconds of `time.monotonic`; spans are ended when they are made, so that nothing stays open."""

    def __init__(self, provider: Any = None) -> None:
        self._tracer = trace.get_tracer("kvtier", __version__, provider)

    def restore(
        self,
        request_id: str,
        began_s: float,
        ended_s: float,
        *,
        hits: Mapping[str, int],
        misses: Mapping[str, int],
        waited_s: float,
        load_s: float,
        loaded: bool,
    ) -> None:
        """A request from its first lookup until it started or was dropped; below it the wait for pages from lower
        tiers, and the load."""
        attributes: dict[str, Any] = {
            "kvtier.request_id": request_id,
            "kvtier.pages": sum(hits.values()) + sum(misses.values()),
            "kvtier.pages.hit": sum(hits.values()),
            "kvtier.loaded": loaded,
        }
        attributes |= {f"kvtier.hits.{tier}": n for tier, n in hits.items()}
        attributes |= {f"kvtier.misses.{reason}": n for reason, n in misses.items() if n}
        parent = self._tracer.start_span(
            "kvtier.restore", start_time=_ns(began_s), attributes=attributes, kind=SpanKind.INTERNAL
        )
        below = trace.set_span_in_context(parent)
        if waited_s > 0:
            span = self._tracer.start_span("kvtier.promote", below, start_time=_ns(began_s))
            span.end(_ns(began_s + waited_s))
        if load_s > 0:
            span = self._tracer.start_span("kvtier.load", below, start_time=_ns(ended_s - load_s))
            span.end(_ns(ended_s))
        parent.end(_ns(ended_s))

    def offload(self, began_s: float, ended_s: float, *, outcomes: Mapping[str, int]) -> None:
        """Pages from their queueing until they are in a tier, or not."""
        attributes: dict[str, Any] = {"kvtier.pages": sum(outcomes.values())}
        attributes |= {f"kvtier.outcomes.{outcome}": n for outcome, n in outcomes.items() if n}
        span = self._tracer.start_span("kvtier.offload", start_time=_ns(began_s), attributes=attributes)
        span.end(_ns(ended_s))


def _ns(monotonic_s: float) -> int:
    """Unix time in nanoseconds, which spans want, of a moment of the monotonic clock."""
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)
