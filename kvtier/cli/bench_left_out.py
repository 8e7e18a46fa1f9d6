"""What a bench leaves out since a program or a package is not there. Its rows are missing, or say null; the rest is
measured."""

from __future__ import annotations

import sys


def left_out(what: str, why: str) -> None:
    """One line on stderr. why: with the way out."""
    sys.stderr.write(f"left out: {what}: {why}\n")
