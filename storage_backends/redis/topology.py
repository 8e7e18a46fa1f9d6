"""Which server has which key: one server, the master that sentinels name, or the slots of a cluster.

The picture is made on the first use and again when servers say that it is wrong (MOVED, READONLY) or do not answer.
"""

from __future__ import annotations

import binascii
import logging
import threading
import time
from array import array

from kvtier.storage_backends.redis.discovery import (
    NO_TIME,
    SLOTS,
    DiscoveryError,
    ServerFacts,
    ask_facts,
    ask_sentinels,
    ask_slots,
    shares,
)
from kvtier.storage_backends.redis.node import Node
from kvtier.storage_backends.redis.options import Address, RedisMode, RedisOptions

_log = logging.getLogger(__name__)

_REFRESH_EVERY_S = 0.5
_ASK_TIMEOUT_S = 1.0


def slot_of(name: bytes) -> int:
    """The cluster slot of a key: CRC16 of the name, or of the part in its first ``{}`` if that is not empty."""
    start = name.find(b"{")
    if start >= 0:
        end = name.find(b"}", start + 1)
        if end > start + 1:
            name = name[start + 1 : end]
    return binascii.crc_hqx(name, 0) % SLOTS


class Topology:
    """Thread-safe. `node_for` never raises: where nothing is known, there is no node, and a picture is due."""

    def __init__(self, options: RedisOptions) -> None:
        self.mode = options.mode
        self._options = options
        self._lock = threading.Lock()
        self._refreshing = threading.Lock()
        self._nodes: dict[Address, Node] = {}
        self._master: Node | None = None
        self._slots = array("i", [-1]) * SLOTS
        self._order: list[Node] = []
        self._stale = True
        self._refreshed = float("-inf")
        self._closed = False
        self.refreshes = 0
        self.last_error = ""

    def node_for(self, slot: int) -> Node | None:
        with self._lock:
            if self.mode is not RedisMode.CLUSTER:
                return self._master
            at = self._slots[slot]
            return None if at < 0 else self._order[at]

    def moved(self, slot: int, address: Address) -> Node:
        """A server said that `slot` lives at `address` now; the rest of the picture is due for renewal."""
        with self._lock:
            node = self._node(address)
            if node not in self._order:
                self._order.append(node)
            self._slots[slot] = self._order.index(node)
            self._stale = True
            return node

    def node_at(self, address: Address) -> Node:
        """The server at `address`, as named by ASK: for one command, no change of the picture."""
        with self._lock:
            return self._node(address)

    def suspect(self) -> None:
        """Something did not answer as this picture says: renew it at the next use."""
        with self._lock:
            self._stale = True

    def refresh_if_due(self, until: float) -> None:
        """Renew the picture where it is stale, at most every half second; by one thread, others go on with what is
        there. Never raises."""
        now = time.monotonic()
        with self._lock:
            due = self._stale and not self._closed and now - self._refreshed >= _REFRESH_EVERY_S
        if not due or not self._refreshing.acquire(blocking=False):
            return
        try:
            self.refresh(min(_ASK_TIMEOUT_S, until - now))
        except DiscoveryError as e:
            if str(e) != self.last_error:
                _log.warning("redis: the servers cannot be found: %s", e)
            self.last_error = str(e)
        finally:
            with self._lock:
                self._refreshed = time.monotonic()
            self._refreshing.release()

    def refresh(self, timeout_s: float) -> None:
        """Renew the picture now, in `timeout_s` at most. Raises DiscoveryError."""
        if timeout_s <= 0:
            raise DiscoveryError(NO_TIME)
        until = time.monotonic() + timeout_s
        if self.mode is RedisMode.AUTO:
            self.mode = self._find_mode(timeout_s)
        if self.mode is RedisMode.STANDALONE:
            self._set_master(self._options.seeds[0])
        elif self.mode is RedisMode.SENTINEL:
            self._set_master(ask_sentinels(self._options, until - time.monotonic()))
        else:
            self._learn_slots(until - time.monotonic())
        self.refreshes += 1
        self.last_error = ""

    def facts(self, timeout_s: float) -> list[ServerFacts]:
        """What every server of the picture says about itself; those that do not answer are left out."""
        found = []
        for node in self.nodes():
            try:
                facts = ask_facts(node.address, self._options, timeout_s)
            except DiscoveryError as e:
                _log.warning("redis: %s", e)
                continue
            found.append(facts)
        return found

    def nodes(self) -> list[Node]:
        """The servers that have pages."""
        with self._lock:
            if self.mode is not RedisMode.CLUSTER:
                return [] if self._master is None else [self._master]
            return [self._order[at] for at in sorted(set(self._slots)) if at >= 0]

    def all_nodes(self) -> list[Node]:
        """Every server that was ever met."""
        with self._lock:
            return list(self._nodes.values())

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for node in self.all_nodes():
            node.close()

    # ---- inside

    def _node(self, address: Address) -> Node:
        node = self._nodes.get(address)
        if node is None:
            database = 0 if self.mode is RedisMode.CLUSTER else self._options.database
            node = self._nodes[address] = Node(address, self._options, database)
            if self._closed:  # a call that is still under way was sent on
                node.close()
        return node

    def _find_mode(self, timeout_s: float) -> RedisMode:
        said = []
        for seed, share_s in shares(self._options.seeds, timeout_s):
            try:
                mode = ask_facts(seed, self._options, share_s).mode
            except DiscoveryError as e:
                said.append(str(e))
                continue
            if mode is RedisMode.SENTINEL and not self._options.service:
                raise DiscoveryError(f"{seed} is a sentinel: set service to the name of the master it watches")
            return mode
        raise DiscoveryError("; ".join(said) or NO_TIME)

    def _set_master(self, address: Address) -> None:
        with self._lock:
            node = self._node(address)
            changed = node is not self._master
            self._master = node
            self._stale = False
        if changed and self.mode is RedisMode.SENTINEL:
            _log.info("redis: the master of %r is %s", self._options.service, address)
        if not changed and not node.up:
            node.forget_idle()

    def _learn_slots(self, timeout_s: float) -> None:
        said = []
        known = [n.address for n in self.nodes() if n.up]
        for address, share_s in shares(list(dict.fromkeys([*known, *self._options.seeds])), timeout_s):
            try:
                ranges = ask_slots(address, self._options, share_s)
            except DiscoveryError as e:
                said.append(str(e))
                continue
            with self._lock:
                self._order = list(dict.fromkeys(self._node(r.address) for r in ranges))
                self._slots = array("i", [-1]) * SLOTS
                for r in ranges:
                    at = self._order.index(self._node(r.address))
                    self._slots[r.first : r.last + 1] = array("i", [at]) * (r.last + 1 - r.first)
                self._stale = False
            return
        raise DiscoveryError("; ".join(said) or NO_TIME)
