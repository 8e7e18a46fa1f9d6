"""Which pages a lower tier gets, and when."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Write(str, Enum):
    """When a page is written to a lower tier. through: as soon as it is in host memory. back: when it is about to leave
    host memory, and on an orderly close; what is in host memory alone is lost with the process. none: never; what the
    tier has is still found."""

    THROUGH = "through"
    BACK = "back"
    NONE = "none"


class Admission(str, Enum):
    """Which pages a lower tier is offered. second_use: those that were loaded from host memory, or that come again
    after they were evicted."""

    ALWAYS = "always"
    SECOND_USE = "second_use"


@dataclass(frozen=True, slots=True)
class TierRules:
    """Of one lower tier. refresh: a page that is loaded from host memory counts as used in this tier, too, where it is
    written through."""

    write: Write = Write.THROUGH
    admit: Admission = Admission.ALWAYS
    refresh: bool = True
