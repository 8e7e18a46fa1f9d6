"""How much of the scheduler's thread lookups may take in one scheduling step, of all requests together.

In pages and not in time, because several ranks must do the same.
"""

from __future__ import annotations

STEP_PAGES = 320
"""Pages that are looked up for the first time in one step: a third of a millisecond, on a busy machine twice that."""
NEW_PAGES = 256
"""Of these, for requests that are new; what they leave is for those that were looked up in part."""
FIRST_PAGES = 64
"""Of one new request: most have no more, and where nothing is found the rest need not be looked up."""
REQUEST_PAGES = 40
"""What a lookup costs beside its pages, in pages."""
COUNTED_PAGES = 256
"""Pages of requests that ended which are counted on the scheduler's thread in one step; others by another thread."""

_NO_LIMIT = 1 << 62


class StepBudget:
    """Used on the scheduler's thread. Between `end` and `begin` nothing but what is counted has a limit."""

    def __init__(self) -> None:
        self._pages = _NO_LIMIT
        self._counted = COUNTED_PAGES

    def begin(self) -> None:
        """A step begins."""
        self._pages, self._counted = STEP_PAGES, COUNTED_PAGES

    def end(self) -> None:
        self._pages = _NO_LIMIT

    def first(self, pages: int) -> int:
        """How many of the `pages` of a request to look up now that asks for the first time, or for others."""
        if self._pages == _NO_LIMIT:
            return pages
        self._pages -= min(self._pages, REQUEST_PAGES)
        return self.next(min(pages, FIRST_PAGES))

    def next(self, pages: int) -> int:
        """How many of `pages` more to look up now."""
        some = min(pages, self._pages)
        self._pages -= some
        return some

    def counts(self, pages: int) -> bool:
        """Whether so many pages of a request that ended may be counted now."""
        if pages > self._counted:
            return False
        self._counted -= pages
        return True
