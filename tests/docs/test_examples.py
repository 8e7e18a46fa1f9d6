"""Every program in examples/ does what it says, stays small, and is listed."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
LINES_MAX = 60
SAYS = {
    "compact_context": "456 tokens: 912 of 1824 rows kept",
    "embed_store": "got 8 of 8 pages, 3.20 times smaller",
    "mirrored_tier": "get: ['hit', 'hit', 'hit', 'hit']",
    "prefix_cache": "restored 288, computed 15 tokens",
    "redis_client": "after a restart: 5000 bytes",
    "size_tiers": "host memory   1024 GB              25.0          31.4",
}
WITH_ENGINES = {
    "compacted_client": "tests/engines/sglang/test_launchers.py",
    "lmcache_server": "tests/engines/lmcache/test_examples.py",
    "sglang_offline": "tests/engines/sglang/test_examples.py",
}


def programs() -> list[str]:
    return sorted(path.stem for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", sorted(SAYS))
def test_it_runs_and_says_what_it_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: importing torch and transformers once more for each takes longer than all of them."""
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert SAYS[name] in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_each_is_run_by_a_test_and_is_listed() -> None:
    assert programs() == sorted({*SAYS, *WITH_ENGINES})
    listed = EXAMPLES.joinpath("README.md").read_text()
    for name in programs():
        assert f"[{name}.py]({name}.py)" in listed, f"examples/README.md does not list {name}.py"
    for name, test in WITH_ENGINES.items():
        assert f"{name}.py" in EXAMPLES.parent.joinpath(test).read_text(), f"{test} does not run {name}.py"


@pytest.mark.parametrize("name", programs())
def test_it_is_small_and_says_what_it_is_for(name: str) -> None:
    source = EXAMPLES.joinpath(f"{name}.py").read_text()
    assert len(source.splitlines()) < LINES_MAX
    assert ast.get_docstring(ast.parse(source))
