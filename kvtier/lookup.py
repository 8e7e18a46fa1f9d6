"""What one request asked for, and how far it has come: the pages it found, pinned, and those on their way."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Sequence

from kvtier.abc.tier import PageMeta, Slot, StagingTier
from kvtier.ledger import MissReason

Pin = tuple[Slot, PageMeta]
Names = Callable[[int, int], tuple[list[bytes], list[bytes]]]
UNPINNED = -1


def _no_names(start: int, stop: int) -> tuple[list[bytes], list[bytes]]:
    return [], []


class Lookup:
    """The pages of one request, in prefix order. Made by `TieredStore.lookup`, guarded by the store's lock.

    A page is pinned in the host tier (`pins[i]` is its slot's id), loading (its key is in `loading`), or missing
    (`misses[i]`). `origins[i]` names the tier it was found in, where that is not the host tier. sparse: each page is of
    use by itself, one behind a gap too; otherwise only a prefix is. counted: its pages are what the ledger counts;
    those beside others (a recurrent state, a window) are not, or one page would be several.

    A long prefix may be asked for piece by piece. `behind(i, j)` names the keys and hashes of pages i to j of those
    that were not asked for yet, `behind_pages` in all: behind a gap nobody asks for them, but they are counted.
    """

    __slots__ = (
        "arrivals", "asked", "began", "behind", "behind_pages", "counted", "deadline", "distinct", "hashes", "held",
        "host", "keys", "load_s", "loading", "misses", "origins", "pins", "promoted", "request_id", "sparse",
        "superseded", "taken", "when_there",
    )  # fmt: skip

    def __init__(
        self, request_id: str, deadline_s: float, host: StagingTier, sparse: bool = False, counted: bool = True
    ) -> None:
        self.request_id = request_id
        self.sparse = sparse
        self.counted = counted
        self.host = host
        self.keys: list[bytes] = []
        self.pins: list[int] = []
        self.origins: dict[int, str] = {}
        self.loading: dict[bytes, int] = {}
        self.misses: dict[int, MissReason] = {}
        self.superseded: dict[bytes, MissReason] = {}
        self.asked = time.monotonic()
        self.deadline = self.asked + deadline_s
        self.held = False
        self.taken = False  # pages of it are being loaded, or were: none of them gives way to others
        self.began = self.asked
        self.promoted: Counter[str] = Counter()  # pages that came up for it, by tier
        self.arrivals: dict[int, float] = {}  # when pages from below were there, by index; monotonic seconds
        self.hashes: list[bytes] = []  # the engine's own, one per key, or none
        self.load_s = 0.0  # verifying and decoding, queueing included
        self.when_there: Callable[[], object] | None = None  # see `TieredStore.when_there`
        self.behind: Names = _no_names
        self.behind_pages = 0
        self.distinct: set[bytes] = set()  # `keys`, where it is asked for piece by piece

    @property
    def ready_pages(self) -> int:
        """Length of the prefix that is verified and pinned in host memory."""
        pins = self.pins
        try:  # one search: read without the lock, a page may arrive between two of them
            return pins.index(UNPINNED)
        except ValueError:
            return len(pins)

    @property
    def pending(self) -> bool:
        """Whether a page that would extend the ready prefix is on its way, and in time. Sparse: any page."""
        if not self.loading or time.monotonic() >= self.deadline:
            return False
        if self.sparse:
            return True
        ready = self.ready_pages
        return ready < len(self.keys) and self.keys[ready] in self.loading

    @property
    def reach(self) -> int:
        """Length of the prefix that is ready or on its way."""
        waits = self.loading
        return next(
            (i for i, pin in enumerate(self.pins) if pin == UNPINNED and self.keys[i] not in waits), len(self.pins)
        )

    def ready_slots(self, pages: int) -> list[Pin]:
        """Where the first `pages` pages lie, which must be ready."""
        return self.slots_of(range(pages))

    def slots_of(self, pages: Sequence[int]) -> list[Pin]:
        """Where pages, given by index, lie; they must be ready."""
        return self.host.pinned_many(self.pins_of(pages))

    def pins_of(self, pages: Sequence[int]) -> list[int]:
        """The pins of pages, given by index, which must be ready."""
        have = len(self.pins)
        pins = [self.pins[i] if i < have else UNPINNED for i in pages]
        if UNPINNED in pins:
            lost = [i for i, pin in zip(pages, pins, strict=True) if pin == UNPINNED]
            raise ValueError(f"pages {lost} of request {self.request_id!r} are not ready, {self.ready_pages} are")
        return pins

    def restored_from(self, pages: int) -> dict[str, int]:
        """Pages of the first `pages` by the tier they were found in."""
        below = Counter(tier for i, tier in self.origins.items() if i < pages)
        return {tier: n for tier, n in {self.host.name: pages - below.total(), **below}.items() if n}

    def host_hits(self) -> list[bytes]:
        """Keys of the ready pages that were in the host tier when they were asked for."""
        pages = range(len(self.keys)) if self.sparse else range(self.ready_pages)
        return [self.keys[i] for i in pages if i not in self.origins and self.pins[i] != UNPINNED]

    def tally(self) -> tuple[dict[str, int], Counter[MissReason]]:
        """Hits by tier and misses by reason: every page that was ever asked for, exactly once."""
        ready = self.ready_pages
        misses = Counter(self.superseded.values())
        if self.sparse:
            hits = Counter(self.origins.get(i, self.host.name) for i, pin in enumerate(self.pins) if pin != UNPINNED)
        else:
            hits = Counter(self.restored_from(ready))
        if not self.sparse and (stranded := len(self.pins) - ready - self.pins[ready:].count(UNPINNED)):
            misses[MissReason.AFTER_GAP] += stranded
        if self.loading:
            misses[MissReason.DEADLINE] += len(self.loading)
        misses.update(self.misses.values())
        return dict(hits), misses

    def outcomes(self) -> list[str | MissReason]:
        """What `tally` counts, by page: the tier it came from, or why it did not. Superseded ones are not there."""
        ready = len(self.keys) if self.sparse else self.ready_pages
        found: list[str | MissReason] = []
        for i, key in enumerate(self.keys):
            if self.pins[i] != UNPINNED:
                found.append(self.origins.get(i, self.host.name) if i < ready else MissReason.AFTER_GAP)
            elif key in self.loading:
                found.append(MissReason.DEADLINE)
            else:
                found.append(self.misses[i])
        return found

    def use(self, pages: int, rest: MissReason = MissReason.DEADLINE) -> list[int]:
        """The request starts with its first `pages` pages, which must be ready: the others become misses for good, for
        `rest` where they were ready too. Returns the pins of these, for release."""
        ready = self.ready_pages
        released = []
        for i in range(pages, len(self.keys)):
            pin, self.pins[i] = self.pins[i], UNPINNED
            if pin != UNPINNED:
                released.append(pin)
            if i not in self.misses:
                late = MissReason.DEADLINE if self.keys[i] in self.loading else MissReason.AFTER_GAP
                self.misses[i] = rest if i < ready else late
        self.loading = {}
        return released

    def cut(self, pages: int, reason: MissReason) -> list[int]:
        """What is there, or on its way, behind the first `pages` is of no use: misses from now on. Returns the pins,
        for release."""
        released = []
        for i in range(pages, len(self.keys)):
            if self.pins[i] != UNPINNED or self.keys[i] in self.loading:
                self.loading.pop(self.keys[i], None)
                released += self.fail(i, reason)
        return released

    def replace(self, keys: Sequence[bytes]) -> list[int]:
        """Ask for `keys` instead. Pages asked before and not now are counted as superseded, and their pins returned for
        release; pages asked before and still keep their state; new ones have neither pin nor reason yet."""
        skipped = len(self.keys) - len(keys)
        if skipped > 0 and keys and self.keys[skipped:] == list(keys):
            return self.skip(skipped)
        return self.exchange(keys)

    def skip(self, pages: int) -> list[int]:
        """As `replace` by what follows the first `pages`."""
        for i, key in enumerate(self.keys[:pages]):
            self.superseded[key] = self.misses.get(i, MissReason.SUPERSEDED)
        released = [pin for pin in self.pins[:pages] if pin != UNPINNED]
        self.keys, self.pins, self.distinct = self.keys[pages:], self.pins[pages:], set()
        self.origins = {i - pages: tier for i, tier in self.origins.items() if i >= pages}
        self.misses = {i - pages: why for i, why in self.misses.items() if i >= pages}
        self.arrivals = {i - pages: at for i, at in self.arrivals.items() if i >= pages}
        self.loading = {key: i - pages for key, i in self.loading.items() if i >= pages}
        return released

    def exchange(self, keys: Sequence[bytes]) -> list[int]:
        """As `replace`, by any pages."""
        old = {key: i for i, key in enumerate(self.keys)}
        pins, origins, misses, loading, arrivals = self.pins, self.origins, self.misses, self.loading, self.arrivals
        self.keys, self.distinct = list(keys), set()
        self.pins, self.origins, self.misses, self.loading = [UNPINNED] * len(keys), {}, {}, {}
        self.arrivals = {}
        if not old and not self.superseded:
            return []
        for i, key in enumerate(self.keys):
            j = old.pop(key, -1)
            if j < 0:
                self.superseded.pop(key, None)
                continue
            self.pins[i] = pins[j]
            if j in origins:
                self.origins[i] = origins[j]
            if j in misses:
                self.misses[i] = misses[j]
            if j in arrivals:
                self.arrivals[i] = arrivals[j]
            if key in loading:
                self.loading[key] = i
        released = []
        for key, j in old.items():
            self.superseded[key] = misses.get(j, MissReason.SUPERSEDED)
            if pins[j] != UNPINNED:
                released.append(pins[j])
        return released

    def extend(self, keys: Sequence[bytes], hashes: Sequence[bytes]) -> range:
        """Ask for more pages, which are next in the prefix; their indices. They have neither pin nor reason yet."""
        first = len(self.keys)
        if not self.distinct:
            self.distinct = set(self.keys)
        self.distinct.update(keys)
        if len(self.distinct) != first + len(keys):
            raise ValueError(f"request {self.request_id!r} asks for the same page twice")
        self.keys += keys
        self.hashes += hashes
        self.pins += [UNPINNED] * len(keys)
        if self.superseded:
            for key in keys:
                self.superseded.pop(key, None)
        return range(first, len(self.keys))

    def pin(self, pages: Sequence[int], pins: list[int]) -> None:
        """What pinning these pages, in ascending order, gave."""
        if not pages:
            return
        if pages[-1] - pages[0] + 1 == len(pages):
            self.pins[pages[0] : pages[-1] + 1] = pins
        else:
            for i, pin in zip(pages, pins, strict=True):
                self.pins[i] = pin

    def missed(self, keys: Sequence[bytes], hashes: Sequence[bytes], reasons: Sequence[MissReason]) -> None:
        """Pages at the end are misses."""
        pages = self.extend(keys, hashes)
        self.misses.update(zip(pages, reasons, strict=True))

    @property
    def gap_reason(self) -> MissReason | None:
        """Why the prefix does not go on, where it does not."""
        return self.misses[min(self.misses)] if self.misses else None

    def unknown(self) -> Sequence[int]:
        """Indices of pages that were not classified yet."""
        if not self.misses and not self.loading and self.pins.count(UNPINNED) == len(self.pins):
            return range(len(self.pins))
        return [
            i
            for i, pin in enumerate(self.pins)
            if pin == UNPINNED and i not in self.misses and self.keys[i] not in self.loading
        ]

    def end(self) -> tuple[Lookup, list[int]]:
        """Nothing is pinned or on its way any more. Returns what it was, and the pins, for release."""
        self.when_there = None  # it often refers back to this
        was = copy.copy(self)
        was.keys, was.hashes, was.misses = list(self.keys), list(self.hashes), dict(self.misses)
        self.pins, self.loading = [UNPINNED] * len(self.keys), {}
        return was, [pin for pin in was.pins if pin != UNPINNED] if UNPINNED in was.pins else was.pins

    def give_up_last(self, pages: int, behind: int) -> list[int]:
        """Turn up to `pages` pinned pages with an index above `behind`, the last ones first, into misses for want of
        room; returns their pins for release."""
        last = [i for i in range(behind + 1, len(self.keys)) if self.pins[i] != UNPINNED][-pages:]
        return [pin for i in last for pin in self.fail(i, MissReason.NO_ROOM)]

    def fail(self, index: int, reason: MissReason) -> list[int]:
        """Turn page `index` into a miss; returns the pin to release, if there was one."""
        pin, self.pins[index] = self.pins[index], UNPINNED
        self.misses[index] = reason
        return [] if pin == UNPINNED else [pin]
