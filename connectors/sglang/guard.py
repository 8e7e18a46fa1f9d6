"""What the engine calls never raises: exceptions are caught and counted, and an answer of the expected type given.

One would end the scheduler, or a thread of the engine's storage and storage with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from kvtier.errors import ClosedError
from kvtier.ledger import Ledger

P = ParamSpec("P")
R = TypeVar("R")


class Guarded(Protocol):
    """What has such methods."""

    ledger: Ledger

    def count_error(self, where: str) -> None:
        """Count and log the exception being handled."""


S = TypeVar("S", bound=Guarded)


def timed(
    call: str, fallback: Callable[[], Any]
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """For methods that the scheduler's thread calls: answer `fallback()` where they fail; the time taken from the
    engine goes to the ledger as `call`."""

    def wrap(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @wraps(method)
        def guarded(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            start = time.perf_counter()
            try:
                return method(self, *args, **kwargs)
            except Exception:  # noqa: BLE001 - an exception here would end the engine
                self.count_error(call)
                answer: R = fallback()
                return answer
            finally:
                self.ledger.time_engine(call, time.perf_counter() - start)

        return guarded

    return wrap


def exactly(
    what: str, fallback: Callable[..., Any]
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """For methods that any thread calls, also of a store that is closed: answer `fallback(*arguments)`, which has the
    type that the engine expects."""

    def wrap(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @wraps(method)
        def guarded(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(self, *args, **kwargs)
            except ClosedError:
                pass  # the engine is being ended, or storage detached
            except Exception:  # noqa: BLE001 - it would end a thread of the engine, and storage with it
                self.count_error(what)
            answer: R = fallback(*args, **kwargs)
            return answer

        return guarded

    return wrap
