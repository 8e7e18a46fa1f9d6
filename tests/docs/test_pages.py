"""The pages hang together: links and anchors lead somewhere, files that are named exist, and what the code says better
is taken from there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from kvtier.config import Config
from tests.docs.pages import ALL, GUIDE, ROOT, anchors, links, name_of, prose

OPERATE = ROOT / "docs" / "operate.md"


@pytest.mark.parametrize("page", ALL, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{name_of(page)}: {target}"
        if anchor:
            assert anchor in anchors(there), f"{name_of(page)}: {target}; {name_of(there)} has {sorted(anchors(there))}"


def test_links_and_anchors_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A title, `code` & [more](x.md)\n\n## Twice\n\n## Twice\n\n[a](b.md#c) ![i](d.png) `[no](e.md)`\n"
    )
    assert links(page) == ["x.md", "b.md#c", "d.png"]
    assert anchors(page) == {"a-title-code--more", "twice", "twice-1"}


@pytest.mark.parametrize("page", GUIDE, ids=name_of)
def test_files_that_are_named_exist(page: Path) -> None:
    for name in re.findall(r"`((?:tests|tools|kvtier|connectors|kernels|storage_backends)/[\w./-]+)`", prose(page)):
        assert (ROOT / name).exists() or re.search(r"[A-Z]{4}", name), f"{name_of(page)}: {name}"


def test_the_map_has_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in links(index)}
    for page in sorted((ROOT / "docs").glob("*.md")):
        assert page == index or page in linked, f"{name_of(page)} is not in docs/README.md"


def test_figures_of_the_readme_are_in_the_results() -> None:
    """Of the table of what was measured; a result that was measured again changes both."""
    rows = re.findall(
        r"^\| .+? \| (.+?) \| \[[^]]+\]\((docs/results/[\w.-]+)\) \|$", (ROOT / "README.md").read_text(), re.M
    )
    assert len(rows) >= 4
    for measured, page in rows:
        for figure in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*[A-Za-z])", measured):
            assert figure in (ROOT / page).read_text(), f"README.md: {figure} is not in {page}: {measured}"


def test_the_page_of_options_is_current() -> None:
    from tools import options_page

    current = options_page.PAGE.read_text(encoding="utf-8")
    assert current == options_page.page(), "run: python tools/options_page.py, and commit docs/options.md"
    for name, model in options_page.blocks():
        assert set(options_page.MEANINGS[name]) == set(model.model_fields), name


# ---- docs/operate.md


def table(heading: str) -> list[list[str]]:
    text = OPERATE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_every_alert_is_explained() -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "grafana" / "kvtier-alerts.yaml").read_text())["groups"][0]["rules"]
    rows = table("What to watch")
    assert [row[0].strip("`") for row in rows] == [rule["alert"] for rule in rules]
    assert all(len(row[1]) > 20 and len(row[2]) > 20 for row in rows)


def option_names(model: Any = Config) -> set[str]:
    names = set()
    for name, field in model.model_fields.items():
        names.add(name)
        stack = [field.annotation]
        while stack:
            annotation = stack.pop()
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                names |= option_names(annotation)
            stack += getattr(annotation, "__args__", ())
    return names


def test_tuned_options_exist() -> None:
    options, named = option_names(), set()
    for row in table("Tuning"):
        for code in re.findall(r"`([^`]+)`", row[1]):
            name = re.split(r"[:=]", code)[0]
            if not code.startswith("--"):
                assert name in options, code
                named.add(name)
    assert len(named) > 20


@pytest.mark.parametrize("page", GUIDE, ids=name_of)
def test_series_that_are_named_exist(page: Path) -> None:
    metrics = (ROOT / "docs" / "metrics.md").read_text()
    names = re.findall(r"`(kvtier_\w+_(?:total|seconds|bytes|ratio|state|pages|requests|tokens|error))\b", prose(page))
    for name in names:
        assert f"`{name}`" in metrics, f"{name_of(page)}: {name}"
