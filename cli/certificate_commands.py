"""`sluice certificates`: creates self-signed certificates for mutual TLS."""

from pathlib import Path
from typing import Annotated

import typer

from cli.stack_commands import fail
from sluice.identity import DOMAIN

certificates = typer.Typer(no_args_is_help=True, help="Certificates for mutual TLS.")


@certificates.command()
def create(
    *,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory of the certificates; its CAs are kept.")
    ],
    days: Annotated[int, typer.Option(min=1, max=825, help="Validity of certificates.")] = 90,
    domain: Annotated[
        str, typer.Option(help="Suffix of the roles' DNS names; MTLS__DOMAIN of all processes.")
    ] = DOMAIN,
    host: Annotated[
        list[str] | None,
        typer.Option(help="Further DNS name or address in all certificates; may be repeated."),
    ] = None,
) -> None:
    """Make a CA for Sluice's processes, one for callers of engines, and a certificate per role.

    A second run renews the certificates and keeps the CAs. Running processes use the new
    certificates for their next connections. Store the CAs' keys in DIR/private elsewhere.
    """
    from cli.certificates import create as create_files

    try:
        made = create_files(out, days=days, domain=domain, hosts=host or [])
    except (OSError, ValueError) as error:
        raise fail(str(error)) from None
    for file in made:
        typer.echo(file)
