"""Pages that people pinned (``kvtier pin``): protected, and protected again after a restart, as long as they are
stored. Kept beside the pages, as the file ``pins.json`` of a directory (`docs/formats.md`)."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvtier.abc.tier import KEY_BYTES, Note

if TYPE_CHECKING:
    from kvtier.store import TieredStore

_log = logging.getLogger(__name__)

FORMAT_VERSION = 1
REMEMBERED = 32_768
"""Pages that a file names; what is pinned beyond that ends with the process."""


class Pins:
    """Of one store. All methods may be called from any thread; they write files, so none belongs into an engine's own
    thread."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        found = latest(data for tier in store.lower for data in tier.notes(Note.PINS))
        kept = store.protect(found) if found else []
        self._pages = {key: None for key, yes in zip(found, kept, strict=True) if yes}
        if len(self._pages) < len(found):  # a page that is gone is not pinned when it is stored again
            _log.warning("%d of %d pinned pages are not stored any more, or find no room", kept.count(False), len(kept))
            self._write()

    def add(self, keys: Sequence[bytes], *, dry_run: bool = False) -> list[bool]:
        """Which of the pages are pinned now, as of `TieredStore.protect`."""
        with self._lock:
            done = self._store.protect(keys, dry_run=dry_run)
            if not dry_run:
                self._pages.update((key, None) for key, yes in zip(keys, done, strict=True) if yes)
                self._write()
        return done

    def end(self, keys: Sequence[bytes]) -> None:
        """They may make room again."""
        with self._lock:
            self._store.unprotect(keys)
            for key in keys:
                self._pages.pop(key, None)
            self._write()

    def deleted(self) -> None:
        """Pages were deleted: those that were pinned are not any more."""
        with self._lock:
            if self._pages:
                self._write()

    def remembered(self, keys: Sequence[bytes]) -> int:
        """How many of pages that are pinned, or would be, are pinned after a restart, too, if they are stored then."""
        if not any(not tier.capabilities.shared and tier.capabilities.persistent for tier in self._store.lower):
            return 0
        with self._lock:
            written = set(list(dict.fromkeys([*self._pages, *keys]))[:REMEMBERED])
        return sum(key in written for key in keys)

    def _write(self) -> None:
        protected = self._store.protected()
        self._pages = {key: None for key in self._pages if key in protected}
        data = encode(self._pages, time.time_ns())
        for tier in self._store.lower:
            tier.note(data, Note.PINS)


def encode(pages: Iterable[bytes], written_ns: int) -> bytes:
    """The file's content; the first `REMEMBERED` pages. written_ns: unix time."""
    named = [key.hex() for key in list(pages)[:REMEMBERED]]
    return json.dumps({"kvtier_pins": FORMAT_VERSION, "written_ns": written_ns, "pages": named}).encode() + b"\n"


def latest(files: Iterable[bytes]) -> list[bytes]:
    """The pages in that of several files that was written last; none of what is damaged or of another version."""
    newest, pages = -1, []
    for data in files:
        try:
            stated = json.loads(data)
            if stated["kvtier_pins"] != FORMAT_VERSION:
                raise ValueError(f"version {stated['kvtier_pins']!r}")
            written_ns, named = stated["written_ns"], [bytes.fromhex(key) for key in stated["pages"][:REMEMBERED]]
            if not isinstance(written_ns, int) or any(len(key) != KEY_BYTES for key in named):
                raise ValueError("no time, or no pages")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            _log.warning("what was pinned is not readable and left out: %r", error)
            continue
        if written_ns > newest:
            newest, pages = written_ns, list(dict.fromkeys(named))
    return pages
