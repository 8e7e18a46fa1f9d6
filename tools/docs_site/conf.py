"""Sphinx builds the site from the pages as they lie in the repository: README.md and docs/, in Markdown (MyST).

    make docs    # into build/site; warnings, broken links and pages that nothing leads to are errors

Nothing is fetched while it builds, and its pages load nothing from elsewhere.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tools.docs_site.navigation import INDEXED, all_pages, inner_pages, sections  # noqa: E402
from tools.docs_site.reference import UnknownNameError, as_myst, read_module  # noqa: E402

project = "kvtier"
project_copyright = "the kvtier developers, Apache-2.0"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "README"
include_patterns = all_pages(ROOT)
suppress_warnings = [
    "myst.header",  # tables of results that are included elsewhere begin with a smaller heading
    "ref.python",  # types in signatures that no page describes, such as `type`
]

myst_heading_anchors = 4
python_maximum_signature_line_length = 100
add_module_names = False
toc_object_entries_show_parents = "hide"
highlight_language = "none"

html_theme = "furo"
html_title = "kvtier"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False


class ApiModule(SphinxDirective):
    """``{api} kvtier.abc.tier`` describes a module, ``{api} kvtier.store`` with names below only those."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        try:
            text = as_myst(read_module(ROOT, name), " ".join(self.content).split())
        except UnknownNameError as e:
            raise self.error(str(e)) from e
        self.env.note_dependency(str(ROOT.joinpath(*name.split(".")).with_suffix(".py")))
        parsed: list[nodes.Node] = self.parse_text_to_nodes(text, offset=self.content_offset)
        return parsed


def add_navigation(app: Sphinx, page: str, source: list[str]) -> None:
    """Appends the table of contents that the navigation is made of, and lets links to a folder lead to its README."""
    if page == root_doc:
        for section in sections(ROOT):
            source[0] += _toctree(section.pages, section.caption)
    elif page in {f"{folder}/README" for folder in INDEXED}:
        source[0] += _toctree(inner_pages(ROOT, f"{page}.md"))
    elif page == "docs/README":
        source[0] = "---\norphan: true\n---\n" + source[0]
    here = ROOT.joinpath(page).parent

    def led(match: re.Match[str]) -> str:
        target = match[1]
        return f"]({target.rstrip('/')}/README.md)" if here.joinpath(target, "README.md").is_file() else match[0]

    source[0] = re.sub(r"\]\(([^)\s#:]+)\)", led, source[0])


def _toctree(pages: tuple[str, ...] | list[str], caption: str = "") -> str:
    lines = ["", "", "```{toctree}", ":hidden:", *([f":caption: {caption}"] if caption else []), ""]
    return "\n".join([*lines, *(f"/{page.removesuffix('.md')}" for page in pages), "```", ""])


def write_index(app: Sphinx, error: Exception | None) -> None:
    """The site's first page under the name that servers look for."""
    if error is None and app.builder.format == "html":
        shutil.copyfile(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("api", ApiModule)
    app.connect("source-read", add_navigation)
    app.connect("build-finished", write_index)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
