"""What SGLang's metrics are told about storage: pages and speed of each transfer since it last asked."""

from __future__ import annotations

import threading

from sglang.srt.observability.metrics_collector import StorageMetrics

_KEPT_MAX = 4096
_GIB = 1 << 30


class Transfers:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metrics = StorageMetrics()

    def take(self) -> StorageMetrics:
        """Pages per transfer, and GiB of hot pages per second, since the last call."""
        with self._lock:
            metrics, self._metrics = self._metrics, StorageMetrics()
        return metrics

    def loaded(self, pages: int, page_bytes: int, seconds: float) -> None:
        with self._lock:
            _add(self._metrics.prefetch_pgs, self._metrics.prefetch_bandwidth, pages, page_bytes, seconds)

    def stored(self, pages: int, page_bytes: int, seconds: float) -> None:
        with self._lock:
            _add(self._metrics.backup_pgs, self._metrics.backup_bandwidth, pages, page_bytes, seconds)


def _add(counts: list[int], speeds: list[float], pages: int, page_bytes: int, seconds: float) -> None:
    if pages > 0 and len(counts) < _KEPT_MAX:  # nobody may ever ask
        counts.append(pages)
        speeds.append(pages * page_bytes / _GIB / max(seconds, 1e-9))
