"""The tree of commands. Every module named here must be cheap to import: ``kvtier --help`` imports them all."""

from __future__ import annotations

import inspect
from typing import Annotated

import typer

from kvtier import __version__
from kvtier.cli import (
    bench,
    calibrate,
    compact,
    config_commands,
    demo,
    doctor,
    eval_cold_page,
    eval_compaction,
    eval_lossless,
    eval_round_trip,
    eval_triattention,
    explain,
    ls,
    pin,
    purge,
    replay,
    serve,
    size,
    top,
    torture,
)

app = typer.Typer(
    help="Cold KV cache pages as NVFP4, kept in host memory, on NVMe and beyond.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"kvtier {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


app.add_typer(size.app, name="size")
app.command()(demo.demo)
app.add_typer(bench.app, name="bench")
app.command()(replay.replay)
app.command()(serve.serve)
app.add_typer(config_commands.app, name="config")
app.command()(top.top)
app.command()(explain.explain)
app.command()(ls.ls)
app.command()(purge.purge)
app.command()(pin.pin)
app.command()(doctor.doctor)
app.command()(torture.torture)
app.command()(calibrate.calibrate)
app.add_typer(compact.app, name="compact")

evaluations = typer.Typer(help="What a method costs and gains on a real model.", no_args_is_help=True)
evaluations.command("cold-page")(eval_cold_page.evaluate)
evaluations.command("round-trip")(eval_round_trip.evaluate)
evaluations.command("lossless")(eval_lossless.evaluate)
evaluations.command("triattention")(eval_triattention.evaluate)
evaluations.command("compaction")(eval_compaction.evaluate)
app.add_typer(evaluations, name="eval")


def _unwrap(commands: typer.Typer) -> None:
    """Docstrings are wrapped for whoever reads the code; a terminal of another width wraps paragraphs by itself."""
    for command in commands.registered_commands:
        if command.help is None and command.callback is not None:
            paragraphs = inspect.cleandoc(command.callback.__doc__ or "").split("\n\n")
            command.help = "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs)
    for group in commands.registered_groups:
        if group.typer_instance is not None:
            _unwrap(group.typer_instance)


_unwrap(app)
