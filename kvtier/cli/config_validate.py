"""``kvtier config validate``: whether files can work, before a process is started with them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.cli.config_sources import Block, Source
    from kvtier.cli.doctor_line import Finding


@dataclass(frozen=True, slots=True)
class Said:
    """A finding about one option of one file. line: from 1; 0 where it is not known."""

    file: str
    line: int
    option: str
    value: Any
    finding: Finding

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file

    def as_json(self) -> dict[str, Any]:
        said = {"file": self.file, "line": self.line or None, "option": self.option or None, "value": self.value}
        return {**said, "state": self.finding.state.value, "text": self.finding.text, "fix": self.finding.fix}


def validate(
    files: Annotated[
        list[str], typer.Argument(help="YAML or JSON: kvtier's block, or an engine's options with one; - is stdin.")
    ],
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check configuration files: each mistake by file, line, option and value, with the way out.

    Warnings are plausible mistakes. Nothing is started and nobody is asked: kvtier doctor tries the tiers. Exit status
    1 if a file cannot work.
    """
    from kvtier.cli.doctor import print_finding
    from kvtier.cli.doctor_line import State

    said = [one for file in files for one in examine(file)]
    bad = sum(one.finding.state is State.BAD for one in said)
    warned = sum(one.finding.state is State.WARNING for one in said)
    failed = bool(bad or (strict and warned))
    if as_json:
        print(json.dumps({"ok": not failed, "findings": [one.as_json() for one in said]}, indent=2, default=str))
    else:
        for one in said:
            print_finding(one.finding)
        typer.echo(f"{bad} mistakes, {warned} warnings, in {len(files)} {'file' if len(files) == 1 else 'files'}")
    if failed:
        raise typer.Exit(1)


def examine(file: str) -> Iterator[Said]:
    """Everything there is to say about one file, in the order of its lines."""
    from kvtier.cli.config_sources import read_source

    try:
        source = read_source(file)
    except ConfigError as error:
        yield Said(file, 0, "", None, _refused(file, str(error)))
        return
    said = [*_own(source), *(one for block in source.blocks for one in _block(source, block))]
    yield from sorted(said, key=lambda one: one.line)


def _own(source: Source) -> Iterator[Said]:
    """What is wrong with the file around its blocks."""
    from kvtier.cli.doctor_line import warning

    for mistake in source.mistakes:
        yield _said(source, mistake.place, mistake.option, mistake.value, lambda at, m=mistake: _refused(at, m.text))
    for name, line in source.twice:
        at = f"{source.path}:{line}"
        yield Said(
            source.path,
            line,
            name,
            None,
            warning(at, f"option {name!r} is given twice; the last one counts", "remove one"),
        )


def _block(source: Source, block: Block) -> Iterator[Said]:
    from kvtier.cli.config_checks import remarks
    from kvtier.cli.config_lmcache import lmcache_remarks
    from kvtier.cli.config_sources import SERDE
    from kvtier.cli.doctor_line import Finding, State, good

    if block.elsewhere:
        told = f"{block.what}: its block is in {block.elsewhere}; validate that file, too"
        yield _said(source, block.place, "", None, lambda at: good(at, told))
        return
    config, mistakes = block.read()
    for mistake in mistakes:
        place = (*block.place, *mistake.place)
        yield _said(source, place, mistake.option, mistake.value, lambda at, m=mistake: _refused(at, m.text))
    if config is None:
        return
    worst = State.GOOD
    path = None if source.path == "-" else Path(source.path)
    for remark in (*remarks(config, block, path), *lmcache_remarks(config, block)):
        state = State.BAD if remark.grade == "error" else State.WARNING
        worst = State.BAD if State.BAD in (worst, state) else state

        def finding(at: str, r: Any = remark, s: State = state) -> Finding:
            return (
                Finding(at, s, f"option {r.option!r} = {r.value!r} {r.text}", r.fix) if r.fix else _refused(at, r.text)
            )

        yield _said(source, (*block.place, *remark.place), remark.option, remark.value, finding)
    if worst is not State.BAD:
        tiers = [tier.type for tier in getattr(config, "tiers", ())]
        held = f"tiers {', '.join(tiers)}" if tiers else "methods for live caches"
        text = block.what if block.what == SERDE else f"{block.what}: {held}"
        text += " and kvtier serve" if getattr(config, "server", None) is not None else ""
        yield _said(source, block.place, "", None, lambda at: good(at, text))


def _said(source: Source, place: tuple[Any, ...], option: str, value: Any, finding: Any) -> Said:
    line = source.line(place)
    return Said(source.path, line, option, value, finding(f"{source.path}:{line}" if line else source.path))


def _refused(at: str, text: str) -> Finding:
    """A mistake; its text says what the value should be, which is the way out."""
    from kvtier.cli.doctor_line import State, bad, refused

    found = refused(at, text)
    match = re.search(r": (?:Input should be|must be) (?=\S)(.+)$", text)
    if found.state is not State.BAD or found.fix != "see the text" or match is None:
        return found
    value = match[1].removeprefix("a valid ").split(", unable to parse")[0]
    return bad(
        at,
        text[: match.start()],
        f"give {'a value ' if value.startswith(('greater', 'less', 'larger')) else ''}{value}",
    )
