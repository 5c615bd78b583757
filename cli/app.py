"""The commands of `sluice`, put together."""

from importlib.metadata import version as installed_version

import typer

from cli import admin_commands, explain, stack_commands, top_commands, trace_commands

app = typer.Typer(
    name="sluice",
    help=(
        "Run the Sluice platform on this machine, and look after it.\n\n"
        "State lives in $SLUICE_HOME (default: .sluice in the current directory)."
    ),
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


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(installed_version("sluice"))
