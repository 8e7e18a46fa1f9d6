"""tools/venv.sh where something is missing: it ends at once, before minutes of downloads, and names the way out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = ("awk", "bash", "cat", "cut", "df", "dirname", "env", "flock", "grep", "mkdir", "rm", "sha256sum")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What the script reads of a clone, with nothing built in it."""
    folder = tmp_path / "clone"
    shutil.copytree(ROOT / "tools", folder / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def refusal(clone: Path, **changed: str) -> str:
    """What it says; that it makes nothing is looked at."""
    cache = clone.parent / "cache"
    environ = {**os.environ, "PYTHON": sys.executable, "KVTIER_CACHE": str(cache), **changed}
    script = str(clone / "tools" / "venv.sh")
    done = subprocess.run(
        ["bash", script, "demo"], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done
    assert done.stdout == "", "only the path of a Python that is there"
    assert not [path for path in cache.rglob("*") if path.suffix != ".lock"]
    return done.stderr


def test_no_compiler(clone: Path, tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in PROGRAMS:
        if (found := shutil.which(name)) is not None:
            (programs / name).symlink_to(found)
    said = refusal(clone, PATH=str(programs), CXX="")
    assert "no C++ compiler" in said and "apt install g++" in said and "CXX" in said


def test_an_older_python(clone: Path, tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\ncase $1 in --version) echo Python 3.9.18 ;; *) exit 1 ;; esac\n")
    old.chmod(0o755)
    said = refusal(clone, PYTHON=str(old))
    assert "Python 3.9.18, at least 3.10 is needed; set PYTHON" in said
    assert "set PYTHON to a Python of at least 3.10" in refusal(clone, PYTHON=str(tmp_path / "none"))


def test_a_cache_that_cannot_be_written(clone: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = refusal(clone, KVTIER_CACHE=str(tmp_path / "file" / "cache"))
    assert "cannot be written: set KVTIER_CACHE" in said


def test_no_room(clone: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "df").write_text("#!/bin/sh\necho Filesystem\necho /dev/vda 9999999 9989999 10000 99% /\n")
    (full / "df").chmod(0o755)
    said = refusal(clone, PATH=f"{full}:{os.environ['PATH']}")
    assert "has 10 MB free, 3000 are needed" in said and "set KVTIER_CACHE" in said
