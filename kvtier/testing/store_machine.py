"""A Hypothesis state machine that drives a TieredStore beside a plain dict.

The oracle knows two things: what was ever stored under a key (bytes derived from the key, so that any mix-up shows),
and how many distinct pages each request asked for. It shares no code with the store. Subclass it, override `open` (and
`corrupt`, where a tier's files can be reached), and run its `TestCase`.
"""

from __future__ import annotations

import hashlib

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.abc.tier import PageMeta, PutStatus, Slot, TierUsage
from kvtier.keys import checksum
from kvtier.lookup import Lookup
from kvtier.store import TieredStore

PAGES = st.integers(0, 19)
REQUESTS = st.sampled_from(["r0", "r1", "r2"])


def page_key(page: int) -> bytes:
    return hashlib.sha256(b"key%d" % page).digest()


def page_bytes(page: int) -> bytes:
    """Content and length (one of three size classes) that follow from the page's number alone."""
    unit = hashlib.sha256(b"content%d" % page).digest()
    return unit * ((3000, 5000, 9000)[page % 3] // 32)


class StoreMachine(RuleBasedStateMachine):
    """See the module's docstring."""

    def open(self) -> TieredStore:
        """A store over tiers that hold about 8 pages in host memory and 16 below. Called again to reopen it."""
        raise NotImplementedError

    def corrupt(self, page: int) -> bool:
        """Damage the stored bytes of a page in a lower tier; False where that cannot be done."""
        del page
        return False

    def __init__(self) -> None:
        super().__init__()
        self.stored: set[int] = set()
        self.damaged: set[int] = set()
        self.protected: set[int] = set()
        self.asked: dict[str, set[int]] = {}
        self.expected_lookups = 0

    @initialize()
    def start(self) -> None:
        self.store = self.open()

    @rule(pages=st.lists(PAGES, min_size=1, max_size=6, unique=True))
    def put(self, pages: list[int]) -> None:
        keys = [page_key(p) for p in pages]
        answers = self.store.reserve(keys, [len(page_bytes(p)) for p in pages], wait_s=0.2)
        filled = [(p, k, a) for p, k, a in zip(pages, keys, answers, strict=True) if isinstance(a, Slot)]
        for page, _, slot in filled:
            self.store.host.view(slot)[:] = page_bytes(page)
            self.stored.add(page)
        metas = [
            PageMeta(len(page_bytes(p)), 1, p, checksum(page_bytes(p), k), bytes(16), priority=p % 3 - 1)
            for p, k, _ in filled
        ]
        self.store.commit([k for _, k, _ in filled], [s for _, _, s in filled], metas)
        for page, answer in zip(pages, answers, strict=True):
            if answer is PutStatus.EXISTS:
                assert page in self.stored
            elif answer is PutStatus.TOO_LARGE:
                raise AssertionError(f"page {page} was refused as too large")

    @rule(page=PAGES)
    def put_and_abort(self, page: int) -> None:
        (answer,) = self.store.reserve([page_key(page)], [len(page_bytes(page))])
        if isinstance(answer, Slot):
            self.store.host.view(answer)[:] = b"\xff" * answer.nbytes
            self.store.abort([page_key(page)], [answer])

    @rule(request=REQUESTS, pages=st.lists(PAGES, min_size=1, max_size=10, unique=True))
    def look_up(self, request: str, pages: list[int]) -> None:
        before = self.asked.setdefault(request, set())
        self.expected_lookups += len(set(pages) - before)
        before.update(pages)
        self.check(self.store.lookup(request, [page_key(p) for p in pages]), pages)

    @rule(request=REQUESTS, pages=st.lists(PAGES, min_size=1, max_size=10, unique=True))
    def look_up_and_wait(self, request: str, pages: list[int]) -> None:
        self.look_up(request, pages)
        lookup = self.store.lookup(request, [page_key(p) for p in pages])
        self.store.wait(lookup)
        assert not lookup.pending
        self.check(lookup, pages)

    def check(self, lookup: Lookup, pages: list[int]) -> None:
        ready = lookup.ready_pages
        for page, (slot, meta) in zip(pages[:ready], lookup.ready_slots(ready), strict=True):
            assert page in self.stored, f"page {page} was never stored"
            assert meta.valid_tokens == page
            assert bytes(self.store.host.view(slot)[: meta.nbytes]) == page_bytes(page)

    @rule(request=REQUESTS, loaded=st.booleans())
    def settle(self, request: str, loaded: bool) -> None:
        hits = sum(self.store.ledger.snapshot().hits.values())
        self.store.settle(request, loaded=loaded)
        self.asked.pop(request, None)
        assert loaded or hits == sum(self.store.ledger.snapshot().hits.values()), "what was not loaded is no hit"

    @rule(pages=st.lists(PAGES, min_size=1, max_size=4, unique=True))
    def delete(self, pages: list[int]) -> None:
        """From this moment on nobody finds them, also not where their promotion was under way."""
        self.store.delete([page_key(p) for p in pages])
        self.stored.difference_update(pages)
        for request in list(self.asked):
            self.store.settle(request)  # what it has pinned stays what it was
            del self.asked[request]

    @rule(page=PAGES)
    def protect(self, page: int) -> None:
        (done,) = self.store.protect([page_key(page)])
        if done:
            assert page in self.stored
            self.protected.add(page)

    @rule()
    def unprotect(self) -> None:
        self.store.unprotect([page_key(p) for p in self.protected])
        self.protected.clear()

    @rule()
    def flush(self) -> None:
        """Every page that a lower tier is to have was offered to it."""
        assert self.store.flush(120.0)
        assert self.store.host.unwritten(0x7F, 100) == []

    @rule(page=PAGES)
    def damage(self, page: int) -> None:
        assert self.store.flush(120.0)
        if self.corrupt(page):
            self.damaged.add(page)

    @precondition(lambda self: hasattr(self, "store"))
    @rule()
    def reopen(self) -> None:
        """Requests that are open are dropped, everything that was flushed may come back, nothing else."""
        assert self.store.flush(120.0)
        self.store.close(120.0)
        self.check_sums()
        self.asked.clear()
        self.protected.clear()
        self.expected_lookups = 0
        self.store = self.open()

    @invariant()
    def sums_hold(self) -> None:
        if not hasattr(self, "store"):
            return
        snapshot = self.store.ledger.snapshot()
        assert snapshot.lookups == sum(snapshot.hits.values()) + sum(snapshot.misses.values())
        assert all(n >= 0 for n in (*snapshot.hits.values(), *snapshot.misses.values()))

    def check_sums(self) -> None:
        """Only once nothing is open: every page of every request was counted exactly once."""
        snapshot = self.store.ledger.snapshot()
        assert snapshot.lookups == self.expected_lookups
        assert sum(snapshot.errors.values()) == 0
        assert self.store.ledger.violations == 0

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        try:
            for request in list(self.asked):
                self.store.settle(request)
            assert self.store.open_requests() == []
            assert self.store.flush(120.0)
            self.check_sums()
            for tier in (self.store.host, *self.store.lower):
                check_usage(tier.usage())
        finally:
            self.store.close(120.0)


def check_usage(usage: TierUsage) -> None:
    """The counts of a tier add up, and its cap holds."""
    came = usage.recovered_pages + usage.stored_pages
    left = usage.evicted_pages + usage.deleted_pages + usage.quarantined_pages
    assert came - left == usage.resident_pages, usage
    assert 0 <= usage.used_bytes <= usage.capacity_bytes, usage
