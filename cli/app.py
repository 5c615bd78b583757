"""The command `sluice`."""

import os
from typing import Annotated

import typer

from cli.commands import CommandGroup

app = typer.Typer(
    name="sluice",
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


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
    """Run the Sluice platform on this machine, and operate it.

    State lives in $SLUICE_HOME (default: .sluice in the current directory).
    """
    if not context:
        return
    from cli.stack.home import Home, parse_env
    from cli.stack_commands import fail

    file = Home.find().context_file(context)
    try:
        os.environ.update(parse_env(file.read_text()))
    except OSError:
        known = ", ".join(sorted(path.stem for path in file.parent.glob("*.env"))) or "none"
        raise fail(
            f"there is no context {context!r} in {file.parent}; choose one of: {known}"
        ) from None
