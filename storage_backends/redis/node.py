"""One Redis server: its pool of connections and its circuit breaker."""

from __future__ import annotations

import logging
import threading
import time

from kvtier.storage_backends.redis.breaker import Breaker, BreakerState
from kvtier.storage_backends.redis.connection import Connection, DeadlineError, LostError
from kvtier.storage_backends.redis.options import Address, RedisOptions

_log = logging.getLogger(__name__)

_FAIR_WAIT_S = 0.1
"""A server that did not answer for less than this has not failed: the caller was in a hurry."""


class Node:
    """`take` a connection, then `give_back` (all is well), `fail` or `drop`. Thread-safe."""

    def __init__(self, address: Address, options: RedisOptions, database: int) -> None:
        self.address = address
        self.breaker = Breaker()
        self._options = options
        self._database = database
        self._free = threading.BoundedSemaphore(options.connections)
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._closed = False
        self.connected = 0
        """Connections opened so far."""

    def take(self, until: float) -> Connection:
        """A connection with its deadline set; waits for one where all are in use. What this raises, `Connection`'s
        errors, the caller reports with `fail`."""
        if not self._free.acquire(timeout=max(0.0, until - time.monotonic())):
            raise DeadlineError(f"{self.address}: all {self._options.connections} connections are in use")
        try:
            with self._lock:
                closed = self._closed
                connection = self._idle.pop() if self._idle else None
            new = connection is None and not closed
            if new:
                connection = Connection(self.address, self._options, until, database=self._database)
            with self._lock:
                self.connected += new
                closed = self._closed
                if connection is not None and not closed:
                    self._busy.add(connection)
            if connection is None or closed:
                if connection is not None:
                    connection.close()
                raise LostError(f"{self.address}: the tier is closed")
            connection.set_deadline(until)
            return connection
        except BaseException:
            self._free.release()
            raise

    def give_back(self, connection: Connection) -> None:
        """Every reply was read: the connection can serve the next call."""
        with self._lock:
            self._busy.discard(connection)
            keep = not self._closed
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()
        self._free.release()
        if self.breaker.succeeded():
            _log.warning("redis %s answers again", self.address)

    def fail(self, connection: Connection | None, error: Exception, waited_s: float) -> None:
        """The server failed, or did not answer for `waited_s`."""
        self.drop(connection)
        if isinstance(error, DeadlineError) and waited_s < _FAIR_WAIT_S:
            self.breaker.abandoned()
        elif self.breaker.failed():
            _log.warning("redis %s is left alone for a while: %s", self.address, error)

    def drop(self, connection: Connection | None) -> None:
        """The connection is of no more use; no verdict on the server."""
        if connection is None:
            return
        with self._lock:
            self._busy.discard(connection)
        connection.close()
        self._free.release()

    def forget_idle(self) -> None:
        """Close idle connections: the server behind them restarted or changed its part."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def close(self) -> None:
        """Close what is idle, and make calls under way fail."""
        with self._lock:
            self._closed = True
            busy = list(self._busy)
        self.forget_idle()
        for connection in busy:
            connection.shut_down()

    @property
    def open_connections(self) -> int:
        with self._lock:
            return len(self._idle) + len(self._busy)

    @property
    def up(self) -> bool:
        return self.breaker.state is BreakerState.CLOSED
