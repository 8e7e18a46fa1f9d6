"""The tests that the decision on storage cases names exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_named_test_exists() -> None:
    rows = (ROOT / "docs" / "decisions" / "2026-11-30-storage-cases.md").read_text().splitlines()
    named = [re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row) for row in rows if row.startswith("| ")][1:]
    assert len(named) > 30 and all(named), "a case without a test"
    missing = {
        f"{path}::{name}"
        for row in named
        for path, name in row
        if not (ROOT / path).exists() or f"def {name}(" not in (ROOT / path).read_text()
    }
    assert not missing
