"""Where pages stand in the site's navigation: derived from the pages themselves, so that none can be forgotten.

`docs/README.md` is the map of the guide: its headings are the sections and its links the pages, in their order. The
other folders have an index of their own (a README.md with links), and every page in them must be in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT_PAGES = (
    "README.md",
    "examples/README.md",
    "deploy/README.md",
    "deploy/grafana/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
)
MAP = "docs/README.md"
INDEXED = ("docs/results", "docs/decisions", "docs/api")
"""Folders with an index of their own."""

_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s#]+)(?:#[^)\s]*)?\)")
_FENCED = re.compile(r"^(`{3,}|~{3,}).*?^\1\s*$", re.MULTILINE | re.DOTALL)


class NavigationError(ValueError):
    """A page that no index leads to."""


@dataclass(frozen=True, slots=True)
class Section:
    """caption: a heading of the map. pages: paths from the repository's root."""

    caption: str
    pages: tuple[str, ...]


def all_pages(root: Path) -> list[str]:
    """Every page of the site, as a path from the repository's root."""
    found = sorted(path.relative_to(root).as_posix() for path in root.joinpath("docs").rglob("*.md"))
    return [page for page in ROOT_PAGES if root.joinpath(page).is_file()] + found


def linked_pages(root: Path, page: str) -> list[str]:
    """Pages of the site that `page` links to, each once, in order; a folder stands for its README.md."""
    return list(dict.fromkeys(target for _, target in _links(root, page)))


def sections(root: Path) -> list[Section]:
    """The guide by the headings of its map, then the folders' indexes and the pages at the root.

    Raises NavigationError for pages of docs/ that the map, and of indexed folders that their index does not link to.
    """
    by_caption: dict[str, list[str]] = {}
    placed = {"README.md", MAP}
    for caption, page in _links(root, MAP):
        if page in placed or page in _indexes() or page in ROOT_PAGES or _index_of(page) is not None:
            continue
        placed.add(page)
        by_caption.setdefault(caption or "Start", []).append(page)
    forgotten = [page for page in all_pages(root) if page.startswith("docs/") and _index_of(page) is None]
    forgotten = [page for page in forgotten if page not in placed and page not in _indexes()]
    if forgotten:
        raise NavigationError(f"{MAP} has no link to {', '.join(forgotten)}; add one below the heading it belongs to")
    found = [Section(caption, tuple(pages)) for caption, pages in by_caption.items()]
    further = [page for page in (*_indexes(), *ROOT_PAGES[1:]) if root.joinpath(page).is_file()]
    return [*found, Section("Further", tuple(further))]


def inner_pages(root: Path, index: str) -> list[str]:
    """The pages of an indexed folder in the order of its index. Raises NavigationError where one is missing."""
    folder = index.rpartition("/")[0]
    pages = [page for page in linked_pages(root, index) if _index_of(page) == index]
    forgotten = [page for page in all_pages(root) if _index_of(page) == index and page not in pages]
    if forgotten:
        raise NavigationError(f"{index} has no link to {', '.join(forgotten)}; every page of {folder} belongs there")
    return pages


def _indexes() -> tuple[str, ...]:
    return tuple(f"{folder}/README.md" for folder in INDEXED)


def _index_of(page: str) -> str | None:
    """The index that leads to `page`, None for pages of the guide and for indexes."""
    for folder in INDEXED:
        if page.startswith(folder + "/") and page != f"{folder}/README.md":
            return f"{folder}/README.md"
    return None


def _links(root: Path, page: str) -> Iterator[tuple[str, str]]:
    """(heading above, empty before the first one, page of the site) for every link of `page` to another page."""
    heading = ""
    text = _FENCED.sub("", root.joinpath(page).read_text(encoding="utf-8"))
    known = set(all_pages(root))
    for line in text.splitlines():
        if line.startswith("##"):
            heading = line.lstrip("#").strip()
        for target in _LINK.findall(line):
            if "://" in target:
                continue
            path = root.joinpath(page).parent.joinpath(target).resolve()
            path = path / "README.md" if path.is_dir() else path
            name = path.relative_to(root.resolve()).as_posix() if path.is_relative_to(root.resolve()) else ""
            if name in known and name != page:
                yield heading, name
