"""`sluice version`."""

from importlib.metadata import version as installed_version

import typer


def version() -> None:
    """Print the version."""
    typer.echo(installed_version("sluice"))
