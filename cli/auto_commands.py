"""`sluice auto`: commands for each tenant's candidates of `auto`, and for their quality."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.admin import AsJson, Tenant, ask, given
from cli.api import Json
from cli.auto_judging import judge_answers, logged_rows
from cli.render import show_fields, show_json, show_objects
from cli.stack_commands import fail
from sluice.auto.evaluation import (
    LoggedOption,
    LoggedTurn,
    PolicyEstimate,
    PolicyEvaluation,
    evaluate,
    learned,
)
from sluice.auto.features import SCHEME
from sluice.auto.quality import QualityCell, QualityPrior, table_of

auto = typer.Typer(help="Candidates and policy of the model `auto`.", no_args_is_help=True)

_PATH = "/v1/auto-policies"
_SETTINGS = (
    *("candidates", "price_max", "quality_min", "second_price", "miss_price", "explored_share"),
    *("queue_priority_min", "pin", "scheme", "cells"),
)
_SHOWN = (
    *("id", "candidates", "price_max", "quality_min", "second_price", "miss_price"),
    *("explored_share", "queue_priority_min", "pin", "judged"),
)
# Number of judged answers below which an estimate of quality is marked as unreliable.
_EFFECTIVE_LEAST = 100.0
# Reasons of choices among several models. Only these choices have a known probability.
_CHOSEN = frozenset({"cheapest", "explored", "saturated", "below_floor"})
Since = Annotated[str, typer.Option(help="30d ago, as 30d; or a moment, as 2030-12-01.")]
TableFile = Annotated[
    Path, typer.Option(exists=True, dir_okay=False, help="A table, as `sluice auto learn` writes.")
]
ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="A model that `auto` may choose.")]


@auto.command("set")
def set_policy(
    tenant: Tenant,
    *,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL=PROMPT,OUTPUT[,CACHED]",
            help="A candidate with its prices of 1M tokens (repeat). 'MODEL=' removes it.",
        ),
    ] = None,
    published: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL=ROW", help="Published results to start from (repeat)."),
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
        typer.Option(min=0, max=50, help="Percent of new conversations that explore at random."),
    ] = None,
    queue_from: Annotated[
        int | None,
        typer.Option(min=0, help="Tiers of this priority or more wait for a saturated pool."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Allow `auto` to a tenant, or change the given fields. Gateways apply it within a second."""
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
    """Show the tenants that may use the model `auto`, with their policies."""
    _show(ask(lambda api: api.list(_PATH)), as_json=as_json)


@auto.command("pin")
def pin_model(tenant: Tenant, model: ModelName, *, as_json: AsJson = False) -> None:
    """Let one model answer all requests for `auto`."""
    _pin(tenant, model, as_json=as_json)


@auto.command("unpin")
def unpin_model(tenant: Tenant, *, as_json: AsJson = False) -> None:
    """Let `auto` choose among the candidates again."""
    _pin(tenant, "", as_json=as_json)


@auto.command("remove")
def remove_policy(tenant: Tenant) -> None:
    """Refuse the model `auto` to a tenant from now on."""
    ask(lambda api: api.call("DELETE", f"{_PATH}/{tenant}"))
    typer.echo(f"removed the policy of auto of tenant {tenant}")


@auto.command("learn")
def learn(
    tenant: Tenant,
    *,
    out: Annotated[Path, typer.Option(help="File for the table, as JSON.", dir_okay=False)],
    since: Since = "30d",
) -> None:
    """Write a table of the models' judged qualities. Gateways use it only after `auto use`."""
    known = ask(lambda api: api.call("GET", f"{_PATH}/{tenant}"))
    turns = _logged(tenant, since)
    candidates = {it["model"] for it in known["candidates"]}
    cells = [it for it in learned(turns, {}) if it.model in candidates]
    if not cells:
        raise fail(
            f"tenant {tenant} has no judged answers since {since}; send some to POST /v1/feedback"
        )
    table = {"scheme": SCHEME, "cells": [it._asdict() for it in cells]}
    out.write_text(json.dumps(table, indent=1) + "\n")
    judged = sum(it.good + it.bad for it in cells)
    typer.echo(f"{out}: {len(cells)} cells of {judged:g} judged answers")


auto.command("judge")(judge_answers)


@auto.command("evaluate")
def evaluate_table(
    tenant: Tenant,
    *,
    table: TableFile,
    since: Since = "30d",
    as_json: AsJson = False,
) -> None:
    """Estimate a table's cost and quality on logged requests, without changing the policy."""
    known = ask(lambda api: api.call("GET", f"{_PATH}/{tenant}"))
    read = _table(table)
    priors = {
        it["model"]: QualityPrior(it["published"], it["quality"]) for it in known["candidates"]
    }
    cells = [QualityCell(**it) for it in read["cells"]]
    found = evaluate(
        _logged(tenant, since),
        table_of(cells, priors, read["scheme"]),
        quality_min=known["quality_min"],
        miss_price=known["miss_price"],
        explored_share=known["explored_share"],
    )
    shown = _estimates(found)
    if as_json:
        show_json(shown)
        return
    show_fields(shown)
    if found.effective < _EFFECTIVE_LEAST:
        typer.echo(
            f"the judged answers are worth {found.effective:.0f} under this table: too few to"
            " decide; explore more, or wait"
        )


@auto.command("use")
def use_table(tenant: Tenant, *, table: TableFile, as_json: AsJson = False) -> None:
    """Let `auto` choose by a table from now on. With an empty table it uses published results."""
    read = _table(table)

    def change(known: Json) -> Json:
        return _kept(known) | read

    _edit(tenant, change, as_json=as_json)


def _logged(tenant: str, since: str) -> list[LoggedTurn]:
    """Return the logged turns whose prompt clusters have this release's scheme."""
    return [_turn(row) for row in logged_rows(tenant, since) if row["scheme"] == SCHEME]


def _turn(row: Json) -> LoggedTurn:
    told = zip(row["models"], row["releases"], row["costs"], row["propensities"], strict=True)
    options = [LoggedOption(*it) for it in told]
    if row["reason"] in _CHOSEN:
        options = [it for it in options if it.propensity > 0]
    else:  # the turn had no choice, so it informs only about the model that answered
        options = [it for it in options if it.name == row["model"]]
    return LoggedTurn(row["cluster"], row["model"], options, row["good"])


def _table(file: Path) -> Json:
    try:
        read: Any = json.loads(file.read_text())
        return {
            "scheme": int(read["scheme"]),
            "cells": [QualityCell(**it)._asdict() for it in read["cells"]],
        }
    except (ValueError, TypeError, KeyError) as error:
        raise fail(f"{file} is no table as `sluice auto learn` writes it: {error!r}") from None


def _estimates(found: PolicyEvaluation) -> Json:
    def told(it: PolicyEstimate) -> str:
        return f"{it.mean:.3f} ({it.low:.3f} to {it.high:.3f})" if it.error < 1 else "not known"

    return {
        "turns": found.turns,
        "judged": found.judged,
        "effective": round(found.effective, 1),
        "good_logged": told(found.logged_good),
        "good_ips": told(found.ips),
        "good_doubly_robust": told(found.doubly_robust),
        "cost_logged": found.logged_cost,
        "cost_new": found.new_cost,
        "moved": found.moved,
    }


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
        raise typer.BadParameter(f"{option!r} is not MODEL=...: write it so", param_hint=name)
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
            raise typer.BadParameter(f"{option!r} needs two prices or three", param_hint="--model")
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
    """Print policies. The table shows the models' names and the number of judged answers."""
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
