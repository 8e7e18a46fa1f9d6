"""What the site is made of: a navigation that forgets no page, a reference read from docstrings, and a comparison whose
every cell has a source. The site itself is built by ``make docs``, in an environment of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, name_of
from tools.docs_site.navigation import (
    INDEXED,
    NavigationError,
    Section,
    all_pages,
    inner_pages,
    linked_pages,
    sections,
)
from tools.docs_site.reference import UnknownNameError, as_myst, read_module

API = ROOT / "docs" / "api"
COMPARISON = ROOT / "docs" / "comparison.md"

# ---- navigation


def test_every_page_stands_in_the_navigation_once() -> None:
    shown = [page for section in sections(ROOT) for page in section.pages]
    shown += [page for folder in INDEXED for page in inner_pages(ROOT, f"{folder}/README.md")]
    assert sorted(["README.md", "docs/README.md", *shown]) == sorted(all_pages(ROOT))


def tree(folder: Path, **pages: str) -> Path:
    for name, text in {"README.md": "# x", "docs/README.md": "# Map", **pages}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_sections_are_the_headings_of_the_map(tmp_path: Path) -> None:
    guide = "# Map\n\n[first](a.md)\n\n## Second\n\n| [b](b.md#part), [code](../x.py) |\n\n```\n[no](c.md)\n```\n"
    root = tree(tmp_path, **{"docs/README.md": guide, "docs/a.md": "# A", "docs/b.md": "# B", "CHANGELOG.md": "# C"})
    assert sections(root) == [
        Section("Start", ("docs/a.md",)),
        Section("Second", ("docs/b.md",)),
        Section("Further", ("CHANGELOG.md",)),
    ]
    root.joinpath("docs/c.md").write_text("# C")
    with pytest.raises(NavigationError, match=r"docs/README\.md has no link to docs/c\.md; add one"):
        sections(root)


def test_an_index_has_every_page_of_its_folder(tmp_path: Path) -> None:
    index = "docs/results/README.md"
    root = tree(tmp_path, **{index: "# R\n\n[b](b.md) and [a](a.md)", "docs/results/a.md": "", "docs/results/b.md": ""})
    assert inner_pages(root, index) == ["docs/results/b.md", "docs/results/a.md"]
    root.joinpath("docs/results/c.md").write_text("")
    with pytest.raises(NavigationError, match=r"docs/results/README\.md has no link to docs/results/c\.md"):
        inner_pages(root, index)


def test_a_link_to_a_folder_is_one_to_its_readme(tmp_path: Path) -> None:
    root = tree(
        tmp_path, **{"README.md": "[r](docs/results) [h](https://x.org/docs/a.md)", "docs/results/README.md": ""}
    )
    assert linked_pages(root, "README.md") == ["docs/results/README.md"]


# ---- reference


def described() -> dict[str, list[str]]:
    """Modules on the pages of docs/api, and the names that they show of each; none: all."""
    found = {}
    for page in sorted(API.glob("*.md")):
        for module, names in re.findall(r"```\{api\} (\S+)\n(.*?)```", page.read_text(), re.DOTALL):
            assert module not in found, f"{name_of(page)}: {module} is described twice"
            found[module] = names.split()
    return found


@pytest.mark.parametrize("module", sorted(described()))
def test_what_the_reference_names_is_there(module: str) -> None:
    text = as_myst(read_module(ROOT, module), described()[module])
    assert "{py:" in text
    for fence in re.findall(r"^(`+)\{py:", text, re.MULTILINE):
        assert len(fence) > 3, "a docstring's own block would end it"


def test_contracts_and_suites_are_described() -> None:
    there = set(described())
    for folder in ("kvtier/abc", "kvtier/testing"):
        for path in sorted((ROOT / folder).glob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            if module.rpartition(".")[2] not in {"__init__", *NOT_FOR_USERS}:
                assert module in there, f"no page of docs/api describes {module}"
    assert there >= {"kvtier.spec", "kvtier.keys", "kvtier.config", "kvtier.store", "kvtier.errors"}


NOT_FOR_USERS = ("faulty_device", "redis_servers", "store_machine", "tiny_model")
"""Of kvtier.testing: for tests of kvtier's own tiers and store."""

MODULE = '''
"""About <this> module."""
from dataclasses import dataclass
from enum import Enum

LIMIT = 4
"""How many."""
UNSAID = 5

class Color(Enum):
    """Kinds."""
    RED = "red"  # like blood
    GREEN = "green"
    """Like grass."""

@dataclass(frozen=True)
class Point:
    """A `point`.

    x: bytes.
    """
    x: int
    y: float = 0.5

    @property
    def size(self) -> int:
        """In *bytes*."""

    @classmethod
    def of(cls, text: str, *, strict: bool = True) -> "Point":
        """Read one."""

    def _hidden(self): ...

def move(point: Point, *by: int) -> None:
    """Move it."""

def _private(): ...
'''

MYST = r"""About \<this> module.

``````{py:data} LIMIT
:module: sample
:value: 4

How many.
``````

``````{py:class} Color
:module: sample

Kinds.

`````{py:attribute} RED
:value: 'red'
:no-contents-entry:

like blood
`````

`````{py:attribute} GREEN
:value: 'green'
:no-contents-entry:

Like grass.
`````
``````

``````{py:class} Point(x: int, y: float = 0.5)
:module: sample

A `point`.

x: bytes.

`````{py:property} size
:type: int

In \*bytes\*.
`````

`````{py:method} of(text: str, *, strict: bool=True) -> 'Point'
:classmethod:

Read one.
`````
``````

``````{py:function} move(point: Point, *by: int) -> None
:module: sample

Move it.
``````
"""


def test_a_module_is_described_by_signatures_and_docstrings(tmp_path: Path) -> None:
    tmp_path.joinpath("sample.py").write_text(MODULE)
    module = read_module(tmp_path, "sample")
    assert as_myst(module) == MYST
    assert as_myst(module, ["move"]) == MYST[MYST.index("``````{py:function}") :]
    with pytest.raises(UnknownNameError, match="sample has no public gone; it has LIMIT, Color, Point, move"):
        as_myst(module, ["gone"])
    with pytest.raises(UnknownNameError, match=r"other: there is no other\.py"):
        read_module(tmp_path, "other")


# ---- comparison


def tables(page: Path) -> list[list[list[str]]]:
    blocks = re.findall(r"(?:^\|.*\n)+", page.read_text(), re.MULTILINE)
    return [[[c.strip() for c in line.split("|")[1:-1]] for line in block.splitlines()] for block in blocks]


def test_every_cell_of_the_comparison_has_a_source() -> None:
    systems = None
    for head, _, *rows in tables(COMPARISON):
        assert systems in (None, [row[0] for row in rows]), "the same systems in the same order everywhere"
        systems = [row[0] for row in rows]
        for row in rows:
            assert len(row) == len(head), row
            for what, cell in zip(head[1:], row[1:], strict=True):
                if what != "read" and what != "what it is" and cell != "not looked up":
                    assert "[^" in cell, f"{row[0]}, {what}: {cell!r} has no source"
    assert systems is not None and len(systems) == 9


def test_sources_of_the_comparison_are_used_and_lead_somewhere() -> None:
    text = COMPARISON.read_text()
    notes = dict(re.findall(r"^\[\^([\w-]+)\]: (.+)$", text, re.MULTILINE))
    used = set(re.findall(r"\[\^([\w-]+)\](?!:)", text))
    assert used == set(notes)
    for name, note in notes.items():
        assert re.search(r"https://|\.md\)|`\w+/", note), f"[^{name}] names neither a page nor a file"
