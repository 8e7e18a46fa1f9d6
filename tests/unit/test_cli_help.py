"""What ``--help`` prints, of every command."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import typer

from kvtier.cli.app import app


def commands(of: typer.Typer, *names: str) -> Iterator[tuple[tuple[str, ...], str]]:
    for command in of.registered_commands:
        name = command.name or getattr(command.callback, "__name__", "").replace("_", "-")
        yield (*names, name), command.help or ""
    for group in of.registered_groups:
        assert group.typer_instance is not None
        yield from commands(group.typer_instance, *names, group.name or "")


ALL = dict(commands(app))


@pytest.mark.parametrize("names", ALL, ids=" ".join)
def test_paragraphs_are_wrapped_by_the_terminal_and_not_before(names: tuple[str, ...]) -> None:
    assert ALL[names], "every command says what it does"
    assert not any("\n" in paragraph for paragraph in ALL[names].split("\n\n"))
