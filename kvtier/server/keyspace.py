"""The keys of the cache server: what clients call their values, over a TieredStore that knows pages only.

Every value is a page of its own under a key that is never used again, so that overwriting is a swap: readers see the
old value or the new one, whole. The page's key begins with a hash of the client's key, and its origin holds the
client's key and the expiry, so that the keys of a persistent tier are found again when it is opened. Specified in
`docs/serve.md`.
"""

from __future__ import annotations

import itertools
import re
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

from kvtier.abc.tier import KEY_BYTES, PageMeta, PutStatus, Removal, Slot
from kvtier.below import Deletion
from kvtier.inventory import by_geometry
from kvtier.kernels import _native
from kvtier.keys import checksum
from kvtier.ledger import MissReason
from kvtier.server.voided import Voided
from kvtier.store import TieredStore

KEY_MAX_BYTES = 240
DATABASES = 16
_HASH_BYTES = 24
_BUCKETS = 1024
_FORM = 0
_SPEC = b"kvtier-server-1\0"
_ORIGIN = struct.Struct("<BQ")
_PREFIX = re.compile(rb"[^:/@|]{1,64}[:/@|]")
_ROOM_WAIT_S = 2.0
_DATABASE = tuple(bytes([n]) for n in range(DATABASES))
_new = tuple.__new__


class Entry(NamedTuple):
    """expires_ms: unix time, 0: never. owner: the user whose quota it counts against, empty: nobody's."""

    database: int
    key: bytes
    page: bytes
    nbytes: int
    expires_ms: int
    owner: str


class Refusal(NamedTuple):
    """Why a value cannot be taken, as an error reply."""

    text: str


class Reservation:
    """Room for a value that is about to be received: `view` is where it goes, `checksum` (`kvtier.keys.checksum`) what
    whoever writes there sets. owner: whose quota has it already, empty: nobody's. Ends in `Keyspace.commit` or
    `abort`."""

    __slots__ = ("checksum", "owner", "page", "slot", "view")

    def __init__(self, page: bytes, slot: Slot, view: memoryview, owner: str) -> None:
        self.page = page
        self.slot = slot
        self.owner = owner
        self.view: memoryview | None = view
        self.checksum = b""


class Reading(NamedTuple):
    """A value that is pinned and was verified: valid until `Keyspace.release`. slot: its id. request: of the lookup
    that pinned it; empty where it was in host memory and pinned there directly."""

    view: memoryview
    slot: int
    request: str


class Keyspace:
    """Thread-safe. owner: the user with a quota that a key counts against, None: there is no such user; quota: bytes of
    that user, 0: no limit. priority: of the value under a key; None: all have the same."""

    def __init__(
        self,
        owner: Callable[[bytes], str] | None,
        quota: Callable[[str], int],
        max_value_bytes: int,
        priority: Callable[[bytes], int] | None = None,
    ) -> None:
        self._priority = priority
        self._owner = owner
        self._quota = quota
        self.max_value_bytes = max_value_bytes
        # Buckets by hash: a scan goes through them in order, and a key never changes its own.
        self._buckets: list[dict[bytes, Entry]] = [{} for _ in range(_BUCKETS)]
        self._lock = threading.Lock()
        self._sequence = 0
        self._requests = itertools.count()
        self._voided: Voided | None = None
        self._keys: Counter[int] = Counter()
        self._used: Counter[str] = Counter()
        self._coming: Counter[str] = Counter()
        """Bytes of reservations, by owner: what is on its way counts, or many values at once would pass a quota."""
        self._expiring: Counter[int] = Counter()
        self.expired = 0
        self.refused: Counter[str] = Counter()
        """Values that were not taken, by reason."""

    def attach(self, store: TieredStore, voided: Voided | None = None) -> None:
        """Serve from `store`, which must have been made with `on_removed=self.removed`; find the keys that its tiers
        already have. voided: where tiers outlive the process."""
        self.store = store
        self._voided = voided
        superseded = []
        for tier in store.lower:
            for page, meta in tier.scan():
                if meta.spec == _SPEC and voided is not None and voided.covers(page):
                    superseded.append(page)
                elif meta.spec == _SPEC and len(meta.origin) > _ORIGIN.size:
                    database, expires_ms = _ORIGIN.unpack_from(meta.origin)
                    key = bytes(meta.origin[_ORIGIN.size :])
                    owner = "" if self._owner is None else self._owner(key)
                    entry = Entry(database, key, page, meta.nbytes, expires_ms, owner)
                    old = self._entry(page[:_HASH_BYTES])
                    if old is not None and old.page > page:
                        superseded.append(page)
                        continue
                    if old is not None:
                        superseded.append(old.page)
                    with self._lock:
                        self._set(page[:_HASH_BYTES], entry, old)
                        self._sequence = max(self._sequence, int.from_bytes(page[_HASH_BYTES:], "big"))
        if superseded:
            store.delete(superseded)
        if voided is not None:
            with self._lock:  # also where the clock was set back since
                self._sequence = max(self._sequence, voided.highest_number)
            voided.opened()

    # ---- writing

    def reserve(self, database: int, key: bytes, nbytes: int) -> Reservation | Refusal:
        """Room for a value; waits a little where pages that are being written below take it."""
        if len(key) > KEY_MAX_BYTES:
            return self._refuse("key", f"ERR the key has {len(key)} bytes, this server takes {KEY_MAX_BYTES}")
        if nbytes > self.max_value_bytes:
            return self._refuse(
                "too_large", f"ERR the value has {nbytes} bytes, this server takes {self.max_value_bytes} (max_value)"
            )
        # Written out from here on, where functions would be shorter: this is done with every value, and receiving
        # one pushes out of the processor's cache whatever the next one needs of the interpreter.
        name = blake2b(_DATABASE[database] + key, digest_size=_HASH_BYTES).digest()
        owner = "" if self._owner is None else self._owner(key)
        if owner and (limit := self._quota(owner)):
            with self._lock:
                old = self._entry(name)
                used = self._used[owner] + self._coming[owner] - (old.nbytes if old is not None else 0)
                if fits := used + nbytes <= limit:
                    self._coming[owner] += nbytes
            if not fits:
                return self._refuse("quota", f"QUOTA {owner} has {used} of {limit} bytes: this value does not fit")
        with self._lock:  # a number that grows, over restarts too: of two pages of a key, the higher one is the newer
            self._sequence = number = max(self._sequence + 1, time.time_ns())
        page = name + number.to_bytes(8, "big")
        slot = self.store.reserve_one(page, nbytes, _ROOM_WAIT_S)
        if isinstance(slot, Slot):
            return Reservation(page, slot, self.store.host.memory[slot[1] : slot[1] + nbytes], owner)
        if owner:
            self._arrived(owner, nbytes)
        if slot is PutStatus.TOO_LARGE:
            return self._refuse("too_large", f"ERR the value has {nbytes} bytes: more than the host tier can hold")
        return self._refuse("full", "OOM command not allowed: every value in host memory is being read or written")

    def abort(self, reservation: Reservation) -> None:
        self.store.abort([reservation.page], [reservation.slot])
        if reservation.owner:
            self._arrived(reservation.owner, reservation.slot[2])

    def _arrived(self, owner: str, nbytes: int) -> None:
        with self._lock:
            self._coming[owner] -= nbytes

    def commit(
        self, database: int, key: bytes, reservation: Reservation, *, expires_ms: int = 0, only_new: bool = False
    ) -> bool:
        """Publish a received value under the key it was reserved for; False where ``only_new`` forbids it (it is given
        back then)."""
        page, slot = reservation.page, reservation.slot
        name, nbytes, owner = page[:_HASH_BYTES], slot[2], reservation.owner
        bucket = self._buckets[(name[0] << 8 | name[1]) % _BUCKETS]
        origin = _ORIGIN.pack(database, expires_ms) + key
        priority = 0 if self._priority is None else self._priority(key)
        # Named construction would be a call each.
        meta = _new(PageMeta, (nbytes, _FORM, 0, reservation.checksum, _SPEC, origin, priority))
        entry = _new(Entry, (database, key, page, nbytes, expires_ms, owner))
        with self._lock:
            old = bucket.get(name)
            kept, gone = only_new and old is not None and not _is_over(old), False
            if not kept:
                if owner:
                    self._coming[owner] -= nbytes
                    reservation.owner = ""  # should what follows fail, `abort` must not count it again
                # Committed under the lock: of two writers of a key, the one that swaps last has the last word; and the
                # news of an eviction right after it, which wants the lock too, finds the name to take away.
                gone = self.store.commit_over(page, slot, meta, b"" if old is None else old.page)
                if old is None or owner or expires_ms or old[4]:
                    self._set(name, entry, old)
                else:  # no count changes
                    bucket[name] = entry
        if kept:
            self.abort(reservation)
            return False
        if old is not None and not gone:
            self._delete([old.page], replaced=True)
        return True

    def expire(self, database: int, key: bytes, expires_ms: int) -> bool:
        """Give a value another expiry; False where there is none. Where values outlive the process it is stored anew,
        since the expiry must too."""
        name = _hash(database, key)
        with self._lock:
            entry = self._alive(name)
            if entry is None:
                return False
            if not self.store.lower:
                self._set(name, entry._replace(expires_ms=expires_ms), entry)
                return True
        reading = self.read(database, key)
        if reading is None:
            return False
        try:
            reservation = self.reserve(database, key, len(reading.view))
            if isinstance(reservation, Refusal) or reservation.view is None:
                return False
            reservation.view[:] = reading.view
            reservation.checksum = checksum(reservation.view, reservation.page)
            return self.commit(database, key, reservation, expires_ms=expires_ms)
        finally:
            self.release(reading)

    def delete(self, database: int, keys: Sequence[bytes]) -> int:
        """Remove values; returns how many were there."""
        with self._lock:
            names = [_hash(database, key) for key in keys]
            gone = [e for name in names if (e := self._unset(name)) is not None]
        self._delete([e.page for e in gone])
        return sum(not _is_over(e) for e in gone)

    def flush(self, database: int, owns: Callable[[bytes], bool]) -> int:
        """Remove every key of a database that `owns` says yes to."""
        gone = 0
        for bucket in self._buckets:
            with self._lock:
                keys = [e.key for e in bucket.values() if e.database == database and owns(e.key)]
            gone += self.delete(database, keys)
        return gone

    # ---- reading

    def read(self, database: int, key: bytes) -> Reading | None:
        """Pin a value in host memory, from wherever it is, and verify it. None: it is not there (any more)."""
        name = blake2b(_DATABASE[database] + key, digest_size=_HASH_BYTES).digest()
        with self._lock:
            entry = self._buckets[(name[0] << 8 | name[1]) % _BUCKETS].get(name)
        if entry is None or (entry[4] and _is_over(entry)):
            self.store.ledger.settle({}, {MissReason.ABSENT: 1})
            self.store.observer.looked_up([name.ljust(KEY_BYTES, b"\0")])
            return None
        page, store = entry[2], self.store
        pinned = store.host.pin_one(page)
        # The usual case, without the detour of a lookup, which is for pages that must come first.
        if pinned is not None:
            slot, at, nbytes, check = pinned
            store.observer.looked_up_one(page)
            view = store.host.memory[at : at + nbytes]
            if _native.xxh3_128(view, int.from_bytes(page[:8], "little")) != check:
                self._quarantine(slot, entry, "")
                return None
            store.ledger.hit_one(store.host.name)
            return _new(Reading, (view, slot, ""))
        if self._replaced(name, entry):  # since it was read here: another value is there now
            return self.read(database, key)
        request = f"get-{next(self._requests)}"
        lookup = self.store.lookup(request, [entry.page])
        if lookup.pending:
            self.store.wait(lookup)
        if not lookup.ready_pages:
            self.store.settle(request)
            if self._replaced(name, entry):
                return self.read(database, key)
            if not self._resident(entry.page):
                self._drop(entry.page)
            return None
        self.store.hold(lookup)
        ((found, meta),) = lookup.ready_slots(1)
        view = self.store.host.view(found)[: meta.nbytes]
        if checksum(view, entry.page) != meta.checksum:
            self._quarantine(found.id, entry, request)
            return None
        return Reading(view, found.id, request)

    def _replaced(self, name: bytes, entry: Entry) -> bool:
        with self._lock:
            now = self._entry(name)
        return now is not None and now.page != entry.page

    def _quarantine(self, slot: int, entry: Entry, request: str) -> None:
        """A value is bad: nobody has it from now on."""
        self.store.host.delete_many([entry.page], Removal.QUARANTINED)
        if request:
            self.store.settle(request)
        else:
            self.store.host.unpin_one(slot)
            self.store.ledger.settle({}, {MissReason.CORRUPT: 1})
        self._drop(entry.page)
        self.store.delete([entry.page])

    def release(self, reading: Reading) -> None:
        if reading.request:
            self.store.settle(reading.request)
        else:
            self.store.host.unpin_one(reading.slot)

    def find(self, database: int, key: bytes) -> Entry | None:
        """What is known of a value, without reading it."""
        with self._lock:
            return self._alive(_hash(database, key))

    def scan(self, database: int, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """Some keys from `cursor` on, at least `count` where there are that many, and the next cursor, 0 at the end.
        Keys that are there all the while are given exactly once."""
        found: list[bytes] = []
        while cursor < _BUCKETS and len(found) < count:
            with self._lock:
                entries = list(self._buckets[cursor].values())
            found += [e.key for e in entries if e.database == database and not _is_over(e)]
            cursor += 1
        return (0 if cursor >= _BUCKETS else cursor), found

    def size(self, database: int, owns: Callable[[bytes], bool] | None = None) -> int:
        """Keys of a database; with `owns`, those that it says yes to."""
        if owns is None:
            with self._lock:
                return self._keys[database]
        return sum(1 for e in self.entries() if e.database == database and owns(e.key))

    def expiring(self, database: int) -> int:
        """Keys of a database that have an expiry."""
        with self._lock:
            return self._expiring[database]

    def entries(self) -> Iterator[Entry]:
        for bucket in self._buckets:
            with self._lock:
                entries = list(bucket.values())
            yield from entries

    def used_by(self) -> dict[str, int]:
        """Bytes of values by the user with a quota they count against."""
        with self._lock:
            return {name: n for name, n in self._used.items() if name}

    # ---- house-keeping

    def removed(self, pages: Sequence[bytes], why: Removal) -> None:
        """Pages left a tier: forget the keys of those that no tier has any more."""
        for page in pages:
            with self._lock:
                entry = self._entry(page[:_HASH_BYTES])
            if entry is not None and entry.page == page and not self._resident(page):
                self._drop(page)

    def _delete(self, pages: list[bytes], *, replaced: bool = False) -> Deletion:
        """Delete pages that clients overwrote or deleted: from now on for good."""
        if pages and self._voided is not None:
            self._voided.add(pages)
        return self.store.delete(pages, replaced=replaced)

    def purge(self, pages: Sequence[tuple[bytes, PageMeta]]) -> Deletion:
        """Remove values by their pages, for good."""
        for page, _ in pages:
            self._drop(page)
        return self._delete([page for page, _ in pages])

    def sweep(self) -> int:
        """Remove values whose time is over; returns how many."""
        if self._voided is not None:
            self._voided.compact(self.store.deleting)
        if not self._expiring.total():
            return 0
        over = [e for e in self.entries() if _is_over(e)]
        for e in over:
            self._drop(e.page)
            self.store.delete([e.page])
        self.expired += len(over)
        return len(over)

    def _resident(self, page: bytes) -> bool:
        return any(tier.contains_many([page])[0] for tier in (self.store.host, *self.store.lower))

    def _drop(self, page: bytes) -> None:
        """Forget the key of a page, unless it has another page by now."""
        with self._lock:
            entry = self._entry(page[:_HASH_BYTES])
            if entry is not None and entry.page == page:
                self._unset(page[:_HASH_BYTES])

    def _refuse(self, reason: str, text: str) -> Refusal:
        with self._lock:
            self.refused[reason] += 1
        return Refusal(text)

    # Below, the lock is held.

    def _entry(self, name: bytes) -> Entry | None:
        return self._buckets[(name[0] << 8 | name[1]) % _BUCKETS].get(name)

    def _alive(self, name: bytes) -> Entry | None:
        entry = self._entry(name)
        return None if entry is None or _is_over(entry) else entry

    def _set(self, name: bytes, entry: Entry, old: Entry | None) -> None:
        """`entry` takes the place of `old`, or of none."""
        self._buckets[(name[0] << 8 | name[1]) % _BUCKETS][name] = entry
        if old is None:
            self._keys[entry.database] += 1
            self._used[entry.owner] += entry.nbytes
            self._expiring[entry.database] += bool(entry.expires_ms)
            return
        if entry.owner:  # which is the same: that of the key, as the database is
            self._used[entry.owner] += entry.nbytes - old.nbytes
        if entry.expires_ms or old.expires_ms:
            self._expiring[entry.database] += bool(entry.expires_ms) - bool(old.expires_ms)

    def _unset(self, name: bytes) -> Entry | None:
        entry = self._buckets[(name[0] << 8 | name[1]) % _BUCKETS].pop(name, None)
        if entry is not None:
            self._keys[entry.database] -= 1
            self._used[entry.owner] -= entry.nbytes
            self._expiring[entry.database] -= bool(entry.expires_ms)
        return entry


def label_of(meta: PageMeta) -> str:
    """What people know a page by: of a value, its database and its key as far as the first separator."""
    if meta.spec != _SPEC or len(meta.origin) < _ORIGIN.size:
        return by_geometry(meta)
    database, _ = _ORIGIN.unpack_from(meta.origin)
    head = _PREFIX.match(meta.origin[_ORIGIN.size :])
    return f"db{database}" if head is None else f"db{database}:{_printable(head[0])}"


def _printable(key: bytes) -> str:
    """Bytes as people see and write them: whatever is not printable, and a backslash, with one before it."""
    text = key.replace(b"\\", b"\\\\").decode(errors="backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _hash(database: int, key: bytes) -> bytes:
    return blake2b(_DATABASE[database] + key, digest_size=_HASH_BYTES).digest()


def _is_over(entry: Entry) -> bool:
    return 0 < entry.expires_ms <= time.time() * 1000
