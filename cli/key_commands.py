"""`sluice keys`: commands for the API keys of a tenant."""

import re
import time
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any

import typer

from cli.admin import AsJson, Tenant, ask, given, show_one
from cli.limit_options import limit_options
from cli.render import console, show_json, show_objects
from sluice.limits import METERED, METERED_NAMES, Limits
from sluice.pacing import INTERVAL_MS_MAX
from sluice.scopes import Scope

keys = typer.Typer(help="API keys of a tenant.", no_args_is_help=True)

_DURATION = re.compile(r"(\d{1,6})([smhd])")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SHOWN = ("id", "is_disabled", "expires", *METERED_NAMES, "interval_ms", "scopes", "models")


def duration_s(text: str) -> int:
    """Return the seconds of `90d`, `12h`, `30m` or `45s`. Raises BadParameter for other texts."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is no duration; 90d, 12h, 30m and 45s are")
    return int(found[1]) * _UNITS_S[found[2]]


def expiry_unix_ms(text: str, now_s: float) -> int:
    """Return the expiry after a duration or at the end of a UTC day, or 0 for `never`."""
    if text == "never":
        return 0
    if re.fullmatch(r"\d{4}-\d\d-\d\d", text):
        try:
            day = date.fromisoformat(text)
        except ValueError as error:
            raise typer.BadParameter(f"{text}: {error}") from None
        end = datetime.combine(day + timedelta(days=1), datetime.min.time(), UTC)
        return round(end.timestamp() * 1000)
    return round((now_s + duration_s(text)) * 1000)


_of_key = limit_options(METERED, "within the tenant's; 0: no limit.")

KeyId = Annotated[str, typer.Argument(help="Id of the key, not the key.")]
Scopes = Annotated[
    list[Scope] | None, typer.Option("--scope", help="Scope (repeat); default: all.")
]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model", help="Model that it may use, by name or 'beginning*' (repeat); default: all."
    ),
]
Expires = Annotated[
    str | None, typer.Option(help="90d, 12h, the last day as 2030-12-31, or never.")
]
IntervalMs = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=INTERVAL_MS_MAX,
        help="Least time between two writes of a stream, unless the request sets it; 0: live.",
    ),
]
Grace = Annotated[str, typer.Option(help="Time that the old key still works: 1d, 12h, 30m, 45s.")]


@keys.command("list")
def list_keys(tenant: Tenant, *, as_json: AsJson = False) -> None:
    """List a tenant's keys, without the secrets, of which only digests are stored."""
    found = ask(lambda api: api.list(f"/v1/tenants/{tenant}/keys"))
    show_objects(found if as_json else [readable(key) for key in found], _SHOWN, as_json=as_json)


@keys.command("show")
def show_key(tenant: Tenant, key: KeyId, *, as_json: AsJson = False) -> None:
    """Show the rights of a key. The secret itself is not stored."""
    show_one(f"/v1/tenants/{tenant}/keys/{key}", as_json=as_json, readable=readable)


@keys.command("create")
@_of_key
def create_key(
    tenant: Tenant,
    *,
    scopes: Scopes = None,
    models: Models = None,
    limits: Limits,
    expires: Expires = None,
    interval_ms: IntervalMs = None,
    as_json: AsJson = False,
) -> None:
    """Create a key and show it, this one time."""
    body = _properties(scopes, models, limits, expires, interval_ms)
    show_once(
        ask(lambda api: api.call("POST", f"/v1/tenants/{tenant}/keys", body)), as_json=as_json
    )


@keys.command("update")
@_of_key
def update_key(
    tenant: Tenant,
    key: KeyId,
    *,
    scopes: Scopes = None,
    models: Models = None,
    limits: Limits,
    expires: Expires = None,
    interval_ms: IntervalMs = None,
    is_disabled: Annotated[
        bool | None, typer.Option("--disable/--enable", help="Disable the key, or enable it again.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Change the given fields of a key. Gateways apply them within a second."""
    body = _properties(scopes, models, limits, expires, interval_ms)
    body |= given(is_disabled=is_disabled)
    changed = ask(lambda api: api.call("PATCH", f"/v1/tenants/{tenant}/keys/{key}", body))
    show_objects([changed if as_json else readable(changed)], _SHOWN, as_json=as_json)


@keys.command("rotate")
def rotate_key(
    tenant: Tenant,
    key: KeyId,
    *,
    grace: Grace = "1d",
    as_json: AsJson = False,
) -> None:
    """Create a key with the same rights. The present key expires after a grace period."""
    rotate(f"/v1/tenants/{tenant}/keys/{key}", grace, as_json=as_json)


@keys.command("revoke")
def revoke_key(tenant: Tenant, key: KeyId) -> None:
    """Revoke a key. Gateways refuse it within a second."""
    ask(lambda api: api.call("DELETE", f"/v1/tenants/{tenant}/keys/{key}"))
    typer.echo(f"revoked {key}")


def _properties(
    scopes: list[Scope] | None,
    models: list[str] | None,
    limits: Limits,
    expires: str | None,
    interval_ms: int | None,
) -> dict[str, Any]:
    """Return the fields of a key that the command line sets."""
    return given(
        scopes=scopes or None,
        models=models or None,
        **limits,
        expires_at_unix_ms=None if expires is None else expiry_unix_ms(expires, time.time()),
        interval_ms=interval_ms,
    )


def rotate(path: str, grace: str, *, as_json: bool) -> None:
    """Rotate the key at a path, and print the new key."""
    body = {"grace_s": duration_s(grace)}
    made = ask(lambda api: api.call("POST", f"{path}/rotate", body))
    if not as_json:
        old = made["replaces"]
        ends = _moment(old["expires_at_unix_ms"])
        console(stderr=True).print(f"{old['id']} works until {ends}")
    show_once(made, as_json=as_json)


def show_once(made: dict[str, Any], *, as_json: bool) -> None:
    """Print a new key. Only the secret is written to stdout, or all fields as JSON."""
    if as_json:
        show_json(made)
    else:
        console(stderr=True).print(f"id {made['id']}; the key is shown only now:")
        typer.echo(made["key"])


def readable(key: Mapping[str, Any]) -> dict[str, Any]:
    """Return a key with its expiry in readable form, as `expires`."""
    return {**key, "expires": _moment(key["expires_at_unix_ms"])}


def _moment(unix_ms: int) -> str:
    if not unix_ms:
        return "never"
    return datetime.fromtimestamp(unix_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
