"""``kvtier ls``: which pages are stored where, by namespace."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from kvtier.cli.place import Json, TokenFile, Where, place_of

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
        console.print(f"{place.name} holds no pages.", highlight=False)
    for tier in not_listed:
        console.print(f"Not listed: {tier}, which others store in, too.", highlight=False)


def table(rows: list[dict[str, Any]]) -> Table:
    """One line per namespace and tier."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    lines = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("namespace", "tier", "pages", "stored", "on device", "pinned"):
        lines.add_column(column, justify="left" if column in ("namespace", "tier") else "right", no_wrap=True)
    lines.add_column("what", overflow="fold")
    for row in rows:
        hot = "" if row["hot_bytes"] is None else size(row["hot_bytes"])
        pinned = f"{row['pinned_pages']:,}" if row["pinned_pages"] else ""
        lines.add_row(
            row["namespace"], row["tier"], f"{row['pages']:,}", size(row["cold_bytes"]), hot, pinned, what(row)
        )
    return lines


def what(row: dict[str, Any]) -> str:
    """A namespace in words; nothing where nobody described it."""
    d = row["description"]
    if d is None:
        return ""
    codec = json.loads(d["codec"])[0]
    parts = [d["model"], codec, d["dtype"], f"{d['page_tokens']} tokens", d["shard"]]
    parts += [f"lora {d['lora']}"] if d["lora"] else []
    parts += [f"generation {d['generation'][:8]}"] if d["generation"] else []
    parts += ["salted"] if d["salted"] else []
    return ", ".join(part for part in parts if part)


def size(nbytes: int) -> str:
    """For people."""
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{nbytes} B"
