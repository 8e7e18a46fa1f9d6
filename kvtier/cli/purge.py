"""``kvtier purge``: delete the pages of a namespace."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from kvtier.cli.ls import size
from kvtier.cli.place import DryRun, Json, Named, TokenFile, Where, place_of, printable
from kvtier.errors import ConfigError


def purge(
    where: Where,
    namespace: Named,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    dry_run: DryRun = False,
    token_file: TokenFile = None,
    json_output: Json = False,
) -> None:
    """Delete a namespace's pages from host memory and disk, and from shared tiers those that are known from there.

    A running engine or server is asked over its HTTP port; a directory must not be open in one. Pages are a cache:
    what is deleted is computed again.
    """
    place = place_of(where, token_file)
    if not (yes or dry_run):
        would = place.act("purge", namespace, dry_run=True)
        if not sys.stdin.isatty():
            raise ConfigError(
                f"{_what(would)} would be deleted, and there is nobody to ask: give --yes, or --dry-run to look"
            )
        names = printable(", ".join(would["namespaces"]))
        typer.confirm(f"Delete {_what(would)} of {names} at {printable(place.name)}?", abort=True, err=True)
    done = place.act("purge", namespace, dry_run=dry_run)
    if json_output:
        typer.echo(json.dumps({**done, "dry_run": dry_run}))
    else:
        for name in done["namespaces"]:
            typer.echo(printable(name))
        typer.echo(f"{'would delete' if dry_run else 'deleted'} {_what(done)}")
    if done.get("pending_pages"):
        typer.echo(
            f"not done yet: {done['pending_pages']} pages are found no longer, but a lower tier still has them, and a "
            "restart may find them; purge again then",
            err=True,
        )
        raise typer.Exit(1)


def _what(done: dict[str, object]) -> str:
    return f"{done['pages']} pages, {size(int(str(done['cold_bytes'])))}"
