"""`sluice tenants, keys, models, requests`: small windows on the admin REST and the telemetry."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import typer

from cli.api import Api, ApiError
from cli.render import console, show_json, show_objects
from cli.stack.home import Home, read_env
from cli.stack_commands import fail

AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
Tenant = Annotated[str, typer.Argument(help="Id of a tenant.")]

tenants = typer.Typer(help="Who may use the platform.", no_args_is_help=True)
keys = typer.Typer(help="API keys of a tenant.", no_args_is_help=True)
models = typer.Typer(help="What can be asked for.", no_args_is_help=True)

WHERE = (
    "Where: SLUICE_ADMIN_URL, SLUICE_ADMIN_KEY and SLUICE_TELEMETRY_URL of the environment, else "
    "the running stack of $SLUICE_HOME."
)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(tenants, name="tenants", epilog=WHERE)
    app.add_typer(keys, name="keys", epilog=WHERE)
    app.add_typer(models, name="models", epilog=WHERE)
    app.command(epilog=WHERE)(requests)


def _setting(name: str) -> str:
    """Return an address or key from the environment, else from the stack's env file."""
    home = Home.find()
    value = os.environ.get(name) or read_env(home).get(name)
    if not value:
        raise fail(f"{name} is not set, nor in {home.env_file}: start the stack, or set it")
    return value


def ask(work: Callable[[Api], Awaitable[Any]], url_name: str = "SLUICE_ADMIN_URL") -> Any:
    """Return what `work` gets from the API; a refusal is one line on stderr and status 1."""

    async def run() -> Any:
        async with Api(_setting(url_name), _setting("SLUICE_ADMIN_KEY")) as api:
            return await work(api)

    try:
        return asyncio.run(run())
    except ApiError as error:
        raise fail(str(error)) from None


@tenants.command("list")
def list_tenants(*, as_json: AsJson = False) -> None:
    """List the tenants."""
    found = ask(lambda api: api.list("/v1/tenants"))
    show_objects(found, ("id", "name", "tier_id", "weight", "is_disabled"), as_json=as_json)


@tenants.command("create")
def create_tenant(
    tenant: Tenant,
    *,
    tier: Annotated[str, typer.Option(help="Id of its tier.")] = "standard",
    name: Annotated[str, typer.Option(help="For people; default: the id.")] = "",
    as_json: AsJson = False,
) -> None:
    """Create a tenant, or change its tier and name."""
    body = {"name": name or tenant, "tier_id": tier, "weight": 1}
    made = ask(lambda api: api.call("PUT", f"/v1/tenants/{tenant}", body))
    show_objects([made], ("id", "name", "tier_id"), as_json=as_json)


@keys.command("list")
def list_keys(tenant: Tenant, *, as_json: AsJson = False) -> None:
    """List a tenant's keys; the keys themselves are kept nowhere."""
    found = ask(lambda api: api.list(f"/v1/tenants/{tenant}/keys"))
    show_objects(found, ("id", "tenant_id", "is_disabled", "rpm", "tpm"), as_json=as_json)


@keys.command("create")
def create_key(tenant: Tenant, *, as_json: AsJson = False) -> None:
    """Create a key and show it, this one time."""
    made = ask(lambda api: api.call("POST", f"/v1/tenants/{tenant}/keys", {}))
    if as_json:
        show_json(made)
    else:
        console(stderr=True).print(f"id {made['id']}; the key is shown only now:")
        typer.echo(made["key"])


@keys.command("revoke")
def revoke_key(
    tenant: Tenant, key: Annotated[str, typer.Argument(help="Id of the key, not the key.")]
) -> None:
    """Revoke a key; gateways refuse it within a second."""
    ask(lambda api: api.call("DELETE", f"/v1/tenants/{tenant}/keys/{key}"))
    typer.echo(f"revoked {key}")


@models.command("list")
def list_models(*, as_json: AsJson = False) -> None:
    """List the models and what serves them."""
    found = ask(lambda api: api.list("/v1/models"))
    show_objects(found, ("id", "pool_id", "release", "base_digest"), as_json=as_json)


def requests(
    *,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="How many.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show the latest requests, as the trace store has them."""
    found = ask(lambda api: api.list("/v1/requests", limit=limit), "SLUICE_TELEMETRY_URL")
    columns = (
        "received_at",
        "request_id",
        "tenant_id",
        "model",
        "prompt_tokens",
        "output_tokens",
        "ttft_us",
        "total_us",
        "outcome",
    )
    show_objects(found, columns, as_json=as_json)
