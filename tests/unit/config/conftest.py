"""``kvtier config`` on a machine that is the same everywhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier.cli import config_checks, main

from .blocks import GIB, VARIABLES, Run


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with 64 GiB of memory and nothing in the environment, wherever this runs."""
    from kvtier.cli import doctor_machine

    for module in (doctor_machine, config_checks):
        monkeypatch.setattr(module, "memory_bytes", lambda: (64 * GIB, 60 * GIB))
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_:
            main(["config", *arguments])
        out, err = capsys.readouterr()
        return int(exit_.value.code or 0), out, err

    return run


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    numbers = itertools.count()

    def write(content: Any, mode: int = 0o600) -> str:
        path = tmp_path / f"{next(numbers)}.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
        path.chmod(mode)
        return str(path)

    return write
