"""What an installed kvtier shows to its environment. `make package-check` looks at the built packages themselves."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import kvtier

ROOT = Path(__file__).parents[2]
LINKED = ("connectors", "kernels", "storage_backends")


def run(code: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=600, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else done.stderr


def test_bare_folder_names_are_not_importable(tmp_path: Path) -> None:
    """A dependency of SGLang is called `kernels`: ours must never stand before it, wheel or editable."""
    code = (
        "import importlib.util as u, kvtier.kernels._native\n"
        f"specs = [u.find_spec(n) for n in {LINKED!r}]\n"
        "print([s.origin or list(s.submodule_search_locations) for s in specs if s])"
    )
    assert run(code, tmp_path) == "[]"


def test_linked_folders_are_importable_below_kvtier(tmp_path: Path) -> None:
    code = f"import importlib\nfor n in {LINKED!r}: importlib.import_module('kvtier.' + n)\nprint('imported')"
    assert run(code, tmp_path) == "imported"


def test_top_level_folders_are_links_without_init() -> None:
    for name in LINKED:
        assert (ROOT / "kvtier" / name).readlink() == Path("..") / name
        assert not (ROOT / name / "__init__.py").exists(), "it would make `import kernels` work from the checkout"


def test_types_are_shipped() -> None:
    assert (ROOT / "kvtier/py.typed").exists()
    assert (ROOT / "kernels/_native.pyi").exists()


def test_version_is_stated_once() -> None:
    assert kvtier.__version__ == importlib.metadata.version("kvtier")


def test_entry_points_name_what_exists() -> None:
    points = importlib.metadata.distribution("kvtier").entry_points
    found = {(point.group, point.name): point for point in points}
    assert ("console_scripts", "kvtier") in found
    assert ("sglang.srt.plugins", "kvtier") in found
    for point in points:
        file = ROOT / Path(*point.module.split("."))
        assert file.with_suffix(".py").exists() or (file / "__init__.py").exists(), point.value


def test_base_install_needs_no_extra() -> None:
    """Numpy and a few small packages; torch and what needs it come with extras only."""
    required = [r for r in importlib.metadata.requires("kvtier") or [] if "extra ==" not in r]
    names = {re.split(r"[^\w-]", r)[0].lower() for r in required}
    assert names == {"numpy", "prometheus-client", "pydantic", "pyyaml", "rich", "typer", "xxhash"}


def test_environment_pins_are_allowed_by_the_extras() -> None:
    """What the tests ran with is what users may install."""
    pins = dict(
        line.split(";")[0].strip().lower().split("==")
        for line in (ROOT / "tools/constraints.txt").read_text().splitlines()
        if "==" in line
    )
    for requirement in importlib.metadata.requires("kvtier") or []:
        parts = re.match(r"([\w-]+)(?:\[[^]]*\])?\s*(==|>=)?\s*([\w.]+)?", requirement)
        assert parts, requirement
        name, operator, version = parts[1].lower(), parts[2], parts[3]
        if name in {"kvtier"}:
            continue
        assert name in pins, f"{name} is not pinned in tools/constraints.txt"
        if operator == ">=":
            assert _numbers(pins[name]) >= _numbers(version), requirement
        elif operator == "==":
            assert pins[name] == version, requirement


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version))
