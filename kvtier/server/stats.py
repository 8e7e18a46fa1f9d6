"""What the cache server counts besides its store: connections, commands, refusals."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

REFUSALS = ("full", "too_large", "key", "quota")


class ServerStats(Collector):
    """Thread-safe. `commands`: the names that are counted apart; anything else is ``unknown``."""

    def __init__(
        self,
        commands: tuple[str, ...],
        refused: Callable[[], Mapping[str, int]],
        used_by: Callable[[], Mapping[str, int]],
        unlogged: Callable[[], int] = lambda: 0,
    ) -> None:
        self._lock = threading.Lock()
        self._commands = {name.upper().encode(): 0 for name in commands}
        self._unknown = 0
        self._counts: Counter[str] = Counter()
        self._refused = refused
        self._used_by = used_by
        self._unlogged = unlogged
        self.connections = 0
        """Open now."""

    def connected(self, by: int) -> None:
        with self._lock:
            self.connections += by
            self._counts["connections"] += by > 0

    def rejected(self) -> None:
        """A connection over the limit."""
        with self._lock:
            self._counts["rejected"] += 1

    def protocol_error(self) -> None:
        with self._lock:
            self._counts["protocol_errors"] += 1

    def denied(self) -> None:
        """A failed authentication or a key of somebody else."""
        with self._lock:
            self._counts["denied"] += 1

    def command(self, name: bytes, received_bytes: int = 0) -> None:
        """A command, by its name in capital letters, and the bytes of the values that came with it."""
        with self._lock:
            if name in self._commands:
                self._commands[name] += 1
            else:
                self._unknown += 1
            if received_bytes:
                self._counts["received_bytes"] += received_bytes

    def sent(self, nbytes: int) -> None:
        with self._lock:
            self._counts["sent_bytes"] += nbytes

    def totals(self) -> Counter[str]:
        with self._lock:
            return Counter({**self._counts, "commands": sum(self._commands.values()) + self._unknown})

    def collect(self) -> Iterator[Metric]:
        totals = self.totals()
        with self._lock:
            commands = {name.decode().lower(): n for name, n in self._commands.items()} | {"unknown": self._unknown}
        yield GaugeMetricFamily("kvtier_server_connections", "Connections open", self.connections)
        for name, text in (
            ("connections", "Connections taken"),
            ("rejected", "Connections over the limit"),
            ("protocol_errors", "Connections closed for what is not a command"),
            ("denied", "Failed authentications and keys of others"),
            ("received_bytes", "Bytes of values received"),
            ("sent_bytes", "Bytes of values sent"),
        ):
            plain = name if name != "connections" else "connections_opened"
            yield CounterMetricFamily(f"kvtier_server_{plain}", text, value=totals[name])
        family = CounterMetricFamily("kvtier_server_commands", "Commands", labels=["command"])
        for name, n in commands.items():
            family.add_metric([name], n)
        yield family
        refused = self._refused()
        family = CounterMetricFamily("kvtier_server_refused_values", "Values not taken", labels=["reason"])
        for reason in REFUSALS:
            family.add_metric([reason], refused.get(reason, 0))
        yield family
        yield CounterMetricFamily(
            "kvtier_server_unlogged_deletions",
            "Values overwritten or deleted that a crash may bring back, since the disk did not take the note",
            value=self._unlogged(),
        )
        gauge = GaugeMetricFamily("kvtier_server_quota_used_bytes", "Bytes against a user's quota", labels=["user"])
        for user, n in self._used_by().items():
            gauge.add_metric([user], n)
        yield gauge
