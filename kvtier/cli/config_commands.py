"""``kvtier config``: configuration files, from the first one to what an upgrade changes in it."""

from __future__ import annotations

import typer

from kvtier.cli import config_diff, config_init, config_show, config_validate

app = typer.Typer(help="Write, check, show and compare configurations.", no_args_is_help=True)
app.command()(config_init.init)
app.command()(config_validate.validate)
app.command()(config_show.show)
app.command()(config_diff.diff)
