"""`sluice version`: prints the version, and the builds of the cores."""

from importlib.metadata import version as installed_version

import typer

from cli.builds import core_builds


def version() -> None:
    """Print the version, and the installed builds of the router's and the engine's cores."""
    typer.echo(installed_version("sluice"))
    for core, build in core_builds().items():
        typer.echo(f"{core}: {build}")
