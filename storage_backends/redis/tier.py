"""The Redis tier: cold pages shared between processes and machines.

A page is one string value: the 96-byte header of `record`, then the page's bytes, under ``<prefix><key in hex>``. It is
written only where there is none yet, and trusted only after length, key, spec and checksum were found right; what is
wrong is deleted. A record of a later release is left alone: a miss here, and no room for a page of ours. What can
happen to a server (gone, frozen, full, restarted, failed over) is a named state per page.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from kvtier.abc.tier import (
    KEY_BYTES,
    LENGTH_ABSENT,
    LENGTH_UNKNOWN,
    GetResult,
    GetStatus,
    PutItem,
    PutStatus,
    Removal,
    Tier,
    TierCapabilities,
    TierUsage,
)
from kvtier.errors import SpecError
from kvtier.storage_backends.redis.connection import Connection, ReplyError, encode
from kvtier.storage_backends.redis.discovery import DiscoveryError, misfits
from kvtier.storage_backends.redis.exchange import Command, Exchange, NoReply
from kvtier.storage_backends.redis.incoming import Incoming
from kvtier.storage_backends.redis.metrics import RedisCollector, RedisCounters
from kvtier.storage_backends.redis.options import RedisMode, RedisOptions
from kvtier.storage_backends.redis.outgoing import Outgoing, SetOptions
from kvtier.storage_backends.redis.record import (
    HEADER_BYTES,
    NewerRecordError,
    RecordError,
    RecordHeader,
    parse_header,
)
from kvtier.storage_backends.redis.topology import Topology
from kvtier.storage_backends.slots.descriptions import check_meta
from kvtier.storage_backends.slots.gate import Gate, notify
from kvtier.storage_backends.slots.table import Removed

_log = logging.getLogger(__name__)

_BATCH_PAGES = 32
_BATCH_BYTES = 32 << 20
_NAMES_BATCH = 512
_CLOSE_S = 1.8
_START_S = 2.0
_UNLIMITED = (1 << 63) - 1
_DEFAULT_VALUE_LIMIT = 512 << 20


class _Found(Enum):
    """A value that is no record, or another key's; a record of a later release."""

    NO_RECORD = "no record"
    NEWER = "newer record"


_NO_RECORD, _NEWER = _Found.NO_RECORD, _Found.NEWER


class RedisTier(Tier):
    """See the module's docstring.

    spec: fingerprint that every page must have, where the caller knows it. record_bytes: the longest page that is
    going to come, for the check of the server's limits at start. `usage` counts what this tier object did; what others
    did, and what the server evicted, it does not know. Servers that do not answer at start are looked for later.
    """

    capabilities = TierCapabilities(persistent=True, shared=True)

    def __init__(
        self, options: RedisOptions, *, name: str = "redis", spec: bytes | None = None, record_bytes: int = 0
    ) -> None:
        self.name = name
        self._options = options
        self._spec = spec
        self._topology = Topology(options)
        self._exchange = Exchange(self._topology)
        self._gate = Gate(name)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._said: set[str] = set()
        self._asks_at_once = True
        self._asks_first = True  # until a batch was new as a whole, as the next one will be then
        self.collector = RedisCollector(name, self.counters)
        """For a metrics registry."""
        self._capacity_bytes = _UNLIMITED
        self._limit_bytes = _DEFAULT_VALUE_LIMIT - HEADER_BYTES
        self._set_options = SetOptions(options.ttl_ms)
        self._incoming = Incoming(spec, self._met_newer, self._say_once)
        self._look_around(record_bytes)

    # ---- tier

    def put_many(self, items: Sequence[PutItem], deadline_s: float | None = None) -> list[PutStatus]:
        for item in items:
            _check_key(item.key)
            check_meta(item.meta)
            if len(item.data) < item.meta.nbytes:
                raise SpecError(f"data has {len(item.data)} bytes, its meta says {item.meta.nbytes}")
        until = _until(deadline_s)
        statuses = [PutStatus.FAILED] * len(items)
        with self._gate:
            for batch in _batches(range(len(items)), lambda i: items[i].meta.nbytes):
                self._put_batch(batch, items, statuses, self._call_end(until))
        return statuses

    def get_many_into(
        self, keys: Sequence[bytes], outs: Sequence[memoryview], deadline_s: float | None = None
    ) -> list[GetResult]:
        if len(keys) != len(outs):
            raise SpecError(f"{len(keys)} keys for {len(outs)} buffers")
        for key, out in zip(keys, outs, strict=True):
            _check_key(key)
            if out.readonly:
                raise SpecError(f"the buffer for page {key.hex()} cannot be written")
        until = _until(deadline_s)
        results = [GetResult(GetStatus.FAILED)] * len(keys)
        with self._gate:
            for batch in _batches(range(len(keys)), lambda i: len(outs[i])):
                self._get_batch(batch, keys, outs, results, self._call_end(until))
        return results

    def length_many(self, keys: Sequence[bytes]) -> list[int]:
        """Asks the servers for the headers: one round trip. A value that does not start with the right one is not
        there."""
        for key in keys:
            _check_key(key)
        with self._gate:
            found = self._headers(keys)
        return [
            header.nbytes
            if isinstance(header, RecordHeader)
            else LENGTH_ABSENT
            if header is None or isinstance(header, _Found)
            else LENGTH_UNKNOWN
            for header in found
        ]

    def delete_many(self, keys: Sequence[bytes], removal: Removal = Removal.DELETED) -> int:
        for key in keys:
            _check_key(key)
        with self._gate:
            found = self._headers(keys)
            there = [i for i, h in enumerate(found) if h is not None and h is not _NEWER and not isinstance(h, NoReply)]
            replies = self._run([_command([b"UNLINK", self._name(keys[i])]) for i in there])
            gone = [i for i, reply in zip(there, replies, strict=True) if reply == 1]
            with self._lock:
                self._counts[removal.value] += len(gone)
                self._counts["freed_bytes"] += sum(h.nbytes for i in gone if isinstance(h := found[i], RecordHeader))
        notify(self._removal_listener, [Removed(keys[i], removal) for i in gone])
        return len(gone)

    def usage(self) -> TierUsage:
        with self._lock:
            c = Counter(self._counts)
        left = c[Removal.EVICTED.value] + c[Removal.DELETED.value] + c[Removal.QUARANTINED.value]
        # Pages of others that this one removed were found, not stored.
        found = max(0, left - c["stored"])
        return TierUsage(
            capacity_bytes=self._capacity_bytes,
            used_bytes=min(max(0, c["put_bytes"] - c["freed_bytes"]), self._capacity_bytes),
            resident_pages=found + c["stored"] - left,
            recovered_pages=found,
            stored_pages=c["stored"],
            evicted_pages=c[Removal.EVICTED.value],
            deleted_pages=c[Removal.DELETED.value],
            quarantined_pages=c[Removal.QUARANTINED.value],
            put_bytes=c["put_bytes"],
            get_bytes=c["get_bytes"],
        )

    def counters(self) -> RedisCounters:
        """What happened on the way to the servers."""
        nodes = self._topology.all_nodes()
        with self._lock:
            c = Counter(self._counts)
        return RedisCounters(
            oom_rejections=c["oom"],
            bad_puts=c["bad_puts"],
            error_replies=c["errors"],
            healed=c["healed"],
            newer_records=c["newer"],
            redirects=self._exchange.redirects,
            refreshes=self._topology.refreshes,
            breaker_opened=sum(n.breaker.opened for n in nodes),
            connected=sum(n.connected for n in nodes),
            open_connections=sum(n.open_connections for n in nodes),
            nodes_up=sum(n.up for n in nodes),
            nodes=len(nodes),
        )

    def close(self) -> None:
        self._gate.close(_CLOSE_S / 2)
        self._topology.close()
        self._gate.close(_CLOSE_S / 2)

    # ---- putting

    def _put_batch(
        self, batch: Sequence[int], items: Sequence[PutItem], statuses: list[PutStatus], until: float
    ) -> None:
        fits = []
        for i in batch:
            if items[i].meta.nbytes <= self._limit_bytes:
                fits.append(i)
            else:
                statuses[i] = PutStatus.TOO_LARGE
                self._say_once(
                    "too large",
                    f"a page of {items[i].meta.nbytes} bytes is larger than the server's proto-max-bulk-len allows: "
                    f"set that to at least {items[i].meta.nbytes + HEADER_BYTES} on the server",
                )
        names = {i: self._name(items[i].key) for i in fits}
        missing: list[int] = fits
        broken: list[int] = []
        if self._asks_first:
            missing, broken = self._sort_out(fits, items, names, statuses, until)
        self._heal([names[i] for i in broken], until)
        pages = {i: Outgoing(names[i], items[i], self._set_options) for i in missing + broken}

        def send(indices: Sequence[int]) -> list[int]:
            """Set what is not there; returns the pages that are said to be there."""
            commands = [Command(names[i], pages[i]) for i in indices]
            there = []
            for i, reply in zip(indices, self._exchange.run(commands, _read_plain, until), strict=True):
                if pages[i].bad:
                    statuses[i] = PutStatus.FAILED
                    with self._lock:
                        self._counts["bad_puts"] += 1
                    self._say_once(
                        "bad put", "a page offered for storing does not match its checksum; it is not stored"
                    )
                    continue
                if reply is None:
                    there.append(i)
                statuses[i] = self._put_status(reply)
                if statuses[i] is PutStatus.STORED:
                    with self._lock:
                        self._counts["stored"] += 1
                        self._counts["put_bytes"] += items[i].meta.nbytes
            return there

        there = send(list(pages))
        if there:
            # Somebody else was faster, or the value is empty, which looks like absent and would stay for ever.
            again = self._headers([items[i].key for i in there], until)
            empty = [i for i, found in zip(there, again, strict=True) if found is None or found is _NO_RECORD]
            for i in [i for i, found in zip(there, again, strict=True) if found is _NEWER]:
                statuses[i] = PutStatus.FAILED
            if empty:
                self._heal([names[i] for i in empty], until)
                send(empty)
        self._asks_first = any(statuses[i] is not PutStatus.STORED for i in fits)

    def _sort_out(
        self,
        indices: Sequence[int],
        items: Sequence[PutItem],
        names: Mapping[int, bytes],
        statuses: list[PutStatus],
        until: float,
    ) -> tuple[list[int], list[int]]:
        """The pages that are not there, and those in whose place something else is. Asking costs a round trip, and
        saves sending pages that another process has put already."""
        missing: list[int] = []
        broken: list[int] = []
        found = self._found([items[i].key for i in indices], [names[i] for i in indices], until)
        for i, header in zip(indices, found, strict=True):
            if isinstance(header, RecordHeader):
                statuses[i] = PutStatus.EXISTS
            elif header is None:
                missing.append(i)
            elif header is _NO_RECORD:
                broken.append(i)
            elif header is not _NEWER:  # whose place is taken: FAILED, as it is
                statuses[i] = self._put_status(header)
        return missing, broken

    def _put_status(self, reply: Any) -> PutStatus:
        if reply == b"OK":
            return PutStatus.STORED
        if reply is None:
            return PutStatus.EXISTS
        if reply is NoReply.DEADLINE:
            return PutStatus.DEADLINE
        if isinstance(reply, ReplyError):
            if reply.code == "OOM":
                with self._lock:
                    self._counts["oom"] += 1
                self._say_once("OOM", "the server is at its maxmemory and evicts nothing; pages are not stored there")
                return PutStatus.FULL
            self._count_error(reply)
        return PutStatus.FAILED

    def _heal(self, names: Sequence[bytes], until: float) -> None:
        """Remove values that are no records, so that pages can take their place."""
        gone = self._exchange.run([_command([b"DEL", n]) for n in names], _read_plain, until) if names else []
        with self._lock:
            self._counts["healed"] += sum(reply == 1 for reply in gone)

    # ---- getting

    def _get_batch(
        self,
        batch: Sequence[int],
        keys: Sequence[bytes],
        outs: Sequence[memoryview],
        results: list[GetResult],
        until: float,
    ) -> None:
        lengths: dict[int, int] = {}
        doubted: set[int] = set()

        def read(connection: Connection, n: int) -> Any:
            i = batch[n]
            lengths[i], reply = self._incoming.read(connection, keys[i], outs[i])
            if connection.doubtful:
                doubted.add(i)
            return reply

        commands = [_command([b"GET", self._name(keys[i])], len(outs[i])) for i in batch]
        bad = []
        for i, reply in zip(batch, self._exchange.run(commands, read, until), strict=True):
            if isinstance(reply, GetResult):
                results[i] = reply
                if reply.status is GetStatus.CORRUPT:
                    bad.append(i)
                elif reply.meta is not None:
                    with self._lock:
                        self._counts["get_bytes"] += reply.meta.nbytes
            else:
                late = reply is NoReply.DEADLINE
                results[i] = GetResult(GetStatus.DEADLINE if late else GetStatus.FAILED)
                if isinstance(reply, ReplyError):
                    if reply.code == "WRONGTYPE":
                        results[i] = GetResult(GetStatus.CORRUPT)
                        bad.append(i)
                    self._count_error(reply)
        if asked := [i for i in bad if i in doubted]:
            # Replies may have been mixed up on the way: what is there is looked at by another connection.
            for i, found in zip(asked, self._headers([keys[i] for i in asked]), strict=True):
                if isinstance(found, RecordHeader | NoReply):
                    results[i] = GetResult(GetStatus.FAILED)
                    bad.remove(i)
        if bad:
            self._quarantine([keys[i] for i in bad], sum(lengths.get(i, 0) for i in bad))

    def _quarantine(self, keys: Sequence[bytes], record_bytes: int) -> None:
        replies = self._run([_command([b"UNLINK", self._name(key)]) for key in keys])
        gone = sum(reply == 1 for reply in replies)
        with self._lock:
            self._counts[Removal.QUARANTINED.value] += gone
            self._counts["freed_bytes"] += max(0, record_bytes - HEADER_BYTES * len(keys))
        notify(self._removal_listener, [Removed(key, Removal.QUARANTINED) for key in keys])

    # ---- inside

    def _name(self, key: bytes) -> bytes:
        return self._options.prefix + key.hex().encode()

    def _found(self, keys: Sequence[bytes], names: Sequence[bytes], until: float) -> list[Any]:
        """As `_headers`, where mostly nothing is there: one server is asked about all keys at once."""
        if self._asks_at_once and keys and self._topology.mode in (RedisMode.STANDALONE, RedisMode.SENTINEL):
            (reply,) = self._run([Command(names[0], [encode([b"EXISTS", *names])])], until)
            if reply == 0:
                return [None] * len(keys)
            if isinstance(reply, NoReply):
                return [reply] * len(keys)
            if isinstance(reply, ReplyError) and reply.code in ("NOPERM", "ERR"):
                self._asks_at_once = False  # this user may not
        return self._headers(keys, until)

    def _headers(self, keys: Sequence[bytes], until: float | None = None) -> list[Any]:
        """What is under each key: a RecordHeader, None (nothing, or an empty value), _NO_RECORD, an error reply, or why
        there is no answer."""
        last = b"%d" % (HEADER_BYTES - 1)
        replies = self._run([_command([b"GETRANGE", self._name(key), b"0", last]) for key in keys], until)
        return [self._header(key, reply) for key, reply in zip(keys, replies, strict=True)]

    def _header(self, key: bytes, reply: Any) -> Any:
        if isinstance(reply, ReplyError) and reply.code == "WRONGTYPE":
            return _NO_RECORD
        if not isinstance(reply, bytes):
            return reply
        try:
            return parse_header(reply, key, self._spec) if reply else None
        except NewerRecordError as e:
            self._met_newer(e)
            return _NEWER
        except RecordError:
            return _NO_RECORD

    def _run(self, commands: Sequence[Command], until: float | None = None) -> list[Any]:
        replies: list[Any] = []
        for at in range(0, len(commands), _NAMES_BATCH):
            end = until if until is not None else self._call_end(None)
            replies += self._exchange.run(commands[at : at + _NAMES_BATCH], _read_plain, end)
        return replies

    def _call_end(self, until: float | None) -> float:
        return until if until is not None else time.monotonic() + self._options.timeout_s

    def _met_newer(self, why: NewerRecordError) -> None:
        with self._lock:
            self._counts["newer"] += 1
        self._say_once("newer", f"{why}: it stays, and is a miss here; a prefix for each release keeps them apart")

    def _count_error(self, reply: ReplyError) -> None:
        with self._lock:
            self._counts["errors"] += 1
        self._say_once(reply.code, f"the server answers {str(reply)!r}")

    def _say_once(self, topic: str, text: str) -> None:
        with self._lock:
            said = topic in self._said
            self._said.add(topic)
        if not said:
            _log.warning("%s tier: %s (said once)", self.name, text)

    def _look_around(self, record_bytes: int) -> None:
        """Find the servers and say what does not suit them. Servers that are down now may come later."""
        try:
            self._topology.refresh(_START_S)
        except DiscoveryError as e:
            _log.warning("%s tier: no server answers, pages are missed until one does: %s", self.name, e)
            return
        facts = self._topology.facts(_START_S)
        if not facts:
            return
        if all(f.maxmemory_bytes for f in facts):
            self._capacity_bytes = sum(f.maxmemory_bytes for f in facts)
        limits = [f.max_value_bytes for f in facts if f.max_value_bytes]
        if limits:
            self._limit_bytes = max(0, min(limits) - HEADER_BYTES)
        largest = self._limit_bytes + HEADER_BYTES
        for text in misfits(facts, largest, record_bytes and record_bytes + HEADER_BYTES, self._topology.mode):
            _log.warning("%s tier: %s", self.name, text)


def _read_plain(connection: Connection, _: int) -> Any:
    return connection.read_reply()


def _command(args: Sequence[bytes], reply_bytes: int = 0) -> Command:
    return Command(args[1], [encode(args)], reply_bytes)


def _check_key(key: bytes) -> None:
    if len(key) != KEY_BYTES:
        raise SpecError(f"a page key has {KEY_BYTES} bytes, got {len(key)}")


def _until(deadline_s: float | None) -> float | None:
    return None if deadline_s is None else time.monotonic() + deadline_s


def _batches(indices: Sequence[int], nbytes: Callable[[int], int]) -> Iterator[list[int]]:
    """Runs of indices that one round trip carries."""
    batch: list[int] = []
    total = 0
    for i in indices:
        if batch and (len(batch) == _BATCH_PAGES or total + nbytes(i) > _BATCH_BYTES):
            yield batch
            batch, total = [], 0
        batch.append(i)
        total += nbytes(i)
    if batch:
        yield batch
