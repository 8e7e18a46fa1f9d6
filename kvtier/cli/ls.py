"""``kvtier ls``: which pages are stored where, by namespace."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from kvtier.cli.place import Json, TokenFile, Where, place_of, printable

if TYPE_CHECKING:
    from rich.table import Table

_FIGURES = ("pages", "stored", "on device", "pinned")
_COLUMNS = ("namespace", "tier", *_FIGURES, "what")
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
    """One line per namespace and tier, without columns that are empty in all."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    lines = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    # On a narrow terminal names take several lines; figures, and ids to copy, stay whole.
    cells = [_cells(row) for row in rows]
    for name in _COLUMNS:
        if not any(line[name] for line in cells):  # of kvtier serve nobody knows more than that
            continue
        if name in _FIGURES:
            lines.add_column(name, justify="right", no_wrap=True)
        else:
            lines.add_column(name, overflow="fold", min_width=12 if name == "namespace" else None)
    shown = [str(column.header) for column in lines.columns]
    for line in cells:
        lines.add_row(*(Text(printable(line[name])) for name in shown))  # names are others': no markup, no escapes
    return lines


def _cells(row: dict[str, Any]) -> dict[str, str]:
    return {
        "namespace": row["namespace"],
        "tier": row["tier"],
        "pages": f"{row['pages']:,}",
        "stored": size(row["cold_bytes"]),
        "on device": "" if row["hot_bytes"] is None else size(row["hot_bytes"]),
        "pinned": f"{row['pinned_pages']:,}" if row["pinned_pages"] else "",
        "what": what(row),
    }


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
