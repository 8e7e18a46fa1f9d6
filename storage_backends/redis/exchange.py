"""One batch of commands, sent to the servers that have their keys; redirections are followed, failures are named.

To every server of a batch everything is sent first, then the replies are read, of each server in turn and as they come,
so that the servers work side by side, one round trip serves the whole batch, and a server that hangs keeps nobody from
the replies of the others. Only where replies are large, commands wait until what they are to bring is wanted soon: a
server makes all replies that it is asked for before it sends on, and memory for many of them, new each time, costs it
more than the replies themselves.
"""

from __future__ import annotations

import logging
import math
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from kvtier.storage_backends.redis.discovery import SLOTS
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
_POLL_MAX_S = 3600.0
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
    with replies of `ahead_bytes` that were not read yet, and the first `answered` are done.

    waited_s: for this server, not while another one kept the thread. The connection is the talk's own until it is
    concluded."""

    node: Node
    indices: list[int] = field(default_factory=list)
    connection: Connection | None = None
    reused: bool = False
    sent: int = 0
    ahead_bytes: int = 0
    answered: int = 0
    waited_s: float = 0.0
    error: Exception | None = None

    @property
    def open(self) -> list[int]:
        return self.indices[self.answered :]

    @property
    def over(self) -> bool:
        return self.error is not None or self.answered == len(self.indices)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """What a server or its connection can do wrong becomes the talk's error."""
        start = time.monotonic()
        try:
            yield
        except (DeadlineError, LostError, LoginError) as e:
            self.error = e
        finally:
            self.waited_s += time.monotonic() - start


@dataclass(slots=True)
class _Batch:
    """One call: its commands, and what has become of them. asks: servers that commands were sent on to by ASK.
    unjudged: those that were admitted, and of which is not known yet whether they answer."""

    commands: Sequence[Command]
    read: Read
    until: float
    results: list[Any]
    asks: dict[int, Node] = field(default_factory=dict)
    unjudged: set[Node] = field(default_factory=set)

    def start(self, talk: _Talk) -> None:
        with talk.attempt():
            talk.connection = talk.node.take(self.until)
            talk.reused = not talk.connection.fresh
            self._send_due(talk, talk.connection)

    def go_on(self, talk: _Talk, *, alone: bool) -> None:
        """Read the next reply, or all where no other server waits for its turn, and send what that makes room for.
        Small replies that have come with it are read, too."""
        with talk.attempt():
            while talk.connection is not None and not talk.over:
                i = talk.indices[talk.answered]
                if i in self.asks:
                    talk.connection.read_reply()
                self.results[i] = self.read(talk.connection, i)
                talk.answered += 1
                reply_bytes = self.commands[i].reply_bytes
                talk.ahead_bytes -= reply_bytes
                self._send_due(talk, talk.connection)
                if not alone and (reply_bytes or not talk.connection.has_input):
                    return

    def _send_due(self, talk: _Talk, connection: Connection) -> None:
        if due := self._due(talk):
            connection.send(self._parts(due))

    def _due(self, talk: _Talk) -> list[int]:
        """The commands to be sent now."""
        if talk.ahead_bytes > _AHEAD_BYTES // 2 and talk.sent - talk.answered >= _AHEAD_MIN:
            return []
        start = talk.sent
        while talk.sent < len(talk.indices):
            nbytes = self.commands[talk.indices[talk.sent]].reply_bytes
            if talk.ahead_bytes + nbytes > _AHEAD_BYTES and talk.sent - talk.answered >= _AHEAD_MIN:
                break
            talk.ahead_bytes += nbytes
            talk.sent += 1
        return talk.indices[start : talk.sent]

    def _parts(self, indices: Sequence[int]) -> Iterator[Buffer]:
        for i in indices:
            if i in self.asks:
                yield _ASKING
            yield from self.commands[i].parts


class Exchange:
    """See the module's docstring. Thread-safe."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._lock = threading.Lock()
        self.redirects = 0
        self._said: set[str] = set()

    def run(self, commands: Sequence[Command], read: Read, until: float) -> list[Any]:
        """The replies in the order of `commands`: what `read` made of them, a ReplyError, or a NoReply. Every command
        must be harmless to repeat."""
        if time.monotonic() >= until:
            return [NoReply.DEADLINE] * len(commands)
        batch = _Batch(commands, read, until, [NoReply.DOWN] * len(commands))
        waiting = list(range(len(commands)))
        try:
            for _ in range(_ROUNDS):
                self._topology.refresh_if_due(until)
                waiting = self._round(batch, waiting)
                if not waiting:
                    break
        finally:
            for node in batch.unjudged:
                node.breaker.abandoned()
        return batch.results

    # ---- inside

    def _round(self, batch: _Batch, waiting: Sequence[int]) -> list[int]:
        """Send commands to the servers that have them; returns those to be sent again."""
        talks = self._talks(batch, waiting)
        try:
            for talk in talks:
                batch.start(talk)
            while going := [talk for talk in talks if not talk.over]:
                for talk in _ready(going, batch.until):
                    batch.go_on(talk, alone=len(going) == 1)
            return [i for talk in talks for i in self._conclude(talk, batch)]
        finally:
            for talk in talks:
                talk.node.drop(talk.connection)  # where something else went wrong: replies are still to come

    def _talks(self, batch: _Batch, waiting: Sequence[int]) -> list[_Talk]:
        talks: dict[Node, _Talk] = {}
        refused: set[Node] = set()
        for i in waiting:
            node = batch.asks.get(i) or self._topology.node_for(slot_of(batch.commands[i].name))
            if node is None:
                self._topology.suspect()
                continue
            if node not in batch.unjudged and node not in refused:
                if node.breaker.admit():
                    batch.unjudged.add(node)
                else:
                    refused.add(node)
            if node in refused:
                self._topology.suspect()
                continue
            if node not in talks:
                talks[node] = _Talk(node)
            talks[node].indices.append(i)
        # All threads take connections in one order: each would wait for what another one has otherwise.
        return sorted(talks.values(), key=lambda talk: str(talk.node.address))

    def _conclude(self, talk: _Talk, batch: _Batch) -> list[int]:
        """Settle with the server; returns the commands to be sent again."""
        again = [i for i in talk.indices[: talk.answered] if self._redirected(i, talk.node, batch)]
        node, error = talk.node, talk.error
        connection, talk.connection = talk.connection, None
        if error is None and connection is not None and connection.doubtful:
            node.drop(connection)
            node.forget_idle()  # whatever mixed up its replies has them in hand, too
            return again
        if error is None and connection is not None:
            node.give_back(connection)
            batch.unjudged.discard(node)
            return again
        if isinstance(error, LostError) and talk.reused and not talk.answered:
            # It may have been closed since its last use; a new one will tell.
            node.drop(connection)
            node.forget_idle()
            return again + talk.open
        why = NoReply.DEADLINE if isinstance(error, DeadlineError) else NoReply.DOWN
        for i in talk.open:
            batch.results[i] = why
        if isinstance(error, LoginError) and str(error) not in self._said:
            self._said.add(str(error))
            _log.error("redis %s: %s; check the user name and the password file", node.address, error)
        node.fail(connection, error or LostError("no connection"), talk.waited_s)
        batch.unjudged.discard(node)
        self._topology.suspect()
        return again

    def _redirected(self, i: int, node: Node, batch: _Batch) -> bool:
        """Whether command `i`, answered by `node`, is to be sent again."""
        reply = batch.results[i]
        if not isinstance(reply, ReplyError):
            return False
        if reply.code in ("MOVED", "ASK"):
            found = _where(reply, node.address)
            if found is None:
                return False
            slot, address = found
            with self._lock:
                self.redirects += 1
            batch.asks.pop(i, None)
            if reply.code == "MOVED":
                self._topology.moved(slot, address)
            else:
                batch.asks[i] = self._topology.node_at(address)
            return True
        if reply.code in _WRONG_PICTURE:
            self._topology.suspect()
            batch.asks.pop(i, None)
            return reply.code in ("READONLY", "TRYAGAIN")
        return False


def _where(reply: ReplyError, asked: Address) -> tuple[int, Address] | None:
    """The slot of a redirection and the server that it names; None where it cannot be understood."""
    try:
        _, slot, where = str(reply).split(" ")[:3]
        host, _, port = where.rpartition(":")
        found = int(slot), Address.of(host or asked.host, int(port))
    except ValueError:
        return None
    return found if 0 <= found[0] < SLOTS else None


def _ready(going: Sequence[_Talk], until: float) -> Sequence[_Talk]:
    """Those whose next reply has begun to come; all where there is one only, or where the deadline passes before."""
    if len(going) == 1:
        return going
    ready: list[_Talk] = []
    silent: dict[int, _Talk] = {}
    poll = select.poll()
    for talk in going:
        if talk.connection is None or talk.connection.has_input:
            ready.append(talk)
        else:
            silent[talk.connection.descriptor] = talk
            poll.register(talk.connection.descriptor, select.POLLIN)
    start = time.monotonic()
    wait_s = 0.0 if ready else min(max(0.0, until - start), _POLL_MAX_S)
    ready += [silent[descriptor] for descriptor, _ in poll.poll(math.ceil(wait_s * 1000))]
    waited_s = time.monotonic() - start
    for talk in silent.values():
        talk.waited_s += waited_s
    return ready or going
