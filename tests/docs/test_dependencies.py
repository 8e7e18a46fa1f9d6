"""docs/dependencies.md names what pyproject.toml asks for, and each extra is installed by one of the targets."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="there is no reader of TOML in this Python")

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "dependencies.md").read_text()
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_FOR_USERS = {"docs", "lint", "test"}


def name_of(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement)[0].lower()


def rows(heading: str) -> list[list[str]]:
    section = TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:2] == "| "]
    return table[1:]


def test_what_is_always_installed() -> None:
    assert [row[0].strip("`") for row in rows("Always")] == [name_of(r) for r in PROJECT["dependencies"]]


def test_what_extras_bring() -> None:
    wanted = {
        (extra, name_of(requirement))
        for extra, requirements in PROJECT["optional-dependencies"].items()
        for requirement in requirements
        if extra not in NOT_FOR_USERS and not requirement.startswith("kvtier[")
    }
    listed = [(row[0].strip("`"), row[1].strip("`")) for row in rows("By extra")]
    assert sorted(listed) == sorted(wanted)


def test_every_row_says_why_what_else_and_the_licence() -> None:
    for row in rows("Always") + rows("By extra"):
        assert all(row) and len(row[-3]) > 5, row


def package_extras() -> Any:
    found = importlib.util.spec_from_file_location("package_extras", ROOT / "tools" / "package_extras.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_what_the_check_of_extras_calls_is_there() -> None:
    """The target takes too long for the gate, so it must not be stale when somebody runs it."""
    pytest.importorskip("torch", reason="torch is not installed")
    exec(package_extras().HEAVY["torch"], {})


def test_every_extra_is_installed_by_a_target() -> None:
    module = package_extras()
    checked = {*module.LIGHT, *module.HEAVY}
    assert checked | module.NOT_FOR_USERS == set(PROJECT["optional-dependencies"])
