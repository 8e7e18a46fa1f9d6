"""When a decode-time method acts: every `beta` generated tokens, once a sequence is over its budget."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.abc.compression import LiveRequest
from kvtier.errors import ConfigError


class RoundSchedule:
    """Remembers, per request, how many generated tokens the last step left in the cache. A step that confirms several
    tokens triggers at most one round."""

    def __init__(self, budget: int, beta: int) -> None:
        for name, value in (("budget", budget), ("beta", beta)):
            if value < 1:
                raise ConfigError(f"option {name!r} = {value}: give a number of tokens from 1 up")
        self.budget = budget
        self.beta = beta
        self._previous: dict[str, int] = {}

    def start(self, requests: Sequence[LiveRequest]) -> None:
        for request in requests:
            self._previous[request.request_id] = request.generated_tokens

    def finish(self, requests: Sequence[LiveRequest]) -> None:
        for request in requests:
            self._previous.pop(request.request_id, None)

    def due(self, requests: Sequence[LiveRequest]) -> list[LiveRequest]:
        """Those whose step crossed a multiple of `beta` with more than `budget` generated rows. Call once per step."""
        found = []
        for request in requests:
            now = request.generated_tokens
            previous = self._previous.get(request.request_id, 0)
            self._previous[request.request_id] = now
            if previous // self.beta < now // self.beta and request.length > request.prompt_tokens + self.budget:
                found.append(request)
        return found

    def __len__(self) -> int:
        """Requests remembered."""
        return len(self._previous)
