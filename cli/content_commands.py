"""`sluice tenants content`: commands for the keys that encrypt a tenant's content."""

from typing import Annotated

import typer

from cli.admin import AsJson, Tenant, ask, show_one
from cli.render import show_objects
from cli.stack_commands import fail

content = typer.Typer(help="Encrypt a tenant's stored content, or erase it.", no_args_is_help=True)

_SHOWN = ("id", "keys", "erased_at_unix_ms")


@content.command("show")
def show_keys(tenant: Tenant, *, as_json: AsJson = False) -> None:
    """Show numbers and ages of a tenant's keys. No command shows a key itself."""
    show_one(_path(tenant), as_json=as_json)


@content.command("rotate")
def rotate_key(tenant: Tenant, *, as_json: AsJson = False) -> None:
    """Encrypt new content of a tenant with a new key. The first key starts the encryption."""
    made = ask(lambda api: api.call("POST", _path(tenant)))
    show_objects([made], _SHOWN, as_json=as_json)


@content.command("erase")
def erase_content(
    tenant: Tenant,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Erase a tenant's content for good. Its keys are erased at once, its rows afterwards."""
    if not yes and not typer.confirm(f"Erase all content of tenant {tenant}?"):
        raise fail("nothing was erased")
    ask(lambda api: api.call("DELETE", _path(tenant)))
    typer.echo(f"erased the content of tenant {tenant}; rows are deleted within minutes")


def _path(tenant: str) -> str:
    return f"/v1/tenants/{tenant}/content-key"
