"""`sluice version`: prints the version, and the build of the router's core."""

from importlib.metadata import version as installed_version

import typer

from cli.builds import core_build


def version() -> None:
    """Print the version, and the installed build of the router's core."""
    typer.echo(installed_version("sluice"))
    typer.echo(f"router core: {core_build()}")
