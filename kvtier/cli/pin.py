"""``kvtier pin``: keep the pages of a namespace from being evicted."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvtier.cli.ls import size
from kvtier.cli.place import DryRun, Json, Named, TokenFile, Where, place_of


def pin(
    where: Where,
    namespace: Named,
    end: Annotated[bool, typer.Option("--end", help="Let them be evicted again.")] = False,
    dry_run: DryRun = False,
    token_file: TokenFile = None,
    json_output: Json = False,
) -> None:
    """Keep a namespace's pages, those that are stored now, until --end; after a restart too, where they are on NVMe.

    At most half of the host tier can be pinned. Pages that are stored later are not.
    """
    done = place_of(where, token_file).act("unpin" if end else "pin", namespace, dry_run=dry_run)
    if json_output:
        typer.echo(json.dumps({**done, "dry_run": dry_run}))
        return
    verb = "unpinned" if end else "pinned"
    typer.echo(f"{'would be ' if dry_run else ''}{verb}: {done['pages']} pages, {size(done['cold_bytes'])}")
    if not end and (forgotten := done["pages"] - done.get("remembered_pages", 0)):
        typer.echo(f"{forgotten} of them are pinned until the process ends, not after a restart", err=True)
    if done.get("refused_pages"):
        typer.echo(f"not pinned: {done['refused_pages']} pages, since at most half of the host tier can be", err=True)
