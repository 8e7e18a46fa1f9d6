"""An NVMe tier over several directories, one per device: an `NvmeTier` each, pages spread over them by their keys.

A page goes to the directory that its key names, or to another one while that one has no room or takes nothing. Every
directory is asked for a page, so one that was added, left out or moved in the list costs nothing but its own pages.
A device that fails takes its pages out of sight, not the others', and comes back by itself: also one that could not be
opened at the start.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvtier.abc.tier import (
    LENGTH_ABSENT,
    GetResult,
    GetStatus,
    Note,
    PageMeta,
    PutItem,
    PutStatus,
    Removal,
    RemovalListener,
    Tier,
    TierCapabilities,
    TierUsage,
)
from kvtier.errors import ClosedError, ConfigError, SpecError, TierPathError
from kvtier.storage_backends.nvme.health import DeviceCounters, DeviceState
from kvtier.storage_backends.nvme.metrics import NvmeCollector
from kvtier.storage_backends.nvme.tier import NvmeTier
from kvtier.storage_backends.nvme.workers import Workers
from kvtier.storage_backends.slots.config import check_capacity
from kvtier.storage_backends.slots.extents import slot_bytes_of
from kvtier.storage_backends.slots.gate import Gate

_log = logging.getLogger(__name__)

_CALLS_S, _MEMBERS_S = 0.7, 0.6
"""How long closing waits for calls under way, and then for those inside of members."""
_REOPEN_MAX_S = 5.0
_DEVICE_FAILURES = {
    errno.EIO, errno.ENXIO, errno.ENODEV, errno.EROFS, errno.ESTALE, errno.EUCLEAN, errno.ENOSPC, errno.EDQUOT,
}  # fmt: skip
"""Errors at opening that are the device's: anything else is a mistake of the configuration, to be told at once."""


class StripedNvmeTier(Tier):
    """See the module's docstring.

    paths: directories, at least two, made if missing. capacity_bytes: of all of them; each holds an equal share.
    Recency is per directory: the page that goes is exact among those that share one. Other options: see `NvmeTier`.
    """

    capabilities = TierCapabilities(persistent=True, shared=False)

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        capacity_bytes: int,
        *,
        name: str = "nvme",
        io_threads: int = 8,
        retry_s: float = 0.25,
        **options: Any,
    ) -> None:
        self.name = name
        self.paths = tuple(Path(path) for path in paths)
        if len({path.resolve() for path in self.paths}) != len(self.paths) or len(self.paths) < 2:
            raise ConfigError(
                f"{name} tier: path = {[str(p) for p in self.paths]} must name different directories, one per device"
            )
        share = check_capacity(name, check_capacity(name, capacity_bytes) // len(self.paths))
        self._share_bytes = share

        options |= {"name": name, "io_threads": max(1, -(-io_threads // len(self.paths))), "retry_s": retry_s}
        self._options = options
        self._retry_s = retry_s
        self._gate = Gate(name)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._members: list[NvmeTier | None] = [None] * len(self.paths)
        self._workers = Workers(len(self.paths), f"kvtier-{name}-stripe")
        self._reopener: threading.Thread | None = None
        self.collector = NvmeCollector(name, self.directories)
        try:
            self._open_all()
        except BaseException:
            for member in self._open_members():
                member.close()
            raise

    # ---- tier

    def put_many(self, items: Sequence[PutItem], deadline_s: float | None = None) -> list[PutStatus]:
        until = None if deadline_s is None else time.monotonic() + deadline_s
        statuses = [PutStatus.FAILED] * len(items)
        with self._gate:
            known = self._lengths([item.key for item in items])
            left = [i for i, nbytes in enumerate(known) if nbytes < 0]
            for i in set(range(len(items))).difference(left):
                statuses[i] = PutStatus.EXISTS
            tried: list[set[NvmeTier]] = [set() for _ in items]
            while left and (groups := self._spread(left, items, tried)):
                self._each(groups, lambda member, part: self._put(member, part, items, statuses, until))
                # What one directory could not take, another one may.
                left = [i for _, part in groups for i in part if statuses[i] is PutStatus.FAILED]
        return statuses

    def get_many_into(
        self, keys: Sequence[bytes], outs: Sequence[memoryview], deadline_s: float | None = None
    ) -> list[GetResult]:
        if len(keys) != len(outs):
            raise SpecError(f"{len(keys)} keys for {len(outs)} buffers")
        until = None if deadline_s is None else time.monotonic() + deadline_s
        results = [GetResult(GetStatus.ABSENT)] * len(keys)
        with self._gate:
            left = list(range(len(keys)))
            asked: list[set[NvmeTier]] = [set() for _ in keys]
            while left:
                groups: dict[NvmeTier, list[int]] = {}
                for member in self._open_members():
                    if self._gate.closed:
                        break
                    unasked = [i for i in left if member not in asked[i]]
                    for i, nbytes in zip(unasked, member.length_many([keys[i] for i in unasked]), strict=True):
                        if nbytes != LENGTH_ABSENT and nbytes <= len(outs[i]):
                            groups.setdefault(member, []).append(i)
                            asked[i].add(member)
                    taken = set(groups.get(member, ()))
                    left = [i for i in left if i not in taken]
                self._each(list(groups.items()), lambda m, part: self._get(m, part, keys, outs, results, until))
                # A page that one directory could not give may lie in another one as well.
                left = [i for part in groups.values() for i in part if results[i].status is not GetStatus.HIT]
        return results

    def length_many(self, keys: Sequence[bytes]) -> list[int]:
        """LENGTH_UNKNOWN for pages of a directory that is out."""
        with self._gate:
            return self._lengths(keys)

    def delete_many(self, keys: Sequence[bytes], removal: Removal = Removal.DELETED) -> int:
        with self._gate:
            return sum(member.delete_many(keys, removal) for member in self._open_members())

    def touch_many(self, keys: Sequence[bytes]) -> None:
        with self._gate:
            for member in self._open_members():
                member.touch_many(keys)

    def demote_many(self, keys: Sequence[bytes]) -> None:
        with self._gate:
            for member in self._open_members():
                member.demote_many(keys)

    def protect_many(self, keys: Sequence[bytes], protected: bool) -> int:
        with self._gate:
            return sum(member.protect_many(keys, protected) for member in self._open_members())

    def scan(self) -> Iterator[tuple[bytes, PageMeta]]:
        """Every page's key and description: a snapshot of now, directory by directory."""
        with self._gate:
            parts = [member.scan() for member in self._open_members()]
        return (page for part in parts for page in part)

    def rank_many(self, keys: Sequence[bytes], priority: int) -> int:
        with self._gate:
            return sum(member.rank_many(keys, priority) for member in self._open_members())

    def note(self, data: bytes, note: Note = Note.NAMESPACES) -> None:
        for member in self._open_members():
            member.note(data, note)

    def notes(self, note: Note = Note.NAMESPACES) -> list[bytes]:
        return [data for member in self._open_members() for data in member.notes(note)]

    @property
    def members(self) -> tuple[NvmeTier, ...]:
        """The tiers that this one consists of, one per directory that is open."""
        return tuple(self._open_members())

    def usage(self) -> TierUsage:
        """Directories that could not be opened yet count nothing but their capacity."""
        parts = [member.usage() for member in self._open_members()]
        total = TierUsage(
            self._share_bytes * len(self.paths), *map(sum, zip(*(_counts(u) for u in parts), strict=True))
        )
        return total

    def set_removal_listener(self, listener: RemovalListener | None) -> None:
        with self._lock:
            self._removal_listener = listener
            for member in self._open_members():
                member.set_removal_listener(listener)

    def directories(self) -> list[tuple[str, DeviceState, DeviceCounters]]:
        """Path, state and counters of each; one that could not be opened is OUT."""
        return [
            (str(path), DeviceState.OUT, DeviceCounters(outages=1))
            if member is None
            else (str(path), member.health.state, member.health.counters())
            for path, member in zip(self.paths, self._members, strict=True)
        ]

    def close(self) -> None:
        if self._gate.closed:
            return
        self._stop.set()
        self._gate.close(_CALLS_S)
        closers = [
            threading.Thread(target=member.close_within, args=(_MEMBERS_S,), daemon=True)
            for member in self._open_members()
        ]
        for closer in closers:  # at once: a directory whose device hangs takes its time
            closer.start()
        for closer in closers:
            closer.join(2 * _MEMBERS_S)
        if self._reopener is not None:
            self._reopener.join(0.1)
        self._workers.close(0.05)

    # ---- members

    def _open_members(self) -> list[NvmeTier]:
        return [member for member in self._members if member is not None]

    def _open_all(self) -> None:
        """Open every directory. Raises what is no device's failure, or where none can be opened."""
        failed = None
        for i, path in enumerate(self.paths):
            opened = self._open_unless_failing(path)
            if isinstance(opened, NvmeTier):
                self._members[i] = opened
            else:
                failed = opened
                _log.warning("%s; its pages are misses, and it is tried again", opened)
        if failed is not None:
            if not self._open_members():
                raise failed
            self._reopener = threading.Thread(target=self._reopen, name=f"kvtier-{self.name}-reopen", daemon=True)
            self._reopener.start()

    def _open_one(self, path: Path) -> NvmeTier:
        return NvmeTier(path, self._share_bytes, **self._options)

    def _open_unless_failing(self, path: Path) -> NvmeTier | TierPathError:
        """The directory's tier, or what its device failed with. Raises what is no device's failure."""
        try:
            return self._open_one(path)
        except TierPathError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in _DEVICE_FAILURES:
                return error
            raise

    def _reopen(self) -> None:
        """Open what could not be opened, in growing intervals, until nothing is left."""
        pause_s = self._retry_s
        while not self._stop.wait(pause_s):
            pause_s = min(2 * pause_s, max(_REOPEN_MAX_S, self._retry_s))
            for i, path in enumerate(self.paths):
                if self._members[i] is not None:
                    continue
                try:
                    member = self._open_one(path)
                except (TierPathError, ConfigError) as error:
                    _log.debug("%s still cannot be opened: %s", path, error)
                    continue
                with self._lock:
                    if self._stop.is_set():
                        member.close()
                        return
                    member.set_removal_listener(self._removal_listener)
                    self._members[i] = member
                _log.warning("the %s tier: %s is in use again", self.name, path)
            if None not in self._members:
                return

    def _lengths(self, keys: Sequence[bytes]) -> list[int]:
        members = self._open_members()
        found = members[0].length_many(keys)
        for member in members[1:]:
            more = member.length_many(keys)
            found = [a if a >= 0 or b == LENGTH_ABSENT else b for a, b in zip(found, more, strict=True)]
        return found

    def _spread(
        self, wanted: Sequence[int], items: Sequence[PutItem], tried: Sequence[set[NvmeTier]]
    ) -> list[tuple[NvmeTier, list[int]]]:
        """Which member is to take which of the `wanted` items, none where it was `tried`: noted there."""
        members = [member for member in self._members if member is not None and member.health.writable]
        if not members:
            for member in self._open_members()[:1]:
                member.health.refused(len(wanted))
            return []
        free = {member: member.free_bytes for member in members}
        groups: dict[NvmeTier, list[int]] = {}
        for i in wanted:
            key, need = items[i].key, slot_bytes_of(items[i].meta.nbytes)
            left = [member for member in members if member not in tried[i]]
            if not left:
                continue
            chosen = left[int.from_bytes(key[:2], "big") % len(left)]
            if free[chosen] < need:
                roomy = max(left, key=free.__getitem__)
                chosen = roomy if free[roomy] >= need else chosen
            free[chosen] -= need
            tried[i].add(chosen)
            groups.setdefault(chosen, []).append(i)
        return list(groups.items())

    def _each(self, groups: Sequence[tuple[NvmeTier, list[int]]], work: Callable[[NvmeTier, list[int]], None]) -> None:
        """`work(member, part)` for every group, at the same time."""

        def run(n: int) -> None:
            try:
                work(*groups[n])
            except ClosedError:
                if not self._gate.closed:  # else a call that did not end in time: what is left of it failed
                    raise

        self._workers.each(len(groups), run)

    @staticmethod
    def _put(
        member: NvmeTier, part: list[int], items: Sequence[PutItem], statuses: list[PutStatus], until: float | None
    ) -> None:
        for i, status in zip(part, member.put_many([items[i] for i in part], _left(until)), strict=True):
            statuses[i] = status

    @staticmethod
    def _get(
        member: NvmeTier,
        part: list[int],
        keys: Sequence[bytes],
        outs: Sequence[memoryview],
        results: list[GetResult],
        until: float | None,
    ) -> None:
        found = member.get_many_into([keys[i] for i in part], [outs[i] for i in part], _left(until))
        for i, result in zip(part, found, strict=True):
            # Of two directories that fail differently, the one that had the page says why.
            if result.status is not GetStatus.ABSENT:
                results[i] = result


def open_nvme(paths: Sequence[Path], capacity_bytes: int, **options: Any) -> NvmeTier | StripedNvmeTier:
    """The tier over one directory or several. options: see `NvmeTier`."""
    if len(paths) == 1:
        return NvmeTier(paths[0], capacity_bytes, **options)
    return StripedNvmeTier(paths, capacity_bytes, **options)


def _left(until: float | None) -> float | None:
    return None if until is None else until - time.monotonic()


def _counts(usage: TierUsage) -> tuple[int, ...]:
    return (
        usage.used_bytes,
        usage.resident_pages,
        usage.recovered_pages,
        usage.stored_pages,
        usage.evicted_pages,
        usage.deleted_pages,
        usage.quarantined_pages,
        usage.put_bytes,
        usage.get_bytes,
    )
