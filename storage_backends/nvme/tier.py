"""The NVMe tier: cold pages in preallocated segment files of one directory, kept over restarts and crashes.

How a page gets in: a slot is reserved, and what had to go for it is logged; its bytes are written; its put record is
logged; only then it is visible. A process that dies anywhere in between leaves every page whose put record was
written, and nothing else. Every get verifies the checksum, which is bound to the key: whatever happens to the files
underneath, the answer is the right bytes or a counted miss.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from kvtier.abc.tier import (
    LENGTH_UNKNOWN,
    SLOT_ALIGN,
    GetResult,
    GetStatus,
    Note,
    PageMeta,
    PutItem,
    PutStatus,
    Removal,
    Slot,
    Tier,
    TierCapabilities,
    TierUsage,
)
from kvtier.errors import ClosedError, ConfigError, SpecError, TierPathError
from kvtier.keys import checksum
from kvtier.storage_backends.nvme.aligned import copy
from kvtier.storage_backends.nvme.device import Device
from kvtier.storage_backends.nvme.directory import TierDirectory
from kvtier.storage_backends.nvme.health import Health
from kvtier.storage_backends.nvme.log import IndexLog
from kvtier.storage_backends.nvme.metrics import NvmeCollector
from kvtier.storage_backends.nvme.note import read_note, write_note
from kvtier.storage_backends.nvme.probe import PROBE_BYTES, try_writing
from kvtier.storage_backends.nvme.recovery import sort_out
from kvtier.storage_backends.nvme.segments import SegmentFiles
from kvtier.storage_backends.nvme.transfers import SlotTransfers
from kvtier.storage_backends.nvme.workers import Workers
from kvtier.storage_backends.slots.columns import Entry, PageColumns
from kvtier.storage_backends.slots.config import check_capacity, check_max_record
from kvtier.storage_backends.slots.descriptions import check_meta
from kvtier.storage_backends.slots.extents import slot_bytes_of
from kvtier.storage_backends.slots.gate import Gate, notify
from kvtier.storage_backends.slots.order import order_of
from kvtier.storage_backends.slots.table import SlotTable

_log = logging.getLogger(__name__)

_CLOSE_S = 1.2
_PROBE_S = 0.4
_SEGMENT_BYTES = 256 << 20
_SEGMENTS_MAX = 256
_CHUNK_MAX = 8
_UNREAD_MAX = 3

T = TypeVar("T")


class NvmeTier(Tier):
    """See the module's docstring.

    path: directory, made if missing, for this process alone. capacity_bytes: hard cap of page data; a directory that
    holds more loses what lies behind it at opening. segment_bytes: size of the files, default 256 MiB and up;
    fixed when the directory is made. io_threads: transfers in flight per direction. max_record_bytes: larger records
    are TOO_LARGE; by default one segment. policy, ttl_s: what makes room, and pages that were not used for this long
    are gone; what a restart finds counts as used then.
    """

    capabilities = TierCapabilities(persistent=True, shared=False)

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        name: str = "nvme",
        segment_bytes: int | None = None,
        io_threads: int = 8,
        max_record_bytes: int | None = None,
        policy: str = "lru",
        ttl_s: float | None = None,
        device: Device | None = None,
        retry_s: float = 0.25,
    ) -> None:
        self.name = name
        self._device = device = device or Device()
        self._capacity_bytes = check_capacity(name, capacity_bytes)
        if io_threads < 1:
            raise ConfigError(f"{name} tier: io_threads = {io_threads} must be at least 1; 8 is the default")
        order = order_of(policy)
        default = _SEGMENT_BYTES
        while default * _SEGMENTS_MAX < self._capacity_bytes:
            default *= 2
        self._directory = TierDirectory(name, Path(path), segment_bytes, default, device)
        try:
            segment = self._directory.segment_bytes
            largest = check_max_record(name, max_record_bytes, min(segment, self._capacity_bytes))
            self._segments = SegmentFiles(name, self._directory.path, self._capacity_bytes, segment, device)
        except BaseException:
            self._directory.close()
            raise
        self.path = self._directory.path
        self._table = SlotTable(self._segments.regions, largest, order, ttl_s)
        self._lock = threading.Lock()
        self._gate = Gate(name)
        self._transfers = SlotTransfers(self._segments)
        self._readers = Workers(io_threads, f"kvtier-{name}-read")
        self._writers = Workers(io_threads, f"kvtier-{name}-write")
        self._io_threads = io_threads
        self._compactor: threading.Thread | None = None
        self._put_bytes = 0
        self._get_bytes = 0
        self._unread: dict[bytes, int] = {}  # how often the device failed to read a page
        self.health = Health(name, self.path, self._probe, retry_s)
        self.collector = NvmeCollector(name, lambda: [(str(self.path), self.health.state, self.health.counters())])
        try:
            self._index = IndexLog(self.path / "index.log", device)
        except OSError as error:
            self._segments.close()
            self._directory.close()
            raise TierPathError(
                f"{name} tier: path = {str(path)!r}: its index.log cannot be used: {error.strerror}; name another "
                "directory, or delete this one (it holds cached pages only)"
            ) from error
        try:
            self._recover()
        except BaseException as error:
            self._index.close()
            self._segments.close()
            self._directory.close()
            if isinstance(error, OSError):
                raise TierPathError(
                    f"{name} tier: path = {str(path)!r}: its index.log cannot be read: {error.strerror}; see to the "
                    "device, or name another directory"
                ) from error
            raise

    # ---- tier

    def put_many(self, items: Sequence[PutItem], deadline_s: float | None = None) -> list[PutStatus]:
        until = _until(deadline_s)
        for item in items:
            check_meta(item.meta)
            if len(item.data) != item.meta.nbytes:
                raise SpecError(f"data has {len(item.data)} bytes, its meta says {item.meta.nbytes}")
        statuses = [PutStatus.FAILED] * len(items)
        with self._gate:
            if not self.health.writable:
                self.health.refused(len(items))
                return statuses
            chunk = min(_CHUNK_MAX, max(1, len(items) // (2 * self._io_threads)))
            parts = [range(at, min(at + chunk, len(items))) for at in range(0, len(items), chunk)]
            self._writers.each(len(parts), lambda i: self._put(parts[i], items, statuses, until))
            for i, status in enumerate(statuses):
                # Room may have been held by other pages of this very call.
                if status is PutStatus.FULL and len(items) > 1:
                    self._put(range(i, i + 1), items, statuses, until)
            self._compact_where_due()
        return statuses

    def get_many_into(
        self, keys: Sequence[bytes], outs: Sequence[memoryview], deadline_s: float | None = None
    ) -> list[GetResult]:
        if len(keys) != len(outs):
            raise SpecError(f"{len(keys)} keys for {len(outs)} buffers")
        until = _until(deadline_s)
        results = [GetResult(GetStatus.ABSENT)] * len(keys)
        with self._gate:
            with self._lock:
                pages = self._table.pages(self._table.pin(keys))
            wanted = [i for i, page in enumerate(pages) if page is not None]
            try:

                def read(n: int) -> None:
                    i = wanted[n]
                    page = pages[i]
                    if page is not None:
                        results[i] = self._get(keys[i], page[0], page[1], outs[i], until)

                self._readers.each(len(wanted), read)
            finally:
                self._after_reading(keys, pages, results)
        return results

    def length_many(self, keys: Sequence[bytes]) -> list[int]:
        """LENGTH_UNKNOWN for pages of a device that is out."""
        with self._gate, self._lock:
            lengths = self._table.lengths(keys)
        if self.health.readable:
            return lengths
        return [LENGTH_UNKNOWN if n >= 0 else n for n in lengths]

    @property
    def direct(self) -> bool:
        """Whether transfers pass the page cache by (O_DIRECT)."""
        return self._segments.direct

    @property
    def free_bytes(self) -> int:
        """What is not in use of the capacity."""
        return self._capacity_bytes - self._table.used_bytes

    def delete_many(self, keys: Sequence[bytes], removal: Removal = Removal.DELETED) -> int:
        with self._gate:
            removed = self._locked(lambda: sum(self._table.remove(key, removal) for key in keys))
            self._flush()
            self._compact_where_due()
            return removed

    def touch_many(self, keys: Sequence[bytes]) -> None:
        with self._gate, self._lock:
            self._table.touch(keys)

    def demote_many(self, keys: Sequence[bytes]) -> None:
        with self._gate, self._lock:
            self._table.demote(keys)

    def protect_many(self, keys: Sequence[bytes], protected: bool) -> int:
        with self._gate, self._lock:
            return self._table.protect(keys, protected)

    def scan(self) -> Iterator[tuple[bytes, PageMeta]]:
        """Every page's key and description, the least recently used first: a snapshot of now."""
        with self._gate, self._lock:
            entries = self._table.entries(staged=False)
        return ((e.key, e.meta) for e in entries)

    def rank_many(self, keys: Sequence[bytes], priority: int) -> int:
        with self._gate, self._lock:
            return self._table.rank(keys, priority)

    def note(self, data: bytes, note: Note = Note.NAMESPACES) -> None:
        try:
            with self._gate:  # behind it the directory may be another process's
                write_note(self._directory.path, note, data)
        except ClosedError:
            _log.debug("the %s tier was closed before a note was written", self.name)

    def notes(self, note: Note = Note.NAMESPACES) -> list[bytes]:
        return read_note(self._directory.path, note)

    @property
    def logged(self) -> bool:
        """Whether a restart now would find everything as it is: False while the log cannot be written."""
        return self._index.complete

    def unlogged(self) -> set[bytes]:
        """Deleted pages that a restart now would find again, since the log could not be written. Waits for a write
        under way."""
        return set() if self._index.complete else self._index.unwritten_deletes()

    @property
    def members(self) -> tuple[NvmeTier, ...]:
        """The tiers that this one consists of, one per directory that is open: itself."""
        return (self,)

    def usage(self) -> TierUsage:
        with self._lock:
            return self._table.usage(
                capacity_bytes=self._capacity_bytes, put_bytes=self._put_bytes, get_bytes=self._get_bytes
            )

    def close(self) -> None:
        self.close_within(_CLOSE_S)

    def close_within(self, calls_s: float) -> None:
        """`close`, waiting this long for calls under way."""
        if self._gate.closed:
            return
        self._index.abort_compaction()
        quiet = self._gate.close(calls_s)
        quiet &= self.health.close(_PROBE_S if quiet else 0.0)
        self._readers.close(0.1 if quiet else 0.0)
        self._writers.close(0.1 if quiet else 0.0)
        if not quiet:
            # The device hangs. Files and lock are left to the end of the process: a late write must not meet a
            # second owner of the directory.
            _log.warning("the %s tier was closed with transfers under way", self.name)
            return
        if self._compactor is not None:
            self._compactor.join()
        self._index.close()
        self._segments.close()
        self._directory.close()

    # ---- writing

    def _put(self, part: range, items: Sequence[PutItem], statuses: list[PutStatus], until: float | None) -> None:
        """Put the items of `part`, one write each, and set their statuses."""
        if self._gate.closed:
            return
        if not self.health.writable:
            self.health.refused(len(part))
            return
        if until is not None and time.monotonic() >= until:
            for i in part:
                statuses[i] = PutStatus.DEADLINE
            return

        def reserve() -> list[tuple[int, Slot]]:
            reserved = []
            for i in part:
                row = self._table.reserve(items[i].key, items[i].meta.nbytes)
                if isinstance(row, PutStatus):
                    statuses[i] = row
                else:
                    statuses[i] = PutStatus.FAILED
                    reserved.append((i, self._table.slot(row)))
            return reserved

        reserved = self._locked(reserve)
        if not reserved:
            return
        # What left these slots must be known to have left before other bytes lie there.
        written = []
        if self._flush():
            written = [(i, slot) for i, slot in reserved if self._write(items[i], slot.offset)]

        def stage() -> None:
            for i, slot in reserved:
                if (i, slot) in written:
                    self._table.stage(slot.id, items[i].meta)
                    self._index.queue_put(Entry(items[i].key, items[i].meta, slot.offset))
                else:
                    self._table.abort(slot.id)

        self._locked(stage)
        if not written:
            return
        logged = self._flush()

        def publish() -> None:
            for i, slot in written:
                if logged:
                    self._table.publish(slot.id, items[i].meta.priority)
                    self._table.unpin([slot.id])
                    self._put_bytes += items[i].meta.nbytes
                    statuses[i] = PutStatus.STORED
                else:
                    self._index.queue_delete(self._table.abort(slot.id))

        self._locked(publish)

    def _write(self, item: PutItem, offset: int) -> bool:
        try:
            with self.health.transfer():
                self._transfers.write(item, offset)
        except OSError as error:
            self.health.write_failed("write", error)
            return False
        self.health.worked("write")
        return True

    # ---- reading

    def _get(self, key: bytes, slot: Slot, meta: PageMeta, out: memoryview, until: float | None) -> GetResult:
        if self._gate.closed or len(out) < meta.nbytes:
            # Closing; or replaced by a longer page since the caller asked for its length.
            return GetResult(GetStatus.FAILED)
        if not self.health.readable:
            return GetResult(GetStatus.FAILED)
        if until is not None and time.monotonic() >= until:
            return GetResult(GetStatus.DEADLINE)
        record = out[: meta.nbytes]
        try:
            with self.health.transfer():
                whole = self._transfers.read(slot.offset, out, meta.nbytes)
            if whole and checksum(record, key) == meta.checksum:
                self.health.worked("read")
                return GetResult(GetStatus.HIT, meta)
            # Once more, into memory that nobody else can touch, before a page is given up.
            with self._transfers.aligned(slot_bytes_of(meta.nbytes)) as buffer:
                again = buffer[: meta.nbytes]
                with self.health.transfer():
                    whole = self._segments.read(slot.offset, buffer) >= meta.nbytes
                self.health.worked("read")
                if whole and checksum(again, key) == meta.checksum:
                    copy(record, again)
                    return GetResult(GetStatus.HIT, meta)
        except OSError as error:
            self.health.read_failed(error)
            self._unread[key] = self._unread.get(key, 0) + 1
            return GetResult(GetStatus.FAILED)
        return GetResult(GetStatus.CORRUPT)

    def _after_reading(
        self,
        keys: Sequence[bytes],
        pages: Sequence[tuple[Slot, PageMeta] | None],
        results: Sequence[GetResult],
    ) -> None:
        bad = 0

        def settle() -> None:
            nonlocal bad
            for key, page, result in zip(keys, pages, results, strict=True):
                if page is None:
                    continue
                if result.status is GetStatus.HIT:
                    self._get_bytes += page[1].nbytes
                    self._unread.pop(key, None)
                elif self._is_bad(key, result.status) and self._table.holds(key, page[0].id):
                    bad += self._table.remove(key, Removal.QUARANTINED)
            self._table.unpin([page[0].id for page in pages if page is not None])

        self._locked(settle)
        if bad:
            _log.warning("the %s tier held %d bad pages; they were dropped", self.name, bad)
            self._flush()

    def _is_bad(self, key: bytes, status: GetStatus) -> bool:
        """Whether a page is to be given up: its bytes are wrong, or only they cannot be read, again and again."""
        if status is GetStatus.CORRUPT:
            return True
        if status is not GetStatus.FAILED or self._unread.get(key, 0) < _UNREAD_MAX or not self.health.readable:
            return False
        del self._unread[key]
        return True

    # ---- the log

    def _locked(self, action: Callable[[], T]) -> T:
        """Run `action` under the lock, queue what it removed for the log, then tell the listener."""
        with self._lock:
            try:
                result = action()
            finally:
                removed = self._table.take_removed()
                for key, _ in removed:
                    self._index.queue_delete(key)
        notify(self._removal_listener, removed)
        return result

    def _flush(self) -> bool:
        """Whether everything queued so far is in the log."""
        if not self.health.writable:
            return False
        try:
            with self.health.transfer():
                self._index.flush(self._index.queued)
        except OSError as error:
            self.health.write_failed("log", error)
            return False
        self.health.worked("log")
        return True

    def _probe(self) -> None:
        """Raise OSError where the device still fails. Writes what waits for the log, too."""
        self._index.flush(self._index.queued)
        with self._transfers.aligned(PROBE_BYTES) as buffer:
            try_writing(self._device, self.path, buffer)
            self._segments.read(0, buffer[:SLOT_ALIGN])

    def _compact_where_due(self) -> None:
        if not self._index.wants_compaction:
            return
        with self._lock:
            if self._compactor is not None and self._compactor.is_alive():
                return
            self._compactor = threading.Thread(target=self._compact, name=f"kvtier-{self.name}-log", daemon=True)
            self._compactor.start()

    def _compact(self) -> None:
        def snapshot() -> PageColumns:
            with self._lock:
                return self._table.columns(staged=True)

        self._index.compact(snapshot)

    def _recover(self) -> None:
        found = self._index.load().pages
        sorted_out = sort_out(found, self._segments, self._table.max_record_bytes)
        self._table.recover(sorted_out.kept)
        self._table.count_lost(len(sorted_out.behind), Removal.EVICTED)
        for key in [*sorted_out.behind.keys(), *sorted_out.gone.keys()]:
            self._index.queue_delete(key)
        self._flush()  # on a full disk they wait: nothing is written to these slots before
        self._segments.trim()
        if sorted_out.gone:
            _log.warning("the %s tier's files lost %d pages since it was last open", self.name, len(sorted_out.gone))


def _until(deadline_s: float | None) -> float | None:
    return None if deadline_s is None else time.monotonic() + deadline_s
