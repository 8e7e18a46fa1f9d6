"""``kvtier config show``: what a configuration file comes to, defaults included."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Look at a configuration.", no_args_is_help=True)


@app.callback()
def _root() -> None: ...


@app.command()
def show(config: Annotated[Path, typer.Option(help="The configuration file.", show_default=False)]) -> None:
    """Print the effective configuration as YAML. Secrets are shown as ***, those in the environment by their names."""
    import yaml

    from kvtier.config import load_config
    from kvtier.server.auth import PASSWORD_VARIABLE
    from kvtier.server.http import TOKEN_VARIABLE
    from kvtier.server.page import SECRET, masked
    from kvtier.storage_backends.redis.options import PASSWORD_VARIABLE as REDIS
    from kvtier.storage_backends.redis.options import SENTINEL_PASSWORD_VARIABLE as SENTINEL

    typer.echo(yaml.safe_dump(masked(load_config(config)), sort_keys=False), nl=False)
    for variable in (PASSWORD_VARIABLE, TOKEN_VARIABLE, REDIS, SENTINEL):
        if os.environ.get(variable):
            typer.echo(f"# {variable} = {SECRET}, from the environment")
