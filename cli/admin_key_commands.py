"""`sluice admin-keys`: commands for the keys of the admin REST and their roles."""

import time
from enum import StrEnum
from typing import Annotated

import typer

from cli.admin import AsJson, ask, given, show_one
from cli.key_commands import Expires, Grace, KeyId, expiry_unix_ms, readable, rotate, show_once
from cli.render import show_objects

admin_keys = typer.Typer(help="Keys of the admin REST.", no_args_is_help=True)

_SHOWN = ("id", "name", "role", "tenant_id", "is_disabled", "expires")


class RoleName(StrEnum):
    """The roles of admin keys, which docs/admin-api.md describes."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    READER = "reader"
    PUBLISHER = "publisher"
    ADMIN = "admin"


Name = Annotated[str | None, typer.Option(help="Name of its holder, for people.")]


@admin_keys.command("list")
def list_keys(*, as_json: AsJson = False) -> None:
    """List the admin keys, without the secrets, of which only digests are stored."""
    found = ask(lambda api: api.list("/v1/admin-keys"))
    show_objects(found if as_json else [readable(key) for key in found], _SHOWN, as_json=as_json)


@admin_keys.command("show")
def show_key(key: KeyId, *, as_json: AsJson = False) -> None:
    """Show the role, the holder and the tenant of an admin key."""
    show_one(f"/v1/admin-keys/{key}", as_json=as_json, readable=readable)


@admin_keys.command("create")
def create_key(
    role: Annotated[
        RoleName,
        typer.Argument(
            help="viewer reads; operator runs the fleet too; reader sees usage and requests of one "
            "tenant; publisher has its models; admin may do everything."
        ),
    ],
    *,
    name: Name = None,
    tenant: Annotated[str | None, typer.Option(help="Tenant of a reader or publisher.")] = None,
    expires: Expires = None,
    as_json: AsJson = False,
) -> None:
    """Create an admin key and show it, this one time."""
    expires_at = None if expires is None else expiry_unix_ms(expires, time.time())
    options = given(name=name, tenant_id=tenant, expires_at_unix_ms=expires_at)
    body = {"role": role.value} | options
    show_once(ask(lambda api: api.call("POST", "/v1/admin-keys", body)), as_json=as_json)


@admin_keys.command("update")
def update_key(
    key: KeyId,
    *,
    name: Name = None,
    expires: Expires = None,
    is_disabled: Annotated[
        bool | None, typer.Option("--disable/--enable", help="Disable the key, or enable it again.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Change the given fields of an admin key. Another role needs another key."""
    expires_at = None if expires is None else expiry_unix_ms(expires, time.time())
    body = given(name=name, expires_at_unix_ms=expires_at, is_disabled=is_disabled)
    changed = ask(lambda api: api.call("PATCH", f"/v1/admin-keys/{key}", body))
    show_objects([changed if as_json else readable(changed)], _SHOWN, as_json=as_json)


@admin_keys.command("rotate")
def rotate_key(key: KeyId, *, grace: Grace = "1d", as_json: AsJson = False) -> None:
    """Create an admin key with the same rights. The present key expires after a grace period."""
    rotate(f"/v1/admin-keys/{key}", grace, as_json=as_json)


@admin_keys.command("revoke")
def revoke_key(key: KeyId) -> None:
    """Revoke an admin key at once."""
    ask(lambda api: api.call("DELETE", f"/v1/admin-keys/{key}"))
    typer.echo(f"revoked {key}")
