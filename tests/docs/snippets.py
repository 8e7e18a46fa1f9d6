"""Python of the pages: their blocks, and those that name a file written to one."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.pages import Block, blocks


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]


def file_of(block: Block) -> str:
    """The file that a block says it is, in a comment in its first line; empty where it says none."""
    named = re.match(r"# (\w+\.py)\n", block.text)
    return named[1] if named else ""


def write_files(page: Path, folder: Path) -> None:
    """Beside them pytest's settings, which would else be sought in the folders above."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    for block in python_blocks(page):
        if file_of(block):
            (folder / file_of(block)).write_text(block.text + "\n")
