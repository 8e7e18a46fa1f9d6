"""Where a restored prefix may end, in models whose cache is more than KV pages.

A prefix of KV pages is of use only if, at the place where it ends, the pools beside are complete too: the last pages
of a sliding window, or the recurrent state there. A page is all of its buffers or a miss, so KV pages that lead to no
such place are misses (`partial`), and are not read. Pages of the pools beside are pinned and promoted like others, but
not counted: they are parts of the pages that are.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvtier.ledger import MissReason
from kvtier.lookup import UNPINNED, Lookup
from kvtier.store import TieredStore

Bools = npt.NDArray[np.bool_]

_SPARE_PAGES = 512
"""Pages before a window that are pinned, too, where a shorter prefix may be wanted."""


def lookup_name(request_id: str, pool: str) -> str:
    """Under which the store knows the pages of one pool beside, for one request."""
    return f"{request_id}\0{pool}"


def is_beside(name: str) -> bool:
    return "\0" in name


class Beside:
    """The pages of one pool beside, for one request: `keys[i]` belongs to KV page i of its tail, and more may be added
    before it is asked for any. window: how many of them, up to the end of the prefix, must be there. spare: pin some of
    what else is in host memory, so that a shorter prefix is ready where another rank lacks a page of the longest. Used
    on the scheduler's thread."""

    def __init__(self, store: TieredStore, name: str, keys: list[bytes], window: int, *, spare: bool = False) -> None:
        self._store = store
        self._name = name
        self.keys = keys
        self.window = window
        self._spare = spare
        self._asked: list[int] = []
        self._gone: set[int] = set()
        self.lookup: Lookup | None = None

    @property
    def state(self) -> tuple[int, int]:
        """Differs when something has changed."""
        return (0, 0) if self.lookup is None else (len(self.lookup.loading), self.lookup.pins.count(UNPINNED))

    @property
    def pending(self) -> bool:
        return self.lookup is not None and self.lookup.pending

    def refresh(self, deadline: float) -> None:
        """The request is still there: its pins do not expire."""
        if self.lookup is not None:
            self._look_up(self._asked, deadline)

    def fits(self, end: int) -> bool:
        """Whether a prefix of `end` pages, more than none, may be complete here."""
        return bool(self._possible(range(max(0, end - self.window), end)).all())

    def possible(self, pages: int) -> Bools:
        """Of the first `pages`, which are there or may be."""
        return self._possible(range(pages))

    def _possible(self, pages: range) -> Bools:
        self._note_gone()
        _, may = self._store.may_have(self.keys[pages.start : pages.stop])
        found = np.array(may, dtype=np.bool_)
        found[[i - pages.start for i in self._waited() if i in pages]] = True
        found[[i - pages.start for i in self._gone if i in pages]] = False
        return found

    def ask(self, end: int, deadline: float) -> None:
        """Get what a prefix of `end` pages needs."""
        wanted = list(range(max(0, end - self.window), end))
        if self._spare and wanted:
            first = max(0, wanted[0] - _SPARE_PAGES)
            here, _ = self._store.may_have(self.keys[first : wanted[0]])
            wanted = [i for i, there in enumerate(here, first) if there and i not in self._gone] + wanted
        if wanted != self._asked or self.lookup is None:
            self._look_up(wanted, deadline)

    def ready(self, pages: int) -> Bools:
        """Of the first `pages`, which are pinned."""
        pinned = np.zeros(pages, dtype=np.bool_)
        if self.lookup is not None:
            pins = self.lookup.pins
            pinned[[i for n, i in enumerate(self._asked) if i < pages and pins[n] != UNPINNED]] = True
        return pinned

    def take(self, first: int, end: int) -> list[int] | None:
        """The request starts with pages `first` to `end`: their places in `lookup`, held; the rest is let go. None if
        one of them is not ready."""
        lookup = self.lookup
        place = {i: n for n, i in enumerate(self._asked)}
        places = [place.get(i, -1) for i in range(first, end)]
        if lookup is None or any(n < 0 or lookup.pins[n] == UNPINNED for n in places):
            return None
        if not self._store.hold(lookup):
            return None
        used = set(places)
        self._store.give_back(lookup, [n for n, pin in enumerate(lookup.pins) if pin != UNPINNED and n not in used])
        return places

    def _look_up(self, wanted: list[int], deadline: float) -> None:
        lookup = self._store.lookup(self._name, [self.keys[i] for i in wanted], sparse=True, counted=False)
        lookup.deadline = deadline
        self.lookup, self._asked = lookup, wanted

    def _waited(self) -> list[int]:
        """Pages that were asked for, and are here or on their way."""
        lookup = self.lookup
        if lookup is None:
            return []
        return [i for n, i in enumerate(self._asked) if lookup.pins[n] != UNPINNED or lookup.keys[n] in lookup.loading]

    def _note_gone(self) -> None:
        """Pages that were asked for in vain: not asked for again by this request."""
        waited = set(self._waited())
        self._gone.update(i for i in self._asked if i not in waited)


class Boundaries:
    """Which prefixes of one request's tail can be restored. Used on the scheduler's thread."""

    def __init__(self, store: TieredStore, kv: Lookup, beside: Mapping[str, Beside]) -> None:
        """beside: by the name of the pool."""
        self._store = store
        self.kv = kv
        self.beside = beside
        self._seen: tuple[object, ...] = ()
        self._lengths: list[int] = []

    @property
    def pending(self) -> bool:
        """Whether a page that may make the prefix longer is on its way, and in time."""
        return self.kv.pending or any(pool.pending for pool in self.beside.values())

    @property
    def loading(self) -> bool:
        """Whether any page is on its way in the pools beside."""
        return any(pool.lookup is not None and pool.lookup.loading for pool in self.beside.values())

    def restorable(self) -> list[int]:
        """Lengths in pages, ascending, of which every page is verified, in host memory and pinned."""
        for pool in self.beside.values():
            pool.refresh(self.kv.deadline)
        if self._state() != self._seen:
            self._ask()
            self._seen = self._state()  # before it is used: what arrives in between is seen next time
            self._lengths = self._ready()
        return self._lengths

    def freeze(self, pages: int) -> list[int]:
        """As `restorable` of the first `pages`, held from now on; asks for nothing more."""
        for pool in self.beside.values():
            if pool.lookup is None or not self._store.hold(pool.lookup):
                return []
        return [length for length in self._ready() if length <= pages]

    def _state(self) -> tuple[object, ...]:
        return (self.kv.ready_pages, len(self.kv.loading), *(pool.state for pool in self.beside.values()))

    def _ask(self) -> None:
        """Get what the longest prefix needs that may be complete, and give up what is behind it."""
        reach = self.kv.reach
        end = self._longest(reach)
        if end < reach:
            self._store.cut(self.kv, end, MissReason.PARTIAL)
        for pool in self.beside.values():
            pool.ask(end, self.kv.deadline)

    def _longest(self, reach: int) -> int:
        """The longest prefix of at most `reach` pages that may be complete."""
        if reach == 0 or all(pool.fits(reach) for pool in self.beside.values()):
            return reach  # by far the most frequent answer
        fits = np.ones(reach, dtype=np.bool_)
        for pool in self.beside.values():
            fits &= complete(pool.possible(reach), pool.window)
        return int(fits.nonzero()[0][-1]) + 1 if fits.any() else 0

    def _ready(self) -> list[int]:
        pages = self.kv.ready_pages
        fits = np.ones(pages, dtype=np.bool_)
        for pool in self.beside.values():
            fits &= complete(pool.ready(pages), pool.window)
        return (fits.nonzero()[0] + 1).tolist()


def complete(there: Bools, window: int) -> Bools:
    """Of each place i, whether the last `window` pages up to and with page i are there, or all where they are fewer."""
    places = np.arange(len(there))
    last_gap = np.maximum.accumulate(np.where(there, -1, places)) if len(there) else places
    return (places - last_gap) >= np.minimum(window, places + 1)
