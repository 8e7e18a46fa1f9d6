"""What the local tiers share around their table: closing behind calls under way, and telling what was removed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from types import TracebackType
from typing import NoReturn

from kvtier.abc.tier import RemovalListener
from kvtier.errors import ClosedError
from kvtier.storage_backends.slots.table import Removed

_log = logging.getLogger(__name__)


class Gate:
    """``with gate:`` around every call. Once closed, calls raise ClosedError; `close` waits for those inside."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()  # entered as it is: a Condition's own __enter__ is Python, and counts here
        self._changed = threading.Condition(self._lock)
        self._inside = 0
        self.closed = False

    def __enter__(self) -> None:
        with self._lock:
            if self.closed:
                self.refuse()
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._inside -= 1
            if self.closed and not self._inside:
                self._changed.notify_all()

    def refuse(self) -> NoReturn:
        raise ClosedError(f"tier {self._name!r} is closed")

    def close(self, timeout_s: float) -> bool:
        """Close; True once nobody is inside, False if somebody still is after `timeout_s`."""
        until = time.monotonic() + timeout_s
        with self._changed:
            self.closed = True
            while self._inside:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
        return True


def notify(listener: RemovalListener | None, removed: Sequence[Removed]) -> None:
    """Call `listener` per run of equal reasons. Call it outside the tier's lock."""
    if listener is None or not removed:
        return
    try:
        for why, group in groupby(removed, key=attrgetter("why")):
            listener([r.key for r in group], why)
    except Exception:  # noqa: BLE001 - the pages are gone already: the tier's own call must end as usual
        _log.exception("the removal listener failed")
