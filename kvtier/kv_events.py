"""KV events for routers that know prefixes: which pages are in which tier, in the format that SGLang and vLLM publish.

Over ZeroMQ PUB: topic, sequence number (8 bytes, big-endian), and in msgpack ``[time, events, data-parallel rank]``;
an event is a map whose ``type`` names it. A page's block hash is the first 8 bytes of the engine's own hash of it, as a
signed number: what SGLang publishes for the same page, where neither LoRA adapter nor salt take part. A number that is
left out tells a subscriber that events were lost.

Needs the extra ``events``.
"""

from __future__ import annotations

import logging
import queue
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtier.errors import ClosedError, ConfigError, MissingExtraError

try:
    import msgspec
    import zmq
except ImportError as error:
    raise MissingExtraError("kv_events needs the extra 'events': pip install 'kvtier[events]'") from error

_log = logging.getLogger(__name__)

MEDIA: Mapping[str, str] = {"host": "CPU_PINNED", "nvme": "DISK", "redis": "EXTERNAL"}
"""What routers call our tiers; others by their own name."""
_HASH_BYTES = 8
_CLOSE_S = 1.0
_LINGER_SHARE = 0.8
_SEND_HWM = 1000
"""Messages that wait for one subscriber that does not read, each of at most twice `_HASHES_MAX` hashes."""
_BATCH_MAX = 256
_HASHES_MAX = 4096
_RECEIVED_BYTES_MAX = 65536
"""Subscribers send topics only."""


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    """Pages are in a medium now. token_ids is empty and there is no parent: who follows the engine's own events knows
    both by the hash."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    """Pages are no longer in a medium."""

    block_hashes: list[int]
    medium: str | None = None


class KVEventBatch(msgspec.Struct, array_like=True):
    """Events in their order. ts: unix time in seconds."""

    ts: float
    events: list[BlockStored | BlockRemoved]
    attn_dp_rank: int | None = None


Event = BlockStored | BlockRemoved


@dataclass(frozen=True, slots=True)
class EventOptions:
    """endpoint: to bind. topic: of every message. queue: events that may wait to be sent; more are dropped."""

    endpoint: str
    topic: str = ""
    queue: int = 10_000


def block_hash(origin: bytes) -> int:
    """What an engine publishes for the page of which it told the hash `origin`."""
    return int.from_bytes(origin[:_HASH_BYTES], "big", signed=True)


class Publisher(Collector):
    """Sends from a thread of its own. `publish` may be called from any thread and never blocks; what finds the queue
    full is dropped and counted. Raises ConfigError where the endpoint cannot be bound."""

    def __init__(self, options: EventOptions) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.set_hwm(_SEND_HWM)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.MAXMSGSIZE, _RECEIVED_BYTES_MAX)
        if "[" in options.endpoint:
            self._socket.setsockopt(zmq.IPV6, 1)
        try:
            _check_free(options.endpoint)
            self._socket.bind(options.endpoint)
        except (zmq.ZMQError, OSError, ValueError) as error:
            self._socket.close()
            self._context.term()
            raise ConfigError(
                f"kv_events: endpoint = {options.endpoint!r} cannot be bound: {error}; choose a free one, such as "
                "tcp://127.0.0.1:5557"
            ) from error
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._topic = options.topic.encode()
        self._queue: queue.Queue[tuple[bool, Event] | None] = queue.Queue(options.queue)
        self._put_lock = threading.Lock()
        self._dropped = 0
        self._lost = False  # events in front of the next one
        self._give_up = 0.0
        self._sent: Counter[str] = Counter()
        self._closed = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kvtier-kv-events", daemon=True)
        self._thread.start()

    def publish(self, event: Event) -> None:
        with self._put_lock:
            try:
                self._queue.put_nowait((self._lost, event))
                self._lost = False
            except queue.Full:
                self._dropped += 1
                self._lost = True

    def collect(self) -> Iterable[Metric]:
        sent = CounterMetricFamily("kvtier_kv_events", "events published for routers", labels=["event"])
        for kind in (BlockStored, BlockRemoved):
            sent.add_metric([kind.__name__], self._sent[kind.__name__])
        yield sent
        yield CounterMetricFamily("kvtier_kv_events_dropped", "events that found the queue full", value=self._dropped)

    def close(self) -> None:
        """Send what is queued for at most a second. Safe to call twice."""
        if not self._closed.acquire(blocking=False):
            return
        self._give_up = give_up = time.monotonic() + _CLOSE_S
        while True:
            try:
                self._queue.put(None, timeout=max(0.01, give_up - time.monotonic()))
                break
            except queue.Full:
                if time.monotonic() >= give_up:
                    _log.warning("kv_events: closed while events were still waiting to be sent")
                    return  # its thread ends with the process
        self._thread.join(max(0.0, give_up - time.monotonic()))

    def _run(self) -> None:
        encode = msgspec.msgpack.Encoder().encode
        sequence = 0
        try:
            for lost, told in self._batches():
                sequence += lost
                batch = KVEventBatch(time.time(), told)
                self._socket.send_multipart([self._topic, sequence.to_bytes(8, "big"), encode(batch)])
                sequence += 1
                self._sent.update(type(event).__name__ for event in told)
        except zmq.ZMQError as error:
            _log.error("kv_events: publishing ended: %s", error)
        finally:
            # What was handed over last is still being sent; the rest of the time is for whoever waits for this thread.
            left_s = max(0.0, self._give_up - time.monotonic()) * _LINGER_SHARE
            self._socket.close(linger=int(left_s * 1000))
            self._context.term()

    def _lost_last(self) -> bool:
        with self._put_lock:
            lost = self._lost and self._queue.empty()
            if lost:
                self._lost = False
            return lost

    def _batches(self) -> Iterator[tuple[bool, list[Event]]]:
        """What is sent as one, and whether events in front of it were lost, until the end; nothing where the last ones
        were lost, so that this is told at once."""
        told: list[Event] = []
        hashes, lost = 0, False
        while True:
            full = len(told) >= _BATCH_MAX or hashes >= _HASHES_MAX
            item = None if (due := bool(told) and (full or self._queue.empty())) else self._queue.get()
            if due or (told and (item is None or item[0])):
                yield lost, told
                told, hashes, lost = [], 0, False
            if due:
                if self._lost_last():
                    yield True, []
                continue
            if item is None:
                return
            lost |= item[0]
            told.append(item[1])
            hashes += len(item[1].block_hashes)


def _check_free(endpoint: str) -> None:
    """Raises OSError or ValueError for what ZeroMQ would take silently: a file that another process listens at, and a
    port that is none."""
    port = re.fullmatch(r"tcp://.*:(\d+)", endpoint)
    if port is not None and int(port[1]) > 65535:
        raise ValueError(f"{port[1]} is no port")
    if endpoint.startswith("ipc:///"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
            other.settimeout(1.0)
            try:
                other.connect(endpoint.removeprefix("ipc://"))
            except OSError:  # nobody listens there
                return
        raise ValueError("another process listens there")


class KvEvents:
    """What a store tells a `Publisher`: pages of one geometry, those that requests are counted in, by tier.

    Knows every page that it told as stored, about 150 bytes for each, since a removal comes by key. All methods may be
    called from any thread, and never block for input or output.

    holds: by tier, which pages it has now; of others what is told is taken for true. News of one page may come in any
    order from several threads, so what a tier has when they come is what counts.
    """

    def __init__(
        self, publisher: Publisher, holds: Mapping[str, Callable[[Sequence[bytes]], Sequence[bool]]] | None = None
    ) -> None:
        self.publisher = publisher
        self._holds = holds or {}
        self._lock = threading.Lock()
        self._spec = b""
        self._tokens = 0
        self._told: dict[str, dict[bytes, int]] = {}

    def page_holds(self, tokens: int, spec: bytes) -> None:
        """Pages with this fingerprint hold so many tokens; others are not told."""
        self._tokens, self._spec = tokens, spec

    def stored(self, tier: str, keys: Sequence[bytes], metas: Sequence[Any]) -> None:
        """Pages are in `tier` now; metas are `PageMeta`."""
        with self._lock:
            told = self._told.setdefault(tier, {})
            new = {
                key: block_hash(meta.origin)
                for key, meta in zip(keys, metas, strict=True)
                if len(meta.origin) >= _HASH_BYTES and meta.spec == self._spec and key not in told
            }
            there = self._there(tier, list(new), True)
            new = {key: name for (key, name), has in zip(new.items(), there, strict=True) if has}
            told.update(new)
            # Under the lock, so that a removal is told behind it.
            for part in _parts(list(new.values())):
                self.publisher.publish(BlockStored(part, None, [], self._tokens, None, MEDIA.get(tier, tier)))

    def removed(self, tier: str, keys: Sequence[bytes]) -> None:
        """Pages left `tier`."""
        with self._lock:
            told = self._told.get(tier, {})
            left = [key for key in keys if key in told]
            gone = [told.pop(k) for k, has in zip(left, self._there(tier, left, False), strict=True) if not has]
            for part in _parts(gone):
                self.publisher.publish(BlockRemoved(part, MEDIA.get(tier, tier)))

    def close(self) -> None:
        """Tell that all pages left, since nobody serves them any longer, and end."""
        # Not that everything was cleared: a router may take that for the engine's own blocks as well.
        with self._lock:
            for tier, told in self._told.items():
                for part in _parts(list(told.values())):
                    self.publisher.publish(BlockRemoved(part, MEDIA.get(tier, tier)))
            self._told.clear()
        self.publisher.close()

    def _there(self, tier: str, keys: Sequence[bytes], said: bool) -> Sequence[bool]:
        if not keys:
            return []
        holds = self._holds.get(tier)
        if holds is None:
            return [said] * len(keys)
        try:
            return holds(keys)
        except ClosedError:  # it has nothing any longer
            return [False] * len(keys)


def _parts(hashes: list[int]) -> Iterator[list[int]]:
    for at in range(0, len(hashes), _HASHES_MAX):
        yield hashes[at : at + _HASHES_MAX]
