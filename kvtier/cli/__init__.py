"""The ``kvtier`` command. One module per command; what a command needs is imported when it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

EXIT_ERROR = 2


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line. An error of kvtier's own is one line on stderr and exit status 2, never a traceback."""
    from kvtier.cli.app import app
    from kvtier.errors import KVTierError

    try:
        app(args=None if argv is None else list(argv), prog_name="kvtier")
    except KVTierError as e:
        print(f"kvtier: error: {e}", file=sys.stderr)
        raise SystemExit(EXIT_ERROR) from None
