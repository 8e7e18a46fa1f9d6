"""What became of each page of some requests: where it was, when it was there, what it weighs. Bounded memory."""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.ledger import MissReason
from kvtier.lookup import Lookup

MAX_REQUESTS = 1024
MAX_PAGES = 32768
"""Pages of all requests that are remembered together; the oldest requests go first."""


@dataclass(frozen=True, slots=True)
class Record:
    """A request as it was settled. keys: page keys. outcomes: the tier it came from, or why it did not. nbytes: as
    stored, 0 for misses. ready_s: from its first lookup until the page was in host memory, None for misses."""

    request_id: str
    at_s: float
    loaded: bool
    keys: tuple[bytes, ...]
    outcomes: tuple[str | MissReason, ...]
    nbytes: tuple[int, ...]
    ready_s: tuple[float | None, ...]
    superseded_pages: int
    waited_s: float
    load_s: float
    saved_s: float | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON and for people."""
        hits = [o for o in self.outcomes if not isinstance(o, MissReason)]
        pages = [
            {
                "index": i,
                "key": key.hex()[:16],
                "outcome": f"miss: {outcome.value}" if isinstance(outcome, MissReason) else f"hit: {outcome}",
                "bytes": nbytes,
                "ready_s": None if ready_s is None else round(ready_s, 6),
            }
            for i, (key, outcome, nbytes, ready_s) in enumerate(
                zip(self.keys, self.outcomes, self.nbytes, self.ready_s, strict=True)
            )
        ]
        saved = "" if self.saved_s is None else f", {self.saved_s:.3f} s of prefill saved"
        return {
            "request": self.request_id,
            "at_s": round(self.at_s, 3),
            "loaded": self.loaded,
            "summary": (
                f"{self.request_id}: {len(hits)} of {len(pages)} pages found, {sum(self.nbytes):,} bytes; waited "
                f"{self.waited_s:.3f} s for lower tiers, loaded in {self.load_s:.3f} s{saved}"
            ),
            "waited_s": round(self.waited_s, 6),
            "load_s": round(self.load_s, 6),
            "saved_s": None if self.saved_s is None else round(self.saved_s, 6),
            "superseded_pages": self.superseded_pages,
            "pages": pages,
        }


class Explainer:
    """Keeps a share of the requests. Any thread may call it."""

    def __init__(self, sample: float, *, max_requests: int = MAX_REQUESTS, max_pages: int = MAX_PAGES) -> None:
        self._sample = sample
        self._max_requests = max_requests
        self._max_pages = max_pages
        self._random = random.Random()
        self._lock = threading.Lock()
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._pages = 0

    def wants(self) -> bool:
        """Whether this request is among the sampled ones."""
        return self._sample > 0 and self._random.random() < self._sample

    def add(self, lookup: Lookup, *, loaded: bool, waited_s: float, saved_s: float | None) -> None:
        """Keep a request that is being settled and still has its pins. Of very many pages only the first are kept."""
        keep = min(len(lookup.keys), self._max_pages)
        outcomes = lookup.outcomes()[:keep]
        if not loaded:
            outcomes = [o if isinstance(o, MissReason) else MissReason.DROPPED for o in outcomes]
        record = Record(
            lookup.request_id,
            time.time(),
            loaded,
            tuple(lookup.keys[:keep]),
            tuple(outcomes),
            tuple(_sizes(lookup, outcomes)),
            tuple(
                None if isinstance(o, MissReason) else lookup.arrivals.get(i, lookup.began) - lookup.began
                for i, o in enumerate(outcomes)
            ),
            len(lookup.superseded),
            waited_s,
            lookup.load_s,
            saved_s,
        )
        with self._lock:
            old = self._records.pop(record.request_id, None)
            self._pages += keep - (0 if old is None else len(old.keys))
            self._records[record.request_id] = record
            while len(self._records) > self._max_requests or self._pages > self._max_pages:
                _, dropped = self._records.popitem(last=False)
                self._pages -= len(dropped.keys)

    def find(self, request_id: str) -> Mapping[str, Any] | None:
        """The record of a request; of several under one name (``name#1``, ``name#2``) the latest."""
        with self._lock:
            record = self._records.get(request_id)
            if record is None:
                named = (r for i, r in reversed(self._records.items()) if i.rpartition("#")[0] == request_id)
                record = next(named, None)
        return None if record is None else record.as_dict()


def _sizes(lookup: Lookup, outcomes: Sequence[str | MissReason]) -> list[int]:
    hits = [i for i, outcome in enumerate(outcomes) if not isinstance(outcome, MissReason)]
    sizes = [0] * len(outcomes)
    for i, (_, meta) in zip(hits, lookup.slots_of(hits), strict=True):
        sizes[i] = meta.nbytes
    return sizes
