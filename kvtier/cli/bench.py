"""``kvtier bench``: what the parts can do on this machine, each figure beside a baseline measured in the same run."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier.cli.options import THREADS_MAX, at_least, at_most, check_writable
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

app = typer.Typer(help="Measure codecs, tiers, the store and the cache server on this machine.", no_args_is_help=True)

_KEY_FORMS = ("nvfp4_offset", "nvfp4_token", "k8v4", "2fp4")
_ROTARY_FORMS = ("nvfp4 rope=2fp4", "nvfp4 rope=fp8", "nvfp4 rope=keep")
_CODECS = ("nvfp4", *_KEY_FORMS, *_ROTARY_FORMS, "lossless", "raw")
_CODEC_DTYPES = ("bf16", "fp16", "fp32", "fp8_e4m3")
_HOT_LAYOUTS = ("nhd", "hnd", "seq")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON list of objects, nothing else on stdout.")]


@app.command()
def codec(
    codec: Annotated[
        list[str] | None, typer.Option(help=f"Any of {', '.join(_CODECS)}. Repeatable; default all.")
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help=f"Any of {', '.join(_CODEC_DTYPES)}. Repeatable; default all but fp32."),
    ] = None,
    threads: Annotated[list[int] | None, typer.Option(help="Repeatable; default 1.")] = None,
    impl: Annotated[
        list[str] | None,
        typer.Option(help="An instruction set (avx512, avx2, scalar) or reference. Repeatable; default the fastest."),
    ] = None,
    hot_layout: Annotated[str | None, typer.Option(help="nhd, hnd or seq; default nhd.")] = None,
    as_json: AsJson = False,
) -> None:
    """Encode and decode against memcpy of the same bytes, plain nvfp4, and torchao and LMCache where installed."""
    for name in codec or ():
        if name not in _CODECS:
            raise ConfigError(f"--codec {name}: use one of {', '.join(_CODECS)}")
    for name in dtype or ():
        if name not in _CODEC_DTYPES:
            raise ConfigError(f"--dtype {name}: use one of {', '.join(_CODEC_DTYPES)}")
    for count in threads or ():
        at_least(1, threads=count)
        at_most(THREADS_MAX, threads=count)
    _check_impls(impl or [])
    if hot_layout not in (None, *_HOT_LAYOUTS):
        raise ConfigError(f"--hot-layout {hot_layout}: use one of {', '.join(_HOT_LAYOUTS)}")
    chosen = {"codecs": codec, "dtypes": dtype, "threads": threads, "impls": impl}
    options: dict[str, Any] = {name: tuple(value) for name, value in chosen.items() if value}
    if hot_layout is not None:
        options["hot_layout"] = hot_layout
    _show("kvtier.cli.bench_codec", "codecs", as_json, options)


@app.command()
def tier(
    directory: Annotated[
        Path | None, typer.Option(help="On the device to measure. Default: where temporary files go.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Put and get of every local tier, against memcpy or fio (where it is installed)."""
    if directory is not None:
        check_writable("--directory", directory)
    _show("kvtier.cli.bench_tier", "tiers", as_json, {"directory": directory})


@app.command()
def server(as_json: AsJson = False) -> None:
    """The cache server beside redis-server, and our client beside redis-py: CPU per byte."""
    _show("kvtier.cli.bench_server", "server", as_json, {})


@app.command()
def store(as_json: AsJson = False) -> None:
    """The whole way of a page through the store: offload, lookup, and what they cost their caller."""
    _show("kvtier.cli.bench_store", "store", as_json, {})


@app.command()
def lmcache(
    directory: Annotated[
        Path | None, typer.Option(help="On the disk to measure. Default: where temporary files go.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="The more, the less it matters what else runs; default 7.")] = None,
    link: Annotated[
        str | None, typer.Option(help="Speed of the way to Redis, such as 10gbit; as root. Default: loopback as it is.")
    ] = None,
    kv: Annotated[
        Path | None,
        typer.Option(
            help="K and V of a model, stored in the place of random values: [2, layers, tokens, heads, dim] in numpy's "
            "format, the bits of BF16 values as uint16."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Behind LMCache, beside its own adapters: chunks stored and loaded on the same disk and the same Redis."""
    at_least(1, rounds=rounds)
    if directory is not None:
        check_writable("--directory", directory)
    options: dict[str, Any] = {"directory": directory}
    if rounds is not None:
        options["rounds"] = rounds
    if link is not None:
        from kvtier.cli.shaped_link import parse_rate

        options["link_bits_per_s"] = parse_rate("--link", link)
    if kv is not None:
        if not kv.is_file():
            raise ConfigError(f"--kv {kv}: there is no such file")
        options["kv"] = kv
    _show("kvtier.cli.bench_lmcache", "lmcache", as_json, options)


@app.command()
def sglang(
    model: Annotated[list[str] | None, typer.Option(help="tiny or smollm2; default both.")] = None,
    codec: Annotated[
        list[str] | None, typer.Option(help="Form of the pages, once for each; default auto and none.")
    ] = None,
    cold: Annotated[int | None, typer.Option(help="New prompts per engine; default 9.")] = None,
    hits: Annotated[int | None, typer.Option(help="Restores of each of two prompts; default 4.")] = None,
    cost: Annotated[
        bool, typer.Option("--cost", help="Only what it costs when nothing is found, with the noise beside it.")
    ] = False,
    pairs: Annotated[int | None, typer.Option(help="With --cost: new prompts per engine at most; default 120.")] = None,
    directory: Annotated[
        Path | None, typer.Option(help="On the disk to measure. Default: where temporary files go.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Folder that the table is written into, as a page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time to the first token of a reused prefix in the real SGLang: recomputed, its own cache, both connectors."""
    at_least(6, cold=cold, pairs=pairs)
    at_least(1, hits=hits)
    for name, folder in (("--directory", directory), ("--report", report)):
        if folder is not None:
            check_writable(name, folder)
    chosen = {"models": model, "codecs": codec, "cold": cold, "hits": hits, "cost": cost, "pairs": pairs}
    options: dict[str, Any] = {"directory": directory, "report": report}
    options |= {name: value for name, value in chosen.items() if value}
    _show("kvtier.cli.bench_sglang", "sglang", as_json, options, _SGLANG_COST_COLUMNS if cost else _SGLANG_COLUMNS)


_SGLANG_COLUMNS = ("model", "system", "codec", "served_from", "ttft_s", "runs", "scheduler_ms", "cost_percent")
_SGLANG_COST_COLUMNS = (
    *("model", "system", "codec", "runs", "ttft_s", "cost_percent", "cost_least_percent", "cost_most_percent"),
    *("thread_percent", "workers_percent"),
)


def _check_impls(names: list[str]) -> None:
    from kvtier.kernels import _native

    here = (*_native.isas(), "reference")
    for name in names:
        if name not in here:
            raise ConfigError(f"--impl {name}: this machine has {', '.join(here)}")


def _show(
    module: str, title: str, as_json: bool, options: dict[str, Any], chosen: tuple[str, ...] | None = None
) -> None:
    """Run and print. chosen: of many columns those that fit on a screen."""
    run: Callable[..., list[dict[str, Any]]] = importlib.import_module(module).run
    rows = run(**options)
    if as_json:
        sys.stdout.write(json.dumps(rows) + "\n")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    columns = list(chosen or dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        numeric = all(isinstance(row.get(column, 0), (int, float)) for row in rows)
        table.add_column(column, justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    Console().print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else str(value)
