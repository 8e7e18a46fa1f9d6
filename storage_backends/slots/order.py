"""Which page makes room next: least recently used, or S3-FIFO; pages of a lower priority go first.

An order decides over the rows of a table and moves no bytes. A row lies in one lane: a priority and a queue of it.
Inside a lane rows go by their stamps, the smallest first. Rows that are pinned or must be kept are passed over: lanes
are gathered as columns, so that passing over many costs little.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from time import monotonic

import numpy as np
import numpy.typing as npt

from kvtier.abc.tier import PRIORITY_MAX, PRIORITY_MIN
from kvtier.errors import ConfigError
from kvtier.storage_backends.slots.extents import slot_bytes_of
from kvtier.storage_backends.slots.rows import LIVE, Rows

_VICTIMS_MIN = 64
_VICTIMS_MAX = 16_384
_VICTIMS_SHARE = 16
_DEMOTED = 1 << 50
"""What is taken off a stamp to put a row behind all others of its lane."""
_LANE = 1 << 52
_USES_MAX = 3
_GHOSTS_MAX = 1 << 20
_TTL_STEPS = 64


class Order(ABC):
    """See the module's docstring. Not thread-safe: every call is made under the tier's lock."""

    def __init__(self, rows: Rows, capacity_bytes: int) -> None:
        self._rows = rows
        self._capacity_bytes = capacity_bytes
        self._clock = 0
        self._members = [0] * (2 * (PRIORITY_MAX - PRIORITY_MIN + 1))
        self._victims: dict[int, list[tuple[int, int]]] = {}  # (row, stamp) by lane, the next to go last

    @property
    def clock(self) -> int:
        """Stamps given out so far: a row whose last use has a larger one was used later."""
        return self._clock

    @abstractmethod
    def insert(self, row: int, key: bytes, priority: int) -> None:
        """A page was published in `row`."""

    @abstractmethod
    def use(self, rows: npt.NDArray[np.int64]) -> None:
        """Pages were used, in the order of `rows`."""

    def use_one(self, row: int) -> None:
        """As `use`, of one page."""
        self.use(np.array([row], np.int64))

    @abstractmethod
    def victims(self) -> Iterator[int]:
        """Rows that may go, the next one first. One passed over comes again in a later call."""

    @abstractmethod
    def last_use(self) -> npt.NDArray[np.int64]:
        """int64 ``[rows]``: the value of `clock` at each row's last use."""

    def remove(self, row: int, key: bytes, *, evicted: bool) -> None:
        """The page in `row` is visible no more."""
        del key, evicted
        self._members[self._rows.lane[row]] -= 1

    def replace(self, row: int, key: bytes, priority: int, old: int, old_key: bytes) -> None:
        """A page was published in `row` in place of the one in `old`."""
        self.remove(old, old_key, evicted=False)
        self.insert(row, key, priority)

    def demote(self, row: int) -> None:
        """Let the page be the next of its priority to go, until it is used again."""
        rows = self._rows
        if rows.stamp[row] >= 0:
            rows.stamp[row] -= _DEMOTED
            lane = rows.lane[row]
            victims = self._victims.setdefault(lane, [])
            if len(victims) < 2 * _VICTIMS_MAX:
                victims.append((row, rows.stamp[row]))
            else:
                victims.clear()

    def recover(self, first: int, last: int) -> None:
        """Rows ``[first, last)`` were filled, the first of them the next to go."""
        rows, count = self._rows, last - first
        rows.stamps[first:last] = np.arange(self._clock + 1, self._clock + 1 + count)
        rows.lanes[first:last] = _lane(0, main=True)
        self._clock += count
        self._members[_lane(0, main=True)] += count

    def ranks(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """int64, one per row: the smaller, the sooner it goes."""
        ranks: npt.NDArray[np.int64] = self._rows.lanes[rows].astype(np.int64) * _LANE + self._rows.stamps[rows]
        return ranks

    def rank(self, row: int) -> int:
        return self._rows.lane[row] * _LANE + self._rows.stamp[row]

    def priorities(self, rows: npt.NDArray[np.int64]) -> list[int]:
        found: list[int] = (self._rows.lanes[rows] // 2 + PRIORITY_MIN).tolist()
        return found

    def priority(self, row: int) -> int:
        return self._rows.lane[row] // 2 + PRIORITY_MIN

    def soon(self, count: int) -> npt.NDArray[np.int64]:
        """int64: about `count` rows that go before others, pinned and kept ones among them."""
        r, there = self._rows, self._rows.count
        live, found = r.states[:there] == LIVE, 0
        chosen = []
        for lane in [lane for lane, members in enumerate(self._members) if members]:
            rows = np.flatnonzero(live & (r.lanes[:there] == lane))
            rows = rows[self._may_go(lane, rows)]
            if count < len(rows):
                rows = rows[np.argpartition(r.stamps[rows], count)[:count]]
            chosen.append(rows)
            found += len(rows) if lane % 2 else 0  # a small lane goes together with its main one
            if found >= count:
                break
        return np.concatenate(chosen) if chosen else np.zeros(0, np.int64)

    def _may_go(self, lane: int, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which rows of a lane go when their turn comes, and do not get another one."""
        del lane
        return np.ones(len(rows), np.bool_)

    def _place(self, row: int, lane: int) -> None:
        """Put a row, which is in no lane, at the far end of one."""
        self._clock += 1
        self._rows.stamp[row], self._rows.lane[row] = self._clock, lane
        self._members[lane] += 1

    def _next(self, lane: int, passed: set[int]) -> int:
        """The row of a lane that goes first, those in `passed` left out, -1 where none may go."""
        if not self._members[lane]:
            return -1
        rows = self._rows
        for gathered in (False, True):
            if gathered:
                self._gather(lane)
            victims = self._victims.setdefault(lane, [])
            while victims:
                row, stamp = victims.pop()
                if (
                    rows.stamp[row] == stamp
                    and rows.lane[row] == lane
                    and rows.state[row] == LIVE
                    and not rows.pin[row]
                    and not rows.keep[row]
                    and row not in passed
                ):
                    return row
        return -1

    def _gather(self, lane: int) -> None:
        """The share of a lane that goes first. Whatever joins it later gets a newer stamp than any of these, so taking
        them in order, but for those used meanwhile, is exact."""
        r, count = self._rows, self._rows.count
        may_go = (r.states[:count] == LIVE) & (r.pins[:count] == 0) & (r.keeps[:count] == 0)
        if self._members[lane] < sum(self._members):
            may_go &= r.lanes[:count] == lane
        rows = np.flatnonzero(may_go)
        take = min(len(rows), max(_VICTIMS_MIN, min(_VICTIMS_MAX, len(rows) // _VICTIMS_SHARE)))
        stamps = r.stamps[rows]
        if take < len(rows):
            oldest = np.argpartition(stamps, take)[:take]
            rows, stamps = rows[oldest], stamps[oldest]
        order = np.argsort(-stamps, kind="stable")
        self._victims[lane] = list(zip(rows[order].tolist(), stamps[order].tolist(), strict=True))


class LruOrder(Order):
    """Exact least recently used, inside each priority."""

    def insert(self, row: int, key: bytes, priority: int) -> None:
        rows, lane = self._rows, 2 * (priority - PRIORITY_MIN) + 1
        self._clock += 1
        rows.stamp[row], rows.lane[row] = self._clock, lane
        self._members[lane] += 1

    def replace(self, row: int, key: bytes, priority: int, old: int, old_key: bytes) -> None:
        rows, lane = self._rows, 2 * (priority - PRIORITY_MIN) + 1
        self._clock += 1
        rows.stamp[row] = self._clock
        if rows.lane[old] != lane:
            self._members[rows.lane[old]] -= 1
            self._members[lane] += 1
        rows.lane[row] = lane

    def use(self, rows: npt.NDArray[np.int64]) -> None:
        self._rows.stamps[rows] = np.arange(self._clock + 1, self._clock + 1 + len(rows))
        self._clock += len(rows)

    def use_one(self, row: int) -> None:
        self._clock += 1
        self._rows.stamp[row] = self._clock

    def last_use(self) -> npt.NDArray[np.int64]:
        stamps = self._rows.stamps[: self._rows.count]
        return np.where(stamps < 0, stamps + _DEMOTED, stamps)

    def victims(self) -> Iterator[int]:
        passed: set[int] = set()
        for lane in range(len(self._members)):
            while (row := self._next(lane, passed)) >= 0:
                passed.add(row)
                yield row


class S3FifoOrder(Order):
    """S3-FIFO (Yang et al., SOSP 2023), inside each priority: new pages wait in a small queue, a tenth of the bytes,
    and move to the main one if they are used more than once meanwhile, or were thrown out of the small one a while
    ago. What is seen once passes through without pushing anything out of the main queue."""

    def __init__(self, rows: Rows, capacity_bytes: int) -> None:
        super().__init__(rows, capacity_bytes)
        self._ghosts: dict[bytes, None] = {}
        self._small_bytes = [0] * (len(self._members) // 2)
        self._small_capacity_bytes = max(1, capacity_bytes // 10)

    def insert(self, row: int, key: bytes, priority: int) -> None:
        self._rows.use[row] = 0
        known = key in self._ghosts
        if known:
            del self._ghosts[key]
        self._move(row, _lane(priority, main=known))
        self._rows.used[row] = self._clock

    def use(self, rows: npt.NDArray[np.int64]) -> None:
        uses = self._rows.uses
        uses[rows] = np.minimum(uses[rows] + 1, _USES_MAX)
        self._rows.useds[rows] = np.arange(self._clock + 1, self._clock + 1 + len(rows))
        self._clock += len(rows)

    def last_use(self) -> npt.NDArray[np.int64]:
        return self._rows.useds[: self._rows.count]

    def recover(self, first: int, last: int) -> None:
        super().recover(first, last)
        self._rows.useds[first:last] = self._rows.stamps[first:last]

    def remove(self, row: int, key: bytes, *, evicted: bool) -> None:
        lane = self._rows.lane[row]
        super().remove(row, key, evicted=evicted)
        if lane % 2:
            return
        self._small_bytes[lane // 2] -= slot_bytes_of(self._rows.nbytes[row])
        if not evicted:
            return
        self._ghosts[key] = None
        there = sum(self._members) + 1
        if len(self._ghosts) > min(there - max(1, there // 10), _GHOSTS_MAX):
            del self._ghosts[next(iter(self._ghosts))]

    def _may_go(self, lane: int, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        may: npt.NDArray[np.bool_] = self._rows.uses[rows] <= (0 if lane % 2 else 1)
        return may

    def victims(self) -> Iterator[int]:
        passed: set[int] = set()
        for small in range(0, len(self._members), 2):
            while (row := self._victim(small, passed)) >= 0:
                passed.add(row)
                yield row

    def _victim(self, small: int, passed: set[int]) -> int:
        """The next row to go of the priority whose small lane this is, -1 where none may go."""
        rows, main = self._rows, small + 1
        while True:
            small_first = self._small_bytes[small // 2] >= self._small_capacity_bytes or not self._members[main]
            first, second = (small, main) if small_first else (main, small)
            row = self._next(first, passed)
            if row < 0:
                row = self._next(second, passed)
            if row < 0:
                return -1
            if rows.lane[row] == small:
                if rows.use[row] <= 1:
                    return row
                rows.use[row] = 0
                self._leave_small(row)
                self._place(row, main)
            elif rows.use[row]:
                rows.use[row] -= 1
                self._members[main] -= 1
                self._place(row, main)
            else:
                return row

    def _move(self, row: int, lane: int) -> None:
        self._place(row, lane)
        if not lane % 2:
            self._small_bytes[lane // 2] += slot_bytes_of(self._rows.nbytes[row])

    def _leave_small(self, row: int) -> None:
        lane = self._rows.lane[row]
        self._members[lane] -= 1
        self._small_bytes[lane // 2] -= slot_bytes_of(self._rows.nbytes[row])


class Age:
    """When rows were last used, as marks of a clock in time: what is older than `ttl_s` is told within a 64th of it."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._marks: deque[tuple[float, int]] = deque()
        self._asked_at = monotonic()
        self._look_at = 0.0

    def horizon(self, clock: int) -> int:
        """Rows whose last use is not after this value of the clock are too old. -1 where nothing new is. To be asked
        before every use: what the clock says now, it has said since then."""
        since, self._asked_at = self._asked_at, (now := monotonic())
        if now < self._look_at:
            return -1
        self._look_at = now + self._ttl_s / _TTL_STEPS
        self._marks.append((since, clock))
        old = -1
        while self._marks and self._marks[0][0] <= now - self._ttl_s:
            old = self._marks.popleft()[1]
        return old


ORDERS: dict[str, type[Order]] = {"lru": LruOrder, "s3fifo": S3FifoOrder}
"""Eviction policies by the name that they have in the configuration."""


def order_of(policy: str) -> type[Order]:
    if policy not in ORDERS:
        raise ConfigError(f"policy = {policy!r}: must be one of {', '.join(ORDERS)}")
    return ORDERS[policy]


def _lane(priority: int, *, main: bool) -> int:
    return 2 * (priority - PRIORITY_MIN) + main
