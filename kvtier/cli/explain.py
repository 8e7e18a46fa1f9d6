"""``kvtier explain``: what became of each page of one request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from kvtier.errors import KVTierError

if TYPE_CHECKING:
    from rich.table import Table


def explain(
    url: Annotated[str, typer.Argument(help="Of a connector's HTTP port, or of kvtier serve's.", show_default=False)],
    request: Annotated[str, typer.Argument(help="The request's id, as the engine names it.", show_default=False)],
    token_file: Annotated[Path | None, typer.Option(help="Holds the token, where one is needed.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say of each page of a request where it was, why it was not found, what it weighs and when it was there.

    The option explain_sample in the configuration says which share of the requests is kept; 0 by default.
    """
    from rich.console import Console

    from kvtier.cli.top import Client, token_of

    status, record = Client(url, token_of(token_file)).get(f"/api/explain?request={quote(request, safe='')}")
    if status != 200 or not isinstance(record, dict):
        raise KVTierError(record["error"] if isinstance(record, dict) else f"{url} answered with status {status}")
    if json_output:
        typer.echo(json.dumps(record))
        return
    console = Console()
    console.print(record["summary"], highlight=False)
    console.print(table(record))
    if record["superseded_pages"]:
        console.print(f"{record['superseded_pages']} more pages were on the device by the time it started.")


def table(record: dict[str, Any]) -> Table:
    """One line per page."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    lines = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("page", "key", "where it was", "bytes", "there after"):
        lines.add_column(column, justify="right" if column in ("page", "bytes", "there after") else "left")
    for page in record["pages"]:
        ready = "" if page["ready_s"] is None else f"{page['ready_s'] * 1e3:.1f} ms"
        nbytes = f"{page['bytes']:,}" if page["bytes"] else ""
        lines.add_row(str(page["index"]), page["key"], page["outcome"], nbytes, ready)
    return lines
