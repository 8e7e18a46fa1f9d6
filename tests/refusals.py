"""What a command says that it refuses."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvtier.cli import main


def assert_refused(capsys: pytest.CaptureFixture[str], args: str, named: Iterable[str]) -> None:
    """Exit status 2, nothing on stdout, and one line on stderr that has all that is `named`."""
    with pytest.raises(SystemExit) as done:
        main(args.split())
    captured = capsys.readouterr()
    assert done.value.code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    for words in named:
        assert words in captured.err
