"""``kvtier doctor``: whether a configuration works on this machine, one line per thing, with the fix."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.cli.doctor_line import Finding
    from kvtier.config import Config

_MARKS = {"good": ("ok", "green"), "warning": ("warn", "yellow"), "bad": ("FAIL", "bold red"), "none": ("-", "dim")}


def doctor(
    config: Annotated[Path, typer.Option(help="The file with the configuration block.")] = Path("kvtier.yaml"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Try every tier with a real put and get, and look at the limits, disks, servers and plugins that they need.

    Leaves nothing behind, touches no stored page, and works beside a running engine. Exit status 1 if something does
    not work; warnings alone leave it 0.
    """
    from kvtier.cli.doctor_line import State

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    findings = []
    for finding in examine(config):
        findings.append(finding)
        if not as_json:
            print_finding(finding)
    failed = sum(finding.state is State.BAD for finding in findings)
    warned = sum(finding.state is State.WARNING for finding in findings)
    if as_json:
        print(json.dumps({"ok": not failed, "findings": [finding.as_json() for finding in findings]}, indent=2))
    else:
        typer.echo(f"{failed} failed, {warned} warnings, of {len(findings)}")
    if failed:
        raise typer.Exit(1)


def examine(path: Path) -> Iterator[Finding]:
    """Everything there is to say about the configuration file at `path`."""
    from kvtier.cli.doctor_line import good, refused
    from kvtier.config import load_config

    try:
        config = load_config(path)
    except ConfigError as error:
        yield refused("configuration", error)
        return
    yield good("configuration", f"{path}: tiers {', '.join(tier.type for tier in config.tiers)}")
    yield from _examine(config)


def _examine(config: Config) -> Iterator[Finding]:
    from kvtier.cli.doctor_disks import check_tiers
    from kvtier.cli.doctor_engines import check_engines, check_extras, check_gpu, check_way
    from kvtier.cli.doctor_machine import check_machine
    from kvtier.cli.doctor_network import check_http, check_redis, check_server
    from kvtier.config import RedisTierConfig

    yield from check_machine(config)
    yield from check_tiers(config)
    for tier in config.tiers:
        if isinstance(tier, RedisTierConfig):
            yield from check_redis(tier)
    yield from check_way(config)
    yield from check_extras(config)
    yield from check_server(config)
    yield from check_http(config)
    yield check_gpu()
    yield from check_engines()


def print_finding(finding: Finding) -> None:
    """One line for people, coloured where that is seen."""
    from rich.console import Console
    from rich.text import Text

    mark, style = _MARKS[finding.state.value]
    line = Text()
    line.append(f"{mark:<5}", style=style)
    line.append(f"{finding.what}: ", style="bold")
    # One line each, for whoever reads or greps it: messages of libraries have more.
    line.append(" ".join(finding.text.splitlines()))
    if finding.fix:
        line.append(f" -> {' '.join(finding.fix.splitlines())}", style=style)
    Console(soft_wrap=True, highlight=False).print(line)
