"""`sluice tenants`: commands for tenants, with their tiers, limits and fallbacks."""

from collections.abc import Callable
from typing import Annotated

import typer

from cli import budget_commands, content_commands, guard_commands, text_commands
from cli.admin import WHERE, AsJson, Tenant, ask, delete_one, given, show_one
from cli.api import Json
from cli.limit_options import limit_options
from cli.render import show_objects
from cli.stack_commands import fail
from sluice.limits import KINDS, Limits
from sluice.pacing import GATHER_MS_MAX

tenants = typer.Typer(help="Tenants, the parties that use the platform.", no_args_is_help=True)

_SHOWN = ("id", "name", "tier_id", "weight", "is_disabled", "limits", "fallbacks", "pins")

_of_tenant = limit_options(KINDS, "instead of the tier's; 0: the tier's.")

Tier = Annotated[str | None, typer.Option(help="Id of its tier.")]
Name = Annotated[str | None, typer.Option(help="Name, for people.")]
Weight = Annotated[int | None, typer.Option(min=1, help="Its share among tenants of its tier.")]
Fallback = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODEL=OTHER",
        help="OTHER answers while MODEL is saturated or down; '*' is any, 'MODEL=' ends it.",
    ),
]
PinnedModel = Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model, no alias.")]
Release = Annotated[str, typer.Argument(help="Name of one of its releases.")]
Disabled = Annotated[
    bool | None,
    typer.Option("--disable/--enable", help="Disable all its keys, or enable them again."),
]
ServerUrls = Annotated[
    bool | None,
    typer.Option(
        "--server-urls/--no-server-urls",
        help="Requests may name MCP servers by address, or registered ones only.",
    ),
]
GatherMs = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=GATHER_MS_MAX,
        help="Milliseconds for which a stream gathers reasoning and calls; 0: no wait.",
    ),
]
RetentionHours = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Hours until stored responses, conversations and chats expire; 0: the platform's.",
    ),
]


tenants.add_typer(budget_commands.budget, name="budget", epilog=WHERE)
tenants.add_typer(text_commands.texts, name="texts", epilog=WHERE)
tenants.add_typer(content_commands.content, name="content", epilog=WHERE)
tenants.add_typer(guard_commands.guard, name="guard", epilog=WHERE)


@tenants.command("list")
def list_tenants(*, as_json: AsJson = False) -> None:
    """List the tenants."""
    found = ask(lambda api: api.list("/v1/tenants"))
    show_objects(found, _SHOWN, as_json=as_json)


@tenants.command("show")
def show_tenant(tenant: Tenant, *, as_json: AsJson = False) -> None:
    """Show a tenant."""
    show_one(f"/v1/tenants/{tenant}", as_json=as_json)


@tenants.command("create")
@_of_tenant
def create_tenant(
    tenant: Tenant,
    *,
    tier: Tier = None,
    name: Name = None,
    weight: Weight = None,
    limits: Limits,
    fallback: Fallback = None,
    as_json: AsJson = False,
) -> None:
    """Create a tenant, by default of tier `standard`, or change its given fields."""
    changes = given(tier_id=tier, name=name, weight=weight)
    fallbacks = _fallbacks(fallback or [])
    new = {"name": tenant, "tier_id": "standard"}
    _put(tenant, changes, limits, fallbacks, as_json=as_json, new=new)


@tenants.command("update")
@_of_tenant
def update_tenant(
    tenant: Tenant,
    *,
    tier: Tier = None,
    name: Name = None,
    weight: Weight = None,
    limits: Limits,
    fallback: Fallback = None,
    is_disabled: Disabled = None,
    server_urls: ServerUrls = None,
    gather_ms: GatherMs = None,
    retention_hours: RetentionHours = None,
    as_json: AsJson = False,
) -> None:
    """Change the given fields of a tenant."""
    changes = given(
        tier_id=tier,
        name=name,
        weight=weight,
        is_disabled=is_disabled,
        allows_server_urls=server_urls,
        gather_ms=gather_ms,
        retention_hours=retention_hours,
    )
    fallbacks = _fallbacks(fallback or [])
    _put(tenant, changes, limits, fallbacks, as_json=as_json)


@tenants.command("delete")
def delete_tenant(tenant: Tenant) -> None:
    """Delete a tenant with its keys, unless it owns models."""
    delete_one(f"/v1/tenants/{tenant}", f"tenant {tenant}")


@tenants.command("pin")
def pin(tenant: Tenant, model: PinnedModel, release: Release, *, as_json: AsJson = False) -> None:
    """Pin a tenant to one release of a model, also during rollouts."""
    name = release.removeprefix(f"{model}@")
    _put_pins(tenant, lambda pins: pins | {model: name}, as_json=as_json)


@tenants.command("unpin")
def unpin(tenant: Tenant, model: PinnedModel, *, as_json: AsJson = False) -> None:
    """Remove a tenant's pin. The model's release or rollout decides again."""

    def without(pins: dict[str, str]) -> dict[str, str]:
        if model not in pins:
            raise fail(f"tenant {tenant} has no pin of {model}")
        return {name: release for name, release in pins.items() if name != model}

    _put_pins(tenant, without, as_json=as_json)


def _fallbacks(options: list[str]) -> dict[str, str]:
    """Return the fallbacks of `MODEL=OTHER` options. An empty OTHER removes a fallback."""
    found: dict[str, str] = {}
    for option in options:
        model, mark, other = option.partition("=")
        if not (model and mark):
            raise typer.BadParameter(f"{option!r} is not MODEL=OTHER", param_hint="--fallback")
        found[model] = other
    return found


def _put(
    tenant: str,
    changes: Json,
    limits: dict[str, int],
    fallbacks: dict[str, str],
    *,
    as_json: bool,
    new: Json | None = None,
) -> None:
    """Write a tenant with changed fields, or create it from `new` if it is missing."""

    def change(known: Json) -> Json:
        known.pop("id", None)
        wanted = known.get("fallbacks", {}) | fallbacks
        kept = {model: other for model, other in wanted.items() if other}
        return known | {"limits": known.get("limits", {}) | limits, "fallbacks": kept} | changes

    made = ask(lambda api: api.edit(f"/v1/tenants/{tenant}", change, new))
    show_objects([made], _SHOWN, as_json=as_json)


def _put_pins(
    tenant: str, pins_of: Callable[[dict[str, str]], dict[str, str]], *, as_json: bool
) -> None:
    def change(known: Json) -> Json:
        known.pop("id", None)
        return known | {"pins": pins_of(known.get("pins", {}))}

    made = ask(lambda api: api.edit(f"/v1/tenants/{tenant}", change))
    show_objects([made], _SHOWN, as_json=as_json)
