"""The ``kvtier`` command. One module per command; what a command needs is imported when it runs."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

EXIT_ERROR = 2
EXIT_TERMINATED = 128 + signal.SIGTERM


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line. An error of kvtier's own is one line on stderr and exit status 2, never a traceback."""
    from kvtier.cli.app import app
    from kvtier.errors import KVTierError

    with _sigterm_ends_in_order():
        try:
            app(args=None if argv is None else list(argv), prog_name="kvtier")
        except KVTierError as e:
            print(f"kvtier: error: {e}", file=sys.stderr)
            raise SystemExit(EXIT_ERROR) from None


@contextmanager
def _sigterm_ends_in_order() -> Iterator[None]:
    """As Ctrl-C does: folders, servers and mounts that a command made for itself go with it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(EXIT_TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
