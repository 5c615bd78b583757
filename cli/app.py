"""The commands of `sluice`, put together."""

import os
from importlib.metadata import version as installed_version
from typing import Annotated

import typer

from cli import (
    admin_commands,
    certificate_commands,
    compose_commands,
    config_commands,
    explain,
    stack_commands,
    top_commands,
    trace_commands,
)
from cli.stack.home import Home, parse_env
from cli.stack_commands import fail

app = typer.Typer(
    name="sluice",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
stack_commands.register(app)
admin_commands.register(app)
explain.register(app)
trace_commands.register(app)
top_commands.register(app)
compose_commands.register(app)
config_commands.register(app)
certificate_commands.register(app)


@app.callback()
def choose(
    context: Annotated[
        str,
        typer.Option(
            envvar="SLUICE_CONTEXT",
            help="Installation to talk to: addresses and key of $SLUICE_HOME/contexts/NAME.env.",
        ),
    ] = "",
) -> None:
    """Run the Sluice platform on this machine, and look after it.

    State lives in $SLUICE_HOME (default: .sluice in the current directory).
    """
    if not context:
        return
    file = Home.find().context_file(context)
    try:
        os.environ.update(parse_env(file.read_text()))
    except OSError:
        known = ", ".join(sorted(path.stem for path in file.parent.glob("*.env"))) or "none"
        raise fail(
            f"there is no context {context!r} in {file.parent}; there are: {known}"
        ) from None


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(installed_version("sluice"))
