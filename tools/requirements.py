"""Print what pyproject.toml asks for: the base dependencies and those of the named extras, one requirement a line.

Makes an environment of dependencies without kvtier itself. `build-system` is taken as one more extra. With --only the
base dependencies are left out.
Usage: requirements.py [--only] [EXTRA ...]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:  # pip is there wherever this runs, and carries a reader for the Pythons that have none
    from pip._vendor import tomli as tomllib  # type: ignore[import-untyped, unused-ignore]

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"


def requirements(pyproject: dict[str, Any], extras: list[str], *, base: bool = True) -> list[str]:
    """Base requirements, unless they are unwanted, and those of `extras`, where ``kvtier[a,b]`` stands for a and b."""
    project = pyproject["project"]
    optional: dict[str, list[str]] = dict(project["optional-dependencies"])
    optional["build-system"] = pyproject["build-system"]["requires"]
    found: dict[str, None] = dict.fromkeys(project["dependencies"] if base else ())
    waiting = list(extras)
    seen = set()
    while waiting:
        extra = waiting.pop()
        if extra in seen:
            continue
        seen.add(extra)
        if extra not in optional:
            raise SystemExit(f"pyproject.toml has no extra {extra!r}; it has {', '.join(sorted(optional))}")
        for requirement in optional[extra]:
            own = re.fullmatch(r"kvtier\[([\w,\s-]+)\]", requirement)
            if own:
                waiting += [name.strip() for name in own.group(1).split(",")]
            else:
                found[requirement] = None
    return list(found)


if __name__ == "__main__":
    extras_wanted = [argument for argument in sys.argv[1:] if argument != "--only"]
    with PYPROJECT.open("rb") as file:
        print("\n".join(requirements(tomllib.load(file), extras_wanted, base="--only" not in sys.argv[1:])))
