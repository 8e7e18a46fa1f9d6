"""One batch of commands, sent to the servers that have their keys; redirections are followed, failures are named.

To every server of a batch everything is sent first, then the replies are read, one of each server in turn, so that the
servers work side by side and one round trip serves the whole batch. Only where replies are large, commands wait until
what they are to bring is wanted soon: a server makes all replies that it is asked for before it sends on, and memory
for many of them, new each time, costs it more than the replies themselves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvtier.storage_backends.redis.connection import (
    Buffer,
    Connection,
    DeadlineError,
    LoginError,
    LostError,
    ReplyError,
    encode,
)
from kvtier.storage_backends.redis.node import Node
from kvtier.storage_backends.redis.options import Address
from kvtier.storage_backends.redis.topology import Topology, slot_of

_log = logging.getLogger(__name__)

_ROUNDS = 6
_AHEAD_BYTES = 1 << 20
"""Of replies that a server is asked for before they are read: more than is on the way of any network that it is worth
keeping pages behind, and what its cache holds."""
_AHEAD_MIN = 3
"""Replies that it is asked for in any case, so that it never waits for the next command."""
_ASKING = encode([b"ASKING"])
_WRONG_PICTURE = ("READONLY", "CLUSTERDOWN", "MASTERDOWN", "LOADING", "TRYAGAIN")


class NoReply(Enum):
    """Why a command has no reply."""

    DOWN = "down"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class Command:
    """What is sent for one key: `name` decides the server, `parts` are the bytes of the command, which may be made as
    they are asked for. reply_bytes: about how long the reply will be, where that is much."""

    name: bytes
    parts: Iterable[Buffer]
    reply_bytes: int = 0


Read = Callable[[Connection, int], Any]
"""Reads the reply of command i completely; returns it, or a ReplyError."""


@dataclass(slots=True)
class _Talk:
    """What is going on with one server in one round: commands `indices`, of which the first `sent` are on their way,
    with replies of `ahead_bytes` that were not read yet, and the first `answered` are done."""

    node: Node
    asking: bool
    indices: list[int]
    started: float
    connection: Connection | None = None
    reused: bool = False
    sent: int = 0
    ahead_bytes: int = 0
    answered: int = 0
    error: Exception | None = None

    @property
    def open(self) -> list[int]:
        return self.indices[self.answered :]

    @property
    def over(self) -> bool:
        return self.error is not None or self.answered == len(self.indices)

    def due(self, commands: Sequence[Command]) -> list[int]:
        """The commands to be sent now."""
        if self.ahead_bytes > _AHEAD_BYTES // 2 and self.sent - self.answered >= _AHEAD_MIN:
            return []
        start = self.sent
        while self.sent < len(self.indices):
            nbytes = commands[self.indices[self.sent]].reply_bytes
            if self.ahead_bytes + nbytes > _AHEAD_BYTES and self.sent - self.answered >= _AHEAD_MIN:
                break
            self.ahead_bytes += nbytes
            self.sent += 1
        return self.indices[start : self.sent]


class Exchange:
    """See the module's docstring. Thread-safe."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self.redirects = 0
        self._said: set[str] = set()

    def run(self, commands: Sequence[Command], read: Read, until: float) -> list[Any]:
        """The replies in the order of `commands`: what `read` made of them, a ReplyError, or a NoReply. Every command
        must be harmless to repeat."""
        if time.monotonic() >= until:
            return [NoReply.DEADLINE] * len(commands)
        results: list[Any] = [NoReply.DOWN] * len(commands)
        waiting = list(range(len(commands)))
        asked: dict[int, Node] = {}
        unjudged: set[Node] = set()
        try:
            for _ in range(_ROUNDS):
                self._topology.refresh_if_due(until)
                talks = self._talks(commands, waiting, asked, unjudged)
                for talk in talks:
                    self._start(talk, commands, until)
                going = talks
                while going := [talk for talk in going if not talk.over]:
                    for talk in going:
                        self._go_on(talk, commands, read, results, in_turn=len(going) > 1)
                waiting = []
                for talk in talks:
                    waiting += self._conclude(talk, commands, results, asked, unjudged)
                if not waiting:
                    break
        finally:
            for node in unjudged:
                node.breaker.abandoned()
        return results

    # ---- inside

    def _talks(
        self, commands: Sequence[Command], waiting: Sequence[int], asked: dict[int, Node], unjudged: set[Node]
    ) -> list[_Talk]:
        talks: dict[tuple[Node, bool], _Talk] = {}
        refused: set[Node] = set()
        for i in waiting:
            node = asked.get(i)
            asking = node is not None
            if node is None:
                node = self._topology.node_for(slot_of(commands[i].name))
            if node is None:
                self._topology.suspect()
                continue
            if node not in unjudged and node not in refused:
                if node.breaker.admit():
                    unjudged.add(node)
                else:
                    refused.add(node)
            if node in refused:
                self._topology.suspect()
                continue
            talk = talks.get((node, asking))
            if talk is None:
                talk = talks[node, asking] = _Talk(node, asking, [], time.monotonic())
            talk.indices.append(i)
        return list(talks.values())

    def _start(self, talk: _Talk, commands: Sequence[Command], until: float) -> None:
        with _failing(talk):
            talk.connection = talk.node.take(until)
            talk.reused = not talk.connection.fresh
            talk.connection.send(_parts(talk, talk.due(commands), commands))

    def _go_on(
        self, talk: _Talk, commands: Sequence[Command], read: Read, results: list[Any], *, in_turn: bool
    ) -> None:
        """Read the next reply, or all where no other server waits for its turn, and send what that makes room for."""
        with _failing(talk):
            while talk.connection is not None and not talk.over:
                i = talk.indices[talk.answered]
                if talk.asking:
                    talk.connection.read_reply()
                results[i] = read(talk.connection, i)
                talk.answered += 1
                talk.ahead_bytes -= commands[i].reply_bytes
                if due := talk.due(commands):
                    talk.connection.send(_parts(talk, due, commands))
                if in_turn:
                    return

    def _conclude(
        self,
        talk: _Talk,
        commands: Sequence[Command],
        results: list[Any],
        asked: dict[int, Node],
        unjudged: set[Node],
    ) -> list[int]:
        """Settle with the server; returns the commands to be sent again."""
        again = [i for i in talk.indices[: talk.answered] if self._redirected(i, talk, commands, results, asked)]
        node, error = talk.node, talk.error
        if error is None and talk.connection is not None:
            node.give_back(talk.connection)
            unjudged.discard(node)
            return again
        if isinstance(error, LostError) and talk.reused and not talk.answered:
            # It may have been closed since its last use; a new one will tell.
            node.drop(talk.connection)
            node.forget_idle()
            return again + talk.open
        why = NoReply.DEADLINE if isinstance(error, DeadlineError) else NoReply.DOWN
        for i in talk.open:
            results[i] = why
        if isinstance(error, LoginError) and str(error) not in self._said:
            self._said.add(str(error))
            _log.error("redis %s: %s; check the user name and the password file", node.address, error)
        node.fail(talk.connection, error or LostError("no connection"), time.monotonic() - talk.started)
        unjudged.discard(node)
        self._topology.suspect()
        return again

    def _redirected(
        self, i: int, talk: _Talk, commands: Sequence[Command], results: list[Any], asked: dict[int, Node]
    ) -> bool:
        reply = results[i]
        if not isinstance(reply, ReplyError):
            return False
        if reply.code in ("MOVED", "ASK"):
            _, slot, where = str(reply).split(" ")[:3]
            host, _, port = where.rpartition(":")
            address = Address(host or talk.node.address.host, int(port))
            self.redirects += 1
            asked.pop(i, None)
            if reply.code == "MOVED":
                self._topology.moved(int(slot), address)
            else:
                asked[i] = self._topology.node_at(address)
            return True
        if reply.code in _WRONG_PICTURE:
            self._topology.suspect()
            asked.pop(i, None)
            return reply.code in ("READONLY", "TRYAGAIN")
        return False


@contextmanager
def _failing(talk: _Talk) -> Iterator[None]:
    """What a server or its connection can do wrong becomes the talk's error."""
    try:
        yield
    except (DeadlineError, LostError, LoginError) as e:
        talk.error = e
    except BaseException:
        talk.node.drop(talk.connection)
        raise


def _parts(talk: _Talk, indices: Sequence[int], commands: Sequence[Command]) -> Iterator[Buffer]:
    for i in indices:
        if talk.asking:
            yield _ASKING
        yield from commands[i].parts
