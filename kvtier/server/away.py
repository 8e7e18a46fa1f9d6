"""Directories of the cache server that were away while it ran without them.

What was overwritten or deleted meanwhile may still lie there, and nothing says so: the server did not know of it. So
every start is noted in all directories that take part, as ``run.json`` beside ``voided.log``, and one that was not part
of the last run gives its values up.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.storage_backends.nvme.tier import NvmeTier

_log = logging.getLogger(__name__)

FORMAT_VERSION = 1
RUN = "run.json"
_BYTES_MAX = 4096
_AT_ONCE = 1024
"""Pages to delete."""


def give_up_what_was_away(directories: Sequence[NvmeTier]) -> int:
    """Empty those of the open directories that the last run of the server was without, and note this run in all of
    them. How many values are gone. To be called before any is looked up."""
    runs = {directory: _read(directory) for directory in directories}
    last = max(runs.values(), default=0)
    gone = 0
    for directory, run in runs.items():
        if run < last:
            pages = [page for page, _ in directory.scan()]
            for at in range(0, len(pages), _AT_ONCE):
                directory.delete_many(pages[at : at + _AT_ONCE])
            gone += len(pages)
            _log.warning(
                "%s was away while the server ran without it: its %d values may have been overwritten or deleted "
                "meanwhile, and are gone",
                directory.path, len(pages),
            )  # fmt: skip
    this = max(last + 1, time.time_ns())
    for directory in directories:
        if directory.logged:  # else what was deleted may be found again
            _write(directory, this)
    return gone


def _read(directory: NvmeTier) -> int:
    """The number of the last run that the directory was part of; 0 where it is not known."""
    path = directory.path.parent / RUN
    try:
        with path.open("rb") as file:
            stated = json.loads(file.read(_BYTES_MAX))
        if stated["kvtier_server_run"] != FORMAT_VERSION or type(stated["number"]) is not int:
            raise ValueError(f"version {stated['kvtier_server_run']!r}")
        return max(0, int(stated["number"]))
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        _log.warning("%s cannot be read: %s", path, error)
        return 0


def _write(directory: NvmeTier, number: int) -> None:
    path = directory.path.parent / RUN
    new = path.with_name(f"{RUN}.new")
    try:
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(json.dumps({"kvtier_server_run": FORMAT_VERSION, "number": number}) + "\n")
        new.replace(path)
    except OSError as error:
        _log.warning("%s cannot be written: %s; beside other directories it starts empty next time", path, error)
