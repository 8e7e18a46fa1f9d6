"""The pages of a tier's directory that no process has open: listed and deleted by its log alone, no capacity needed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvtier.abc.tier import PageMeta
from kvtier.errors import TierPathError
from kvtier.storage_backends.nvme.directory import FORMAT, TierDirectory
from kvtier.storage_backends.nvme.log import IndexLog
from kvtier.storage_backends.nvme.note import read_note

_DEPTH_MAX = 4  # <path>/<shard>/rank<r>


def directories_below(path: Path) -> list[Path]:
    """Directories of tiers at `path` and below it, sorted. Raises TierPathError where there is none."""
    try:
        found = sorted(_search(path, _DEPTH_MAX))
    except OSError as error:
        raise TierPathError(f"{str(path)!r} cannot be read: {error.strerror}; name a readable directory") from error
    if not found:
        raise TierPathError(f"{str(path)!r} holds no tier: name the directory that the option path of the tier names")
    return found


def _search(path: Path, depth: int) -> Iterator[Path]:
    if (path / FORMAT).is_file():
        yield path
        return
    if depth:
        with os.scandir(path) as entries:
            below = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
        for inner in below:
            yield from _search(inner, depth - 1)


class ClosedTier:
    """One directory, locked. Not thread-safe."""

    def __init__(self, path: Path, log: IndexLog) -> None:
        self.path = path
        self._log = log
        self.pages: list[tuple[bytes, PageMeta]] = [(e.key, e.meta) for e in log.load().pages.entries()]

    def notes(self) -> list[bytes]:
        return read_note(self.path)

    def delete(self, keys: Sequence[bytes]) -> None:
        """Raises TierPathError where that cannot be written; some pages may be gone by then."""
        for key in keys:
            self._log.queue_delete(key)
        try:
            self._log.flush(self._log.queued)
        except OSError as error:
            raise TierPathError(
                f"{str(self.path)!r}: deletions cannot be written to its index.log: {error.strerror}; see to the disk, "
                "or delete the directory (it holds cached pages only)"
            ) from error


@contextmanager
def open_closed(path: Path) -> Iterator[ClosedTier]:
    """The tier in `path`, for this process alone. Raises TierPathError, also where another process has it open."""
    way_out = (
        "give the URL of its HTTP port in place of the directory (http://127.0.0.1:9404, if its configuration says "
        "http: {port: 9404}), or stop it"
    )
    directory = TierDirectory("nvme", path, None, 1 << 28, if_in_use=way_out)
    try:
        try:
            log = IndexLog(path / "index.log")
        except OSError as error:
            raise TierPathError(f"{str(path)!r}: its index.log cannot be used: {error.strerror}") from error
        try:
            try:
                tier = ClosedTier(path, log)
            except OSError as error:
                raise TierPathError(f"{str(path)!r}: its index.log cannot be read: {error.strerror}") from error
            yield tier
        finally:
            log.close()
    finally:
        directory.close()
