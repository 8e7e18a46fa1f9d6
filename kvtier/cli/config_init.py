"""``kvtier config init``: a first configuration file, with comments, for a machine's size."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.config_presets import Preset
from kvtier.cli.options import nearest_there
from kvtier.errors import ConfigError, TierPathError

_GIB = 1 << 30
_MIB = 1 << 20
_SHARE_OF_FREE = 0.8
"""A file system that is full is slow, and others want to write there, too."""


def init(
    file: Annotated[str, typer.Argument(help="Where to write; - is standard output.")] = "kvtier.yaml",
    preset: Annotated[Preset, typer.Option(help="Who is going to read the file.")] = Preset.SINGLE_NODE,
    memory: Annotated[
        str,
        typer.Option(
            help="Memory for pages, such as 64GiB.",
            show_default="half of this machine's or container's; for client an eighth",
        ),
    ] = "",
    disk: Annotated[
        str, typer.Option(help="Disk for pages, such as 1TiB.", show_default="four fifths of what is free at --path")
    ] = "",
    path: Annotated[str, typer.Option(help="Directory on a local NVMe disk.")] = "/var/lib/kvtier",
    url: Annotated[
        str, typer.Option(help="Of Redis or Valkey, for redis-cluster.")
    ] = "rediss://cache-1:6379,cache-2:6379",
    socket: Annotated[str, typer.Option(help="Unix socket of kvtier serve.")] = "/run/kvtier/cache.sock",
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it is there.")] = False,
) -> None:
    """Write a configuration file with comments, sized to this machine or to --memory and --disk.

    single-node, sglang, lmcache: an engine with memory and a disk of its own. sidecar, node: kvtier serve beside one
    engine, or for all of a machine. client: an engine beside such a server. redis-cluster: engines that share pages.
    """
    from kvtier.cli.config_presets import text_of
    from kvtier.cli.config_text import size_text
    from kvtier.cli.options import check_sizes
    from kvtier.config import parse_bytes

    check_sizes(memory=memory or None, disk=disk or None)
    for option, given in (("--memory", memory), ("--disk", disk)):
        if given and parse_bytes(given) < _MIB:
            raise ConfigError(f"{option} {given} is less than a page or two: give it a unit, such as 64GiB")
    host_bytes = parse_bytes(memory) if memory else _share_of_memory(preset)
    disk_bytes = parse_bytes(disk) if disk else _most_of_disk(Path(path).expanduser())
    text = text_of(
        preset, size_text(host_bytes), size_text(disk_bytes), max_value=size_text(min(512 * _MIB, host_bytes)),
        path=path, url=url, socket=socket,
    )  # fmt: skip
    if file == "-":
        sys.stdout.write(text)
        return
    _write(Path(file), text, force)
    typer.echo(f"{file}: {preset.value}, {size_text(host_bytes)} of memory; next: kvtier config validate {file}")


def _share_of_memory(preset: Preset) -> int:
    """Half of it, except for an engine's own few pages beside a server that has taken its half."""
    from kvtier.cli.doctor_machine import memory_bytes

    total, _ = memory_bytes()
    if not total:
        raise ConfigError("--memory is missing: this system does not say how much there is; give a size such as 64GiB")
    return _rounded(total / (8 if preset is Preset.CLIENT else 2))


def _most_of_disk(path: Path) -> int:
    found = os.statvfs(nearest_there(path.absolute()))
    return _rounded(found.f_bavail * found.f_frsize * _SHARE_OF_FREE)


def _rounded(nbytes: float) -> int:
    """Down to whole GiB, of little to whole MiB."""
    unit = _GIB if nbytes >= 4 * _GIB else _MIB
    return max(unit, int(nbytes // unit) * unit)


def _write(file: Path, text: str, force: bool) -> None:
    try:
        with file.open("w" if force else "x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise ConfigError(
            f"{str(file)!r} is there already: name another file, or give --force to overwrite it"
        ) from None
    except OSError as error:
        raise TierPathError(f"{str(file)!r} cannot be written: {error.strerror}; name another file") from None
