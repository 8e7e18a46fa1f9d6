"""``python -m kvtier.cli``, where the script is not on the path."""

from __future__ import annotations

from kvtier.cli import main

main()
