"""`sluice tiers`: commands for priority classes and their limits."""

from typing import Annotated

import typer

from cli.admin import AsJson, ask, delete_one, given, show_one
from cli.api import Json
from cli.limit_options import limit_options
from cli.render import show_objects
from sluice.limits import KINDS, NAMES, Limits

tiers = typer.Typer(help="Priority classes and their limits.", no_args_is_help=True)

_SHOWN = (
    *("id", "priority", *NAMES, "model_limits"),
    *("ttft_deadline_ms", "reserved_percent", "is_preemptible"),
)

_of_tier = limit_options(KINDS, "of each tenant; 0: none.")

Tier = Annotated[str, typer.Argument(help="Id of a tier.")]
Priority = Annotated[
    int | None, typer.Option(min=0, help="Priority; the higher tier is served first.")
]
ModelLimit = Annotated[
    list[str] | None,
    typer.Option(
        metavar="'MODEL NAME=N ...'",
        help=(
            f"Limits of one model, within the others: {', '.join(NAMES)}; MODEL alone removes them."
        ),
    ),
]
Deadline = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Longest predicted wait for a first token, in milliseconds; 0: the router's.",
    ),
]
Reserved = Annotated[
    float | None, typer.Option(min=0, max=100, help="Least share of every cell, in percent.")
]
Preemptible = Annotated[
    bool | None,
    typer.Option("--batch/--no-batch", help="Whether its requests are shed first and preempted."),
]


@tiers.command("list")
def list_tiers(*, as_json: AsJson = False) -> None:
    """List the tiers."""
    show_objects(ask(lambda api: api.list("/v1/tiers")), _SHOWN, as_json=as_json)


@tiers.command("show")
def show_tier(tier: Tier, *, as_json: AsJson = False) -> None:
    """Show a tier."""
    show_one(f"/v1/tiers/{tier}", as_json=as_json)


@tiers.command("create")
@_of_tier
def create_tier(
    tier: Tier,
    *,
    priority: Priority = None,
    limits: Limits,
    model_limit: ModelLimit = None,
    ttft_deadline_ms: Deadline = None,
    reserved_percent: Reserved = None,
    is_preemptible: Preemptible = None,
    as_json: AsJson = False,
) -> None:
    """Create a tier, or change its given fields."""
    changes = given(
        priority=priority,
        ttft_deadline_ms=ttft_deadline_ms,
        reserved_percent=reserved_percent,
        is_preemptible=is_preemptible,
    )
    _put(tier, changes | limits, model_limits(model_limit or []), as_json=as_json, new={})


@tiers.command("update")
@_of_tier
def update_tier(
    tier: Tier,
    *,
    priority: Priority = None,
    limits: Limits,
    model_limit: ModelLimit = None,
    ttft_deadline_ms: Deadline = None,
    reserved_percent: Reserved = None,
    is_preemptible: Preemptible = None,
    as_json: AsJson = False,
) -> None:
    """Change the given fields of a tier. Gateways apply them within a second."""
    changes = given(
        priority=priority,
        ttft_deadline_ms=ttft_deadline_ms,
        reserved_percent=reserved_percent,
        is_preemptible=is_preemptible,
    )
    _put(tier, changes | limits, model_limits(model_limit or []), as_json=as_json)


@tiers.command("delete")
def delete_tier(tier: Tier) -> None:
    """Delete a tier, unless tenants are in it."""
    delete_one(f"/v1/tiers/{tier}", f"tier {tier}")


def model_limits(options: list[str]) -> dict[str, dict[str, int]]:
    """Return the limits of `MODEL NAME=N ...` options. An option of only MODEL removes its limits.

    Raises:
        BadParameter: An option has another form.
    """
    found: dict[str, dict[str, int]] = {}
    for option in options:
        model, *limits = option.split() or [""]
        parts = [limit.partition("=") for limit in limits]
        if not model or any(name not in NAMES or not n.isdecimal() for name, _, n in parts):
            message = f"{option!r} is not MODEL NAME=N ... with names of {', '.join(NAMES)}"
            raise typer.BadParameter(message, param_hint="--model-limit")
        found[model] = {name: int(n) for name, _, n in parts}
    return found


def _put(
    tier: str,
    changes: Json,
    limits: dict[str, dict[str, int]],
    *,
    as_json: bool,
    new: Json | None = None,
) -> None:
    """Write a tier with changed fields, or create it from `new` if it is missing."""

    def change(known: Json) -> Json:
        known.pop("id", None)
        wanted = known.get("model_limits", {}) | limits
        kept = {model: limit for model, limit in wanted.items() if limit}
        return known | {"model_limits": kept} | changes

    made = ask(lambda api: api.edit(f"/v1/tiers/{tier}", change, new))
    show_objects([made], _SHOWN, as_json=as_json)
