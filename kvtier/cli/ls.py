"""``kvtier ls``: which pages are stored where, by namespace."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from kvtier.cli.place import Json, TokenFile, Where, place_of, printable

if TYPE_CHECKING:
    from rich.table import Table

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def ls(where: Where = "http://127.0.0.1:9404", token_file: TokenFile = None, json_output: Json = False) -> None:
    """List what is stored, by namespace and tier: pages, their bytes, and those they had on the device.

    A running engine or server is asked over its HTTP port; a directory must not be open in one. The token may also be
    in the environment variable KVTIER_HTTP_TOKEN.
    """
    from rich.console import Console

    place = place_of(where, token_file)
    rows, not_listed = place.rows()
    if json_output:
        typer.echo(json.dumps({"namespaces": rows, "not_listed": not_listed}))
        return
    console = Console()
    if rows:
        console.print(table(rows))
    else:
        typer.echo(f"{printable(place.name)} holds no pages.")
    for tier in not_listed:
        typer.echo(f"Not listed: {printable(tier)}, which others store in, too.")


def table(rows: list[dict[str, Any]]) -> Table:
    """One line per namespace and tier."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    lines = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    # On a narrow terminal names take several lines; figures, and ids to copy, stay whole.
    lines.add_column("namespace", overflow="fold", min_width=12)
    lines.add_column("tier", overflow="fold")
    for column in ("pages", "stored", "on device", "pinned"):
        lines.add_column(column, justify="right", no_wrap=True)
    lines.add_column("what", overflow="fold")
    for row in rows:
        hot = "" if row["hot_bytes"] is None else size(row["hot_bytes"])
        pinned = f"{row['pinned_pages']:,}" if row["pinned_pages"] else ""
        cells = (row["namespace"], row["tier"], f"{row['pages']:,}", size(row["cold_bytes"]), hot, pinned, what(row))
        lines.add_row(*(Text(printable(cell)) for cell in cells))  # names are others': no markup, no escapes
    return lines


def what(row: dict[str, Any]) -> str:
    """A namespace in words; nothing where nobody described it."""
    d = row["description"]
    if d is None:
        return ""
    parts = [d["model"], _codec(d["codec"]), d["dtype"], f"{d['page_tokens']} tokens", d["shard"]]
    parts += [f"lora {d['lora']}"] if d["lora"] else []
    parts += [f"generation {d['generation'][:8]}"] if d["generation"] else []
    parts += ["salted"] if d["salted"] else []
    return ", ".join(part for part in parts if part)


def _codec(policy: str) -> str:
    """The name in what a namespace says of its codec; all of it where that is no JSON list."""
    try:
        name = json.loads(policy)[0]
    except (ValueError, LookupError, TypeError, RecursionError):
        return policy
    return name if isinstance(name, str) else policy


def size(nbytes: int) -> str:
    """For people."""
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{nbytes} B"
