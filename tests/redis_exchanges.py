"""Batches of GETs to scripted servers, whose replies name their keys: what is asked for when, and what comes of it."""

from __future__ import annotations

import dataclasses
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from kvtier.storage_backends.redis import topology as topology_module
from kvtier.storage_backends.redis.connection import Buffer, Connection, ReplyError, encode
from kvtier.storage_backends.redis.discovery import SLOTS, SlotRange
from kvtier.storage_backends.redis.exchange import Command, Exchange
from kvtier.storage_backends.redis.node import Node
from kvtier.storage_backends.redis.options import Address, RedisOptions
from kvtier.storage_backends.redis.topology import Topology, slot_of
from tests.scripted_redis import PATIENCE_S, ScriptedServer

HALF = SLOTS // 2


class Client:
    """An exchange with scripted servers: with one, or with two that have half of the slots each. Closes them, too."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        *servers: ScriptedServer,
        connections: int = 2,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.servers = servers
        url = "redis://" + ",".join(str(server.address) for server in servers)
        mode = "standalone" if len(servers) == 1 else "cluster"
        shares = [(0, HALF - 1), (HALF, SLOTS - 1)]
        ranges = [SlotRange(*share, server.address) for share, server in zip(shares, servers, strict=False)]
        patch.setattr(topology_module, "ask_slots", lambda *_: ranges)
        options = RedisOptions.of(url, mode=mode, connections=connections, timeout_s=PATIENCE_S)
        options = dataclasses.replace(options, tls=tls)
        self.connections = connections
        self.topology = Topology(options)
        self.exchange = Exchange(self.topology)

    def run(self, batch: Batch, until: float | None = None) -> list[Any]:
        """The results, error replies as their text."""
        until = time.monotonic() + PATIENCE_S if until is None else until
        results = self.exchange.run(batch.commands, batch.read, until)
        return [str(r).encode() if isinstance(r, ReplyError) else r for r in results]

    def node(self, server: ScriptedServer) -> Node:
        return self.topology.node_at(server.address)

    def failures(self, server: ScriptedServer) -> int:
        """In a row, as the breaker counts them."""
        return self.node(server).breaker._failures

    def open_connections(self) -> list[int]:
        """Of each server; after it was found that no other is counted as in use."""
        for server in self.servers:
            node = self.node(server)
            assert node._free._value == self.connections, "connections are missing in the pool"
            assert not node._busy
        return [self.node(server).open_connections for server in self.servers]

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            for server in self.servers:
                stack.callback(server.close)
            self.topology.close()


class Batch:
    """One GET of each key. asked: those that were asked for so far; before_reading: called with the connection and the
    index of each command whose reply is due."""

    def __init__(
        self,
        keys: Sequence[bytes],
        reply_bytes: int = 0,
        before_reading: Callable[[Connection, int], None] = lambda connection, i: None,
    ) -> None:
        self.keys = keys
        self.asked: list[bytes] = []
        self.answered: list[bytes] = []
        self.windows: list[int] = []
        """For each reply, how many were asked for and not answered when it was read."""
        self._before_reading = before_reading
        self.commands = [Command(key, _Asking(key, self.asked), reply_bytes) for key in keys]

    def read(self, connection: Connection, i: int) -> Any:
        self.windows.append(len(self.asked) - len(self.answered))
        self._before_reading(connection, i)
        reply = connection.read_reply()
        self.answered.append(self.keys[i])
        return reply


class _Asking:
    """The parts of a GET, which notes when it is sent."""

    def __init__(self, key: bytes, asked: list[bytes]) -> None:
        self._key, self._asked = key, asked

    def __iter__(self) -> Iterator[Buffer]:
        self._asked.append(self._key)
        return iter([encode([b"GET", self._key])])


def keys_of(count: int, half: int = 0, nbytes: int = 0) -> list[bytes]:
    """Names in one half of the slots, of `nbytes` at least."""
    found: list[bytes] = []
    n = 0
    while len(found) < count:
        name = (b"%c%d" % (b"ab"[half], n)).ljust(nbytes, b".")
        if slot_of(name) // HALF == half:
            found.append(name)
        n += 1
    return found


def moved(key: bytes, to: Address, word: bytes = b"MOVED") -> bytes:
    return b"-%b %d %b\r\n" % (word, slot_of(key), str(to).encode())
