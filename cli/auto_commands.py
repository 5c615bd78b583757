"""`sluice auto`: the models that `auto` may choose from for a tenant, and how it does."""

from collections.abc import Callable
from typing import Annotated

import typer

from cli.admin import AsJson, Tenant, ask, given
from cli.api import Json
from cli.render import show_objects
from cli.stack_commands import fail

auto = typer.Typer(help="What the model `auto` may choose from, and how.", no_args_is_help=True)

_PATH = "/v1/auto-policies"
_SETTINGS = (
    *("candidates", "price_max", "quality_min", "second_price", "miss_price", "explored_share"),
    *("queue_priority_min", "pin", "scheme", "cells"),
)
_SHOWN = (
    *("id", "candidates", "price_max", "quality_min", "second_price", "miss_price"),
    *("explored_share", "queue_priority_min", "pin", "judged"),
)
ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="One that `auto` may choose.")]


@auto.command("set")
def set_policy(
    tenant: Tenant,
    *,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL=PROMPT,OUTPUT[,CACHED]",
            help="May answer; prices of 1M tokens (repeat). 'MODEL=' takes it out.",
        ),
    ] = None,
    published: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL=ROW", help="Published results that it begins with (repeat)."),
    ] = None,
    quality_of: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL=SHARE", help="Own estimate of good answers, 0 to 1 (repeat)."),
    ] = None,
    price_max: Annotated[
        float | None, typer.Option(min=0, help="Ceiling of a turn's tokens; 0: none.")
    ] = None,
    quality_min: Annotated[
        float | None, typer.Option(min=0, max=1, help="Floor of quality; 0: none.")
    ] = None,
    second_price: Annotated[
        float | None, typer.Option(min=0, help="Worth of a second of waiting.")
    ] = None,
    miss_price: Annotated[float | None, typer.Option(min=0, help="Cost of a bad answer.")] = None,
    explored: Annotated[
        float | None,
        typer.Option(min=0, max=50, help="Percent of new conversations that draw lots."),
    ] = None,
    queue_from: Annotated[
        int | None,
        typer.Option(min=0, help="Tiers of this priority or more wait for a saturated pool."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Let a tenant ask for `auto`, or change what is given; gateways follow within a second."""
    changes = given(
        price_max=price_max,
        quality_min=quality_min,
        second_price=second_price,
        miss_price=miss_price,
        explored_share=None if explored is None else explored / 100,
        queue_priority_min=queue_from,
    )

    def change(known: Json) -> Json:
        models = {it["model"]: it for it in known.get("candidates", [])}
        _take_prices(models, model or [])
        _take(models, published or [], "published", str, "--published")
        _take(models, quality_of or [], "quality", float, "--quality-of")
        return _kept(known) | {"candidates": list(models.values())} | changes

    _edit(tenant, change, as_json=as_json, new={})


@auto.command("show")
def show_policies(*, as_json: AsJson = False) -> None:
    """Show the tenants that may ask for `auto`."""
    _show(ask(lambda api: api.list(_PATH)), as_json=as_json)


@auto.command("pin")
def pin_model(tenant: Tenant, model: ModelName, *, as_json: AsJson = False) -> None:
    """Let one model answer all that asks for `auto`."""
    _pin(tenant, model, as_json=as_json)


@auto.command("unpin")
def unpin_model(tenant: Tenant, *, as_json: AsJson = False) -> None:
    """Let `auto` choose again."""
    _pin(tenant, "", as_json=as_json)


@auto.command("remove")
def remove_policy(tenant: Tenant) -> None:
    """Let a tenant ask for `auto` no more."""
    ask(lambda api: api.call("DELETE", f"{_PATH}/{tenant}"))
    typer.echo(f"removed the policy of auto of tenant {tenant}")


def _pin(tenant: str, model: str, *, as_json: bool) -> None:
    def change(known: Json) -> Json:
        return _kept(known) | {"pin": model}

    _edit(tenant, change, as_json=as_json)


def _edit(
    tenant: str, change: Callable[[Json], Json], *, as_json: bool, new: Json | None = None
) -> None:
    made = ask(lambda api: api.edit(f"{_PATH}/{tenant}", change, new))
    _show([made], as_json=as_json)


def _kept(known: Json) -> Json:
    return {field: known[field] for field in _SETTINGS if field in known}


def _pair(option: str, name: str) -> tuple[str, str]:
    model, mark, value = option.partition("=")
    if not (model and mark):
        raise typer.BadParameter(f"{option!r} is not MODEL=...", param_hint=name)
    return model, value


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no number", param_hint=name) from None


def _take_prices(models: dict[str, Json], options: list[str]) -> None:
    for option in options:
        name, prices = _pair(option, "--model")
        if not prices:
            models.pop(name, None)
            continue
        numbers = [_number(it, "--model") for it in prices.split(",")]
        if len(numbers) not in (2, 3):
            raise typer.BadParameter(
                f"{option!r} has not two prices or three", param_hint="--model"
            )
        prompt, output = numbers[:2]
        cached = numbers[2] if len(numbers) > 2 else prompt
        models[name] = models.get(name, {"model": name}) | {
            "prompt_price": prompt,
            "output_price": output,
            "cached_price": cached,
        }


def _take(
    models: dict[str, Json], options: list[str], field: str, kind: type, option_name: str
) -> None:
    for option in options:
        name, value = _pair(option, option_name)
        if name not in models:
            raise fail(f"{option_name} {option}: {name} is no model of this policy; add --model")
        models[name] = models[name] | {
            field: _number(value, option_name) if kind is float else value
        }


def _show(policies: list[Json], *, as_json: bool) -> None:
    """Show policies; a table has the models' names and the number of judged answers."""
    if not as_json:
        policies = [
            it
            | {
                "candidates": [one["model"] for one in it["candidates"]],
                "judged": sum(cell["good"] + cell["bad"] for cell in it["cells"]),
            }
            for it in policies
        ]
    show_objects(policies, _SHOWN, as_json=as_json)
