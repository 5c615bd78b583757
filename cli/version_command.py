"""`sluice version`."""

from importlib.metadata import version as installed_version

import typer

from cli.builds import core_build


def version() -> None:
    """Print the version, and which build of the router's core is installed."""
    typer.echo(installed_version("sluice"))
    typer.echo(f"router core: {core_build()}")
