"""How a context is compacted, and how many of its tokens stay. No torch here: files are described without it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that tells one compaction of a context from another.

    method: ``kvzip``, ``am``, ``random``, ``recent``. ratio: share of the tokens that is removed, 0 <= ratio < 1.
    selector: which rule chose the rows (``pair``, ``uniform``, ``head``, ``raw_max``, ``normalized_max``,
    ``log_coverage``, ``hak``, ``omp``, ``indexer_hak``, ``indexer_omp``). queries: where fitting queries came from
    (``repeat``, ``self_study``, ``context``, ``given``), empty where none were used. options: further settings of the
    method that change its result, as text.
    """

    method: str
    ratio: float
    selector: str = ""
    seed: int = 0
    queries: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ratio) and 0.0 <= self.ratio < 1.0):
            raise ConfigError(
                f"ratio = {self.ratio}: it is the share of the tokens to remove; give 0 or more, and less than 1"
            )

    def encoded(self) -> str:
        """One line of JSON, equal for equal recipes only: part of the key of what is stored."""
        fields = [self.method, repr(float(self.ratio)), self.selector, self.seed, self.queries]
        return json.dumps([*fields, dict(sorted(self.options.items()))], separators=(",", ":"))


def budget_tokens(tokens: int, ratio: float) -> int:
    """Tokens that stay of `tokens` at `ratio` removed: rounded down, at least 1."""
    return max(1, int(tokens * (1.0 - ratio) + 1e-9))
